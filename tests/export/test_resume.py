"""An export that is interrupted goes on where it was, to the same bytes; until then no engine takes it for a model."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from exported_files import State, change, files_of
from safetensors.torch import load_file, save_file

from vllm_h3_quant.errors import H3QuantError
from vllm_h3_quant.export import plan, resume, run
from vllm_h3_quant.export.run import Unwatched

SPEC = {"transformer": "h3_int8"}
SHARDS = [f"FL2VA/transformer/model-{number:05d}-of-00003.safetensors" for number in (1, 2, 3)]


class Interrupted(Exception):
    """What stops an export in a test."""


class Watch(Unwatched):
    """Calls ``stop`` after each file and each piece, with the number of files so far and of pieces since the last."""

    def __init__(self, stop: Callable[[int, int], bool] = lambda files, pieces: False) -> None:
        self.stop = stop
        self.files: list[str] = []
        self.layers = 0
        self.nbytes = 0
        self.pieces = 0
        self.begun: list[tuple[str, int, int]] = []

    def begin(self, what: str, nbytes: int, layers: int) -> None:
        self.begun.append((what, nbytes, layers))
        self.nbytes = 0

    def passed(self, nbytes: int) -> None:
        self.nbytes += nbytes
        self.pieces += 1
        self._ask()

    def finished(self, path: str, layer: bool) -> None:
        self.files.append(path)
        self.layers += layer
        self.pieces = 0
        self._ask()

    def _ask(self) -> None:
        if self.stop(len(self.files), self.pieces):
            raise Interrupted


@pytest.fixture(scope="module")
def in_one_go(model: Path, run_export: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Files of an export that nothing interrupted."""
    out = tmp_path_factory.mktemp("one-go") / "out"
    run_export(model, out, SPEC)
    return files_of(out)


def interrupt(run_export: Any, model: Path, out: Path, files: int, spec: Any = SPEC) -> None:
    """Stop an export after so many files."""
    with pytest.raises(Interrupted):
        run_export(model, out, spec, watcher=Watch(lambda done, pieces: done == files))


STOPS = {
    "in the first file": (0, 2),
    "after the first file": (1, 0),
    "in the second file": (1, 2),
    "after the weights": (3, 0),
    "in a copy": (8, 1),
}
"""So many files, and so many pieces of the next."""


@pytest.mark.parametrize(("files", "pieces"), STOPS.values(), ids=STOPS)
def test_goes_on_to_the_same_bytes(
    model: Path, run_export: Any, tmp_path: Path, in_one_go: dict[str, str], files: int, pieces: int
) -> None:
    out, second = tmp_path / "out", Watch()
    first = Watch(lambda done, passed: (done, passed) == (files, pieces))
    with pytest.raises(Interrupted):
        run_export(model, out, SPEC, watcher=first)
    assert not out.exists()
    done = run_export(model, out, SPEC, watcher=second)
    assert files_of(out) == in_one_go
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert (first.files + second.files, done.kept) == (
        list(dict.fromkeys(first.files + second.files)),
        len(first.files),
    )


def test_a_process_that_is_killed_leaves_what_the_next_can_use(
    model: Path, run_export: Any, tmp_path: Path, in_one_go: dict[str, str]
) -> None:
    """Without a chance to clean up: in the middle of the third shard."""
    program = f"""
import os, signal, torch
from pathlib import Path
from vllm_h3_quant.export.config import parse_request
from vllm_h3_quant.export.run import Unwatched, export
class Kill(Unwatched):
    files = 0
    def finished(self, path, layer):
        self.files += 1
    def passed(self, nbytes):
        if self.files == 2:
            os.kill(os.getpid(), signal.SIGKILL)
request = parse_request({SPEC!r}, where="test")
export(Path({str(model)!r}), Path({str(tmp_path / "out")!r}), request, device=torch.device("cpu"), watcher=Kill())
"""
    done = subprocess.run([sys.executable, "-c", program], timeout=240, check=False)
    assert done.returncode == -signal.SIGKILL
    partial = tmp_path / "out.partial"
    assert sorted(path.name for path in (partial / "FL2VA/transformer").iterdir()) == [
        Path(SHARDS[0]).name,
        Path(SHARDS[1]).name,
        f"{Path(SHARDS[2]).name}.tmp",
    ]
    watch = Watch()
    assert run_export(model, tmp_path / "out", SPEC, watcher=watch).kept == 2
    assert watch.files[0] == SHARDS[2]
    assert files_of(tmp_path / "out") == in_one_go


