"""An exported model: codes and scales of online quantization, everything else as it was, and nothing left unsaid."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from exported_files import SPEC, State, change, files_of, tensors_of
from safetensors.torch import save_file
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from vllm_h3_quant.config.schema import H3QuantOptions, parse
from vllm_h3_quant.errors import H3QuantError
from vllm_h3_quant.export import run, weights
from vllm_h3_quant.export.config import parse_request
from vllm_h3_quant.export.plan import LinearFile, Shard
from vllm_h3_quant.kernels.formats import FP8, INT8, CodeFormat
from vllm_h3_quant.kernels.quantize import quantize_rows_reference
from vllm_h3_quant.loader.checkpoint import open_checkpoint
from vllm_h3_quant.loader.coding import Values
from vllm_h3_quant.loader.header import read_header
from vllm_h3_quant.loader.manifest import digests_of, read_manifest
from vllm_h3_quant.loader.plan import Plan, plan_text_encoder, plan_transformer
from vllm_h3_quant.loader.reader import digest
from vllm_h3_quant.loader.stored import Segment, StoredLinear

TRANSFORMER, TEXT_ENCODER = "FL2VA/transformer", "FL2VA/text_encoder"
HEADS, HEAD = SPEC.heads, 128


class Case(NamedTuple):
    """A configuration, the format of its codes, and names that contain one of ``kept`` stay values."""

    spec: Any
    fmt: CodeFormat
    rotation: int
    kept: tuple[str, ...]


FP32 = ("patch_proj", "time_embedder", "video_out", "audio_out")
CASES = {
    "h3_fp8": Case("h3_fp8", FP8, 0, FP32),
    "h3_int8": Case("h3_int8", INT8, 256, FP32),
    "some kept": Case(
        {
            "method": "h3_int8_full",
            "rotation": 64,
            "adaln": "keep",
            "ignored_layers": ["blocks.*.mlp.fc2", "token_refiner", "text_encoder.text_model.layers.1.self_attn"],
        },
        INT8,
        64,
        (*FP32, "adaln", ".fc2", "token_refiner", "layers.1.self_attn"),
    ),
}


@pytest.fixture(scope="module")
def exported(model: Path, run_export: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """``exported(case)``: the model's export, made once. Not to be changed."""

    def root(case: str) -> Path:
        out = tmp_path_factory.getbasetemp() / f"exported {case}"
        if not out.exists():
            run_export(model, out, CASES[case].spec)
        return out

    return root


ALL = pytest.mark.parametrize("case", CASES)


def in_model_order(state: State) -> State:
    """The DiT's tensors with rows of ``qkv_proj`` in thirds; a checkpoint has them head by head."""

    def thirds(weight: torch.Tensor) -> torch.Tensor:
        return weight.view(HEADS, 3, HEAD, -1).transpose(0, 1).reshape(weight.shape)

    return {name: thirds(value) if "qkv_proj" in name else value for name, value in state.items()}


def fused(state: State) -> State:
    """The text encoder's tensors with fused projections, without what the engine never reads."""
    found = {
        name: value
        for name, value in state.items()
        if name not in ("lm_head.weight", "model.language_model.norm.weight")
    }
    for index in range(SPEC.encoder_layers):
        for into, parts in (("self_attn.qkv_proj", "qkv"), ("mlp.gate_up_proj", ("gate", "up"))):
            stem = f"model.language_model.layers.{index}.{into.split('.')[0]}"
            names = [f"{stem}.{part}_proj.weight" for part in parts]
            found[f"model.language_model.layers.{index}.{into}.weight"] = torch.cat([found.pop(name) for name in names])
    return found


def plan_of(root: Path, component: str) -> Plan:
    checkpoint = open_checkpoint(root / component)
    return plan_transformer(checkpoint) if component == TRANSFORMER else plan_text_encoder(checkpoint, 50)


