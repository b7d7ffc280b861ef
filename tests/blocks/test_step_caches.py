"""The engine's caches that skip blocks or whole steps: over fused blocks they give the bytes of the same cache over
unfused ones, and over AdaLN on the host those over AdaLN on the device.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.denoise import Clip, denoise, denoise_inputs

from vllm_h3_quant.blocks.edges import Edge, obstacles
from vllm_h3_quant.kernels.rows import QuantizedRows
from vllm_h3_quant.methods.base import H3LinearMethod
from vllm_h3_quant.upstream.platform import compute_device

STEPS, BLOCKS = 8, 3
CACHES: dict[str, dict[str, Any]] = {
    "tea_cache": {"rel_l1_thresh": 0.2},
    # A threshold that random weights stay under.
    "cache_dit": {
        "Fn_compute_blocks": 1,
        "Bn_compute_blocks": 0,
        "max_warmup_steps": 2,
        "residual_diff_threshold": 10.0,
        "max_continuous_cached_steps": 2,
    },
}
CACHED = pytest.mark.parametrize("cache", list(CACHES))

Load = Callable[..., Any]
Latents = tuple[torch.Tensor, torch.Tensor]
Taken = Counter[tuple[str, type]]


@pytest.fixture
def load(load_pipeline: Load, tiny_h3: Path) -> Load:
    def loaded(config: dict[str, Any]) -> Any:
        parts = {"transformer": True, "vae": True, "text_encoder": False, "vae_encoder": True}
        return load_pipeline({"transformer": config}, model=tiny_h3, model_loaded=parts)

    return loaded


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> Taken:
    """How often each of our linears ran, by what it was given."""
    seen: Taken = Counter()
    apply = H3LinearMethod.apply

    def watched(self: H3LinearMethod, layer: Any, x: Any, bias: Any = None) -> torch.Tensor:
        seen[self.name, type(x)] += 1
        return apply(self, layer, x, bias)

    monkeypatch.setattr(H3LinearMethod, "apply", watched)
    return seen


def requests(pipeline: Any, cache: str) -> Iterator[Latents]:
    """Two requests under a cache, as the engine's runner has it; it is gone afterwards."""
    from vllm_omni.diffusion.cache.selector import get_cache_backend

    backend = get_cache_backend(cache, CACHES[cache])
    assert backend is not None
    backend.enable(pipeline)
    for seed in (0, 1):
        backend.refresh(pipeline, STEPS)
        inputs = denoise_inputs(pipeline, Clip(64, 64, 39), schedule=STEPS, seed=seed)
        yield denoise(pipeline, inputs, pipeline.transformer, steps=STEPS, device=compute_device())
    if cache == "cache_dit":
        backend.disable(pipeline)


def same(one: Latents, other: Latents) -> bool:
    return all(map(torch.equal, one, other))


@CACHED
@pytest.mark.parametrize(("method", "attention"), [("h3_fp8", "fp8"), ("h3_int8", "int8")])
def test_fusion_changes_no_byte(cache: str, method: str, attention: str, load: Load, taken: Taken) -> None:
    config = {"method": method, "attention": attention}
    pipeline = load(config)
    assert {obstacles(block)[Edge.ATTENTION] for block in pipeline.transformer.blocks} == {None}
    fused = list(requests(pipeline, cache))
    ran, kinds = Counter[str](), set()
    for (name, kind), times in taken.items():
        if name.startswith("blocks.") and name.endswith(("attn.qkv_proj", "mlp.fc1", "mlp.fc2")):
            ran[name] += times
            kinds.add(kind)
    assert kinds == {QuantizedRows}, "a block ran that is not ours"
    assert len(ran) == 3 * BLOCKS
    for name, times in ran.items():
        assert times > 2
        # Cache-DiT computes the first block of each step to see whether it may skip the others.
        first = cache == "cache_dit" and name.startswith("blocks.0.")
        assert times == 2 * STEPS if first else times < 2 * STEPS, f"{name} ran {times} times: nothing was skipped"

    taken.clear()
    plain = list(requests(load(config | {"fuse": False}), cache))
    assert {kind for _, kind in taken} == {torch.Tensor}
    assert all(map(same, fused, plain))
    assert not same(*fused)


@CACHED
def test_adaln_on_the_host_changes_no_byte(cache: str, load: Load) -> None:
    """And is copied once for a schedule: TeaCache asks for outputs that the DiT's own forward did not announce."""
    hosted = load({"method": "h3_fp8", "adaln": "host"})
    found = list(requests(hosted, cache))
    assert all(map(same, found, requests(load({"method": "h3_fp8", "adaln": "keep"}), cache)))
    assert (hosted.transformer.adaln_cache.passes, hosted.transformer.adaln_cache.unannounced) == (1, 0)
