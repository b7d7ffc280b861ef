"""Clips that several files compare: arguments of the engine, and what is asked of it (``generate.py``)."""

from __future__ import annotations

from typing import Any

FP8, INT8 = "h3_fp8", "h3_int8"
CAT, DOG = "a cat plays the piano", "a dog barks at the moon"
RUNS: dict[str, dict[str, Any]] = {
    "bf16": {},
    "string_fp8": {"arguments": {"quantization": FP8}},
    "string_int8": {"arguments": {"quantization_config": INT8}, "requests": 2},
    "mapping": {
        "arguments": {"quantization_config": {"method": FP8, "ignored_layers": ["blocks.0.attn", "*.down_proj"]}}
    },
    "mapping_int8": {"arguments": {"quantization_config": {"method": INT8, "adaln": "keep", "rotation": 128}}},
    "transformer": {"arguments": {"quantization_config": {"transformer": {"method": FP8}}}},
    "text_encoder": {"arguments": {"quantization_config": {"text_encoder": {"method": INT8}}}},
    "both": {"arguments": {"quantization_config": {"transformer": {"method": FP8}, "text_encoder": {"method": INT8}}}},
    "both_strings": {"arguments": {"quantization_config": {"transformer": FP8, "text_encoder": INT8}}},
    "null": {"arguments": {"quantization_config": {"transformer": {"method": INT8}, "text_encoder": None}}},
    "layerwise": {"arguments": {"quantization": FP8, "enable_layerwise_offload": True, "pin_cpu_memory": False}},
    "distributed": {
        "arguments": {
            "quantization": INT8,
            "enable_distributed_layerwise_offload": True,
            "dlo_use_allgather": False,
            "pin_cpu_memory": False,
        }
    },
    "full_fp8": {
        # Two requests in one forward, which needs step_execution, and each of them by itself.
        "arguments": {"quantization": "h3_fp8_full", "step_execution": True, "max_num_seqs": 2},
        "calls": [([CAT, DOG], None), ([CAT], None), ([DOG], None)],
        "debug": ["vllm_omni.diffusion.models.minimax_h3.pipeline_minimax_h3"],
    },
    "full_int8": {"arguments": {"quantization_config": "h3_int8_full"}},
    "unfused_fp8": {"arguments": {"quantization_config": {"method": "h3_fp8_full", "fuse": False}}},
    "unfused_int8": {"arguments": {"quantization_config": {"method": "h3_int8_full", "fuse": False}}},
    "cached": {"arguments": {"quantization_config": "h3_int8_full", "cache_backend": "cache_dit"}},
    "engine_option": {"arguments": {"diffusion_kv_cache_dtype": "fp8", "diffusion_kv_cache_skip_layers": "0"}},
    "replaced_fp8": {"arguments": {"quantization": "fp8"}, "env": {"VLLM_H3_QUANT_REPLACE": "fp8,int8"}},
    "replaced_int8": {"arguments": {"quantization": "int8"}, "env": {"VLLM_H3_QUANT_REPLACE": "fp8,int8"}},
}
