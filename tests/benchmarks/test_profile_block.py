"""The profile of a block: kinds of real kernel names, sums and medians, the method a kernel belongs to, the picture."""

from __future__ import annotations

import csv
import importlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import typer
import vllm_omni
from matplotlib.colors import to_rgb
from matplotlib.image import imread
from torch.autograd import DeviceType
from typer.testing import CliRunner
from vllm.config import set_current_vllm_config

import vllm_h3_quant

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
OURS = Path(vllm_h3_quant.__file__).parent
ENGINE = Path(vllm_omni.__file__).parent / "diffusion" / "layers"
CPU = torch.device("cpu")

LIBRARY_KERNELS = [
    (
        "void cutlass::device_kernel<flash::enable_sm90<flash::FlashAttnFwdSm90<flash::CollectiveMainloopFwdSm90<2, "
        "cute::tuple<cute::C<1> >, cutlass::float_e4m3_t> > > >(flash::Params)",
        "attention kernel",
    ),
    ("void flash::prepare_varlen_num_blocks_kernel<16, false>(int, cutlass::FastDivmod, int*)", "attention kernel"),
    ("_ZN7cutlass13device_kernelIN5flash11enable_sm90INS1_16FlashAttnFwdSm90EEEEE", "attention kernel"),
    ("fmha_cutlassF_bf16_aligned_64x128_rf_sm80(PyTorchMemEffAttention::Params)", "attention kernel"),
    ("nvjet_sm90_tst_192x192_64x4_2x1_v_bz_coopB_TNT", "GEMM"),
    (
        "void cutlass::device_kernel<enable_sm90_or_later<cutlass::gemm::kernel::GemmUniversal<cute::tuple<int> > > >",
        "GEMM",
    ),
    ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_execute_segment_k_off", "GEMM"),
    (
        "void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16>(cublasLt::cublasSplitKParams<float>)",
        "GEMM",
    ),
    ("void vllm::act_and_mul_kernel<c10::BFloat16, __nv_bfloat162, &(c10::BFloat16 vllm::silu_kernel<>)>", "SwiGLU"),
    ("void flashinfer::activation::act_and_mul_kernel<__nv_bfloat16, silu>", "SwiGLU"),
    ("void vllm::dynamic_per_token_scaled_fp8_quant_kernel_strided<c10::BFloat16, c10::Float8_e4m3fn>", "quantize"),
    ("void vllm::scaled_fp8_quant_kernel_strided_dynamic<c10::BFloat16, c10::Float8_e4m3fn>", "quantize"),
    ("triton_red_fused__to_copy_abs_clamp_max_mul_reciprocal_unsqueeze_0", "quantize"),
    ("void vllm::segmented_max_reduction_strided<c10::BFloat16, c10::Float8_e4m3fn>", "quantize"),
    (
        "void vllm::dynamic_scaled_int8_quant_kernel<c10::BFloat16, float>(c10::BFloat16 const*, signed char*)",
        "quantize",
    ),
    (
        "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<int>, std::array<char*, 1ul> >",
        "other",
    ),
    ("Memcpy DtoD (Device -> Device)", "other"),
    ("h3_quant::attention", "other"),
]

TRITON_KERNELS = [
    (OURS, "_int8_attention_kernel", "attention kernel"),
    (OURS, "_scaled_gemm_kernel", "GEMM"),
    (OURS, "_part_kernel", "attention preparation"),
    (OURS, "_document_kernel", "attention preparation"),
    (OURS, "_codes_kernel", "attention preparation"),
    (OURS, "_locate_kernel", "attention preparation"),
    (OURS, "_add_mean_kernel", "attention output"),
    (OURS, "_quantize_rows_kernel", "quantize"),
    (OURS, "_modulate_kernel", "AdaLN, norm, gate"),
    (OURS, "_turn_kernel", "q/k norm, RoPE"),
    (OURS, "_mean_codes_kernel", "attention output"),
    (OURS, "_swiglu_kernel", "SwiGLU"),
    (ENGINE, "_rms_norm_indexed_scale_shift_kernel", "AdaLN, norm, gate"),
    (ENGINE, "_indexed_gate_kernel", "AdaLN, norm, gate"),
    (ENGINE, "_indexed_scale_shift_kernel", "AdaLN, norm, gate"),
    (ENGINE, "_indexed_gate_rms_norm_scale_shift_kernel", "AdaLN, norm, gate"),
    (ENGINE, "_rms_norm_rope_kernel", "q/k norm, RoPE"),
    (ENGINE, "_qk_norm_rope_kernel", "q/k norm, RoPE"),
]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("profile_block")


