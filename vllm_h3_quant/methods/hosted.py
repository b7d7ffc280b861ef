"""A linear whose weight stays in host memory and visits the device when it is used.

For MiniMax-H3's AdaLN projections: 40% of the DiT's bytes, a few rows of work for each of a request's timesteps. The
weight is no parameter of its module: what offloads, shards or moves blocks passes it by.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn import Module
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod

from vllm_h3_quant.dlo.pages import allocate, pin
from vllm_h3_quant.dlo.sharing import Store, shared
from vllm_h3_quant.errors import H3QuantError
from vllm_h3_quant.upstream.model_loader import mark_processed


class HostedLinearMethod(UnquantizedLinearMethod):
    """The engine's own linear, on a weight that is copied from the host for it.

    One instance serves one layer.

    Args:
        name: the layer's name, for logs.
        store: where ranks of a host meet that may hold the same weight; None keeps it private.
    """

    # Read by vLLM-Omni's loader, which may keep layers on the host once they are loaded.
    supports_offload_after_quant = True

    def __init__(self, name: str, store: Store | None = None) -> None:
        super().__init__()
        self.name = name
        self.store = store
        self.bias: torch.Tensor | None = None
        self._raw: torch.Tensor | None = None
        self._here: torch.Tensor | None = None
        self._loaded = False

    def enable_offload_after_quant(self) -> None:
        """It is on the host from the start."""

    def create_weights(
        self,
        layer: LinearBase,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Register ``weight`` as the engine does, in host memory that it never leaves."""
        load = extra_weight_attrs["weight_loader"]

        def load_and_note(param: torch.nn.Parameter, loaded: torch.Tensor, *args: Any, **kwargs: Any) -> None:
            load(param, loaded, *args, **kwargs)
            self._loaded = True
            self._share(param)

        extra_weight_attrs["weight_loader"] = load_and_note
        sizes = (input_size_per_partition, output_partition_sizes, input_size, output_size, params_dtype)
        with torch.device("cpu"):
            super().create_weights(layer, *sizes, **extra_weight_attrs)
        weight = layer.weight
        self._raw = allocate(weight.numel() * weight.itemsize, pinned=False, shareable=self.store is not None)
        weight.data = self._raw.view(params_dtype).view(weight.shape)

    def process_weights_after_loading(self, layer: LinearBase) -> None:
        """Nothing: :meth:`hold` was called before, and a weight that was never read is no weight."""

    def hold(self, layer: LinearBase, device: torch.device, *, pinned: bool) -> None:
        """Take the loaded weight and bias out of the module's parameters.

        Args:
            layer: the linear.
            device: where it computes; the bias goes there.
            pinned: register the weight with CUDA, so that it is copied beside kernels.

        Raises:
            H3QuantError: nothing was loaded into the weight.
        """
        raw = self._raw
        if raw is None:
            return
        if not self._loaded:
            raise H3QuantError(
                f"{self.name}: adaln='host' needs the weight when the model has been loaded, and it was not read; use"
                " adaln='keep' with this way of loading"
            )
        weight = layer.weight.data
        own = raw.view(weight.dtype).view(weight.shape)
        if own.data_ptr() != weight.data_ptr():
            own.copy_(weight)
        if pinned:
            pin(raw)
        self._raw = None
        del layer._parameters["weight"]
        layer.weight = own
        if layer.bias is not None:
            self.bias = layer.bias.data.to(device)
            layer._parameters["bias"] = None
        mark_processed(layer)

    def _share(self, param: torch.nn.Parameter) -> None:
        """Let go of a weight that another rank of the host holds too, before the next one is read."""
        assert self._raw is not None
        self._raw = shared(self._raw, self.store, pinned=False)
        param.data = self._raw.view(param.dtype).view(param.shape)

    @contextmanager
    def arrived(self, weight: torch.Tensor) -> Iterator[None]:
        """Use ``weight``, a copy of the layer's on the device, for the calls inside."""
        self._here = weight
        try:
            yield
        finally:
            self._here = None

    def apply(self, layer: Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """``x @ W^T + bias`` by the engine's kernel; the weight is copied here and now where it has not arrived."""
        at_rest = layer.weight
        layer.weight = at_rest.to(x.device) if self._here is None else self._here
        try:
            return super().apply(layer, x, self.bias if bias is None else bias)
        finally:
            layer.weight = at_rest
