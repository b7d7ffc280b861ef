"""Timesteps of a request, announced before its first step."""

from __future__ import annotations

import itertools

import pytest
import torch
from vllm_omni.diffusion.models.minimax_h3.denoise_loop import (
    MINIMAX_H3_AUDIO_REF_COND_TIMESTEP,
    MINIMAX_H3_IMGVID_COND_TIMESTEP,
)

from vllm_h3_quant.upstream.adaln import _plans

NOTHING = (False, False, False)


@pytest.mark.parametrize("steps", [2, 8, 50])
@pytest.mark.parametrize("shifts", [(6.0, 6.0), (12.0, 3.0)])
def test_every_kind_that_the_engine_plans_is_there(steps: int, shifts: tuple[float, float]) -> None:
    from vllm_omni.diffusion.models.minimax_h3.adaln_cache import MODES, schedule_contract, timestep_plans

    ours = [[tuple(step.tolist()) for step in kind] for kind in _plans((steps, None, *shifts), NOTHING)]
    for mode in MODES:
        contract = schedule_contract(
            mode=mode, num_steps=steps, base_schedule=None, flow_shift=shifts[0], audio_flow_shift=shifts[1]
        )
        assert [tuple(step.tolist()) for step in timestep_plans(contract)] in ours


def test_a_schedule_of_positions() -> None:
    from vllm_omni.diffusion.models.minimax_h3.adaln_cache import schedule_contract, timestep_plans

    positions = (1.0, 0.75, 0.5, 0.25, 0.0)
    contract = schedule_contract(
        mode="fl2va", num_steps=4, base_schedule=positions, flow_shift=6.0, audio_flow_shift=6.0
    )
    ours = [[tuple(step.tolist()) for step in kind] for kind in _plans((4, positions, 6.0, 6.0), NOTHING)]
    assert [tuple(step.tolist()) for step in timestep_plans(contract)] in ours


def test_one_step_and_locked_audio() -> None:
    kinds = [[step.tolist() for step in kind] for kind in _plans((1, None, 6.0, 6.0), NOTHING)]
    assert [[0.0]] in kinds
    assert [[0.0, 1.0]] in kinds
    assert all(len(kind) == 1 for kind in kinds)


def test_timesteps_are_those_that_the_engine_fills_in() -> None:
    """One tensor a step, in ascending order, without doubles, in fp32."""
    for kind in _plans((50, None, 6.0, 12.0), NOTHING):
        assert len(kind) == 50
        for step in kind:
            assert step.dtype is torch.float32
            assert torch.equal(step, step.unique())


@pytest.mark.parametrize("likely", list(itertools.product((False, True), repeat=3)))
def test_the_likely_kind_is_the_first(likely: tuple[bool, bool, bool]) -> None:
    locked, frames, sounds = likely
    (*_, last), *others = _plans((50, None, 12.0, 3.0), likely)
    assert len(others) == 7
    video, audio = _plans((50, None, 12.0, 3.0), NOTHING)[0][-1].tolist()
    expected = {video, 1.0 if locked else audio}
    expected |= {max(video, MINIMAX_H3_IMGVID_COND_TIMESTEP)} if frames else set()
    expected |= {max(audio, MINIMAX_H3_AUDIO_REF_COND_TIMESTEP)} if sounds else set()
    assert last.tolist() == pytest.approx(sorted(expected))
