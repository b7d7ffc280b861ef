"""Offload by AllGather and quantization at load time do not go together, and the engine's configuration says so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from vllm_h3_quant.errors import H3QuantError
from vllm_h3_quant.plugin import register

register()

EXPORTED = {"method": "h3_fp8", "checkpoint": "vllm-h3-quant"}
FLAG = {"enable_distributed_layerwise_offload": True}


def public(**transfers: str) -> dict[str, Any]:
    options = {component: {"weight_transfer": transfer} for component, transfer in transfers.items()}
    return {"diffusion_offload_config": {"mode": "layer", "components": list(transfers), "layer_options": options}}


def configure(quantization: Any, **fields: Any) -> Any:
    from vllm_omni.diffusion.data import OmniDiffusionConfig

    return OmniDiffusionConfig(
        model=str(Path(__file__).parent), pin_cpu_memory=False, quantization_config=quantization, **fields
    )


@pytest.mark.parametrize("ranks", [1, 2, 8])
@pytest.mark.parametrize(
    ("quantization", "component", "method"),
    [
        ("h3_fp8", "transformer", "h3_fp8"),
        ("h3_int8_full", "transformer", "h3_int8"),
        ({"transformer": "h3_int8", "text_encoder": None}, "transformer", "h3_int8"),
        ({"default": "h3_fp8"}, "transformer", "h3_fp8"),
    ],
    ids=str,
)
def test_the_older_flag(quantization: Any, component: str, method: str, ranks: int) -> None:
    with pytest.raises(
        H3QuantError,
        match=rf"component '{component}': {method} .*--dlo-no-use-allgather.*vllm-h3-quant export MODEL OUT --method"
        rf" {method}\)$",
    ):
        configure(quantization, **FLAG, num_gpus=ranks, parallel_config={"ulysses_degree": ranks})


@pytest.mark.parametrize(
    ("quantization", "offload", "component"),
    [
        ("h3_fp8", public(dit="allgather"), "transformer"),
        ("h3_fp8", public(text_encoder="allgather"), "text_encoder"),
        ("h3_fp8", public(dit="rank-local", text_encoder="allgather"), "text_encoder"),
        ({"transformer": None, "text_encoder": "h3_int8"}, public(text_encoder="allgather"), "text_encoder"),
        ({"transformer": EXPORTED, "text_encoder": "h3_fp8"}, public(text_encoder="allgather"), "text_encoder"),
    ],
    ids=str,
)
def test_the_public_form(quantization: Any, offload: dict[str, Any], component: str) -> None:
    key = {"transformer": "dit"}.get(component, component)
    with pytest.raises(
        H3QuantError, match=rf'component {component!r}: .*"{key}": {{"weight_transfer": "rank-local"}}.*export'
    ):
        configure(quantization, **offload)


@pytest.mark.parametrize(
    ("quantization", "fields"),
    [
        ("h3_fp8", FLAG | {"dlo_use_allgather": False}),
        ("h3_fp8", {"enable_layerwise_offload": True}),
        ("h3_fp8", public(dit="rank-local", text_encoder="rank-local")),
        ({"transformer": None, "text_encoder": "h3_int8"}, FLAG),
        ({"transformer": "h3_fp8", "text_encoder": None}, public(text_encoder="allgather")),
        (EXPORTED, FLAG),
        ({"transformer": EXPORTED, "text_encoder": EXPORTED}, public(dit="allgather", text_encoder="allgather")),
        (None, FLAG),
        ("fp8", FLAG),
    ],
    ids=str,
)
def test_what_may_be_gathered(quantization: Any, fields: dict[str, Any]) -> None:
    assert configure(quantization, **fields).pin_cpu_memory is False


def test_a_quantization_that_the_checkpoint_brings_along_is_seen_too() -> None:
    from vllm_omni.diffusion.data import TransformerConfig

    online = {"quant_method": "h3_fp8"}
    with pytest.raises(H3QuantError, match="component 'transformer': h3_fp8"):
        configure(None, **FLAG).set_tf_model_config(TransformerConfig.from_dict({"quantization_config": online}))
    exported = TransformerConfig.from_dict({"quantization_config": online | {"checkpoint": EXPORTED["checkpoint"]}})
    configure(None, **FLAG).set_tf_model_config(exported)


@pytest.mark.parametrize("key", ["minimax_h3_adaln_cache_path", "minimax_h3_ref_adaln_cache_path"])
@pytest.mark.parametrize("flat", [True, False])
def test_outputs_from_a_file_beside_weights_that_compute_them(key: str, flat: bool) -> None:
    options = {"method": "h3_fp8", "adaln": "host"}
    message = rf"cache_config: {key}='/x' holds what adaln='host' computes; remove the key, or use adaln='keep'$"
    with pytest.raises(H3QuantError, match=message):
        configure(options if flat else {"transformer": options, "text_encoder": None}, cache_config={key: "/x"})
    configure({**options, "adaln": "keep"}, cache_config={key: "/x"})
    # Only what an export wrote may hold a key that its component cannot use.
    configure({"transformer": None, "text_encoder": {**options, **EXPORTED}}, cache_config={key: "/x"})
