"""The methods on vLLM's real linear classes, under a real process group of one rank."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from vllm.config import set_current_vllm_config
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
    UnquantizedLinearMethod,
)

from vllm_h3_quant.config.schema import Method
from vllm_h3_quant.engine.quant_config import H3QuantConfig, build
from vllm_h3_quant.errors import H3QuantError
from vllm_h3_quant.kernels import gemm, quantize
from vllm_h3_quant.kernels.gemm import Backend
from vllm_h3_quant.kernels.gemm_triton import scaled_gemm_triton
from vllm_h3_quant.kernels.product import Product
from vllm_h3_quant.kernels.quantize import quantize_rows_triton
from vllm_h3_quant.methods import base
from vllm_h3_quant.testing.numeric import relative_l2

METHODS = pytest.mark.parametrize("method", ["h3_fp8", "h3_int8"])

# Relative L2 error of a product of two quantized Gaussian operands. e4m3 rounds to 4 significant bits:
# uniform in a relative step of 2^-3..2^-4, RMS 2.6%; INT8 at 4 sigma of 127 steps: RMS 0.9%. Two
# operands add in squares; a third on top for small samples.
ERROR = {"h3_fp8": 0.05, "h3_int8": 0.017}


def randn(*shape: int, seed: int = 0, std: float = 1.0) -> torch.Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * std).bfloat16()


@pytest.fixture(autouse=True)
def engine(one_rank: Any) -> Any:
    with set_current_vllm_config(one_rank):
        yield


def linear(cls: Any, k: int, n: int, config: H3QuantConfig, *, bias: bool = False, name: str = "condition_proj") -> Any:
    layer = cls(k, n, bias=bias, params_dtype=torch.bfloat16, quant_config=config, prefix=name, return_bias=False)
    if bias:
        layer.quant_method.watch_bias(layer)
    return layer


def filled(method: str, k: int, n: int, *, cls: Any = ColumnParallelLinear, bias: bool = False) -> tuple[Any, Any, Any]:
    layer = linear(cls, k, n, build(method, where="test"), bias=bias)
    weight = randn(n, k, seed=1, std=k**-0.5)
    offset = randn(n, seed=2) if bias else None
    if offset is not None:
        layer.bias.weight_loader(layer.bias, offset)
    layer.weight.weight_loader(layer.weight, weight)
    return layer, weight, offset


@METHODS
@pytest.mark.parametrize("cls", [ColumnParallelLinear, RowParallelLinear, ReplicatedLinear])
@pytest.mark.parametrize("bias", [False, True])
def test_close_to_the_unquantized_product(method: str, cls: Any, bias: bool) -> None:
    layer, weight, offset = filled(method, 512, 96, cls=cls, bias=bias)
    x = randn(33, 512, seed=3)
    expected = x.double() @ weight.double().t() + (0 if offset is None else offset.double())
    assert relative_l2(layer(x), expected) < ERROR[method]


@METHODS
def test_fused_shards_are_independent_of_their_order(method: str) -> None:
    config = build(method, where="test")
    weights = {shard: randn(64, 256, seed=i, std=1 / 16) for i, shard in enumerate("qkv")}
    layers = []
    for order in ("qkv", "vkq"):
        layer = QKVParallelLinear(
            256, 32, 2, 2, bias=False, params_dtype=torch.bfloat16, quant_config=config, prefix="blocks.0.attn.qkv_proj"
        )
        for shard in order:
            assert layer.weight.dtype is torch.bfloat16, "quantized before its last shard"
            layer.weight.weight_loader(layer.weight, weights[shard], shard)
        layers.append(layer)
    assert torch.equal(layers[0].weight.view(torch.uint8), layers[1].weight.view(torch.uint8))
    assert torch.equal(layers[0].weight_scale, layers[1].weight_scale)
    x = randn(5, 256, seed=9)
    expected = torch.cat([x.double() @ weights[s].double().t() for s in "qkv"], dim=1)
    assert relative_l2(layers[0](x)[0], expected) < ERROR[method]


@METHODS
def test_merged_halves(method: str) -> None:
    layer = MergedColumnParallelLinear(
        256, [64, 64], bias=False, params_dtype=torch.bfloat16, quant_config=build(method, where="test"),
        prefix="blocks.0.mlp.fc1", return_bias=False,
    )  # fmt: skip
    gate, up = randn(64, 256, seed=1, std=1 / 16), randn(64, 256, seed=2, std=1 / 16)
    meta = layer.weight  # the model keeps the parameter it saw before loading
    meta.weight_loader(meta, up, 1)
    assert not layer.quant_method.arrival.complete
    meta.weight_loader(meta, gate, 0)
    x = randn(5, 256, seed=3)
    assert relative_l2(layer(x), x.double() @ torch.cat((gate, up)).double().t()) < ERROR[method]


@METHODS
def test_storage(method: str) -> None:
    layer, _weight, _ = filled(method, 256, 48)
    code = torch.float8_e4m3fn if method == "h3_fp8" else torch.int8
    assert (layer.weight.dtype, tuple(layer.weight.shape), layer.weight.stride()) == (code, (256, 48), (1, 256))
    assert (layer.weight_scale.dtype, tuple(layer.weight_scale.shape)) == (torch.float32, (1, 48))
    assert not layer.weight.requires_grad


@METHODS
def test_casts_leave_codes_and_scales_alone(method: str) -> None:
    layer, _, _ = filled(method, 256, 48, bias=True)
    x = randn(4, 256, seed=3)
    before = layer(x)
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), layer)
    model.to(torch.bfloat16)
    model.half().bfloat16().to("cpu")
    assert model[0].weight.dtype is torch.bfloat16, "the cast reaches the other modules"
    assert layer.weight_scale.dtype is torch.float32
    assert layer.weight.element_size() == 1
    assert torch.equal(layer(x), before)


@METHODS
def test_a_quantized_layer_can_be_copied(method: str) -> None:
    layer, _, _ = filled(method, 256, 48, bias=True)
    x = randn(4, 256, seed=3)
    other = copy.deepcopy(layer)
    layer.weight_scale.data.zero_()
    other.to(torch.bfloat16)
    assert other.weight_scale.dtype is torch.float32
    assert other(x).abs().sum() > layer(x).abs().sum(), "the copy shares no storage"


@METHODS
@pytest.mark.parametrize("shape", [(256,), (6, 256), (2, 3, 256), (2, 1, 3, 256), (0, 256), (2, 0, 256)])
def test_input_shapes(method: str, shape: tuple[int, ...]) -> None:
    layer, weight, offset = filled(method, 256, 40, bias=True)
    x = randn(*shape, seed=4)
    out = layer(x)
    assert out.shape == (*shape[:-1], 40)
    assert out.dtype is torch.bfloat16
    if x.numel():
        assert relative_l2(out, x.double() @ weight.double().t() + offset.double()) < ERROR[method]


@METHODS
def test_compiles_once_for_every_length(method: str) -> None:
    from torch._dynamo.testing import CompileCounter

    layer, _, _ = filled(method, 256, 40, bias=True)
    counter = CompileCounter()
    compiled = torch.compile(layer, fullgraph=True, backend=counter, dynamic=True)
    for tokens in (5, 33, 7):
        x = randn(tokens, 256, seed=tokens)
        assert torch.equal(compiled(x), layer(x))
    assert counter.frame_count == 1


@METHODS
def test_strided_inputs(method: str) -> None:
    layer, _, _ = filled(method, 128, 32)
    wide = randn(10, 300, seed=5)
    for view in (wide[:, 40:168], wide[::2, 1:257:2], wide[:, :128].view(2, 5, 128).transpose(0, 1)):
        assert torch.equal(layer(view), layer(view.contiguous()))


@METHODS
@pytest.mark.parametrize(("k", "n"), [(24, 40), (2520, 56), (5, 3), (5384, 16)])
def test_sizes_that_are_no_multiple_of_16(method: str, k: int, n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a backend that needs a multiple of 16, zeros pad the weight and change nothing."""
    plain, _weight, _ = filled(method, k, n, bias=True)
    backend_for = base.backend_for
    monkeypatch.setattr(
        base, "backend_for", lambda *args, **kwargs: replace(backend_for(*args, **kwargs), alignment=16)
    )
    padded, _, _ = filled(method, k, n, bias=True)
    assert all(size % 16 == 0 for size in padded.weight.shape)
    assert padded.weight_scale.shape[1] == padded.weight.shape[1]
    x = randn(9, k, seed=6)
    # fp32 sums of the same products in another order, then one bf16 rounding.
    torch.testing.assert_close(padded(x), plain(x), rtol=2**-7, atol=2**-8)