def invoke(script: Any, *arguments: object) -> tuple[int, str]:
    """Exit code and what is printed, without the frames and line breaks of messages."""
    app = typer.Typer(add_completion=False)
    app.command()(script.main)
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, re.sub(r"[\s│]+", " ", result.output)


class TestKinds:
    @pytest.mark.parametrize(("name", "kind"), [*LIBRARY_KERNELS, *((name, kind) for _, name, kind in TRITON_KERNELS)])
    def test_of_a_kernel(self, name: str, kind: str, script: Any) -> None:
        assert script.kind_of(name) == kind

    @pytest.mark.parametrize("root", [OURS, ENGINE], ids=["ours", "engine"])
    def test_names_are_those_in_the_source(self, root: Path) -> None:
        defined = triton_kernels(root)
        assert {name for where, name, _ in TRITON_KERNELS if where == root} <= defined

    def test_every_kernel_of_this_package_has_one(self, script: Any) -> None:
        assert [name for name in triton_kernels(OURS) if script.kind_of(name) == script.OTHER] == []

    def test_each_has_a_colour_of_its_own(self, script: Any) -> None:
        assert len(set(script.COLOURS.values())) == len(script.COLOURS) == len(script.KINDS) + 1


def triton_kernels(root: Path) -> set[str]:
    """Names of the Triton functions under ``root`` that end in ``_kernel``."""
    pattern = re.compile(r"@triton\.jit[^\n]*\n\s*def (\w+_kernel)\(")
    return {name for path in root.rglob("*.py") for name in pattern.findall(path.read_text())}


def event(name: str, us: float, device: DeviceType = DeviceType.CUDA, **more: Any) -> SimpleNamespace:
    elapsed = SimpleNamespace(elapsed_us=lambda: us)
    cells = {"is_user_annotation": False, "self_cpu_time_total": us, **more}
    return SimpleNamespace(name=name, device_type=device, time_range=elapsed, **cells)


class TestTimes:
    def test_launches_of_a_kernel_are_summed(self, script: Any) -> None:
        events = [
            event("gemm", 1500.0),
            event("gemm", 500.0),
            event("gate", 250.0),
            event("empty", 0.0),
            event("a range", 4000.0, is_user_annotation=True),
            event("cudaLaunchKernel", 70.0, DeviceType.CPU),
        ]
        assert script.kernel_ms(events, torch.device("cuda")) == {"gemm": 2.0, "gate": 0.25}

    def test_operators_of_a_cpu_count_without_those_they_call(self, script: Any) -> None:
        nested = event("aten::linear", 900.0, DeviceType.CPU, self_cpu_time_total=100.0)
        assert script.kernel_ms([nested, event("gemm", 5.0)], CPU) == {"aten::linear": 0.1}

    def test_calls_without_a_kernel_count_as_zero(self, script: Any) -> None:
        calls = [{"a": 1.0}, {"b": 5.0, "a": 3.0}, {"a": 2.0}]
        assert list(script.by_kernel(calls).items()) == [("a", [1.0, 3.0, 2.0]), ("b", [0.0, 5.0, 0.0])]

    def test_rows(self, script: Any) -> None:
        calls = [{"nvjet_a": a, "gemm_b": 2.0, "_swiglu_kernel": 1.0, "memset": 1.0} for a in (4.0, 90.0, 6.0)]
        rows = script.rows_of({"h3_fp8": calls}, {"fp8": "CUDA only", "h3_fp8": None}, 64, CPU)
        kinds = [row for row in rows if row.benchmark == script.BY_KIND]
        assert {row.case["tokens"] for row in rows} == {64}
        assert (kinds[0].variant, kinds[0].case["method"], kinds[0].ms) == (script.TOTAL, "fp8", None)
        assert kinds[0].unavailable == "CUDA only"
        ms = {row.variant: row.ms for row in kinds[1:]}
        assert list(ms) == [*script.COLOURS, script.TOTAL]
        # The median of a kernel, then the sum: 6 + 2.
        expected = {"GEMM": 8.0, "SwiGLU": 1.0, "other": 1.0, script.TOTAL: 10.0}
        assert ms == {**dict.fromkeys(script.COLOURS, 0.0), **expected}
        assert {row.variant: row.extra["percent"] for row in kinds[1:]}["GEMM"] == pytest.approx(80)
        kernels = [row for row in rows if row.benchmark == script.BY_KERNEL]
        assert [(row.variant, row.ms, row.repetitions) for row in kernels] == [
            ("nvjet_a", 6.0, 3),
            ("gemm_b", 2.0, 3),
            ("_swiglu_kernel", 1.0, 3),
            ("memset", 1.0, 3),
        ]
        assert kernels[0].extra == {"percent": pytest.approx(60), "kind": "GEMM"}
        assert (kernels[0].ms_p20, kernels[0].ms_p80) == (pytest.approx(4.8), pytest.approx(56.4))

    def test_the_console_hides_no_kernel_of_unknown_kind(self, script: Any) -> None:
        call = {f"gemm_{index}": 100.0 - index for index in range(script.SHOWN + 3)}
        call |= {"unknown": 0.001, "void late[int]" + "x" * 300: 0.0005}
        shown = script.for_console(script.rows_of({"bf16": [call]}, {"bf16": None}, 64, CPU))
        names = [row.variant for row in shown if row.benchmark == script.BY_KERNEL]
        assert names[: script.SHOWN] == list(call)[: script.SHOWN]
        assert names[script.SHOWN] == "unknown"
        (cut,) = names[script.SHOWN + 1 :]
        assert cut.startswith(r"late\[int]xxx")
        assert len(cut) == script.NAME_WIDTH + 1  # with the escape


