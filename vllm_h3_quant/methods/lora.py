"""Keeps a LoRA out of 8-bit codes.

The engine's LoRA wrapper leaves a linear's weight alone and adds ``scale * B (A x)`` to what the method's
``apply`` returns, which is right for codes as it is for bf16. A merge, ``W + scale * B A``, is not: the codes
are ``W / s``, transposed and for ``h3_int8`` rotated, so that the sum is another matrix; and codes that are
decoded, changed and encoded again are rounded twice. What would write a merge is refused here.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch.nn import Module, Parameter

from vllm_h3_quant.errors import H3QuantError

_INSTEAD = "serve it with lora_backend='peft', each request naming it, or merge it into the bf16 checkpoint first"


class CodesParameter(Parameter):
    """A linear's 8-bit codes. Adding to them, or loading a weight into them, is an error.

    ``add_`` is what vLLM-Omni's own merge calls on each parameter, ``weight_loader`` what a model's
    ``load_weights`` calls. Moves between devices assign ``data`` and are not concerned.

    Attributes:
        layer_name: the linear's name, for the error.
    """

    layer_name: str = "a linear"

    def __deepcopy__(self, memo: dict[int, Any]) -> CodesParameter:
        copied: CodesParameter = super().__deepcopy__(memo)
        copied.layer_name = self.layer_name
        return copied

    def refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Stands for every way to write a merge.

        Raises:
            H3QuantError: always, with the linear's name.
        """
        raise H3QuantError(f"{self.layer_name}.weight holds 8-bit codes, no LoRA can be merged into them: {_INSTEAD}")

    add_ = sub_ = addmm_ = __iadd__ = __isub__ = weight_loader = refuse

    def copy_(self, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        """Copy codes.

        Raises:
            H3QuantError: ``source`` has another dtype, as a merged weight has.
        """
        if source.dtype is not self.dtype:
            self.refuse()
        return super().copy_(source, non_blocking)


def codes_parameter(codes: torch.Tensor, layer_name: str) -> CodesParameter:
    """``codes`` as the weight of the linear ``layer_name``."""
    weight = CodesParameter(codes, requires_grad=False)
    weight.layer_name = layer_name
    return weight


def refuse_merging_backend(where: str, od_config: Any, model: Module) -> None:
    """Refuse ``lora_backend="distill"``, which merges after the weights are loaded and so after they are codes.

    A pipeline that merges its adapter into the tensors of the checkpoint as they are read (``lora_is_fused``,
    FastH3's) does so before they are quantized and may.

    Args:
        where: where the quantization was asked for.
        od_config: the engine's configuration.
        model: the pipeline.

    Raises:
        H3QuantError: the backend is asked for, together with an adapter.
    """
    if od_config.lora_path and od_config.lora_backend == "distill" and not getattr(model, "lora_is_fused", False):
        paths = od_config.lora_path if isinstance(od_config.lora_path, list) else [od_config.lora_path]
        raise H3QuantError(
            f"{where}: lora_backend='distill' merges {', '.join(paths)} into weights that are 8-bit codes by then:"
            f" {_INSTEAD}"
        )