@METHODS
def test_a_layer_through_the_triton_kernels(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What runs where no library serves the product, under Triton's interpreter: the layer comes out the same.

    fp32 sums of K products in another order: K * 2^-24 of the sum of magnitudes. fp32 activations, since the
    interpreter truncates to bf16.
    """
    plain, weight, _ = filled(method, 512, 48, bias=True)
    x = randn(9, 512, seed=3).float()
    expected = plain(x)

    used = []

    def triton(product: Product) -> torch.Tensor:
        used.append("product")
        return scaled_gemm_triton(product)

    def quantize_triton(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        used.append("quantize")
        return quantize_rows_triton(*args, **kwargs)

    monkeypatch.setattr(quantize, "_implementation", lambda _: quantize_triton)
    monkeypatch.setattr(gemm, "_backend_of", lambda *_: replace(gemm.select(gemm.INT8, None), run=triton))
    layer, _, _ = filled(method, 512, 48, bias=True)
    out = layer(x)
    assert used == ["quantize", "quantize", "product"], "weight, activation, product"
    assert out.dtype is torch.float32
    assert torch.equal(layer.weight.view(torch.uint8), plain.weight.view(torch.uint8))
    magnitude = (x.abs() @ weight.float().abs().t()).max()
    torch.testing.assert_close(out, expected, rtol=0, atol=float(magnitude) * 512 * 2**-24)


@METHODS
@pytest.mark.parametrize("bias", [False, True])
def test_the_backend_reported_is_the_one_for_a_bias(method: str, bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not every backend adds one, and the load report names what runs."""
    backend_for = base.backend_for

    def named(method: Method, *, biased: bool = False) -> Backend:
        return replace(backend_for(method, biased=biased), name="biased" if biased else "plain")

    monkeypatch.setattr(base, "backend_for", named)
    layer, _, _ = filled(method, 32, 16, bias=bias)
    assert layer.quant_method.backend.name == ("biased" if bias else "plain")


@METHODS
def test_rows_that_are_zero_tiny_infinite_or_nan(method: str) -> None:
    layer, _weight, _ = filled(method, 256, 32)
    x = randn(6, 256, seed=7)
    expected = layer(x)
    x[1], x[2] = 0.0, 1e-38
    x[3, 5], x[4, 6] = float("inf"), float("nan")
    out = layer(x)
    assert not out[1].any()
    assert out[2].abs().max() < 1e-28
    assert not torch.isfinite(out[3]).any(), "as the unquantized product would be"
    assert out[4].isnan().all()
    assert torch.equal(out[[0, 5]], expected[[0, 5]]), "neighbours do not change"


def test_zero_weight_rows() -> None:
    layer = linear(ColumnParallelLinear, 64, 16, build("h3_fp8", where="test"))
    weight = randn(16, 64, seed=1)
    weight[3] = 0.0
    layer.weight.weight_loader(layer.weight, weight)
    out = layer(randn(4, 64, seed=2))
    assert torch.isfinite(out).all()
    assert not out[:, 3].any()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_weight_that_is_not_finite_is_refused(value: float) -> None:
    layer = linear(ColumnParallelLinear, 64, 16, build("h3_fp8", where="test"))
    weight = randn(16, 64, seed=1)
    weight[7, 3] = value
    with pytest.raises(H3QuantError, match="condition_proj: the weights of output 7 are not finite"):
        layer.weight.weight_loader(layer.weight, weight)


def test_rotation_falls_back_to_a_width_that_divides() -> None:
    for k, group in ((512, 256), (2688, 128), (24, 8), (7, 0)):
        layer = linear(ColumnParallelLinear, k, 16, build("h3_int8", where="test"))
        assert layer.quant_method.rotation == group
    layer = linear(ColumnParallelLinear, 512, 16, build("h3_int8", {"rotation": 0}, where="test"))
    assert layer.quant_method.rotation == 0


def test_rotation_protects_int8_from_one_large_channel() -> None:
    """One channel 100 times the others: without rotation it takes all of a token's 127 codes."""
    errors = {}
    for rotation in (0, 256):
        layer = linear(ColumnParallelLinear, 512, 64, build("h3_int8", {"rotation": rotation}, where="test"))
        weight = randn(64, 512, seed=1, std=512**-0.5)
        layer.weight.weight_loader(layer.weight, weight)
        x = randn(16, 512, seed=2)
        x[:, 17] *= 100
        weight_without = weight.double().clone()
        weight_without[:, 17] = 0
        exact = x.double() @ weight.double().t()
        errors[rotation] = float((layer(x).double() - exact).norm() / (x.double() @ weight_without.t()).norm())
    assert errors[256] < errors[0] / 2


class TestArrival:
    """A layer is quantized when its last tensor is there: no later, no earlier, and only once."""

    def biased(self) -> Any:
        return linear(ColumnParallelLinear, 64, 16, build("h3_fp8", where="test"), bias=True)

    def test_bias_before_weight(self) -> None:
        layer = self.biased()
        layer.bias.weight_loader(layer.bias, randn(16, seed=1))
        assert layer.weight.is_meta
        layer.weight.weight_loader(layer.weight, randn(16, 64, seed=2))
        assert layer.weight.dtype is torch.float8_e4m3fn
        assert torch.equal(layer.bias, randn(16, seed=1))

    def test_weight_before_bias(self) -> None:
        layer = self.biased()
        layer.weight.weight_loader(layer.weight, randn(16, 64, seed=2))
        assert layer.weight.dtype is torch.bfloat16
        layer.bias.weight_loader(layer.bias, randn(16, seed=1))
        assert layer.weight.dtype is torch.float8_e4m3fn

    def test_a_second_weight_is_refused(self) -> None:
        layer = self.biased()
        weight = layer.weight
        weight.weight_loader(weight, randn(16, 64, seed=2))
        with pytest.raises(H3QuantError, match=r"condition_proj\.weight arrives twice"):
            weight.weight_loader(weight, randn(16, 64, seed=2))

    def test_an_incomplete_layer_is_refused_at_the_end(self) -> None:
        layer = self.biased()
        layer.weight.weight_loader(layer.weight, randn(16, 64, seed=2))
        with pytest.raises(H3QuantError, match=r"condition_proj: .*incomplete, bias lacks 16 elements"):
            layer.quant_method.process_weights_after_loading(layer)

    def test_the_final_sweep_changes_nothing(self) -> None:
        layer, _, _ = filled("h3_fp8", 64, 16)
        before = layer.weight
        layer.quant_method.process_weights_after_loading(layer)
        assert layer.weight is before

    @pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8, torch.uint8])
    def test_codes_in_the_checkpoint_are_refused(self, dtype: torch.dtype) -> None:
        """Read as numbers they load without an error and are about 1/scale too large."""
        layer = self.biased()
        with pytest.raises(H3QuantError, match=r"condition_proj\.weight holds .* codes"):
            layer.weight.weight_loader(layer.weight, randn(16, 64, seed=2).to(dtype))

    def test_goes_back_to_the_host_when_asked(self) -> None:
        layer = self.biased()
        layer.quant_method.enable_offload_after_quant()
        layer.bias.weight_loader(layer.bias, randn(16, seed=1))
        layer.weight.weight_loader(layer.weight, randn(16, 64, seed=2))
        assert {p.device.type for p in layer.parameters()} == {"cpu"}
        assert layer.weight.stride() == (1, 64)


