"""The benchmark scripts: their shapes are the model's, and each runs on the CPU at tiny sizes."""

from __future__ import annotations

import csv
import importlib
import json
import os
import subprocess
import sys
from dataclasses import astuple
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.config import set_current_vllm_config

from vllm_h3_quant.kernels.attention.documents import locate_documents
from vllm_h3_quant.testing.attention import Outliers, exact_attention, synthetic_qkv
from vllm_h3_quant.testing.numeric import relative_l2

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def shapes(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("shapes")


@pytest.fixture
def h3_layers(shapes: Any) -> Any:
    return importlib.import_module("h3_layers")


class TestShapes:
    def test_sizes_are_those_of_the_engines_model(self, shapes: Any) -> None:
        from vllm_omni.diffusion.models.minimax_h3.minimax_h3_transformer import MiniMaxH3DiTArchConfig

        arch = MiniMaxH3DiTArchConfig()
        given = (
            arch.hidden_size,
            arch.num_attention_heads,
            arch.attention_head_dim,
            arch.ffn_hidden_size,
            arch.time_embed_dim,
        )
        assert astuple(shapes.H3) == given
        assert shapes.H3.adaln.n == arch.adaln_out_features

    @pytest.mark.parametrize("name", ["H3", "TINY"])
    def test_linears_are_those_of_the_engines_block(
        self, name: str, shapes: Any, h3_layers: Any, one_rank: Any
    ) -> None:
        from vllm.model_executor.layers.linear import LinearBase, RowParallelLinear
        from vllm_omni.diffusion.models.minimax_h3.minimax_h3_transformer import MiniMaxH3DiTBlock

        shape = getattr(shapes, name)
        with set_current_vllm_config(one_rank), torch.device("meta"):
            block = MiniMaxH3DiTBlock(h3_layers.arch(shape), None, prefix="blocks.0")
        found = {
            f"blocks.0.{layer}": (module.weight.shape, isinstance(module, RowParallelLinear))
            for layer, module in block.named_modules()
            if isinstance(module, LinearBase)
        }
        row = shapes.Parallel.ROW
        assert found == {
            linear.layer: ((linear.n, linear.k), linear.parallel is row) for linear in (*shape.linears, shape.adaln)
        }

    def test_known_shapes(self, shapes: Any) -> None:
        """Written out, so that a wrong derivation shows."""
        assert [(linear.name, linear.k, linear.n) for linear in shapes.H3.linears] == [
            ("qkv", 5376, 21504),
            ("out", 7168, 5376),
            ("fc1", 5376, 28672),
            ("fc2", 14336, 5376),
        ]
        assert (shapes.H3.adaln.k, shapes.H3.adaln.n) == (2688, 96768)
        assert shapes.TOKENS == {4: 32704, 5: 38592, 10: 73728, 15: 109952}

    def test_every_tensor_parallel_size_splits_every_linear(self, shapes: Any) -> None:
        assert shapes.TENSOR_PARALLEL == (1, 2, 4, 8)
        for ranks in shapes.TENSOR_PARALLEL:
            for linear in shapes.H3.linears:
                assert linear.shard(ranks).flops(7) * ranks == linear.flops(7)
        sizes = [(shard.k, shard.n) for shard in (linear.shard(8) for linear in shapes.H3.linears)]
        assert sizes == [(5376, 2688), (896, 5376), (5376, 3584), (1792, 5376)]
        assert shapes.H3.widths() == (5376, 7168, 14336)
        assert shapes.H3.widths(8) == (896, 1792, 5376)

    def test_a_size_that_cannot_be_split_is_refused(self, shapes: Any) -> None:
        with pytest.raises(ValueError, match="out: k = 7168 cannot be split over 3 ranks"):
            shapes.H3.linears[1].shard(3)

    def test_operations_and_bytes(self, shapes: Any) -> None:
        linear = shapes.Linear("l", "condition_proj", 3, 5, shapes.Parallel.COLUMN)
        assert linear.flops(7) == 2 * 3 * 5 * 7
        assert linear.weight_bytes() == 2 * 15
        assert linear.weight_bytes(1) == 15
        assert linear.activation_bytes(7) == 2 * 7 * (3 + 5)
        assert shapes.quantize_bytes(7, 3) == 7 * 3 * 2 + 7 * 3 + 7 * 4
        four_seconds = shapes.TOKENS[4]
        assert shapes.H3.linear_flops(four_seconds) == pytest.approx(25.2e12, rel=0.01)
        assert shapes.H3.attention_flops(four_seconds) == pytest.approx(30.7e12, rel=0.01)

    def test_parse(self, shapes: Any) -> None:
        assert shapes.parse_tokens("4s,15s,8") == (32704, 109952, 8)
        assert shapes.parse_ranks("1,2") == (1, 2)
        assert shapes.parse_rotations("16,512") == (16, 512)
        with pytest.raises(ValueError, match=r"^3 is none of 1, 2, 4, 8$"):
            shapes.parse_ranks("1,3")
        for text in ("3", "1024", "1"):
            with pytest.raises(ValueError, match=f"^{text} is none of 2, 4, 8, 16, 32, 64, 128, 256, 512$"):
                shapes.parse_rotations(text)
        for text in ("3s", "0", "-1", "", "4,", "x"):
            with pytest.raises(ValueError, match="is no positive number or one of 4s, 5s, 10s, 15s"):
                shapes.parse_tokens(text)


class TestMethods:
    def test_known_names(self, h3_layers: Any) -> None:
        assert h3_layers.check_methods("bf16,h3_int8") == ("bf16", "h3_int8")
        assert h3_layers.ALL_METHODS == (
            "bf16,fp8,int8,h3_fp8,h3_int8,h3_fp8_full,h3_fp8_full:unfused,h3_int8_full,h3_int8_full:unfused"
        )
        assert h3_layers.LINEAR_METHODS == "bf16,fp8,int8,h3_fp8,h3_int8"

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("bf61", "unknown method 'bf61', choose from bf16, fp8"),
            ("bf16,", "unknown method ''"),
            ("bf16,bf16", "given twice in 'bf16,bf16'"),
        ],
    )
    def test_bad_names_are_refused(self, text: str, message: str, h3_layers: Any) -> None:
        with pytest.raises(ValueError, match=message):
            h3_layers.check_methods(text)

    def test_the_engines_names_must_mean_the_engines_methods(
        self, h3_layers: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("VLLM_H3_QUANT_REPLACE", "fp8")
        with pytest.raises(ValueError, match="VLLM_H3_QUANT_REPLACE serves 'fp8' with this package"):
            h3_layers.check_methods("bf16,fp8")


IN_ONE_PROCESS = """
import json, os, runpy, sys
for script, *arguments in json.loads(sys.argv[1]):
    sys.path[0] = os.path.dirname(script)
    sys.argv = [script, *arguments]
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as stop:
        if stop.code:
            raise
"""
"""Importing the engine takes most of a script's time at these sizes: those that need it share a process."""


def run(tmp_path: Path, *commands: tuple[str, ...]) -> tuple[list[dict[str, Any]], str]:
    """Rows that scripts append to one CSV file, with the JSON columns parsed, and what they print."""
    path = tmp_path / "rows.csv"
    full = [[str(BENCHMARKS / script), *given, "--repeat", "2", "--csv", str(path)] for script, *given in commands]
    command = full[0] if len(full) == 1 else ["-c", IN_ONE_PROCESS, json.dumps(full)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}  # sizes this small only lose by threads
    done = subprocess.run(
        [sys.executable, *command], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=150
    )
    assert done.returncode == 0, done.stderr[-3000:]
    with path.open(newline="") as file:
        rows: list[dict[str, Any]] = list(csv.DictReader(file))
    for row in rows:
        row.update(case=json.loads(row["case"]), extra=json.loads(row["extra"]))
        assert bool(row["ms"]) is not bool(row["unavailable"]), row
    assert {row["gpu"] for row in rows} == {"cpu"}
    return rows, done.stdout


@pytest.fixture(scope="module")
def of_the_engine(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, Any]], str]:
    return run(
        tmp_path_factory.mktemp("rows"),
        ("bench_linear.py", "--tiny", "--tokens", "24", "--tp", "1,2"),
        ("bench_block.py", "--tiny", "--tokens", "64"),
        ("bench_attention.py", "--tiny", "--tokens", "200", "--errors", "2"),
    )