def test_no_file_is_recorded_before_it_is_there(model: Path, run_export: Any, tmp_path: Path) -> None:
    """And what makes a folder a model comes after all others, what the engine reads first last of all."""
    partial = tmp_path / "out.partial"
    made: list[str] = []

    def look(done: int, pieces: int) -> bool:
        recorded = json.loads((partial / "progress.json").read_text())["finished"]
        assert all((partial / name).stat().st_size == told["bytes"] for name, told in recorded.items())
        assert not [
            name for name in files_of(partial) if name.endswith(("model_index.json", "transformer/config.json"))
        ]
        return False

    original = run._put

    def put(file: Path, content: bytes) -> None:
        made.append(file.relative_to(partial).as_posix())
        original(file, content)

    run._put, watch = put, Watch(look)
    try:
        run_export(model, tmp_path / "out", SPEC, watcher=watch)
    finally:
        run._put = original
    assert made == [
        "FL2VA/transformer/model.safetensors.index.json",
        "FL2VA/transformer/config.json",
        "FL2VA/model_index.json",
        "transformer/config.json",
        "model_index.json",
    ]
    assert (watch.layers, [layers for _, _, layers in watch.begun]) == (2, [2])
    assert watch.nbytes == sum(file.stat().st_size for file in (tmp_path / "out").rglob("*.safetensors")) + sum(
        (tmp_path / "out" / name).stat().st_size for name in watch.files if not name.endswith(".safetensors")
    ) - _headers(tmp_path / "out")


def _headers(out: Path) -> int:
    return sum(8 + int.from_bytes((out / shard).read_bytes()[:8], "little") for shard in SHARDS)


@pytest.mark.parametrize("damage", ["a bit", "the end", "all"])
def test_a_finished_file_that_changed_is_written_again(
    model: Path, run_export: Any, tmp_path: Path, in_one_go: dict[str, str], damage: str
) -> None:
    out = tmp_path / "out"
    interrupt(run_export, model, out, 2)
    file = tmp_path / "out.partial" / SHARDS[0]
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    if damage == "all":
        file.unlink()
    else:
        file.write_bytes(content if damage == "a bit" else content[:-1])
    watch = Watch()
    assert run_export(model, out, SPEC, watcher=watch).kept == 1
    assert watch.files[:2] == [SHARDS[0], SHARDS[2]]
    assert files_of(out) == in_one_go


