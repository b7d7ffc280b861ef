"""Turns a linear's weight on the meta device into a real one as its tensors arrive.

vLLM's own online loader finishes a layer when the elements loaded reach the layer's total, but it
sees only the parameters that exist when the weight is created. A bias is registered after that and
lies before the weight in H3's files, so the count falls short and all 50 AdaLN projections wait for
the end of the load (24.2 GiB of bf16). Here each parameter is counted by itself, and a bias counts
from the moment it can be watched.

A weight with a source is read from there when the engine hands over its stand-in, a tensor on the meta
device: in the order of rows that the model has, straight to where it belongs, without the copy on the host
with which the engine reorders rows. A rank that holds whole rows quantizes them a piece at a time, so that the
device never holds all of a large weight beside its codes.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.nn import Module, Parameter
from torch.utils._python_dispatch import TorchDispatchMode

from vllm_h3_quant.errors import H3QuantError
from vllm_h3_quant.kernels.formats import CodeFormat
from vllm_h3_quant.methods.source import WeightSource

PIECE = 224 * 2**20
"""Bytes of values that are read before they are quantized: all of H3's qkv_proj, whose rows lie interleaved in the
file and are read best at once (220.5 MiB), and a third of an AdaLN projection."""

Quantize = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


class _CopiedElements(TorchDispatchMode):
    """Counts the elements written by ``copy_``, whatever slices a weight loader takes."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            self.count += args[0].numel()
        return func(*args, **(kwargs or {}))