def multiply(x: torch.Tensor, **_: object) -> torch.Tensor:
    return torch.mm(x, x)


def add(x: torch.Tensor, **_: object) -> torch.Tensor:
    return torch.add(x, x)


@pytest.fixture
def without_engine(script: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script with one operator in place of each block: a product for bf16, a sum for the others."""

    @contextmanager
    def engine() -> Iterator[torch.device]:
        yield CPU

    monkeypatch.setattr(script, "engine", engine)
    monkeypatch.setattr(script, "block", lambda shape, method, device: multiply if method == "bf16" else add)
    monkeypatch.setattr(script, "block_inputs", lambda shape, tokens, device: (torch.ones(tokens, tokens), {}))
    return script


class TestProfile:
    def test_kernels_belong_to_the_method_that_ran_them(self, without_engine: Any) -> None:
        calls = without_engine.profile_blocks(None, {"bf16": multiply, "h3_fp8": add}, 16, CPU, 4)
        assert [set(call) - {"aten::resolve_conj"} for call in calls["bf16"]] == [{"aten::mm"}] * 4
        assert [set(call) for call in calls["h3_fp8"]] == [{"aten::add"}] * 4
        assert all(ms > 0 for rounds in calls.values() for call in rounds for ms in call.values())

    def test_a_call_without_kernels_is_refused(self, without_engine: Any) -> None:
        with pytest.raises(RuntimeError, match="recorded no kernel of 'idle': detach other profilers"):
            without_engine.profile_blocks(None, {"idle": lambda x, **_: None}, 16, CPU, 1)

    def test_script(self, without_engine: Any, tmp_path: Path) -> None:
        rows, picture = tmp_path / "rows.csv", tmp_path / "new" / "picture.png"
        code, printed = invoke(
            without_engine,
            "--tokens",
            "16,8",
            "--methods",
            "bf16,fp8,h3_fp8",
            "--repeat",
            2,
            "--csv",
            rows,
            "--png",
            picture,
        )
        assert code == 0, printed
        assert "vLLM-Omni serves it on CUDA only" in printed
        assert "aten::mm" in printed
        with rows.open(newline="") as file:
            kernels = [row for row in csv.DictReader(file) if row["benchmark"] == without_engine.BY_KERNEL]
        found = {(*json.loads(row["case"]).values(), row["variant"]) for row in kernels}
        assert {
            (tokens, *rest) for tokens in (16, 8) for rest in (("bf16", "aten::mm"), ("h3_fp8", "aten::add"))
        } <= found
        assert sorted(path.name for path in picture.parent.iterdir()) == ["picture-16.png", "picture-8.png"]

    def test_methods_that_are_all_refused_leave_no_picture(self, without_engine: Any, tmp_path: Path) -> None:
        code, printed = invoke(without_engine, "--methods", "fp8", "--tokens", 8, "--png", tmp_path / "picture.png")
        assert code == 0, printed
        assert "vLLM-Omni serves it on CUDA only" in printed
        assert not list(tmp_path.iterdir())

    def test_an_unknown_method_is_refused(self, without_engine: Any) -> None:
        code, printed = invoke(without_engine, "--methods", "bf16,bf61")
        assert code == 2
        assert "unknown method 'bf61', choose from bf16, fp8" in printed

    @pytest.mark.skipif(torch.cuda.is_available(), reason="tells operators of the CPU")
    def test_blocks_of_the_engine(self, script: Any, one_rank: Any) -> None:
        from vllm_h3_quant import plugin

        plugin.register()
        with set_current_vllm_config(one_rank), torch.inference_mode():
            blocks = {method: script.block(script.TINY, method, CPU) for method in ("bf16", "h3_fp8")}
            calls = script.profile_blocks(script.TINY, blocks, 32, CPU, 1)
        assert "h3_quant::quantize_rows" not in calls["bf16"][0]
        assert {"h3_quant::quantize_rows", "h3_quant::scaled_gemm"} <= calls["h3_fp8"][0].keys()


TIMES = {"bf16": {"GEMM": 30.0, "attention kernel": 40.0}, "h3_fp8": {"GEMM": 10.0, "quantize": 20.0}}


class TestPicture:
    def rows(self, script: Any, tokens: int = 64) -> list[Any]:
        names = {"GEMM": "nvjet", "attention kernel": "flash", "quantize": "quant"}
        times = {method: [{names[kind]: ms for kind, ms in kinds.items()}] for method, kinds in TIMES.items()}
        return script.rows_of(times, {"fp8": "CUDA only", **dict.fromkeys(times)}, tokens, CPU)

    def test_redrawn_from_a_csv_file(self, script: Any, tmp_path: Path) -> None:
        rows, picture = tmp_path / "rows.csv", tmp_path / "picture.png"
        script.write_csv(rows, self.rows(script))
        code, printed = invoke(script, "--from-csv", rows, "--png", picture, "--methods", "bf16")
        assert code == 0, printed
        area = {kind: pixels(picture, script.COLOURS[kind]) for kind in script.COLOURS}
        # Bars of one height, less labels and with a square of the legend.
        assert area["attention kernel"] / area["GEMM"] == pytest.approx(1, rel=0.1)
        assert area["quantize"] / area["GEMM"] == pytest.approx(0.5, rel=0.1)
        assert area["SwiGLU"] == 0

    def test_bars_are_those_of_the_rows(self, script: Any) -> None:
        gpu, found = script.bars(row.record() for tokens in (64, 128) for row in self.rows(script, tokens))
        assert gpu == "cpu"
        nothing = dict.fromkeys(script.COLOURS, 0.0)
        expected = {method: nothing | kinds for method, kinds in TIMES.items()}
        assert found == {64: expected, 128: expected}
        assert list(found[64]) == list(TIMES)

    def test_rows_that_make_no_picture_are_refused(self, script: Any) -> None:
        records = [row.record() for row in self.rows(script)]
        with pytest.raises(
            ValueError, match=r"^bf16 at 64 tokens is there twice: write each run to a file of its own$"
        ):
            script.bars(records * 2)
        elsewhere = [row.record() | {"gpu": "another"} for row in self.rows(script, 128)]
        with pytest.raises(ValueError, match=r"^rows of cpu and another: write each GPU's to a file of its own$"):
            script.bars(records + elsewhere)
        with pytest.raises(ValueError, match="unknown kind 'sorting', the kinds are attention kernel, GEMM"):
            script.bars([*records, records[1] | {"variant": "sorting"}])
        with pytest.raises(ValueError, match="no row of 'profile by kind' with times"):
            script.bars(records[:1])
        with pytest.raises(ValueError, match="needs at least one method"):
            script.save_bars(Path("unused.png"), {}, "")

    def test_files_that_are_no_profile_are_refused(self, script: Any, tmp_path: Path) -> None:
        other = tmp_path / "other.csv"
        other.write_text("a,b\n1,2\n")
        picture = tmp_path / "picture.png"
        for arguments, message in (
            (("--from-csv", other), "--from-csv needs --png, the picture to draw"),
            (("--from-csv", other, "--png", picture), "has the columns a, b; give a file that --csv wrote"),
            (("--from-csv", tmp_path / "none.csv", "--png", picture), "No such file"),
        ):
            code, printed = invoke(script, *arguments, "--methods", "bf16")
            assert code == 2
            assert message in printed
        assert not picture.exists()


def pixels(path: Path, colour: str) -> int:
    """How many pixels of a PNG have that colour."""
    return int((abs(imread(path)[..., :3] - to_rgb(colour)) < 0.005).all(axis=-1).sum())