class TestAnotherExport:
    """What was begun is finished as it was begun, or not at all."""

    def refused(self, run_export: Any, model: Path, out: Path, spec: Any, message: str, **more: Any) -> None:
        before = files_of(out.with_name("out.partial"))
        with pytest.raises(H3QuantError, match=message) as error:
            run_export(model, out, spec, **more)
        assert "\n" not in str(error.value)
        assert files_of(out.with_name("out.partial")) == before

    @pytest.mark.parametrize(
        ("spec", "more", "message"),
        [
            ({"transformer": {"method": "h3_int8", "rotation": 64}}, {}, "another configuration of transformer: "),
            ({"transformer": "h3_int8", "text_encoder": "h3_int8"}, {}, "another configuration of text_encoder: none"),
            (SPEC, {"encoder_layers": 1}, "another number of decoder layers: 50 then, 1 now"),
        ],
    )
    def test_asked_for_otherwise(
        self, model: Path, run_export: Any, tmp_path: Path, spec: Any, more: Any, message: str
    ) -> None:
        interrupt(run_export, model, tmp_path / "out", 1)
        told = rf"^{tmp_path}/out\.partial was begun with {message}"
        self.refused(run_export, model, tmp_path / "out", spec, told, **more)

    def test_of_another_version(
        self, model: Path, run_export: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Versions are in the metadata of every shard."""
        interrupt(run_export, model, tmp_path / "out", 1)
        monkeypatch.setattr(resume, "package_versions", lambda: {**plan.package_versions(), "torch": "0.1"})
        self.refused(run_export, model, tmp_path / "out", SPEC, r"another torch version: .* then, 0\.1 now")

    @pytest.mark.parametrize("how", ["header", "bytes"])
    def test_of_a_source_that_changed(self, own_model: Path, run_export: Any, tmp_path: Path, how: str) -> None:
        """A file of the same header counts as another if it was written since: it may have been copied again."""
        interrupt(run_export, own_model, tmp_path / "out", 1)
        folder = own_model / "FL2VA" / "transformer"
        file = sorted(folder.glob("*.safetensors"))[0]
        if how == "bytes":
            os.utime(file, ns=(1, 1))
        else:
            found, tensors = file.stat(), load_file(file)
            save_file(tensors, tmp_path / "new", metadata={"format": "xx"})
            assert (tmp_path / "new").stat().st_size == found.st_size
            file.unlink()
            shutil.move(tmp_path / "new", file)
            os.utime(file, ns=(found.st_atime_ns, found.st_mtime_ns))
        self.refused(run_export, own_model, tmp_path / "out", SPEC, rf"another file FL2VA/transformer/{file.name}: ")

    def test_is_begun_anew_where_nothing_was_finished(self, model: Path, run_export: Any, tmp_path: Path) -> None:
        partial = tmp_path / "out.partial"
        partial.mkdir()
        (partial / "progress.json").write_text(json.dumps({"fingerprint": {"torch version": "0.1"}, "finished": {}}))
        assert run_export(model, tmp_path / "out", SPEC).kept == 0

    @pytest.mark.parametrize(
        ("name", "content", "message"),
        [
            ("notes.txt", "mine", "is no export that was interrupted"),
            ("progress.json", "{}", "is no record of an export"),
            ("progress.json", "{", "is no JSON"),
            ("progress.json", '{"fingerprint": {}, "finished": {"a": {"bytes": 1}}}', "is no record of an export"),
        ],
    )
    def test_something_else_is_there(
        self, model: Path, run_export: Any, tmp_path: Path, name: str, content: str, message: str
    ) -> None:
        partial = tmp_path / "out.partial"
        partial.mkdir()
        (partial / name).write_text(content)
        self.refused(run_export, model, tmp_path / "out", SPEC, message)

    def test_at_the_same_time(self, model: Path, run_export: Any, tmp_path: Path) -> None:
        tried: list[str] = []

        def second(files: int, pieces: int) -> bool:
            if files == 1 and not tried:
                with pytest.raises(H3QuantError, match=r"out\.partial: another export writes it") as error:
                    run_export(model, tmp_path / "out", SPEC)
                tried.append(str(error.value))
            return False

        run_export(model, tmp_path / "out", SPEC, watcher=Watch(second))
        assert len(tried) == 1


def test_a_failure_keeps_what_was_finished(
    own_model: Path, run_export: Any, tmp_path: Path, in_one_go: dict[str, str]
) -> None:
    """A weight that is not finite in the last block: what comes before it stays."""

    def damage(tensors: State) -> None:
        if "blocks.1.mlp.fc1.weight" in tensors:
            tensors["blocks.1.mlp.fc1.weight"][0, 0] = torch.nan

    change(own_model / "FL2VA" / "transformer", damage)
    with pytest.raises(H3QuantError, match=r"blocks\.1\.mlp\.fc1"):
        run_export(own_model, tmp_path / "out", SPEC)
    found = files_of(tmp_path / "out.partial")
    assert found.keys() == {SHARDS[0], SHARDS[1], "progress.json"}
    assert {name: found[name] for name in SHARDS[:2]} == {name: in_one_go[name] for name in SHARDS[:2]}
