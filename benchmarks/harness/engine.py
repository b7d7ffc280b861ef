"""The engine's own loader without its server: process groups, and a pipeline with loaded weights."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_OFFLOADS = ("cpu", "layerwise", "distributed_layerwise")


def free_port() -> int:
    """A TCP port on this host that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def process_groups(
    *, rank: int = 0, tensor_parallel: int = 1, hsdp: int = 1, ulysses: int = 1, port: int | None = None
) -> Iterator[Any]:
    """vLLM's and vLLM-Omni's groups for one rank of as many as one of the degrees says; yields the vLLM configuration.

    Args:
        rank: this process's rank.
        tensor_parallel: ranks in all; each must enter with the same ``port``.
        hsdp: the same where HSDP shards over them.
        ulysses: the same where they share a sequence. One of the three is above one.
        port: rendezvous port on this host; a free one for a single rank.
    """
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm_omni.diffusion.distributed.parallel_state import (
        destroy_distributed_env,
        init_distributed_environment,
        initialize_model_parallel,
    )
    from vllm_omni.platforms import current_omni_platform

    os.environ["MASTER_ADDR"] = "127.0.0.1"
    os.environ["MASTER_PORT"] = str(port or free_port())
    current_omni_platform.set_device(current_omni_platform.get_torch_device(rank))
    config = VllmConfig()
    with set_current_vllm_config(config):
        init_distributed_environment(world_size=max(tensor_parallel, hsdp, ulysses), rank=rank, local_rank=rank)
        initialize_model_parallel(
            tensor_parallel_size=tensor_parallel,
            fully_shard_degree=hsdp,
            use_hsdp=hsdp > 1,
            ulysses_degree=ulysses,
            sequence_parallel_size=ulysses,
        )
        try:
            yield config
        finally:
            destroy_distributed_env()


def load_pipeline(
    model: Path,
    quantization_config: Any,
    *,
    rank: int = 0,
    watch: Callable[[Any], None] | None = None,
    **more: Any,
) -> Any:
    """Load a MiniMax-H3 pipeline as a worker does, to the host where an offload is asked for.

    Call inside :func:`process_groups`. What the engine does for an offload after the load is not done.

    Args:
        model: repository root.
        quantization_config: anything that ``Omni(quantization_config=...)`` takes.
        rank: this process's rank, which is also its device.
        watch: called with the engine's loader before it loads, to read its clock afterwards.
        more: further fields of ``OmniDiffusionConfig``.
    """
    from vllm.config import LoadConfig, set_current_vllm_config
    from vllm_omni.diffusion.data import OmniDiffusionConfig
    from vllm_omni.diffusion.forward_context import set_forward_context
    from vllm_omni.diffusion.model_loader.diffusers_loader import DiffusersPipelineLoader
    from vllm_omni.diffusion.vllm_config import create_diffusion_vllm_config
    from vllm_omni.platforms import current_omni_platform

    device = current_omni_platform.get_torch_device(rank)
    od_config = OmniDiffusionConfig(
        model=str(model),
        task_type="t2va",
        trust_remote_code=True,
        enforce_eager=True,
        quantization_config=quantization_config,
        **{"num_gpus": 1, **more},
    )
    od_config.enrich_config()
    vllm_config = create_diffusion_vllm_config(device, od_config)
    with (
        set_forward_context(vllm_config=vllm_config, omni_diffusion_config=od_config),
        set_current_vllm_config(vllm_config),
    ):
        loader = DiffusersPipelineLoader(LoadConfig(), od_config=od_config)
        if watch is not None:
            watch(loader)
        to_host = any(getattr(od_config, f"enable_{kind}_offload", False) for kind in _OFFLOADS)
        return loader.load_model(load_device="cpu" if to_host else str(device), load_format="default", device=device)