class TestConfig:
    def test_ignored_layers_keep_their_precision(self) -> None:
        config = build("h3_fp8", {"ignored_layers": ["blocks.0.attn", "*.fc2"]}, where="test")
        for name, quantized in (
            ("blocks.0.attn.qkv_proj", False),
            ("blocks.0.attn.out_proj", False),
            ("blocks.1.mlp.fc2", False),
            ("blocks.1.mlp.fc1", True),
            ("token_refiner.blocks.0.attn.out_proj", True),
        ):
            layer = linear(ColumnParallelLinear, 64, 16, config, name=name)
            assert isinstance(layer.quant_method, UnquantizedLinearMethod) is not quantized, name

    def test_adaln_keep(self) -> None:
        config = build("h3_fp8", {"adaln": "keep"}, where="test")
        kept = linear(ColumnParallelLinear, 64, 16, config, name="blocks.0.adaln_proj.linear")
        assert isinstance(kept.quant_method, UnquantizedLinearMethod)

    def test_other_models_are_refused(self) -> None:
        with pytest.raises(H3QuantError, match=r"MiniMax-H3 only.*'transformer_blocks\.0\.img_mod\.1'"):
            linear(ColumnParallelLinear, 64, 16, build("h3_fp8", where="x"), name="transformer_blocks.0.img_mod.1")
