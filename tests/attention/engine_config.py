"""What an attention layer and this package read of the engine's configuration."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

H3 = "MiniMaxH3Pipeline"


def od_config(quantization_config: Any = None, **changes: Any) -> Any:
    """Stands for an ``OmniDiffusionConfig``; ``parallel`` changes its parallel configuration."""
    parallel = {"ring_degree": 1, "allgather_degree": 1, **changes.pop("parallel", {})}
    plain = {
        "model_class_name": H3,
        "quantization_config": quantization_config,
        "diffusion_attention_config": None,
        "diffusion_kv_cache_dtype": None,
        "diffusion_kv_cache_skip_layer_indices": None,
        "diffusion_kv_cache_skip_step_indices": None,
    }
    return SimpleNamespace(**{**plain, **changes}, parallel_config=SimpleNamespace(**parallel))
