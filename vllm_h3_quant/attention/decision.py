"""Which attention a layer gets: one function of what was asked, the layer and the device."""

from __future__ import annotations

from dataclasses import dataclass

from vllm_h3_quant.attention.request import AttentionRequest
from vllm_h3_quant.config.schema import Method
from vllm_h3_quant.errors import H3QuantError
from vllm_h3_quant.kernels import attention as kernels
from vllm_h3_quant.kernels.backend import Capability, NoBackend, told

AUTO = "auto"
AUTO_ERROR_BOUND: dict[Method, float] = {Method.FP8: kernels.SHARP_ERROR["fp8"], Method.INT8: 0.05}
"""What ``auto`` accepts as error on sharp scores. Linears in e4m3 are off by three times as much as those in INT8, and
whoever chose them takes what e4m3 costs attention too."""

DENSE_BACKENDS = (
    "FLASH_ATTN",
    "FLASH_ATTN_HUB",
    "FLASH_ATTN_3_HUB",
    "CUDNN_ATTN",
    "FLASHINFER_ATTN",
    "TRTLLM_ATTN",
    "SDPA",
)
"""Backends of exact attention. Sparse and quantized ones are a choice of the user's, which stays."""

SKIPPED = "skipped by selector"
NOT_ASKED = "token refiner, not asked for"
KEPT_BY_AUTO = "kept by auto"


@dataclass(frozen=True)
class DeviceFacts:
    """A device.

    Attributes:
        capability: CUDA compute capability; None for the CPU.
        name: for messages.
    """

    capability: Capability | None
    name: str


@dataclass(frozen=True)
class LayerFacts:
    """One of MiniMax-H3's attention layers.

    Attributes:
        block: index of its DiT block; None in the token refiner.
        heads, kv_heads: of the query, and of key and value.
        head_size: channels of a head.
        causal: whether a token sees those before it only.
        backend: name of the engine's implementation.
        backend_options: whether that was given options of its own.
        ring, all_gather: whether the layer's sequence is spread over ranks that way.
    """

    block: int | None
    heads: int
    kv_heads: int
    head_size: int
    causal: bool
    backend: str
    backend_options: bool = False
    ring: bool = False
    all_gather: bool = False


@dataclass(frozen=True)
class Choice:
    """The attention that a device runs.

    Attributes:
        kind: one of ``kernels.attention.KINDS``, or None to keep the engine's.
        kernel: the backend's name; empty without a kind.
        why: why this one; empty where it was asked for by name.
    """

    kind: str | None
    kernel: str = ""
    why: str = ""


@dataclass(frozen=True)
class AttentionDecision:
    """What becomes of one attention layer.

    Attributes:
        kind: one of ``kernels.attention.KINDS``, or None where the layer keeps the engine's attention.
        reason: who asked for the kind, or why the layer keeps what it has.
        kernel: the backend's name; empty without a kind.
        why: why ``auto`` stands for what it does on this device; empty where the user left nothing open.
        skipped_steps: denoising steps that keep the engine's attention.
    """

    kind: str | None
    reason: str
    kernel: str = ""
    why: str = ""
    skipped_steps: frozenset[int] = frozenset()


def on_device(kind: str, method: Method | None, device: DeviceFacts) -> Choice:
    """What ``attention=kind`` (a kind or ``auto``) means beside linears in ``method`` on a device.

    Raises:
        H3QuantError: the device cannot run the kind; the message names it, each backend's reason and a
            kind that the device does run.
    """
    found: str | None = kind
    why = ""
    if kind == AUTO:
        assert method is not None, "only a configuration of ours, which has one, says auto"
        found, why = kernels.choose(device.capability, AUTO_ERROR_BOUND[method])
    if found is None:
        return Choice(None, why=why)
    try:
        return Choice(found, kernels.select(found, device.capability).name, why)
    except NoBackend as error:
        others = [other for other in kernels.KINDS if other != found and _serves(other, device.capability)]
        instead = f"attention='{others[0]}'" if others else "attention='none'"
        raise H3QuantError(
            f"attention='{found}' cannot run on {told(device.name, device.capability)}: {error}; use {instead} instead"
        ) from None


def decide(request: AttentionRequest, layer: LayerFacts, device: DeviceFacts) -> AttentionDecision:
    """What becomes of a layer.

    Raises:
        H3QuantError: the device cannot run the kind (:func:`on_device`), or the engine's own option asks for what the
            layer cannot do.
    """
    choice = on_device(request.kind, request.method, device)
    reason = _left_out(request, layer) or (KEPT_BY_AUTO if choice.kind is None else None)
    if reason is None:
        reason = obstacle(layer)
        if reason is not None and request.by_engine_option:
            raise H3QuantError(f"{request.source} cannot be served: {reason}; leave it out")
    if reason is not None:
        return AttentionDecision(None, reason, why=choice.why)
    return AttentionDecision(choice.kind, request.source, choice.kernel, choice.why, request.skipped_steps)


def _left_out(request: AttentionRequest, layer: LayerFacts) -> str | None:
    """Why the request leaves a layer out, or None."""
    if layer.block is None:
        return None if request.token_refiner else NOT_ASKED
    return SKIPPED if layer.block in request.skipped_blocks else None


def obstacle(layer: LayerFacts) -> str | None:
    """Why a layer keeps its implementation in every call, or None."""
    if layer.ring:
        return "ring parallelism"
    if layer.all_gather:
        return "all-gather parallelism"
    if layer.causal:
        return "causal attention"
    if layer.kv_heads != layer.heads:
        return f"{layer.heads} query heads share {layer.kv_heads} key heads"
    if layer.head_size not in kernels.HEAD_SIZES:
        return f"head size {layer.head_size}, the kernels take {' and '.join(map(str, kernels.HEAD_SIZES))}"
    if layer.backend not in DENSE_BACKENDS:
        return f"backend {layer.backend}, which is not dense attention"
    if layer.backend_options:
        return f"backend {layer.backend} with options of its own"
    return None


def _serves(kind: str, capability: Capability | None) -> bool:
    try:
        kernels.select(kind, capability)
    except NoBackend:
        return False
    return True
