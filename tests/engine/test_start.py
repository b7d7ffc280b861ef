"""What a start asks of this package is refused before the engine uses it, in whatever form it was asked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from vllm_h3_quant.engine.start import check, explain
from vllm_h3_quant.errors import H3QuantError
from vllm_h3_quant.plugin import register

register()

WRONG = {"text_encoder": {"method": "h3_fp8", "fuse": False}}
FORMS: dict[str, dict[str, Any]] = {
    "python": {"quantization_config": WRONG},
    "command": {"diffusion_quantization_config": json.dumps(WRONG)},
    "stage, python": {"stage_overrides": {"0": {"quantization_config": WRONG}}},
    "stage, command": {"stage_overrides": json.dumps({"1": {"diffusion_quantization_config": WRONG}})},
    "stage, text in JSON": {"stage_overrides": json.dumps({"1": {"quantization_config": json.dumps(WRONG)}})},
}


@pytest.mark.parametrize("form", FORMS)
def test_each_form_is_read(form: str) -> None:
    with pytest.raises(H3QuantError, match="component 'text_encoder': fuse=False") as caught:
        check(FORMS[form])
    assert str(caught.value).startswith("stage ") == form.startswith("stage")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"quantization": "h3_fp9"}, "quantization 'h3_fp9': unknown method 'h3_fp9'; did you mean 'h3_fp8'"),
        ({"quantization_config": {"method": "h3_fp8", "fusee": 1}}, "did you mean 'fuse'"),
        ({"quantization_config": {"transfomer": "h3_fp8"}}, "did you mean 'transformer'"),
        ({"stage_overrides": {"0": {"quantization": "h3_int9"}}}, "stage 0: quantization 'h3_int9'.*'h3_int8'"),
    ],
)
def test_what_is_said(arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(H3QuantError, match=says):
        check({**arguments, "model": "/nowhere"})


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"quantization": "fp8"},
        {"quantization": None, "quantization_config": None, "stage_overrides": None},
        {"quantization_config": {"transformer": {"method": "fp8"}, "nonsense": None}},
        {"diffusion_quantization_config": "{no JSON"},
        {"stage_overrides": "{no JSON"},
        {"stage_overrides": {"0": {"quantization": "fp8"}, "1": None}},
    ],
    ids=str,
)
def test_what_is_not_ours_is_not_looked_at(arguments: dict[str, Any]) -> None:
    check({**arguments, "model": "/nowhere"})


def built() -> Any:
    from vllm_omni.quantization import build_quant_config

    return build_quant_config({"transformer": "h3_fp8"})


@pytest.mark.parametrize(
    "asked",
    [
        lambda: {"quantization": "h3_fp8"},
        lambda: {"quantization_config": {"transformer": "h3_fp8"}},
        lambda: {"quantization_config": built()},
        lambda: {"stage_overrides": '{"0": {"quantization": "h3_fp8"}}'},
    ],
)
def test_the_model(asked: Any, tiny_h3: Path) -> None:
    arguments = asked()
    for right in (tiny_h3, tiny_h3 / "FL2VA", str(tiny_h3)):
        check({**arguments, "model": right})
    with pytest.raises(H3QuantError, match=rf"^model: {tiny_h3}/transformer is a part of .*; give {tiny_h3}$"):
        check({**arguments, "model": str(tiny_h3 / "transformer")})
    with pytest.raises(H3QuantError, match=rf"^model: {tiny_h3} holds no Ref2VA/"):
        check({**arguments, "model": str(tiny_h3), "task_type": "ref2va"})


def test_a_name_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    arguments = {"quantization": "h3_fp8", "model": "MiniMaxAI/MiniMax-H3"}
    with pytest.raises(H3QuantError, match=r"^model: MiniMaxAI/MiniMax-H3 is no folder here"):
        check(arguments)
    (tmp_path / "models--MiniMaxAI--MiniMax-H3" / "snapshots" / "abc").mkdir(parents=True)
    check(arguments)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    check({**arguments, "model": "MiniMaxAI/another"})


def test_an_export_is_found_without_a_method(tiny_h3: Path, tmp_path: Path) -> None:
    """Nothing tells its start from another model's before the engine has failed."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "OUT").symlink_to(tiny_h3)
    place = tmp_path / "folder"
    assert explain({"model": str(place)}) == f"model: {place} holds the model {place / 'OUT'}; give {place / 'OUT'}"
    assert explain({"model": str(tiny_h3)}) is None
    assert explain({"model": "Qwen/Qwen-Image"}) is None
    (tmp_path / "other").mkdir()
    assert explain({"model": str(tmp_path / "other")}) is None