def same(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether two tensors have the same dtype, shape and bytes."""
    return (first.dtype, first.shape) == (second.dtype, second.shape) and torch.equal(
        first.contiguous().view(torch.uint8), second.contiguous().view(torch.uint8)
    )


def codes_of(weight: torch.Tensor, case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales by the reference, rotated in the widest groups that fit."""
    group = case.rotation
    while group and weight.shape[1] % group:
        group //= 2
    return quantize_rows_reference(weight, case.fmt, rotation=group)


def is_linear(name: str, value: torch.Tensor) -> bool:
    return value.ndim == 2 and "visual" not in name and "embed" not in name


@ALL
@pytest.mark.parametrize(("component", "ordered"), [(TRANSFORMER, in_model_order), (TEXT_ENCODER, fused)])
def test_tensors_are_codes_of_the_source_or_its_values(
    model: Path, exported: Callable[[str], Path], case: str, component: str, ordered: Callable[[State], State]
) -> None:
    chosen = CASES[case]
    expected: State = {}
    for name, value in ordered(tensors_of(model / component)).items():
        if is_linear(name, value) and not any(part in name for part in chosen.kept):
            expected[name], expected[f"{name}_scale"] = codes_of(value, chosen)
        else:
            expected[name] = value
    found = tensors_of(exported(case) / component)
    assert found.keys() == expected.keys()
    assert [name for name, value in expected.items() if not same(value, found[name])] == []
    assert sum(name.endswith("_scale") for name in found) > 0


@ALL
def test_the_loader_reads_it(exported: Callable[[str], Path], case: str) -> None:
    """It says how each linear's codes were made, and every mapped weight is an operand as it lies."""
    chosen = CASES[case]
    for component in (TRANSFORMER, TEXT_ENCODER):
        plan = plan_of(exported(case), component)
        plan.check()
        assert plan.detection.format.is_export
        for name, linear in plan.linears.items():
            kept = any(part in name for part in chosen.kept)
            assert linear.has_codes(chosen.fmt) != kept, name
            assert kept == (name in plan.kept)
            weight = linear.whole()
            assert weight is not None, name
            assert weight.t().data_ptr() % 128 == 0
            assert weight.t().stride() == (1, linear.shape[1])
        metadata = plan.checkpoint.metadata
        assert metadata["version"] == "1"
        options = H3QuantOptions(**json.loads(metadata["options"]))
        keys = dict(chosen.spec) if isinstance(chosen.spec, dict) else {"method": chosen.spec}
        assert options == parse(keys.pop("method"), {**keys, "checkpoint": "vllm-h3-quant"}, where="test")
        assert set(json.loads(metadata["versions"])) == {"vllm_h3_quant", "torch", "vllm", "vllm-omni"}


def test_a_shard_holds_one_layer(exported: Callable[[str], Path]) -> None:
    """A block a file, and one file for what lies outside of them, with the index that says so."""
    folder = exported("h3_fp8") / TRANSFORMER
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    files: dict[str, set[str]] = {}
    for name, file in index["weight_map"].items():
        files.setdefault(file, set()).add(name.split(".")[1] if name.startswith("blocks.") else "outside")
    assert files == {
        f"model-{number + 1:05d}-of-00003.safetensors": {layer} for number, layer in enumerate(("outside", "0", "1"))
    }
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in tensors_of(folder).values())


def test_decoder_layers_that_the_engine_does_not_read_are_left_out(
    model: Path, run_export: Any, tmp_path: Path
) -> None:
    run_export(model, tmp_path / "out", "h3_fp8", encoder_layers=1)
    names = tensors_of(tmp_path / "out" / TEXT_ENCODER)
    layers = {name.split(".")[3] for name in names if name.startswith("model.language_model.layers.")}
    assert layers == {"0"}


@ALL
def test_everything_else_is_copied(model: Path, exported: Callable[[str], Path], case: str) -> None:
    before, after = files_of(model), files_of(exported(case))
    for component in (TRANSFORMER, TEXT_ENCODER):
        before = {
            name: found for name, found in before.items() if not name.startswith(component) or ".safe" not in name
        }
        after = {name: found for name, found in after.items() if not name.startswith(component) or ".safe" not in name}
    changed = {name for name in before if before[name] != after[name]}
    assert after.keys() - before.keys() == {"manifest.json"}
    assert changed == {"transformer/config.json", "FL2VA/transformer/config.json"}