def variants(rows: list[dict[str, Any]], **case: object) -> dict[str, dict[str, Any]]:
    """The rows of one case by variant."""
    return {row["variant"]: row for row in rows if case.items() <= row["case"].items()}


def test_bench_quantize(tmp_path: Path) -> None:
    rows, printed = run(tmp_path, ("bench_quantize.py", "--tokens", "8,16", "--tp", "1,8"))
    assert {(row["case"]["tokens"], row["case"]["k"]) for row in rows} == {
        (tokens, k) for tokens in (8, 16) for k in (896, 1792, 5376, 7168, 14336)
    }
    found = variants(rows, tokens=8, k=7168)
    measured = ["h3 fp8", "h3 int8", "h3 int8, rotation 256"]
    assert list(found) == ["device copy", *measured, "vllm fp8", "vllm int8"]
    copied = float(found["device copy"]["gb_s"])
    for name in measured:
        rate = float(found[name]["gb_s"])
        assert rate * float(found[name]["ms"]) == pytest.approx(8 * (3 * 7168 + 4) / 1e6)
        assert found[name]["extra"]["percent_of_copy"] == pytest.approx(100 * rate / copied)
    assert found["vllm fp8"]["unavailable"] == "vLLM's extension needs CUDA"
    assert variants(rows, k=896)["h3 int8, rotation 256"]["unavailable"] == "256 does not divide 896 inputs"
    assert "percent of copy" in printed


