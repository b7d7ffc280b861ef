"""What an engine's configuration asks for beside a method of ours, refused before anything is built."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from vllm_omni.diffusion.data import OmniDiffusionConfig, TransformerConfig

from vllm_h3_quant.engine.quant_config import build
from vllm_h3_quant.errors import H3QuantError
from vllm_h3_quant.plugin import register

register()

EXPORT = {"method": "h3_fp8", "checkpoint": "vllm-h3-quant"}
ON_DISK = {"quant_method": "h3_fp8", "checkpoint": "vllm-h3-quant"}
HSDP = {"num_gpus": 2, "parallel_config": {"use_hsdp": True, "hsdp_shard_size": 2}}
BROADCAST = {**HSDP, "enable_broadcast_weight_load": True}


def configure(quantization: Any, **fields: Any) -> Any:
    return OmniDiffusionConfig(
        model=str(Path(__file__).parent), pin_cpu_memory=False, quantization_config=quantization, **fields
    )


class TestDtype:
    @pytest.mark.parametrize("dtype", ["float16", "half", "fp16", torch.float16, "float32", "float", torch.float32])
    @pytest.mark.parametrize(
        "quantization", ["h3_fp8", {"transformer": None, "text_encoder": "h3_int8"}, EXPORT], ids=str
    )
    def test_refused(self, dtype: Any, quantization: Any) -> None:
        name = "float16" if "16" in str(dtype) or dtype == "half" else "float32"
        with pytest.raises(H3QuantError, match=rf"^dtype={name!r}: h3_\w+ .*bfloat16.*$") as caught:
            configure(quantization, dtype=dtype)
        assert "\n" not in str(caught.value)
        assert ("NaN or a black clip" in str(caught.value)) == (name == "float16")

    def test_of_an_export_without_a_flag(self) -> None:
        config = configure(None, dtype="float16")
        found = TransformerConfig.from_dict({"quantization_config": ON_DISK})
        with pytest.raises(H3QuantError, match="dtype='float16'"):
            config.set_tf_model_config(found)

    @pytest.mark.parametrize("dtype", ["auto", "bfloat16", "bf16", torch.bfloat16])
    def test_bfloat16_in_every_spelling(self, dtype: Any) -> None:
        assert configure("h3_fp8", dtype=dtype).dtype == torch.bfloat16
        assert configure("h3_fp8").dtype == torch.bfloat16

    @pytest.mark.parametrize("quantization", [None, "fp8"])
    def test_what_is_not_ours(self, quantization: Any) -> None:
        assert configure(quantization, dtype="float16").dtype == torch.float16

    def test_the_methods_say_the_same(self) -> None:
        assert build("h3_fp8", where="test").get_supported_act_dtypes() == [torch.bfloat16]


class TestBroadcast:
    """Rank 0 would read an export and send parameters, of which the other ranks have not made those for codes."""

    @pytest.mark.parametrize(
        "quantization",
        [EXPORT, {"transformer": EXPORT, "text_encoder": None}, {"transformer": EXPORT, "text_encoder": EXPORT}],
        ids=str,
    )
    def test_of_an_export(self, quantization: Any) -> None:
        with pytest.raises(H3QuantError, match=r"^enable_broadcast_weight_load: .*export.*remove.*$") as caught:
            configure(quantization, **BROADCAST)
        assert "\n" not in str(caught.value)

    def test_of_an_export_without_a_flag(self) -> None:
        found = TransformerConfig.from_dict({"quantization_config": ON_DISK})
        with pytest.raises(H3QuantError, match=r"^enable_broadcast_weight_load"):
            configure(None, **BROADCAST).set_tf_model_config(found)

    @pytest.mark.parametrize(
        ("quantization", "fields"),
        [
            ("h3_fp8", BROADCAST),  # each rank reads by itself, the engine says so
            ({"transformer": EXPORT, "text_encoder": "h3_int8"}, BROADCAST),
            (EXPORT, HSDP),
            (EXPORT, {"enable_broadcast_weight_load": True}),
            (None, BROADCAST),
        ],
        ids=str,
    )
    def test_what_is_complete(self, quantization: Any, fields: dict[str, Any]) -> None:
        configure(quantization, **fields)
