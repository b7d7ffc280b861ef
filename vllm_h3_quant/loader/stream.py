"""A component's tensors under the names and in the layout that the engine's ``load_weights`` takes.

For a weight that a linear method reads by itself (``taken``) the stream yields a stand-in: a tensor of the
checkpoint's shape on the meta device. The engine reorders and splits it as it would the weight, which costs nothing,
and the method is told with it that the weight, or which part of it, is due.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator

import torch

from vllm_h3_quant.errors import H3QuantError
from vllm_h3_quant.loader import naming
from vllm_h3_quant.loader.architecture import ROPE, Architecture
from vllm_h3_quant.loader.coding import Values
from vllm_h3_quant.loader.header import Entry
from vllm_h3_quant.loader.plan import Plan
from vllm_h3_quant.loader.reader import mapped
from vllm_h3_quant.loader.stored import StoredLinear

Tensors = Iterator[tuple[str, torch.Tensor]]
Done = Callable[[Entry], None]

CURVE_TABLE = "time_embedder.table"
"""The model's name of a pruned checkpoint's curve (``upstream/curve.py``)."""


def transformer_stream(plan: Plan, taken: Collection[str], *, diffusers: bool, arrive: Done, done: Done) -> Tensors:
    """The tensors of a DiT, in the order of files and bytes.

    Args:
        plan: of its checkpoint, without problems.
        taken: linears that read their weight by themselves.
        diffusers: whether the engine's model expects Diffusers names, as it does for FastVideo's modular releases.
        arrive: called with each tensor of the checkpoint before it is due.
        done: called with each once the engine has asked for the next.
    """
    if diffusers:
        yield from _diffusers_stream(plan, taken, arrive, done)
        return
    last = {linear.entries[-1]: linear for linear in plan.linears.values()}
    parts = {entry for linear in plan.linears.values() for entry in linear.entries}
    names = {entry: name for name, entry in plan.plain.items()}
    for entry in plan.checkpoint.entries.values():
        if entry in last:
            linear = last[entry]
            for part in linear.entries:
                arrive(part)
            if linear.name in taken:
                yield f"{linear.name}.weight", _stand_in(linear.shape)
            else:
                yield f"{linear.name}.weight", _native_weight(linear, plan)
        elif entry not in parts:
            arrive(entry)
            if entry in names:
                name = names[entry]
                yield CURVE_TABLE if name == naming.CURVE else name, mapped(entry)
        done(entry)
    if ROPE not in plan.plain and plan.architecture is not None:
        yield ROPE, rope_frequencies(plan.architecture)


def encoder_stream(plan: Plan, taken: Collection[str], *, arrive: Done, done: Done) -> Tensors:
    """The tensors of a text encoder, as :func:`transformer_stream`, under the checkpoint's own names, parts apart."""
    linears = {entry: linear for linear in plan.linears.values() for entry in linear.entries}
    names = {entry: name for name, entry in plan.plain.items()}
    for entry in plan.checkpoint.entries.values():
        arrive(entry)
        if entry in linears:
            linear = linears[entry]
            for name, first, rows in _encoder_parts(plan, linear, entry):
                if linear.name in taken:
                    yield name, _stand_in((rows, linear.shape[1]))
                else:
                    yield name, linear.values(first, rows, _value_dtype(linear))
        elif entry in names:
            yield names[entry], mapped(entry)
        done(entry)


def rope_frequencies(architecture: Architecture) -> torch.Tensor:
    """``rope.inv_freq`` of a checkpoint that leaves it out: ``theta ** (-i / n)`` for ``i`` below ``n``, fp32."""
    count = architecture.rope_inv_freq_len
    exponents = torch.arange(0, 2 * count, 2, dtype=torch.float32) / (2 * count)
    return 1.0 / architecture.rope_theta**exponents


