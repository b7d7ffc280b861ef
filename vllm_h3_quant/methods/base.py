"""The common part of the linear methods: create on meta, quantize on arrival, apply.

The weight's storage after quantization, for a linear with ``N`` outputs and ``K`` inputs on this
rank and ``N'``, ``K'`` padded to the backend's alignment with zeros:

========================  ==================  ======================================
parameter                 shape, stride       meaning
========================  ==================  ======================================
``weight``                (K', N'), (1, K')   codes; the transposed view that GEMMs take
``weight_scale``          (1, N'), fp32       one scale per output channel
``bias``                  as created          untouched
========================  ==================  ======================================

Under HSDP the linears of the DiT keep the same bytes by rows (:mod:`vllm_h3_quant.methods.sharding`).
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch.nn import Parameter
from vllm.model_executor.layers.linear import LinearBase, LinearMethodBase, UnquantizedLinearMethod
from vllm.model_executor.utils import set_weight_attrs

from vllm_h3_quant.config.schema import H3QuantOptions
from vllm_h3_quant.dlo.returning import return_to_host
from vllm_h3_quant.errors import H3QuantError
from vllm_h3_quant.kernels.formats import CodeFormat
from vllm_h3_quant.kernels.gemm import Backend, scaled_gemm
from vllm_h3_quant.kernels.quantize import largest_scale, quantize_rows, row_divisors
from vllm_h3_quant.kernels.rows import QuantizedRows, RowFormat
from vllm_h3_quant.methods.arrival import Arrival
from vllm_h3_quant.methods.device import backend_for
from vllm_h3_quant.methods.lora import codes_parameter
from vllm_h3_quant.methods.sharding import operands_by_rows, store_by_rows
from vllm_h3_quant.methods.source import WeightSource
from vllm_h3_quant.methods.storage import keep_dtypes
from vllm_h3_quant.upstream.model_loader import is_processed, mark_processed


class H3LinearMethod(LinearMethodBase):
    """Online 8-bit linear: weight codes per output channel, activation codes per token.

    One instance serves one layer. Weights start on the meta device.

    Args:
        options: the component's configuration.
        name: the layer's name, for logs and errors.
    """

    fmt: ClassVar[CodeFormat]

    # Read by vLLM-Omni's loader: a layer may go back to the host once it is quantized.
    supports_offload_after_quant: ClassVar[bool] = True

    def __init__(self, options: H3QuantOptions, name: str) -> None:
        self.options = options
        self.name = name
        self.backend: Backend = backend_for(options.method)
        self.rotation = 0
        self.by_rows = False
        # Read by vLLM-Omni's loader, which takes it for quantization at load time.
        self.uses_meta_device = not options.checkpoint
        self.may_pin = True
        self._offload_after_quant = False
        self._shared_divisors: torch.Tensor | None = None

    def enable_offload_after_quant(self) -> None:
        """Send the layer to host memory as soon as it is quantized."""
        self._offload_after_quant = True

    def choose_rotation(self, input_size: int) -> int:
        """Width of the Hadamard groups for ``input_size`` inputs on this rank; 0 for none."""
        return 0

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
        """Register ``weight`` as ``(N, K)`` on the meta device and watch its tensors arrive."""
        outputs = sum(output_partition_sizes)
        self._created = (
            input_size_per_partition,
            output_partition_sizes,
            input_size,
            output_size,
            params_dtype,
            extra_weight_attrs,
        )
        layer.logical_widths = output_partition_sizes
        layer.input_size_per_partition = input_size_per_partition
        layer.output_size_per_partition = outputs
        layer.orig_dtype = params_dtype
        self.rotation = self.choose_rotation(input_size_per_partition)
        weight = Parameter(
            torch.empty(outputs, input_size_per_partition, dtype=params_dtype, device="meta"),
            requires_grad=False,
        )
        set_weight_attrs(weight, {"input_dim": 1, "output_dim": 0, **extra_weight_attrs})
        layer.register_parameter("weight", weight)
        self.arrival = Arrival(
            layer, self.name, on_tensor=self.see_tensor, on_complete=self.process_weights_after_loading
        )
        self.arrival.watch("weight")

    def watch_bias(self, layer: LinearBase) -> None:
        """Count the bias too, now that the linear has registered it, and take the backend for one."""
        if getattr(layer, "bias", None) is not None:
            self.backend = backend_for(self.options.method, biased=True)
            self.arrival.watch("bias")

    def take_from(self, layer: LinearBase, source: WeightSource) -> bool:
        """Read the weight from ``source`` instead of from what the engine hands over.

        Returns:
            Whether its codes are used as they are. Otherwise its values are, and are quantized.
        """
        kept = source.has_codes(self.fmt) and (
            source.rotation == self.rotation
            or (source.rotation > 0 and layer.input_size_per_partition % source.rotation == 0)
        )
        if kept:
            self.rotation = source.rotation
        self.arrival.take_from(source, self.fmt, self._quantize_values, as_it_is=kept)
        return kept

    def _quantize_values(self, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return quantize_rows(values, self.fmt, rotation=self.rotation)

    def withdraw(self, layer: LinearBase) -> None:
        """Leave the linear to the engine, unquantized. Call before any of its tensors has arrived."""
        *sizes, attributes = self._created
        layer.quant_method = UnquantizedLinearMethod()
        with self.arrival.device:
            layer.quant_method.create_weights(layer, *sizes, **attributes)

    def see_tensor(self, layer: LinearBase, param_name: str, loaded: torch.Tensor) -> None:
        """Take the scales of a row-parallel weight from all of it, before this rank's columns are cut out.

        Ranks that hold parts of the same rows then share their scales without a collective, which
        could not be matched: each rank reads its files in an order of its own.
        """
        if param_name != "weight" or layer.input_size_per_partition == layer.input_size:
            return
        whole = (layer.output_size_per_partition, layer.input_size)
        if tuple(loaded.shape) != whole:
            raise H3QuantError(
                f"{self.name}.weight arrives as {tuple(loaded.shape)}, not {whole}: the scales of a row-parallel"
                " weight need all of it"
            )
        self._shared_divisors = row_divisors(loaded.to(self.arrival.device), self.fmt, rotation=self.rotation)

    def process_weights_after_loading(self, layer: LinearBase) -> None:
        """Replace the weight by codes and scales.

        Called when the last tensor has arrived, and once more by the loader's final sweep, where a
        layer that is not complete is an error.
        """
        if is_processed(layer):
            return
        if not self.arrival.complete:
            raise H3QuantError(f"{self.name}: the checkpoint is incomplete, {self.arrival.describe()}")
        if self.arrival.scale is not None:
            self._refuse_broken(self.arrival.scale.data)
            codes, scale = self._pad(layer.weight.data, self.arrival.scale.data)
            self.arrival.scale = None
        else:
            codes, scale = self.quantize_weight(layer.weight.data)
        layer.register_parameter("weight", codes_parameter(codes.t(), self.name))
        layer.register_parameter("weight_scale", Parameter(scale.t(), requires_grad=False))
        mark_processed(layer)
        keep_dtypes(layer)
        if self._offload_after_quant:
            return_to_host(layer, pinned=self.may_pin)

    def store_for_sharding(self, layer: LinearBase) -> None:
        """Keep the codes by rows from now on, so that HSDP can shard them. Call once the layer is quantized."""
        if not self.by_rows:
            store_by_rows(layer, self.name)
            self.by_rows = True

    def operands(self, layer: LinearBase) -> tuple[torch.Tensor, torch.Tensor]:
        """``(K', N')`` codes with stride ``(1, K')`` and ``(1, N')`` scales, however the layer keeps them.

        Raises:
            H3QuantError: HSDP has sharded them and not gathered them for this call.
        """
        if self.by_rows:
            return operands_by_rows(layer, self.fmt.dtype, self.name)
        return layer.weight, layer.weight_scale

    def quantize_weight(self, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """``(N', K')`` codes and ``(N', 1)`` scales of a ``(N, K)`` weight."""
        codes, scale = quantize_rows(
            weight,
            self.fmt,
            rotation=self.rotation,
            divisor=self._shared_divisors,
            padded=self.aligned(weight.shape[1]),
        )
        self._shared_divisors = None
        self._refuse_broken(scale)
        return self._pad(codes, scale)

    def _refuse_broken(self, scale: torch.Tensor) -> None:
        broken = ~(scale < largest_scale(self.fmt, self.rotation))
        if broken.any():
            row = int(broken.nonzero()[0, 0])
            raise H3QuantError(f"{self.name}: the weights of output {row} are not finite in the checkpoint")

    def _pad(self, codes: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """``(N', K')`` codes and ``(N', 1)`` scales; those given where they need no padding."""
        outputs, inputs = codes.shape
        rows, columns = self.aligned(outputs) - outputs, self.aligned(inputs) - inputs
        if rows or columns:
            padded = codes.new_zeros(outputs + rows, inputs + columns)
            padded[:outputs, :inputs] = codes
            codes = padded
        if rows:
            scale = F.pad(scale, (0, 0, 0, rows), value=1.0)
        return codes, scale

    @property
    def row_format(self) -> RowFormat:
        """The codes that :meth:`apply` takes."""
        return RowFormat(self.fmt.name, self.rotation)

    def apply(
        self, layer: LinearBase, x: torch.Tensor | QuantizedRows, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """``x @ W^T + bias`` for ``x`` of shape ``(..., K)``; the result has the dtype of ``x``.

        Raises:
            H3QuantError: ``x`` holds codes of another format, rotation or width than the weight's, or the weight
                is sharded (:meth:`operands`).
        """
        outputs = layer.output_size_per_partition
        weight, weight_scale = self.operands(layer)
        if isinstance(x, QuantizedRows):
            self._check_codes(x, weight.shape[0])
            if x.shape[0] == 0:
                return x.scale.new_empty(0, outputs, dtype=x.dtype)
            codes, scale = x.codes, x.scale
        else:
            rows = x.reshape(-1, x.shape[-1])
            if rows.shape[0] == 0:
                return x.new_empty(*x.shape[:-1], outputs)
            codes, scale = quantize_rows(rows, self.fmt, rotation=self.rotation, padded=weight.shape[0])
        spare = weight.shape[1] - outputs
        if bias is not None and spare:
            bias = F.pad(bias, (0, spare))
        out = scaled_gemm(codes, weight, scale, weight_scale, bias, x.dtype)
        return out[:, :outputs].reshape(*x.shape[:-1], outputs)

    def _check_codes(self, rows: QuantizedRows, inputs: int) -> None:
        if rows.format != self.row_format or rows.shape[1] != inputs:
            raise H3QuantError(
                f"{self.name} takes {inputs} codes a row of {self.row_format}, not {rows.shape[1]} of {rows.format}"
            )

    def aligned(self, size: int) -> int:
        """``size`` rounded up to what the backend takes."""
        step = self.backend.alignment
        return -(-size // step) * step