@ALL
def test_the_manifest_has_every_file_and_tensor(exported: Callable[[str], Path], case: str) -> None:
    root = exported(case)
    manifest, found = read_manifest(root), files_of(root)
    del found["manifest.json"]
    assert {name: told["sha256"] for name, told in manifest.files.items()} == found
    assert {name: told["bytes"] for name, told in manifest.files.items()} == {
        name: (root / name).stat().st_size for name in found
    }
    shards = {name for name in found if name.endswith(".safetensors") and "_vae" not in name}
    assert manifest.tensors.keys() == shards
    for name in shards:
        entries = read_header(root / name).entries.values()
        assert digests_of(root, root / name) == {entry.name: digest(entry) for entry in entries}


class TestConfiguration:
    """What ``config.json`` says, and that it says it in words that are understood."""

    @pytest.mark.parametrize(
        ("method", "keys", "written"),
        [
            ("h3_fp8", {}, {"quant_method": "h3_fp8"}),
            ("h3-int8", {}, {"quant_method": "h3_int8"}),
            ("h3_int8", {"rotation": 0}, {"quant_method": "h3_int8", "rotation": 0}),
            ("h3_fp8_full", {}, {"quant_method": "h3_fp8", "attention": "auto"}),
            (
                "h3_int8_full",
                {"attention_skip_layers": [1, 2, 3], "ignored_layers": ["blocks.0"], "adaln": "keep", "fuse": False},
                {
                    "quant_method": "h3_int8",
                    "attention": "auto",
                    "attention_skip_layers": "1-3",
                    "ignored_layers": ["blocks.0"],
                    "adaln": "keep",
                    "fuse": False,
                },
            ),
        ],
    )
    def test_one_method(self, method: str, keys: dict[str, Any], written: dict[str, Any]) -> None:
        found = parse_request({"method": method, **keys}, where="test").quantization_config()
        assert found == {**written, "checkpoint": "vllm-h3-quant"}
        told = json.loads(json.dumps(found))
        assert parse(told.pop("quant_method"), told, where="test") == parse(
            method, {**keys, "checkpoint": "vllm-h3-quant"}, where="test"
        )

    @pytest.mark.parametrize(
        ("spec", "written"),
        [
            ({"transformer": "h3_fp8"}, {"transformer": {"method": "h3_fp8"}, "text_encoder": None}),
            (
                {"transformer": {"method": "h3_fp8_full"}, "text_encoder": "h3_int8", "vae": None},
                {"transformer": {"method": "h3_fp8", "attention": "auto"}, "text_encoder": {"method": "h3_int8"}},
            ),
            (
                {"default": {"quant_method": "h3_int8", "rotation": 64}, "transformer": None},
                {"transformer": None, "text_encoder": {"method": "h3_int8", "rotation": 64}},
            ),
        ],
    )
    def test_by_component(self, spec: dict[str, Any], written: dict[str, Any]) -> None:
        found = json.loads(json.dumps(parse_request(spec, where="test").quantization_config()))
        for value in written.values():
            if value:
                value["checkpoint"] = "vllm-h3-quant"
        assert found == written
        assert parse_request(_without_checkpoint(found), where="test") == parse_request(
            _without_checkpoint(written), where="test"
        )

    @pytest.mark.parametrize(
        "spec",
        [{"transformer": "h3_fp8", "text_encoder": {"method": "h3_fp8"}}, {"default": "h3_fp8"}],
    )
    def test_alike_in_both_components_is_one_method(self, spec: dict[str, Any]) -> None:
        found = parse_request(spec, where="test").quantization_config()
        assert found == {"quant_method": "h3_fp8", "checkpoint": "vllm-h3-quant"}

    def test_stands_in_both_configurations_of_the_transformer(
        self, model: Path, exported: Callable[[str], Path]
    ) -> None:
        for name in ("transformer/config.json", "FL2VA/transformer/config.json"):
            config = json.loads((exported("h3_fp8") / name).read_text())
            assert config.pop("quantization_config") == {"quant_method": "h3_fp8", "checkpoint": "vllm-h3-quant"}
            assert config == json.loads((model / name).read_text())


