"""Component mappings, built through upstream's public ``build_quant_config`` as the engine does."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
from vllm_omni.quantization import build_quant_config

from vllm_h3_quant.engine.components import H3ComponentConfig
from vllm_h3_quant.errors import H3QuantError
from vllm_h3_quant.plugin import register

register()


def name_of(config: Any) -> str | None:
    return None if config is None else config.get_name()


@pytest.mark.parametrize(
    ("spec", "transformer", "text_encoder"),
    [
        ({"transformer": {"method": "h3_fp8"}}, "h3_fp8", None),
        ({"text_encoder": {"method": "h3_int8"}}, None, "h3_int8"),
        ({"transformer": {"method": "h3_fp8"}, "text_encoder": {"method": "h3_int8"}}, "h3_fp8", "h3_int8"),
        ({"transformer": "h3_fp8", "text_encoder": "h3_int8"}, "h3_fp8", "h3_int8"),
        ({"transformer": {"method": "h3_int8"}, "text_encoder": None}, "h3_int8", None),
        ({"default": "h3_fp8", "text_encoder": None}, "h3_fp8", None),
        ({"transformer": "h3_fp8", "vae": None}, "h3_fp8", None),
        ({"transformer": "h3_fp8_full", "text_encoder": "h3_int8"}, "h3_fp8", "h3_int8"),
        ({"default": "h3_int8_full"}, "h3_int8", "h3_int8"),
    ],
)
def test_forms(spec: dict[str, Any], transformer: str | None, text_encoder: str | None) -> None:
    before = copy.deepcopy(spec)
    config = build_quant_config(spec)
    assert isinstance(config, H3ComponentConfig)
    assert name_of(config.resolve("transformer")) == transformer
    assert name_of(config.resolve("text_encoder")) == text_encoder
    assert spec == before


def test_names_end_at_a_dot() -> None:
    config = build_quant_config({"transformer": "h3_fp8", "text_encoder": "h3_int8"})
    assert config.resolve("transformer.blocks.0") is config.resolve("transformer")
    assert config.resolve("transformer_2") is None
    assert config.resolve("text_encoder_2.layers.0") is None


def test_strictest_capability_counts() -> None:
    assert build_quant_config({"transformer": "h3_fp8", "text_encoder": "h3_int8"}).get_min_capability() == 89
    assert build_quant_config({"transformer": None, "text_encoder": "h3_int8"}).get_min_capability() == 80


def test_crosses_processes() -> None:
    options = {"method": "h3_int8_full", "rotation": 64, "attention_skip_layers": [0, 1]}
    config = build_quant_config({"transformer": options, "text_encoder": None})
    again = pickle.loads(pickle.dumps(config))
    assert again.resolve("transformer").options == config.resolve("transformer").options
    assert again.resolve("text_encoder") is None


def test_an_engine_method_beside_ours_is_built_by_the_engine() -> None:
    config = build_quant_config({"transformer": "h3_fp8", "text_encoder": "fp8"})
    assert type(config.resolve("text_encoder")).__module__.startswith("vllm.")


def test_mappings_without_our_methods_stay_upstreams() -> None:
    config = build_quant_config({"transformer": {"method": "fp8"}, "vae": None})
    assert not isinstance(config, H3ComponentConfig)
    with pytest.raises(ValueError, match="must have a 'method'"):
        build_quant_config({"transformer": "fp8", "text_encoder": "fp8"})


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ({"transfomer": {"method": "h3_fp8"}}, ["'transfomer'", "did you mean 'transformer'"]),
        ({"transformer": "h3_fp8", "txt_encoder": None}, ["'txt_encoder'", "did you mean 'text_encoder'"]),
        ({"transformer": {"method": "h3_fp9"}}, ["component 'transformer'", "'h3_fp9'", "did you mean 'h3_fp8'"]),
        ({"text_encoder": {"method": "h3_int8", "rotatoin": 4}}, ["'text_encoder'", "did you mean 'rotation'"]),
        ({"transformer": "h3_fp8", "vae": "h3_fp8"}, ["'vae'", "remote code of the checkpoint"]),
        ({"transformer": {"method": "h3_fp8", "quant_method": "h3_int8"}}, ["'transformer'", "'quant_method'"]),
        ({"transformer": "h3_fp8", "text_encoder": {"rotation": 4}}, ["'text_encoder'", "'method'"]),
        ({"transformer": "h3_fp8_ful"}, ["'h3_fp8_ful'", "did you mean 'h3_fp8_full'"]),
        (
            {"transformer": "h3_fp8", "text_encoder": "h3_int8_full"},
            ["component 'text_encoder'", "attention='auto' is for the layers of 'transformer'", "write 'h3_int8'"],
        ),
        (
            {"transformer": "h3_fp8", "text_encoder": {"method": "h3_fp8", "fuse": False}},
            ["component 'text_encoder'", "fuse=False is for the layers of 'transformer'", "valid: ignored_layers, "],
        ),
        (
            {"default": "h3_fp8_full", "transformer": None},
            ["component 'default'", "attention='auto'", "'default' does not reach", "write 'h3_fp8'"],
        ),
    ],
)
def test_refusals(spec: dict[str, Any], says: list[str]) -> None:
    with pytest.raises(H3QuantError) as caught:
        build_quant_config(spec)
    assert "\n" not in str(caught.value)
    assert all(part in str(caught.value) for part in says), str(caught.value)