class Arrival:
    """The tensors of one layer on their way in.

    Args:
        layer: the linear; its parameters' ``weight_loader`` attributes are replaced.
        name: the layer's name, for errors.
        on_tensor: called with a parameter's name and each checkpoint tensor for it, before this rank's
            part of it is taken.
        on_complete: called once, when every watched parameter is full.
    """

    def __init__(
        self,
        layer: Module,
        name: str,
        *,
        on_tensor: Callable[[Module, str, torch.Tensor], None],
        on_complete: Callable[[Module], None],
    ) -> None:
        self._layer: weakref.ref[Module] | None = weakref.ref(layer)
        self.name = name
        self.on_tensor = on_tensor
        self.on_complete = on_complete
        self.device = torch.get_default_device()
        self.complete = False
        self._missing: dict[str, int] = {}
        self._shards: set[tuple[str, object]] = set()
        self._source: WeightSource | None = None
        self._quantize: Quantize | None = None
        self.has_codes = False
        self.scale: torch.Tensor | None = None

    def take_from(self, source: WeightSource, fmt: CodeFormat, quantize: Quantize, *, as_it_is: bool) -> None:
        """Read the weight from ``source``.

        Args:
            source: all of it.
            fmt: of the codes that the layer keeps.
            quantize: ``(M, K)`` codes and ``(M, 1)`` scales of ``(M, K)`` values.
            as_it_is: whether the source's codes are used; its values are quantized otherwise.
        """
        self._source, self._fmt, self._quantize, self.has_codes = source, fmt, quantize, as_it_is

    @property
    def layer(self) -> Module:
        layer = self._layer() if self._layer else None
        assert layer is not None, f"{self.name} was dropped while its tensors arrive"
        return layer

    def watch(self, param_name: str) -> None:
        """Count ``param_name`` from now on; the layer is not complete before it is full."""
        if self.complete or param_name in self._missing:
            return
        param = getattr(self.layer, param_name)
        self._missing[param_name] = param.numel()
        load = param.weight_loader

        def load_and_count(param: Parameter, loaded: torch.Tensor, *args: Any, **kwargs: Any) -> None:
            self._load(param_name, load, loaded, args, kwargs)

        param.weight_loader = load_and_count

    def describe(self) -> str:
        """What is still missing, for an error."""
        parts = [f"{name} lacks {count} elements" for name, count in self._missing.items() if count]
        return ", ".join(parts) or "nothing"

    def _load(
        self,
        param_name: str,
        load: Callable[..., object],
        loaded: torch.Tensor,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        shard = (param_name, args[0] if args else kwargs.get("loaded_shard_id"))
        if self.complete or shard in self._shards:
            part = "" if shard[1] is None else f" (shard {shard[1]!r})"
            raise H3QuantError(f"{self.name}.{param_name}{part} arrives twice: the checkpoint holds it more than once")
        self._shards.add(shard)
        if loaded.is_meta:
            arrived = self._load_from_source(param_name, shard[1], partial(load, **kwargs), args)
        else:
            arrived = self._load_tensor(param_name, loaded, partial(load, **kwargs), args)
        self._missing[param_name] -= arrived
        if not any(self._missing.values()):
            self.complete = True
            layer, self._layer = self.layer, None  # a complete layer can be copied, a weak reference cannot
            self._source = None
            self.on_complete(layer)

    def _load_tensor(
        self, param_name: str, loaded: torch.Tensor, load: Callable[..., object], args: tuple[Any, ...]
    ) -> int:
        """Hand a tensor of the checkpoint to the engine's loader; how many elements of this rank it wrote."""
        if loaded.element_size() < 2:
            raise H3QuantError(
                f"{self.name}.{param_name} holds {str(loaded.dtype).removeprefix('torch.')} codes in the checkpoint,"
                " and nothing told their scales: online quantization needs its bf16 weights"
            )
        self.on_tensor(self.layer, param_name, loaded)
        with _CopiedElements() as copied:
            load(self._materialize(param_name), loaded, *args)
        return copied.count

    def _load_from_source(
        self, param_name: str, shard: object, load: Callable[..., object], args: tuple[Any, ...]
    ) -> int:
        """Read the rows that a stand-in stands for; how many elements of this rank they are."""
        source = self._source
        layer: Any = self.layer
        if source is None or param_name != "weight":
            raise H3QuantError(f"{self.name}.{param_name} has nothing but a stand-in: its source was never told")
        widths = layer.logical_widths
        local = slice(0, sum(widths))
        if shard is not None:
            index = _SHARDS[shard] if isinstance(shard, str) else int(shard)  # type: ignore[call-overload]
            local = slice(sum(widths[:index]), sum(widths[: index + 1]))
        # Parts of a fused weight are shared out among ranks alike, so that shares of a rank are shares of all.
        first, last = (source.shape[0] * row // sum(widths) for row in (local.start, local.stop))
        elements = (local.stop - local.start) * layer.input_size_per_partition
        if (sum(widths), layer.input_size_per_partition) == source.shape:
            self._fill(source, local, first)
            return elements
        if self.has_codes:
            with _CopiedElements() as copied:
                load(self._materialize("weight", codes=True), source.codes(first, last - first), *args)
            self._load_scale(source.row_scale(first, last - first), load, args)
            return copied.count
        return self._load_tensor("weight", source.values(first, last - first, layer.orig_dtype), load, args)

    def _fill(self, source: WeightSource, rows: slice, first: int) -> None:
        """Write whole rows, as codes: the source's, or those of its values."""
        scale = self._scale_parameter().data
        if self.has_codes:
            mapped = source.whole() if self.device.type == "cpu" else None
            weight = self._materialize("weight", mapped, codes=True).data
            if mapped is None:
                source.fill(weight[rows], first)
            scale[rows] = source.row_scale(first, rows.stop - rows.start).to(self.device)
            return
        weight = self._materialize("weight", codes=True).data
        layer: Any = self.layer
        count, columns = rows.stop - rows.start, weight.shape[1]
        pieces = max(-(-count * columns * layer.orig_dtype.itemsize // PIECE), 1)
        step = -(-count // pieces)
        for begin in range(rows.start, rows.stop, step):
            piece = slice(begin, min(begin + step, rows.stop))
            weight[piece], scale[piece] = self._quantized(source, first + begin - rows.start, weight[piece].shape)

    def _quantized(self, source: WeightSource, first: int, shape: torch.Size) -> tuple[torch.Tensor, torch.Tensor]:
        """Codes and scales of some rows, whose values are gone when the next are read."""
        assert self._quantize is not None
        layer: Any = self.layer
        values = torch.empty(shape, dtype=layer.orig_dtype, device=self.device)
        source.fill(values, first)
        return self._quantize(values)

    def _load_scale(self, scale: torch.Tensor, load: Callable[..., object], args: tuple[Any, ...]) -> None:
        """Take this rank's part of whole rows' scales as the engine's loader takes it of the rows."""
        if self.layer.input_size_per_partition == self.layer.input_size:
            load(self._scale_parameter(), scale, *args)
        else:
            self._scale_parameter().data.copy_(scale)

    def _scale_parameter(self) -> Parameter:
        if self.scale is None:
            layer: Any = self.layer
            rows = sum(layer.logical_widths)
            self.scale = Parameter(torch.empty(rows, 1, dtype=torch.float32, device=self.device), requires_grad=False)
            self.scale.output_dim = 0  # type: ignore[attr-defined]
        return self.scale  # type: ignore[return-value]

    def _materialize(self, param_name: str, tensor: torch.Tensor | None = None, *, codes: bool = False) -> Parameter:
        param = getattr(self.layer, param_name)
        if not param.is_meta:
            return param
        if tensor is None:
            dtype = self._fmt.dtype if codes else param.dtype
            tensor = torch.empty_like(param, device=self.device, dtype=dtype)
        real = Parameter(tensor, requires_grad=False)
        real.__dict__.update(param.__dict__)
        self.layer.register_parameter(param_name, real)
        return real


_SHARDS = {"q": 0, "k": 1, "v": 2}
"""Names of a fused projection's parts, in the order of its rows."""
