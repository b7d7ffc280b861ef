"""The CPU reference platform."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from vllm_omni.platforms import current_omni_platform

from vllm_h3_quant.errors import H3QuantError
from vllm_h3_quant.platforms.host_stream import HostEvent, HostStream

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the CPU platform is not active beside CUDA")


def test_active_without_being_asked_for() -> None:
    code = (
        "from vllm.platforms import current_platform as v; from vllm_omni.platforms import current_omni_platform as o;"
        "print(v.is_cpu(), o.is_cpu(), o.is_out_of_tree(), o.is_cuda(), type(o).__module__)"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert found.stdout.split()[-5:] == ["True", "True", "True", "False", "vllm_h3_quant.platforms.cpu"]


def test_other_attention_backends_are_refused() -> None:
    with pytest.raises(H3QuantError, match=r"'FLASH_ATTN' needs a GPU; use 'TORCH_SDPA'"):
        current_omni_platform.get_diffusion_attn_backend_cls("FLASH_ATTN", 128)


@pytest.mark.parametrize("masked", [False, True])
def test_attention_stays_within_documents(masked: bool) -> None:
    """Two requests with their padding behind each; a mask describes one request, and is used as it is."""
    from vllm_omni.diffusion.attention.backends.abstract import AttentionMetadata

    from vllm_h3_quant.platforms.cpu_attention import CpuSDPABackend

    assert CpuSDPABackend.supports_multi_doc_packed_varlen()
    implementation = CpuSDPABackend.get_impl_cls()(num_heads=2, head_size=64, softmax_scale=0.125)
    q, k, v = torch.randn(1, 20, 3, 2, 64, generator=torch.Generator().manual_seed(0)).unbind(2)
    mask = torch.arange(20)[None] < 15 if masked else None
    ends = [15, 20] if masked else [7, 9, 18, 20]
    metadata = AttentionMetadata(attn_mask=mask, extra={"cu_seqlens_q": torch.tensor([0, *ends], dtype=torch.int32)})
    out = implementation.forward(q, k, v, metadata)
    for start, end in zip([0, *ends], ends, strict=False):
        keys = slice(0, 15) if masked else slice(start, end)
        parts = (t.transpose(1, 2) for t in (q[:, start:end], k[:, keys], v[:, keys]))
        want = torch.nn.functional.scaled_dot_product_attention(*parts, scale=0.125).transpose(1, 2)
        torch.testing.assert_close(out[:, start:end], want)


def test_autoregressive_stages_are_refused() -> None:
    with pytest.raises(H3QuantError, match="autoregressive stages do not run"):
        current_omni_platform.get_omni_ar_worker_cls()


def test_memory_figures_are_real() -> None:
    free, total = current_omni_platform.get_device_memory()
    assert 0 < free <= total
    assert 0 < current_omni_platform.memory_allocated() < total
    assert torch.accelerator.get_memory_info()[1] == total


def test_events_measure_time() -> None:
    start, end = HostEvent(), HostEvent()
    with pytest.raises(RuntimeError, match="two recorded events"):
        start.elapsed_time(end)
    start.record()
    HostStream().record_event(end)
    assert start.elapsed_time(end) >= 0