def _without_checkpoint(spec: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value and {key: held for key, held in value.items() if key != "checkpoint"}
        for name, value in spec.items()
    }


class TestParts:
    """What is quantized of a model, and what stays a copy."""

    def test_a_component_without_a_method_is_copied(self, model: Path, run_export: Any, tmp_path: Path) -> None:
        run_export(model, tmp_path / "out", {"transformer": "h3_fp8"})
        before, after = files_of(model / TEXT_ENCODER), files_of(tmp_path / "out" / TEXT_ENCODER)
        assert before == after

    def test_a_component_with_nothing_to_quantize_is_copied(self, model: Path, run_export: Any, tmp_path: Path) -> None:
        """The engine reads it by itself, in the order of rows that a checkpoint has."""
        run_export(model, tmp_path / "out", {"method": "h3_fp8", "ignored_layers": ["text_encoder"]})
        before, after = files_of(model / TEXT_ENCODER), files_of(tmp_path / "out" / TEXT_ENCODER)
        assert before == after

    @pytest.mark.parametrize(("given", "found"), [("", {"FL2VA", "Ref2VA"}), ("Ref2VA", {"Ref2VA"})])
    def test_partitions(self, own_model: Path, run_export: Any, tmp_path: Path, given: str, found: set[str]) -> None:
        """A root with both, one of them a link, or one alone."""
        (own_model / "Ref2VA").mkdir()
        for part in ("transformer", "model_index.json"):
            (own_model / "Ref2VA" / part).symlink_to(own_model / "FL2VA" / part)
        (own_model / ".cache").mkdir()
        run_export(own_model / given, tmp_path / "out", {"transformer": "h3_fp8"})
        assert {path.name for path in (tmp_path / "out").iterdir()} == {
            "manifest.json",
            "model_index.json",
            "tiny_h3.json",
            "transformer",
            *found,
        }
        for partition in found:
            folder = tmp_path / "out" / partition
            assert plan_transformer(open_checkpoint(folder / "transformer")).detection.format.is_export
            assert (folder / "model_index.json").is_file()


