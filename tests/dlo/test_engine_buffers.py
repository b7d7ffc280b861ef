"""The engine's offload keeps its weights in host memory of this package."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from cuda_runtime import Runtime
from torch import nn

from vllm_h3_quant.dlo import host_memory, pages
from vllm_h3_quant.dlo.packing import ALIGNMENT


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    gc.collect()  # pages of other tests leave through CUDA itself
    runtime = Runtime()
    monkeypatch.setattr(pages, "can_pin", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    host_memory.install()
    host_memory.install()


def block() -> nn.Module:
    """A quantized linear's tensors, 300 KiB of codes and 3 KiB of the rest."""
    module = nn.Module()
    codes = torch.randint(-127, 128, (600, 512), dtype=torch.int8).t()
    module.weight = nn.Parameter(codes, requires_grad=False)
    module.bias = nn.Parameter(torch.randn(600, dtype=torch.bfloat16), requires_grad=False)
    module.register_buffer("scale", torch.rand(1, 600))
    return module


def held_for(call: Any) -> tuple[Any, int, int]:
    gc.collect()  # or what other tests held may go meanwhile
    before = pages.held()
    result = call()
    after = pages.held()
    return result, after.own - before.own, after.pinned - before.pinned


WHOLE_PAGES = 75 * 4096 + 4096 + 4096


def test_layerwise() -> None:
    from vllm_omni.diffusion.offloader.layerwise_backend import LayerwiseOffloadHook

    module = block()
    params, buffers = dict(module.named_parameters()), dict(module.named_buffers())
    (_, described), own, pinned = held_for(lambda: LayerwiseOffloadHook._to_cpu(params, buffers, True))
    assert own == pinned == WHOLE_PAGES
    assert module.weight.numel() == module.scale.numel() == 0
    assert described[torch.int8][0]["stride"] == (1, 512)


def test_distributed() -> None:
    from vllm_omni.diffusion.offloader.distributed_layerwise_backend import DistributedLayerwiseOffloadHook

    module = block()
    params, buffers = dict(module.named_parameters()), dict(module.named_buffers())
    (shards, _), own, pinned = held_for(
        lambda: DistributedLayerwiseOffloadHook._shard_and_pin(params, buffers, 2, 1, True)
    )
    assert own == pinned == 38 * 4096 + 4096 + 4096
    assert torch.equal(shards[torch.int8], module.weight.t().flatten()[300 * 512 :])
    assert module.weight.numel() == 600 * 512


def test_a_module_that_is_staged_whole() -> None:
    from vllm_omni.diffusion.offloader.module_residency import PinnedModuleStager

    module = block()
    before = [tensor.clone() for tensor in (*module.parameters(), *module.buffers())]
    groups, own, pinned = held_for(lambda: PinnedModuleStager._snapshot_groups((module,), pin_memory=True))
    assert own == pinned == 76 * 4096  # 300 KiB, 1,280 and 2,432 bytes in one buffer
    assert all(group.master.data_ptr() % ALIGNMENT == 0 for group in groups)
    found = [PinnedModuleStager._view(group.master, binding) for group in groups for binding in group.bindings]
    assert all(map(torch.equal, found, before))
    del groups, found
    gc.collect()
    _, own, pinned = held_for(lambda: PinnedModuleStager._snapshot_groups((module,), pin_memory=False))
    assert own == pinned == 0


def test_nothing_is_pinned_where_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm_omni.diffusion.offloader.layerwise_backend import LayerwiseOffloadHook
    from vllm_omni.diffusion.offloader.module_residency import PinnedModuleStager

    monkeypatch.setattr(pages, "can_pin", lambda: False)
    module, other = block(), block()
    params, buffers = dict(module.named_parameters()), dict(module.named_buffers())
    _packed, own, pinned = held_for(lambda: LayerwiseOffloadHook._to_cpu(params, buffers, True))
    assert (own, pinned) == (WHOLE_PAGES, 0)
    _, own, pinned = held_for(lambda: PinnedModuleStager._snapshot_groups((other,), pin_memory=True))
    assert pinned == 0
