"""A CPU platform for vLLM-Omni, which ships none: correctness without a GPU.

It runs the whole engine on PyTorch's CPU kernels and this package's reference kernels. What it does
not serve is refused where it is asked for: attention backends other than TORCH_SDPA, autoregressive
stages, and pinned memory (by vLLM-Omni).
"""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Iterator
from typing import Any

import psutil
import torch
from vllm.config.kernel import IrOpPriorityConfig
from vllm.platforms.cpu import CpuPlatform
from vllm_omni.platforms.interface import OmniPlatform, OmniPlatformEnum

from vllm_h3_quant.errors import H3QuantError
from vllm_h3_quant.platforms.host_stream import HOST_STREAM, HostEvent, HostStream
from vllm_h3_quant.upstream.cpu_linear import keep_plain_weights
from vllm_h3_quant.upstream.host_accelerator import serve_from_host

MAX_RANKS = 8
"""Logical devices: ranks of one host share its cores."""


class CpuOmniPlatform(OmniPlatform, CpuPlatform):
    """One synchronous device; memory figures are the process's and the host's."""

    _omni_enum = OmniPlatformEnum.OOT

    # vLLM's platforms pass unknown attributes on to the torch module of their device.
    Stream = HostStream
    Event = HostEvent

    def __init__(self) -> None:
        super().__init__()
        serve_from_host(HOST_STREAM)
        keep_plain_weights()

    @classmethod
    def get_diffusion_attn_backend_cls(
        cls, selected_backend: str | None, head_size: int, allow_trtllm_default: bool = False
    ) -> str:
        if selected_backend is not None and selected_backend.upper() != "TORCH_SDPA":
            raise H3QuantError(f"attention backend {selected_backend!r} needs a GPU; use 'TORCH_SDPA' on the CPU")
        return "vllm_h3_quant.platforms.cpu_attention.CpuSDPABackend"

    @classmethod
    def get_omni_ar_worker_cls(cls) -> str:
        raise H3QuantError("autoregressive stages do not run on the CPU reference platform; use a GPU")

    @classmethod
    def get_omni_generation_worker_cls(cls) -> str:
        raise H3QuantError("generation stages do not run on the CPU reference platform; use a GPU")

    @classmethod
    def get_default_stage_config_path(cls) -> str:
        return "vllm_omni/deploy"

    @classmethod
    def supports_torch_inductor(cls) -> bool:
        return False

    @classmethod
    def supports_cpu_offload(cls) -> bool:
        return True

    @classmethod
    def get_default_ir_op_priority(cls, vllm_config: Any) -> IrOpPriorityConfig:
        return IrOpPriorityConfig.with_default(["native"])

    @classmethod
    def get_torch_device(cls, local_rank: int | None = None) -> torch.device:
        return torch.device("cpu")

    @classmethod
    def get_device_count(cls) -> int:
        return MAX_RANKS

    @classmethod
    def get_device_version(cls) -> str | None:
        return None

    @classmethod
    def get_device_total_memory(cls, device_id: int = 0) -> int:
        return int(psutil.virtual_memory().total)

    @classmethod
    def get_free_memory(cls, device: torch.device | None = None) -> int:
        return int(psutil.virtual_memory().available)

    @classmethod
    def get_device_memory(cls, device: torch.device | None = None) -> tuple[int, int]:
        memory = psutil.virtual_memory()
        return int(memory.available), int(memory.total)

    mem_get_info = get_device_memory

    @classmethod
    def memory_allocated(cls, device: Any = None) -> int:
        return int(psutil.Process().memory_info().rss)

    memory_reserved = memory_allocated

    @classmethod
    def max_memory_allocated(cls, device: Any = None) -> int:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    max_memory_reserved = max_memory_allocated

    @classmethod
    def reset_peak_memory_stats(cls, device: Any = None) -> None:
        """The host keeps one peak a process; it cannot be reset."""

    @classmethod
    def empty_cache(cls) -> None:
        """Freed host memory goes back by itself."""

    @classmethod
    def set_device(cls, device: Any) -> None:
        """There is one device."""

    @classmethod
    def synchronize(cls) -> None:
        """Nothing is ever pending."""

    @classmethod
    def current_device(cls) -> int:
        return 0

    @classmethod
    def is_available(cls) -> bool:
        return True

    @classmethod
    def is_initialized(cls) -> bool:
        return True

    @classmethod
    def current_stream(cls, device: Any = None) -> HostStream:
        return HOST_STREAM

    default_stream = current_stream

    @classmethod
    @contextlib.contextmanager
    def stream(cls, stream: HostStream) -> Iterator[HostStream]:
        yield stream