class TestQuantizedSource:
    """A checkpoint with e4m3 codes of a scale a row in some linears, and values in one that it excludes."""

    NAMES = ("blocks.0.mlp.fc1", "blocks.0.attn.qkv_proj", "blocks.1.adaln_proj.linear")

    @pytest.fixture
    def codes(self, own_model: Path) -> State:
        """Its codes and scales; every other linear of the method is excluded, as a whole format would do."""
        kept: State = {}

        def encode(tensors: State) -> None:
            for name in self.NAMES:
                weight = tensors.get(f"{name}.weight")
                if weight is not None:
                    # Not the scales that quantization would choose: who quantizes again moves these bytes.
                    scale = weight.float().abs().amax(1, keepdim=True) / 300
                    kept[f"{name}.weight"] = tensors[f"{name}.weight"] = (weight.float() / scale).to(
                        torch.float8_e4m3fn
                    )
                    kept[f"{name}.weight_scale"] = tensors[f"{name}.weight_scale"] = scale

        change(own_model / TRANSFORMER, encode)
        return kept

    def test_codes_of_the_method_are_taken_as_they_are(
        self, own_model: Path, codes: State, run_export: Any, tmp_path: Path
    ) -> None:
        before = tensors_of(own_model / TRANSFORMER)
        done = run_export(own_model, tmp_path / "out", {"transformer": "h3_fp8"})
        found = tensors_of(tmp_path / "out" / TRANSFORMER)
        assert all(same(found[name], value) for name, value in codes.items())
        assert {name for name in found if name.endswith("_scale")} == {
            name for name in codes if name.endswith("_scale")
        }
        assert same(found["blocks.0.mlp.fc2.weight"], before["blocks.0.mlp.fc2.weight"])
        assert "3 of 22 linears as fp8 codes, 3 of them those of the source; as values: " in done.notes[0]
        assert "13 stored as values beside codes" in done.notes[0]

    def test_codes_of_another_method_are_decoded(
        self, own_model: Path, codes: State, run_export: Any, tmp_path: Path
    ) -> None:
        run_export(own_model, tmp_path / "out", {"transformer": "h3_int8"})
        found = tensors_of(tmp_path / "out" / TRANSFORMER)
        for name in self.NAMES:
            values = (codes[f"{name}.weight"].float() * codes[f"{name}.weight_scale"]).bfloat16()
            expected = codes_of(values, CASES["h3_int8"])
            assert same(found[f"{name}.weight"], expected[0])
            assert same(found[f"{name}.weight_scale"], expected[1])

    def test_codes_that_the_configuration_leaves_out_become_values(
        self, own_model: Path, codes: State, run_export: Any, tmp_path: Path
    ) -> None:
        run_export(own_model, tmp_path / "out", {"transformer": {"method": "h3_fp8", "adaln": "keep"}})
        name = self.NAMES[2]
        found = tensors_of(tmp_path / "out" / TRANSFORMER)
        values = (codes[f"{name}.weight"].float() * codes[f"{name}.weight_scale"]).bfloat16()
        assert same(found[f"{name}.weight"], values)
        assert f"{name}.weight_scale" not in found

    def test_a_code_that_is_no_number(self, own_model: Path, codes: State, run_export: Any, tmp_path: Path) -> None:
        def damage(tensors: State) -> None:
            if "blocks.0.mlp.fc1.weight" in tensors:
                tensors["blocks.0.mlp.fc1.weight"].view(torch.uint8)[9, 3] = 0xFF

        change(own_model / TRANSFORMER, damage)
        with pytest.raises(H3QuantError, match=r"fc1\.weight': the weights of output 9 of blocks\.0\.mlp\.fc1 are not"):
            run_export(own_model, tmp_path / "out", {"transformer": "h3_fp8"})


class _LiveBytes(TorchDispatchMode):
    """Counts the bytes of storages that operations made and that are still there, at most."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        given = {value.untyped_storage()._cdata for value in args if isinstance(value, torch.Tensor)}
        for value in found if isinstance(found, tuple | list) else [found]:
            if isinstance(value, torch.Tensor) and value.untyped_storage()._cdata not in given:
                storage = value.untyped_storage()
                self._live[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self._live = {key: held for key, held in self._live.items() if not held[0].expired()}
        self.most = max(self.most, sum(nbytes for _, nbytes in self._live.values()))
        return found


@pytest.mark.parametrize("method", ["h3_fp8", "h3_int8"])
def test_one_linear_is_in_memory_at_a_time(
    model: Path, run_export: Any, tmp_path: Path, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its bf16 weight, codes of a piece of its rows, and the scales of its file."""
    monkeypatch.setattr(weights, "PIECE", 2**16)
    linears = plan_of(model, TEXT_ENCODER).linears.values()
    largest = max(2 * linear.shape[0] * linear.shape[1] for linear in linears)
    layer = sum(2 * n * k for n, k in (linear.shape for linear in linears if ".layers.0." in linear.name))
    # Codes of a piece, and of the one before until it is written; no file has scales of more than 2**15 rows. What the
    # quantization itself holds for a piece is not seen here.
    pieces, scales = 2 * 2**16, 4 * 2**15
    with _LiveBytes() as live:
        run_export(model, tmp_path / "out", {"text_encoder": method})
    assert largest < live.most <= largest + pieces + scales < layer


