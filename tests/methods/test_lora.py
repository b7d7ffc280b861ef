"""A LoRA beside quantized linears, through the engine's own manager; and what is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import engine
from peft_adapter import SCALING, write_adapter
from safetensors import safe_open
from safetensors.torch import save_file

from vllm_h3_quant.errors import H3QuantError
from vllm_h3_quant.methods.base import H3LinearMethod

Load = Callable[..., Any]
METHOD_NAMES = ("h3_fp8", "h3_int8")
METHODS = pytest.mark.parametrize("method", METHOD_NAMES)

# Linear: the modules of an adapter that stand for it, each with its rows of the output.
PARTS: dict[str, dict[str, slice]] = {
    "blocks.1.attn.qkv_proj": {f"blocks.1.attn.to_{x}": slice(256 * i, 256 * i + 256) for i, x in enumerate("qkv")},
    "blocks.2.attn.qkv_proj": {"blocks.2.attn.qkv_proj": slice(0, 768)},
    "token_refiner.blocks.0.attn.qkv_proj": {"token_refiner.blocks.0.attn.to_k": slice(256, 512)},
}
WHOLE = (
    "blocks.1.attn.out_proj",
    "blocks.1.mlp.fc1",
    "blocks.1.mlp.fc2",
    "blocks.1.adaln_proj.linear",
    "token_refiner.blocks.0.attn.out_proj",
    "token_refiner.blocks.1.mlp.fc1",
    "token_refiner.blocks.1.mlp.fc2",
    "condition_proj",
    "final_layer.adaln_proj.linear",
)
PARTS |= {name: {name: slice(None)} for name in WHOLE}


def randn(*shape: int, seed: int, std: float = 1.0) -> torch.Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * std).bfloat16()


def run(layer: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():  # as the engine does; with gradients the wrapper takes another path
        out = layer(x)
    return out[0] if isinstance(out, tuple) else out


@dataclass
class Served:
    """A tiny pipeline with a manager, and an adapter for the linears of :data:`PARTS`.

    Attributes:
        inputs: an input for each quantized linear of the DiT.
        base: its output before anything was wrapped.
    """

    pipeline: Any
    manager: Any
    folder: Path
    adapter: dict[str, torch.Tensor]
    inputs: dict[str, torch.Tensor]
    base: dict[str, torch.Tensor]

    def activate(self, scale: float = 1.0, *, folder: Path | None = None, number: int = 1) -> None:
        from vllm_omni.lora.request import LoRARequest

        self.manager.set_active_adapter(LoRARequest("adapter", number, str(folder or self.folder)), scale)

    def output(self, name: str) -> torch.Tensor:
        return run(self.pipeline.transformer.get_submodule(name), self.inputs[name])


def serve(pipeline: Any, folder: Path) -> Served:
    from vllm_omni.diffusion.lora import DiffusionLoRAManager

    layers = {
        name: module
        for name, module in pipeline.transformer.named_modules()
        if isinstance(getattr(module, "quant_method", None), H3LinearMethod)
    }
    inputs = {name: randn(7, layer.input_size, seed=i) for i, (name, layer) in enumerate(layers.items())}
    base = {name: run(layer, inputs[name]) for name, layer in layers.items()}
    shapes = {
        part: (len(range(base[name].shape[1])[rows]), layers[name].input_size)
        for name, parts in PARTS.items()
        for part, rows in parts.items()
    }
    adapter = write_adapter(folder, shapes)
    manager = DiffusionLoRAManager(pipeline, torch.device("cpu"), torch.bfloat16)
    return Served(pipeline, manager, folder, adapter, inputs, base)


@pytest.fixture(scope="module", params=METHOD_NAMES)
def served(one_rank: Any, tiny_h3: Path, tmp_path_factory: Any, request: Any) -> Served:
    return serve(engine.load_pipeline(tiny_h3, request.param), tmp_path_factory.mktemp("lora"))


def lora_output(served: Served, name: str, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """``scale * B (A x)`` in fp64 for a linear, and how far from it the wrapper's may be.

    A bf16 rounding is off by at most 2^-8 of the value. ``A x`` is rounded, an error that B carries on, and
    so is the product with B where it is not added in fp32. An fp32 sum of K terms is off by at most K 2^-24
    of the sum of their magnitudes.
    """
    x = served.inputs[name].double()
    exact = torch.zeros(served.base[name].shape, dtype=torch.double)
    error = torch.zeros_like(exact)
    for part, rows in PARTS[name].items():
        a, b = (served.adapter[f"{part}.lora_{side}.weight"].double() for side in "AB")
        b = b * SCALING * scale
        inner = x @ a.t()
        exact[:, rows] = inner @ b.t()
        error[:, rows] = (2 * 2**-8 * inner.abs() + x.shape[1] * 2**-24 * (x.abs() @ a.abs().t())) @ b.abs().t()
    return exact, error


def with_rounding(error: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """``error`` and the rounding of the sum ``out``; a hundredth more for products of the two."""
    return 1.01 * (error + 2**-8 * out.double().abs())


@pytest.mark.parametrize("name", PARTS)
def test_the_output_is_the_base_and_b_a_x(served: Served, name: str) -> None:
    served.activate()
    exact, error = lora_output(served, name, 1.0)
    out = served.output(name)
    allowed = with_rounding(error, out)
    assert ((out.double() - served.base[name].double() - exact).abs() <= allowed).all()
    assert torch.equal(out[exact == 0], served.base[name][exact == 0]), "rows without a LoRA are those of the base"
    assert exact.norm() > 20 * allowed.norm(), "the tolerance would hide the LoRA"


@pytest.mark.parametrize("name", PARTS)
def test_half_the_scale_is_half_the_difference(served: Served, name: str) -> None:
    base = served.base[name].double()
    served.activate(1.0)
    whole = served.output(name)
    served.activate(0.5)
    half = served.output(name)
    _, error = lora_output(served, name, 1.0)
    allowed = with_rounding(error / 2, half) + with_rounding(error, whole) / 2
    assert ((half.double() - base - (whole.double() - base) / 2).abs() <= allowed).all()


def test_without_the_adapter_every_output_is_the_base(served: Served) -> None:
    for leave in (lambda: served.manager.set_active_adapter(None), lambda: served.manager.remove_adapter(1)):
        served.activate()
        leave()
        for name, base in served.base.items():
            assert torch.equal(served.output(name), base), name


def test_linears_without_a_lora_are_untouched(served: Served) -> None:
    served.activate()
    others = set(served.base) - set(PARTS)
    assert len(others) > 10
    for name in others:
        assert torch.equal(served.output(name), served.base[name]), name


def test_the_text_encoder_takes_none(served: Served, tmp_path: Path) -> None:
    write_adapter(tmp_path, {"text_encoder.text_model.layers.0.mlp.down_proj": (5120, 256)})
    with pytest.raises(ValueError, match="binding is incomplete: bound=0/1"):
        served.activate(folder=tmp_path, number=2)


def test_matrices_are_on_the_compute_device_beside_offloaded_linears(load_pipeline: Load, tmp_path: Path) -> None:
    """The meta device stands for the GPU, and the weights are on the host, as layer-wise offload leaves them."""
    served = serve(load_pipeline("h3_fp8"), tmp_path)
    served.manager.device = torch.device("meta")
    served.activate()
    for name in PARTS:
        wrapper = served.pipeline.transformer.get_submodule(name)
        assert {t.device.type for t in (*wrapper.lora_a_stacked, *wrapper.lora_b_stacked)} == {"meta"}, name
        assert wrapper.weight.device.type == "cpu"


@pytest.fixture(scope="module", params=METHOD_NAMES)
def pipeline(one_rank: Any, tiny_h3: Path, request: Any) -> Any:
    return engine.load_pipeline(tiny_h3, request.param)


class TestMerging:
    """Into codes it is refused, with the name of the linear and what to do instead."""

    says = r"blocks\.1\.mlp\.fc2\.weight holds 8-bit codes, no LoRA can be merged.* lora_backend='peft', .*bf16"

    @pytest.fixture
    def layer(self, pipeline: Any) -> Any:
        """A linear whose codes must be the same after the test."""
        layer = pipeline.transformer.blocks[1].mlp.fc2
        before = layer.weight.data.view(torch.uint8).clone()
        yield layer
        assert torch.equal(layer.weight.data.view(torch.uint8), before)

    def test_by_the_engine(self, pipeline: Any, layer: Any, tmp_path: Path) -> None:
        from vllm_omni.diffusion.lora.loader import LoraLoaderMixin

        # Of the codes' shape, so that nothing else stops the sum.
        state = write_adapter(tmp_path, {"transformer.blocks.1.mlp.fc2": tuple(layer.weight.shape)})
        for change in (LoraLoaderMixin.load_lora_into_module, LoraLoaderMixin.unload_module_lora):
            with pytest.raises(H3QuantError, match=self.says) as caught:
                change(state, pipeline.transformer)
            assert "\n" not in str(caught.value)

    @pytest.mark.parametrize(
        "merge",
        [
            lambda weight, other: weight.add_(other.to(weight.dtype)),
            lambda weight, other: weight.sub_(other.to(weight.dtype)),
            lambda weight, other: weight.addmm_(other, other.t()),
            lambda weight, other: weight.copy_(other),
            lambda weight, other: weight.weight_loader(weight, other.t()),
            lambda weight, other: weight.__iadd__(other),
            lambda weight, other: weight.__isub__(other),
        ],
        ids=["add_", "sub_", "addmm_", "copy_", "weight_loader", "+=", "-="],
    )
    def test_by_hand(self, layer: Any, merge: Callable[[Any, torch.Tensor], object]) -> None:
        for linear in (layer, copy.deepcopy(layer)):
            with pytest.raises(H3QuantError, match=self.says):
                merge(linear.weight, randn(*layer.weight.shape, seed=1))

    def test_by_loading_a_merged_weight(self, pipeline: Any, layer: Any) -> None:
        merged = ("transformer.blocks.1.mlp.fc2.weight", randn(192, 512, seed=1))
        with pytest.raises(H3QuantError, match=self.says):
            pipeline.load_weights(iter([merged]))

    def test_codes_can_still_be_moved_and_copied(self, layer: Any) -> None:
        x = randn(5, 512, seed=1)
        before = run(layer, x)
        state = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
        layer.weight.data.zero_()
        layer.load_state_dict(state)
        layer.weight.data = layer.weight.data.clone(memory_format=torch.preserve_format)
        assert torch.equal(run(layer.to("cpu"), x), before)


@METHODS
def test_a_backend_that_merges_is_refused(load_pipeline: Load, tmp_path: Path, method: str) -> None:
    """Without the refusal the engine warns that H3 takes no such LoRA, and serves the clip without it."""
    with pytest.raises(H3QuantError, match=f"{method}.*lora_backend='distill' merges .* codes by then.*peft"):
        load_pipeline(method, lora_path=str(tmp_path), lora_backend="distill")


@pytest.mark.parametrize(
    ("config", "lora_path"), [({"text_encoder": "h3_fp8"}, "adapter"), ("h3_fp8", None)], ids=["bf16 DiT", "no LoRA"]
)
def test_a_backend_with_nothing_to_merge_into_codes_starts(load_pipeline: Load, config: Any, lora_path: Any) -> None:
    load_pipeline(config, lora_path=lora_path, lora_backend="distill")


@METHODS
def test_an_adapter_merged_while_loading_is_quantized_with_the_weight(
    load_pipeline: Load, tiny_h3: Path, tmp_path: Path, method: str
) -> None:
    """FastH3's is merged into the tensors as they are read, whatever the backend: the codes are those of W + B A."""
    tensors = {}
    for stack, blocks in (("transformer_blocks", 3), ("token_refiner.refiner_blocks", 2)):
        for index in range(blocks):
            name = f"{stack}.{index}.ff.net.2"
            tensors[f"{name}.lora_A.weight"] = randn(4, 512, seed=index, std=512**-0.5)
            tensors[f"{name}.lora_B.weight"] = randn(192, 4, seed=index + 9)
    counts = {"low_rank_tensors": str(len(tensors)), "diff_tensors": "0", "set_weight_tensors": "0"}
    path = tmp_path / "adapter_model.safetensors"
    save_file(tensors, path, {"format": "fastvideo-lora-v2", "finetuned_model": "FastVideo/FastH3-tiny", **counts})

    layer = load_pipeline(method, lora_path=str(path), lora_backend="distill").transformer.blocks[1].mlp.fc2
    a, b = (tensors[f"transformer_blocks.1.ff.net.2.lora_{side}.weight"].float() for side in "AB")
    weight = checkpoint_tensor(tiny_h3, "blocks.1.mlp.fc2.weight")
    codes, scale = layer.quant_method.quantize_weight((weight + b @ a).bfloat16())
    assert torch.equal(layer.weight.t().view(torch.uint8), codes.view(torch.uint8))
    assert torch.equal(layer.weight_scale, scale.t())


def checkpoint_tensor(model: Path, name: str) -> torch.Tensor:
    for path in (model / "FL2VA" / "transformer").glob("*.safetensors"):
        with safe_open(path, "pt") as shard:
            if name in shard.keys():  # noqa: SIM118
                return shard.get_tensor(name)
    raise KeyError(name)