def test_bench_linear(of_the_engine: tuple[list[dict[str, Any]], str]) -> None:
    rows = [row for row in of_the_engine[0] if row["benchmark"] == "linear"]
    linears = ["qkv", "out", "fc1", "fc2", "all four"]
    assert [row["case"]["linear"] for row in rows[:35:7]] == linears
    gemms = ["gemm PyTorch reference FP8", "gemm PyTorch reference INT8"]
    for ranks in (1, 2):
        for linear in linears:
            found = variants(rows, linear=linear, tp=ranks, tokens=24)
            assert list(found) == ["bf16", "fp8", "int8", "h3_fp8", "h3_int8", *gemms]
            for stock in ("fp8", "int8"):
                assert found[stock]["unavailable"] == "vLLM-Omni serves it on CUDA only"
            if linear != "all four":
                error = {name: found[name]["extra"].get("relative_error") for name in found}
                assert error["bf16"] == 0
                assert 0 < error["h3_int8"] < error["h3_fp8"] < 0.05
                # The layer is the quantization and this product.
                assert error["h3_fp8"] == pytest.approx(error[gemms[0]])
                assert error["h3_int8"] == pytest.approx(error[gemms[1]])
    qkv = variants(rows, linear="qkv", tp=1)
    assert qkv["h3_fp8"]["extra"]["weight_mib"] < 0.6 * qkv["bf16"]["extra"]["weight_mib"]
    total = sum(2 * 24 * n * k for n, k in ((768, 256), (256, 256), (1024, 256), (256, 512)))
    whole = variants(rows, linear="all four", tp=1)["bf16"]
    assert float(whole["tflop_s"]) * float(whole["ms"]) * 1e9 == pytest.approx(total)
    assert "vLLM-Omni serves it on CUDA only" in of_the_engine[1]