def _diffusers_stream(plan: Plan, taken: Collection[str], arrive: Done, done: Done) -> Tensors:
    if plan.detection.layout.name != "DIFFUSERS":
        raise H3QuantError(
            f"{plan.checkpoint.place}: the engine expects Diffusers names in this model, but it is a"
            f" {plan.detection.name} checkpoint; serve it in a folder of MiniMax-H3's own layout (FL2VA/transformer)"
        )
    linears = {entry: linear for linear in plan.linears.values() for entry in linear.entries}
    plain = set(plan.plain.values())
    for name, entry in plan.checkpoint.entries.items():
        arrive(entry)
        linear = linears.get(entry)
        if linear is None and entry not in plain:
            pass
        elif linear is not None and linear.name in taken:
            yield name, _stand_in((entry.shape[0], linear.shape[1]))
        elif linear is not None:
            coding = next(segment.coding for segment in linear.segments if segment.entry == entry)
            raw = mapped(entry)
            yield name, raw if isinstance(coding, Values) else coding.decode(raw, 0).to(torch.bfloat16)
        else:
            yield name, mapped(entry)
        done(entry)


def _native_weight(linear: StoredLinear, plan: Plan) -> torch.Tensor:
    """A weight with its rows as MiniMax's own release has them, which is what the engine reorders."""
    grouped = linear.name.endswith(".attn.qkv_proj")
    if isinstance(linear.coding, Values) and len(linear.entries) == 1:
        only = linear.entries[0]
        in_order = [s.file_row for s in linear.segments] == sorted(s.file_row for s in linear.segments)
        if (plan.detection.layout.name == "GROUPED" and grouped) or (in_order and not grouped):
            return mapped(only)
    values = linear.values(0, linear.shape[0], _value_dtype(linear))
    if not grouped or plan.architecture is None:
        return values
    heads, width = plan.architecture.num_attention_heads, plan.architecture.attention_head_dim
    return values.reshape(3, heads, width, -1).transpose(0, 1).reshape(values.shape)


def _encoder_parts(plan: Plan, linear: StoredLinear, entry: Entry) -> list[tuple[str, int, int]]:
    """The engine's names of what a checkpoint's tensor holds, each with first row and number of rows."""
    part = next(name for name, owner in _owners(linear).items() if owner == entry)
    if part:
        return [(entry.name, *linear.parts[part])]
    for fused, apart in _FUSED.items():
        if linear.name.endswith(fused):
            sizes = _encoder_widths(plan, linear, fused)
            starts = [sum(sizes[:index]) for index in range(len(sizes))]
            stem = entry.name.removesuffix(f"{fused}.weight")
            names = [f"{stem}{name}.weight" for name in apart]
            return list(zip(names, starts, sizes, strict=True))
    return [(entry.name, 0, linear.shape[0])]


_FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


def _owners(linear: StoredLinear) -> dict[str, Entry]:
    """The tensor of each part of a linear."""
    found = {}
    for part, (first, _) in linear.parts.items():
        begin = 0
        for segment in linear.segments:
            if begin == first:
                found[part] = segment.entry
            begin += segment.rows
    return found


def _encoder_widths(plan: Plan, linear: StoredLinear, fused: str) -> list[int]:
    if fused == "gate_up_proj":
        return [linear.shape[0] // 2] * 2
    config = plan.checkpoint.config.get("text_config", plan.checkpoint.config)
    try:
        heads, groups = int(config["num_attention_heads"]), int(config["num_key_value_heads"])
    except (KeyError, TypeError, ValueError):
        raise H3QuantError(
            f"{plan.checkpoint.place / 'config.json'}: states no num_attention_heads and num_key_value_heads, which"
            f" {linear.name} is split by"
        ) from None
    head = linear.shape[0] // (heads + 2 * groups)
    return [heads * head, groups * head, groups * head]


def _value_dtype(linear: StoredLinear) -> torch.dtype:
    return linear.entries[0].torch_dtype if isinstance(linear.coding, Values) else torch.bfloat16


def _stand_in(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.bfloat16, device="meta")