def test_codes_of_odd_size_come_after_their_scale(tmp_path: Path) -> None:
    """No linear of the model is like that; codes and scales are those of any other."""
    weight = torch.randn(5, 7, generator=torch.Generator().manual_seed(1)).bfloat16()
    save_file({"odd.weight": weight}, tmp_path / "source.safetensors")
    entry = read_header(tmp_path / "source.safetensors").entries["odd.weight"]
    linear = LinearFile("odd", StoredLinear("odd", (5, 7), (Segment(entry, Values(), 0, 5),), {"": (0, 5)}), FP8)
    shard = Shard("odd.safetensors", {linear.weight.name: linear}, {}, True, {})
    assert [spec.name for spec in shard.specs] == ["odd.weight_scale", "odd.weight"]
    written = weights.write_shard(shard, tmp_path / "out" / shard.path, torch.device("cpu"), lambda nbytes: None)
    found = tensors_of(tmp_path / "out")
    codes, scale = quantize_rows_reference(weight, FP8)
    assert same(found["odd.weight"], codes)
    assert same(found["odd.weight_scale"], scale)
    assert written.nbytes == shard.nbytes == (tmp_path / "out" / shard.path).stat().st_size


class TestRefusals:
    """One line with what is wrong, and nothing left behind."""

    def refused(self, run_export: Any, model: Path, out: Path, spec: Any, message: str) -> None:
        with pytest.raises(H3QuantError, match=message) as error:
            run_export(model, out, spec)
        assert "\n" not in str(error.value)
        assert not out.with_name("out.partial").exists()

    @pytest.mark.parametrize(
        ("spec", "message"),
        [
            ("h3_fp9", r"unknown method 'h3_fp9'; did you mean 'h3_fp8'"),
            ({"method": "h3_fp8", "adalm": "keep"}, r"did you mean 'adaln'"),
            (
                {"method": "h3_fp8", "checkpoint": "vllm-h3-quant"},
                r"checkpoint='vllm-h3-quant' is what an export writes",
            ),
            ({"transformers": "h3_fp8"}, r"unknown component 'transformers'; did you mean 'transformer'"),
            ({"vae": "h3_fp8"}, r"component 'vae': cannot be quantized \(remote code"),
            ({"transformer": None}, r"names no method"),
            (
                {"transformer": {"adaln": "keep"}},
                r"component 'transformer': .* is not a method name",
            ),
            ({"transformer": ["h3_fp8"]}, r"\['h3_fp8'\] is not a method name"),
            ({"transformer": "h3_fp8", "text_encoder": "fp8"}, r"'text_encoder': 'fp8' is a method of the engine's"),
            ({"text_encoder": {"method": "h3_fp8", "fuse": False}}, r"'text_encoder': fuse=False is for the layers of"),
            ({"text_encoder": "h3_fp8_full"}, r"component 'text_encoder': attention='auto' is for the layers of"),
            (["h3_fp8"], r"\['h3_fp8'\] is not a method name or a mapping"),
            (
                {"method": "h3_fp8", "ignored_layers": ["blocks.0.attn.q_proj"]},
                r"'blocks\.0\.attn\.q_proj' matches no linear; did you mean 'blocks\.0\.attn\.qkv_proj'",
            ),
            (
                {"transformer": "h3_fp8", "text_encoder": {"method": "h3_fp8", "ignored_layers": ["blocks.0"]}},
                r"component 'text_encoder': ignored_layers entry 'blocks\.0' matches no linear",
            ),
            ({"method": "h3_fp8", "ignored_layers": ["video_patch_proj"]}, r"'video_patch_proj' matches no linear"),
            ({"method": "h3_fp8", "ignored_layers": ["*"]}, r"leaves nothing to quantize"),
        ],
    )
    def test_what_is_asked_for(self, model: Path, run_export: Any, tmp_path: Path, spec: Any, message: str) -> None:
        self.refused(run_export, model, tmp_path / "out", spec, message)

    def test_an_export(self, exported: Callable[[str], Path], run_export: Any, tmp_path: Path) -> None:
        self.refused(
            run_export, exported("h3_fp8"), tmp_path / "out", "h3_int8", r"is an export of vllm-h3-quant already"
        )

    def test_a_folder_that_is_taken_before_anything_is_read(
        self, model: Path, run_export: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(run, "open_source", lambda *args: pytest.fail("the model was read"))
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "mine").write_text("")
        self.refused(run_export, model, tmp_path / "out", "h3_fp8", r"/out exists and is not empty")

    def test_an_empty_folder_is_free(self, model: Path, run_export: Any, tmp_path: Path) -> None:
        (tmp_path / "out").mkdir()
        run_export(model, tmp_path / "out", {"transformer": "h3_fp8"})
        assert (tmp_path / "out" / "model_index.json").is_file()

    def test_a_folder_inside_the_model(self, own_model: Path, run_export: Any) -> None:
        self.refused(
            run_export, own_model / "FL2VA", own_model / "out", "h3_fp8", r"lies in .*own, whose files are copied"
        )

    @pytest.mark.parametrize(
        ("gone", "message"),
        [
            ("FL2VA", r"own holds no FL2VA/ or Ref2VA/"),
            ("model_index.json", r"own holds no model_index\.json"),
            ("transformer", r"own holds no transformer/config\.json"),
            ("FL2VA/transformer", r"component 'transformer': .*own has no transformer to quantize"),
            ("FL2VA/transformer/diffusion_pytorch_model-00001-of-00002.safetensors", r"00001-of-00002.*is missing"),
        ],
    )
    def test_a_model_that_lacks_something(
        self, own_model: Path, run_export: Any, tmp_path: Path, gone: str, message: str
    ) -> None:
        if (own_model / gone).is_dir():
            shutil.rmtree(own_model / gone)
        else:
            (own_model / gone).unlink()
        self.refused(run_export, own_model, tmp_path / "out", {"transformer": "h3_fp8"}, message)

    @pytest.mark.parametrize("value", [float("nan"), float("inf")])
    @pytest.mark.parametrize("method", ["h3_fp8", "h3_int8"])
    def test_a_weight_that_is_not_finite(
        self, own_model: Path, run_export: Any, tmp_path: Path, method: str, value: float, monkeypatch: Any
    ) -> None:
        """Row 11 of the model is row 11 of the file here, and not in the first piece."""
        monkeypatch.setattr(weights, "PIECE", 256 * 4)

        def damage(tensors: State) -> None:
            if "condition_proj.weight" in tensors:
                tensors["condition_proj.weight"][11, 4] = value

        change(own_model / TRANSFORMER, damage)
        message = r"tensor 'condition_proj\.weight': the weights of output 11 of condition_proj are not finite"
        self.refused(run_export, own_model, tmp_path / "out", method, message)

    def test_a_disk_that_is_too_small(
        self, model: Path, run_export: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        class Usage(NamedTuple):
            free: int

        monkeypatch.setattr(run.shutil, "disk_usage", lambda folder: Usage(2**20 * 5))
        monkeypatch.setattr(run, "write_shard", lambda *args: pytest.fail("work was begun"))
        self.refused(run_export, model, tmp_path / "out", "h3_fp8", r"takes 0\.03 GiB more, 0\.00 GiB are free")

    def test_a_quantization_that_would_be_replaced(self, own_model: Path, run_export: Any, tmp_path: Path) -> None:
        file = own_model / "FL2VA" / "transformer" / "config.json"
        config = json.loads(file.read_text())
        file.write_text(json.dumps({**config, "quantization_config": {"quant_method": "modelopt"}}))
        message = r"transformer/config\.json: has a quantization_config \('modelopt'\)"
        self.refused(run_export, own_model, tmp_path / "out", {"text_encoder": "h3_fp8"}, message)


def test_the_space_that_is_asked_for_is_what_is_written(
    model: Path, run_export: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(run, "_check_space", lambda folder, nbytes: asked.append(nbytes))
    run_export(model, tmp_path / "out", "h3_int8")
    total = sum(file.stat().st_size for file in (tmp_path / "out").rglob("*") if file.is_file())
    assert asked == [total - (tmp_path / "out" / "manifest.json").stat().st_size]