def test_bench_block(of_the_engine: tuple[list[dict[str, Any]], str]) -> None:
    rows = [row for row in of_the_engine[0] if row["benchmark"] == "block"]
    parts = ["block", "qkv", "out", "mlp", "attention", "adaln"]
    full = [name + more for name in ("h3_fp8_full", "h3_int8_full") for more in ("", ":unfused")]
    assert [row["case"]["part"] for row in rows[::9]] == parts
    for part in parts:
        found = variants(rows, part=part)
        assert list(found) == ["bf16", "fp8", "int8", "h3_fp8", "h3_int8", *full]
        assert [name for name in found if found[name]["unavailable"]] == ["fp8", "int8"]
    extra = {name: row["extra"] for name, row in variants(rows, part="block").items()}
    assert extra["bf16"]["update_error"] == 0
    # Each linear is off by at most 5% (FP8) or 1.7% (INT8), and a block has a chain of a few.
    assert 0.01 < extra["h3_fp8"]["update_error"] < 0.15
    assert 0.003 < extra["h3_int8"]["update_error"] < 0.05
    assert extra["h3_int8"]["weight_mib"] < 0.55 * extra["bf16"]["weight_mib"]
    assert extra["h3_fp8"]["attention"] == "SDPA"
    assert extra["h3_fp8_full"]["attention"] == "PyTorch reference FP8 attention"
    assert extra["h3_int8_full"]["attention"] == "PyTorch reference INT8 attention"
    assert extra["h3_int8"]["update_error"] != extra["h3_int8_full"]["update_error"] < 0.05
    for name in full[::2]:
        assert extra[name] == extra[f"{name}:unfused"], "fusion changes nothing but the time"
    assert "update error" in of_the_engine[1]


def test_bench_attention(of_the_engine: tuple[list[dict[str, Any]], str]) -> None:
    found = variants([row for row in of_the_engine[0] if row["benchmark"] == "attention"], tokens=200)
    assert list(found) == ["bf16, PyTorch", "h3 int8", "h3 fp8"]
    error = {name: row["extra"]["error 2"] for name, row in found.items()}
    assert error["bf16, PyTorch"] < error["h3 int8"] < error["h3 fp8"] < 0.1
    assert float(found["h3 int8"]["tflop_s"]) * float(found["h3 int8"]["ms"]) * 1e9 == pytest.approx(4 * 200**2 * 256)


def test_steps_of_bench_fused(shapes: Any, one_rank: Any) -> None:
    """On a CPU there are only the plain kernels; the producers are compared with them by their own tests."""
    script = importlib.import_module("bench_fused")
    with set_current_vllm_config(one_rank):
        for kind, count in (("fp8", 6), ("int8", 5)):
            steps = list(script.steps(shapes.TINY, 24, kind, torch.device("cpu")))
            assert len(steps) == count
            assert [step.name for step in steps if step.fused is None] == ["gated residual"]
            moved = {step.name: step.bytes for step in steps}
            assert moved["norm, AdaLN"] == 24 * 256 * 3
            assert moved["SwiGLU"] == 24 * 512 * 5
            for step in steps[:4]:
                assert step.plain() is not None


@pytest.mark.parametrize("text", ["x", "0", "-1", "1.6,nan", "inf"])
def test_bad_amplitudes_are_refused(text: str, shapes: Any) -> None:
    with pytest.raises(ValueError, match=r"is no positive number, write for example '1.6,2.8,4.0'"):
        importlib.import_module("bench_attention").amplitudes(text)


def test_bytes_of_preparation(shapes: Any) -> None:
    """Two elements of each of three operands: 2 bytes read in each of two passes, 1 written."""
    assert importlib.import_module("bench_attention").prepare_bytes(2) == 2 * 3 * (2 + 2 + 1)


@pytest.mark.skipif(torch.cuda.is_available(), reason="runs under the interpreter, which a GPU turns off")
def test_ablation_takes_steps_in_turn(shapes: Any) -> None:
    ablation = importlib.import_module("ablate_attention")
    q, k, v = synthetic_qkv(256, 1, 128, 2.8, device=torch.device("cpu"), outliers=Outliers.HUGE_K)
    documents = locate_documents(torch.tensor([0, 256], dtype=torch.int32), 256, 256)
    exact = exact_attention(q, k, v, 128**-0.5)
    errors = [
        relative_l2(ablation.int8(ablation.prepare(q, k, v, steps), documents, 128**-0.5), exact)
        for steps in range(len(ablation.STEPS))
    ]
    # Four channels of K a hundred times as large: of the others nothing is left in 8 bits but for rotation or balance.
    assert errors[0] > 2 * errors[3] > 2 * errors[4]
    with pytest.raises(ValueError, match="32704 tokens do not fill tiles of 128, the nearest that do are 32640"):
        ablation.whole_tiles("4s")
