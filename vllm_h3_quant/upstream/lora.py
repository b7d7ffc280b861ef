"""Keeps a LoRA's matrices on the compute device while the linears beside them are offloaded.

Why: vLLM-Omni puts them where the linear's weight is at that moment. Under layer-wise offload that is host
memory for every block that has not run yet, and the first product with an activation of the GPU fails; only
for distributed layer-wise offload does the manager move them itself.
Symbols: ``DiffusionLoRAManager._replace_layers_with_lora(self, peft_helper)`` in
``vllm_omni.diffusion.lora.manager`` and ``DiffusionBaseLinearLayerWithLoRA._set_diffusion_lora_buffer_device(self,
device)`` in ``vllm_omni.diffusion.lora.layers.base_linear``, vLLM-Omni 0.30.0; ``device``, ``pipeline`` and
``_lora_modules`` of the manager are read. When they move: check where the manager wraps linears.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch.nn import Module

from vllm_h3_quant.upstream.preflight import Symbol

_MANAGER = "vllm_omni.diffusion.lora.manager"
_LAYERS = "vllm_omni.diffusion.lora.layers.base_linear"
SYMBOLS = (
    Symbol("vllm-omni", _MANAGER, "DiffusionLoRAManager._replace_layers_with_lora", ("self", "peft_helper")),
    Symbol("vllm-omni", _LAYERS, "DiffusionBaseLinearLayerWithLoRA._set_diffusion_lora_buffer_device", ("device",)),
)

_ORIGINAL = "_h3_quant_original"


def keep_on_device(ours: Callable[[Module], bool]) -> None:
    """Make the manager of each pipeline that ``ours`` accepts keep LoRA matrices on its own device.

    A second call replaces the first.
    """
    from vllm_omni.diffusion.lora.manager import DiffusionLoRAManager

    wrap = DiffusionLoRAManager._replace_layers_with_lora
    original = getattr(wrap, _ORIGINAL, wrap)

    @functools.wraps(original)
    def replace_layers_with_lora(self: Any, peft_helper: Any) -> None:
        original(self, peft_helper)
        if ours(self.pipeline):
            for layer in self._lora_modules.values():
                layer._set_diffusion_lora_buffer_device(self.device)

    setattr(replace_layers_with_lora, _ORIGINAL, original)
    DiffusionLoRAManager._replace_layers_with_lora = replace_layers_with_lora
