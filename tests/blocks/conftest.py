"""Whole DiT blocks of the engine: MiniMax-H3's own sizes on a GPU, small ones elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from bench_block import block_inputs
from h3_layers import block
from shapes import H3, TINY
from vllm.config import set_current_vllm_config

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SHAPE = H3 if DEVICE.type == "cuda" else TINY


@pytest.fixture(autouse=True)
def in_engine(one_rank: Any) -> Iterator[None]:
    with set_current_vllm_config(one_rank), torch.inference_mode():
        yield


@pytest.fixture
def build(in_engine: None) -> Callable[..., Any]:
    """``build("h3_fp8_full", fuse=False)``: a block with random weights, the same each time."""

    def build(method: str, **options: Any) -> Any:
        return block(SHAPE, {"method": method, **options}, DEVICE)

    return build


@pytest.fixture
def inputs(in_engine: None) -> Callable[[list[int]], tuple[torch.Tensor, dict[str, Any]]]:
    """``inputs([300, 7])``: a residual stream of two documents and the block's other arguments."""

    def inputs(lengths: list[int]) -> tuple[torch.Tensor, dict[str, Any]]:
        x, arguments = block_inputs(SHAPE, sum(lengths), DEVICE)
        bounds = [0, *torch.tensor(lengths).cumsum(0).tolist()]
        arguments["cu_seqlens"] = torch.tensor(bounds, dtype=torch.int32, device=DEVICE)
        arguments["max_seqlen"] = max(lengths)
        return x, arguments

    return inputs
