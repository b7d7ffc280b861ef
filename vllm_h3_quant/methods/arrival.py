"""Turns a linear's weight on the meta device into a real one as its tensors arrive.

vLLM's own online loader finishes a layer when the elements loaded reach the layer's total, but it
sees only the parameters that exist when the weight is created. A bias is registered after that and
lies before the weight in H3's files, so the count falls short and all 50 AdaLN projections wait for
the end of the load (24.2 GiB of bf16). Here each parameter is counted by itself, and a bias counts
from the moment it can be watched.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import Module, Parameter
from torch.utils._python_dispatch import TorchDispatchMode

from vllm_h3_quant.errors import H3QuantError


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
        if loaded.element_size() < 2:
            raise H3QuantError(
                f"{self.name}.{param_name} holds {str(loaded.dtype).removeprefix('torch.')} codes in the checkpoint:"
                " online quantization needs its bf16 weights"
            )
        self.on_tensor(self.layer, param_name, loaded)
        with _CopiedElements() as copied:
            load(self._materialize(param_name), loaded, *args, **kwargs)
        self._missing[param_name] -= copied.count
        if not any(self._missing.values()):
            self.complete = True
            layer, self._layer = self.layer, None  # a complete layer can be copied, a weak reference cannot
            self.on_complete(layer)

    def _materialize(self, param_name: str) -> Parameter:
        param = getattr(self.layer, param_name)
        if not param.is_meta:
            return param
        real = Parameter(torch.empty_like(param, device=self.device), requires_grad=False)
        real.__dict__.update(param.__dict__)
        self.layer.register_parameter(param_name, real)
        return real
