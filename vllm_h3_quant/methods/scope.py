"""Which linears of MiniMax-H3 are quantized, which are not, and why.

Names are those that vLLM-Omni gives to a linear: the DiT's without a component in front
(``blocks.0.attn.qkv_proj``), the text decoder's with it
(``text_encoder.text_model.layers.0.mlp.down_proj``).

What never asks for a method: norms and RoPE are elementwise, and their few bytes set the scale of all
that follows; embeddings are a lookup; the text encoder's vision tower is made of plain torch linears.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from vllm_h3_quant.config.components import TEXT_ENCODER, TRANSFORMER
from vllm_h3_quant.config.schema import H3QuantOptions
from vllm_h3_quant.errors import nearest


class Storage(str, Enum):
    """What becomes of a linear's weight."""

    CODES = "codes"
    HOST = "host"
    VALUES = "values"


@dataclass(frozen=True)
class Role:
    """A kind of linear.

    Attributes:
        component: the pipeline component it belongs to.
        pattern: regular expression that a linear's whole name matches.
        quantized: whether 8-bit codes replace its weight.
        reason: why, one line.
        adaln: whether the ``adaln`` key decides.
    """

    component: str
    pattern: str
    quantized: bool
    reason: str
    adaln: bool = False


ROLES: tuple[Role, ...] = (
    Role(TRANSFORMER, r"blocks\.\d+\.attn\.(qkv_proj|out_proj)", True, "40% of a block's linear FLOPs"),
    Role(TRANSFORMER, r"blocks\.\d+\.mlp\.(fc1|fc2)", True, "60% of a block's linear FLOPs"),
    Role(TRANSFORMER, r"blocks\.\d+\.adaln_proj\.linear", True, "40% of the DiT's bytes", adaln=True),
    Role(TRANSFORMER, r"final_layer\.adaln_proj\.linear", True, "same input as the blocks' AdaLN", adaln=True),
    Role(
        TRANSFORMER,
        r"token_refiner\.blocks\.\d+\.(attn\.(qkv_proj|out_proj)|mlp\.(fc1|fc2))",
        True,
        "as large as a block's, on text tokens",
    ),
    Role(TRANSFORMER, r"condition_proj", True, "text features into the DiT, once a step"),
    Role(
        TRANSFORMER,
        r"blocks\.\d+\.attn\.to_gate_compress",
        False,
        "the VSA gate is zero until an adapter assigns it, and zero weights carry no scale",
    ),
    Role(TRANSFORMER, r"(video|audio)_patch_proj", False, "fp32 in and out as the engine checks"),
    Role(TRANSFORMER, r"time_embedder\.(proj_in|proj_out)", False, "fp32: timesteps differ in the last digits"),
    Role(TRANSFORMER, r"final_layer\.(video_out|audio_out)", False, "fp32: its rounding lands in the latents"),
    Role(
        TEXT_ENCODER,
        r"text_encoder\.text_model\.layers\.\d+\.self_attn\.(qkv_proj|o_proj)",
        True,
        "the rest of the text decoder's bytes",
    ),
    Role(
        TEXT_ENCODER,
        r"text_encoder\.text_model\.layers\.\d+\.mlp\.(gate_up_proj|down_proj)",
        True,
        "most of the text decoder's bytes",
    ),
)


def role_of(name: str) -> Role | None:
    """The role of a linear by its name, or None when the name is not one of MiniMax-H3's."""
    for role in ROLES:
        if re.fullmatch(role.pattern, name):
            return role
    return None


def parents(name: str) -> list[str]:
    """``name`` and every dotted parent of it, longest first."""
    parts = name.split(".")
    return [".".join(parts[:end]) for end in range(len(parts), 0, -1)]


def matches(name: str, entry: str) -> bool:
    """Whether ``entry`` is ``name``, a dotted parent of it, or a pattern over either."""
    return any(fnmatch.fnmatchcase(candidate, entry) for candidate in parents(name))


UNKNOWN = "no linear of MiniMax-H3"
NOT_ASKED = "built by the engine without a method"


@dataclass(frozen=True)
class LinearDecision:
    """What becomes of one linear.

    Attributes:
        storage: 8-bit codes; values in host memory; or values as the engine keeps them.
        reason: why, one line.
        role: its kind; None for a name that is not one of MiniMax-H3's.
        entries: those of ``ignored_layers`` that match its name.
    """

    storage: Storage
    reason: str
    role: Role | None = None
    entries: tuple[str, ...] = ()


def decide(options: H3QuantOptions, name: str) -> LinearDecision:
    """What ``options`` make of the linear that the engine calls ``name``.

    An entry of ``ignored_layers`` counts before the ``adaln`` key.
    """
    role = role_of(name)
    if role is None:
        return LinearDecision(Storage.VALUES, UNKNOWN)
    entries = tuple(entry for entry in options.ignored_layers if matches(name, entry))
    storage, reason = Storage.CODES, role.reason
    if not role.quantized:
        storage = Storage.VALUES
    elif entries:
        storage, reason = Storage.VALUES, f"ignored_layers entry {entries[0]!r}"
    elif role.adaln and options.adaln != "quantize":
        storage = Storage.HOST if options.adaln == "host" else Storage.VALUES
        reason = f"adaln: {options.adaln}"
    return LinearDecision(storage, reason, role, entries)


def decide_unasked(name: str) -> LinearDecision:
    """What becomes of the linear ``name``, which the engine builds without asking for a method: the fp32 ones."""
    role = role_of(name)
    if role is None:
        return LinearDecision(Storage.VALUES, UNKNOWN)
    return LinearDecision(Storage.VALUES, NOT_ASKED if role.quantized else role.reason, role)


def asked_name(component: str, name: str) -> str:
    """The name by which the engine asks for a linear's method, from the one inside its component."""
    return f"{TEXT_ENCODER}.{name}" if component == TEXT_ENCODER else name


def without_match(entry: str, names: Sequence[str]) -> str:
    """Why an entry of ``ignored_layers`` is wrong that matches none of ``names``, with the nearest that would."""
    close = _nearest_entry(entry, names)
    hint = f"did you mean {close!r}?" if close else f"a name is for example {names[0]!r}"
    return f"ignored_layers entry {entry!r} matches no linear; {hint}"


def _nearest_entry(entry: str, names: Sequence[str]) -> str | None:
    # The DiT's names have no component in front, which is the likeliest slip.
    bare = entry.removeprefix(f"{TRANSFORMER}.")
    if any(matches(name, bare) for name in names):
        return bare
    return nearest(entry, dict.fromkeys(parent for name in names for parent in parents(name)))
