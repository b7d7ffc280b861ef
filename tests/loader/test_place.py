"""Every way in which a path can be wrong, and the right one that it is told with."""

from __future__ import annotations

from pathlib import Path

import pytest

from vllm_h3_quant.loader.place import wrong_name, wrong_place


def write_model(root: Path, *partitions: str) -> Path:
    """Folders and the files that tell a model, without weights."""
    for name in ("model_index.json", "transformer/config.json", "processor/x.json"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("{}")
    for partition in partitions:
        for name in ("model_index.json", "transformer/config.json", "text_encoder/model.safetensors"):
            (root / partition / name).parent.mkdir(parents=True, exist_ok=True)
            (root / partition / name).write_text("{}")
    return root


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "models" / "H3", "FL2VA")


@pytest.mark.parametrize("place", ["", "FL2VA", "FL2VA/../"])
def test_right(model: Path, place: str) -> None:
    assert wrong_place(model / place) is None


def test_a_link(model: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(model)
    assert wrong_place(tmp_path / "link") is None


def test_a_partition_without_a_root(tmp_path: Path) -> None:
    """Downloaded alone; the engine reads everything from it."""
    partition = write_model(tmp_path / "H3", "FL2VA") / "FL2VA"
    (tmp_path / "H3" / "model_index.json").unlink()
    assert wrong_place(partition) is None


@pytest.mark.parametrize("marker", ["modular_model_index.json", "fastvideo_inference.json"])
def test_a_modular_release(tmp_path: Path, marker: str) -> None:
    (tmp_path / marker).write_text("{}")
    assert wrong_place(tmp_path) is None


@pytest.mark.parametrize(
    ("place", "says"),
    [
        ("H3/FL2VA/transformer", "is a part of the model {model}; give {model}"),
        ("H3/transformer", "is a part of the model {model}; give {model}"),
        ("H3/FL2VA/text_encoder", "is a part of the model {model}; give {model}"),
        ("H3/processor", "is a part of the model {model}; give {model}"),
        ("H3/FL2VA/text_encoder/model.safetensors", "is a file; give the model's folder, {model}"),
        ("H3/model_index.json", "is a file; give the model's folder, {model}"),
        ("", "holds the model {model}; give {model}"),
        ("..", "holds the model {model}; give {model}"),
        ("h3", "does not exist; did you mean {model}?"),
        ("H3/fl2va", "does not exist; did you mean {model}/FL2VA?"),
        ("H33/FL2VA", "does not exist; did you mean {model}/FL2VA?"),
        ("nowhere/near", "does not exist; {models} is there"),
    ],
)
def test_nearest(model: Path, place: str, says: str) -> None:
    path = model.parent / place
    said = wrong_place(path)
    assert said == f"{path} " + says.format(model=model, models=model.parent)


def test_several_below(model: Path) -> None:
    other = write_model(model.with_name("OUT"), "FL2VA", "Ref2VA")
    assert wrong_place(model.parent) == f"{model.parent} holds the models {model}, {other}; give one of them"


def test_inside_a_partition_without_a_root(tmp_path: Path) -> None:
    partition = write_model(tmp_path / "H3", "FL2VA") / "FL2VA"
    (tmp_path / "H3" / "model_index.json").unlink()
    said = wrong_place(partition / "transformer")
    assert said == f"{partition / 'transformer'} is a part of the model {partition}; give {partition}"


def test_by_a_relative_name(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine goes by a partition's name, which '.' hides."""
    monkeypatch.chdir(model / "FL2VA")
    assert wrong_place(Path()) == f". is a part of the model {model}; give {model}"
    monkeypatch.chdir(model)
    assert wrong_place(Path()) is None
    assert wrong_place(Path("transformer")) == f"transformer is a part of the model {model}; give {model}"


@pytest.mark.parametrize(
    ("gone", "says"),
    [
        ("FL2VA", "holds no FL2VA/ or Ref2VA/"),
        ("model_index.json", "holds no model_index.json"),
        ("transformer/config.json", "holds no transformer/config.json"),
    ],
)
def test_a_model_that_lacks_something(model: Path, gone: str, says: str) -> None:
    (model / gone).rename(model.parent / "moved")
    said = wrong_place(model)
    assert said is not None
    assert said.startswith(
        f"{model} {says}; a MiniMax-H3 model's root holds model_index.json, transformer/config.json and"
    )


def test_a_partition_of_another_name(model: Path) -> None:
    partition = (model / "FL2VA").rename(model.parent / "h3_fl2va")
    said = wrong_place(partition)
    assert said == f"{partition} looks like a partition, whose folder must be named FL2VA or Ref2VA; rename it"


def test_nothing_near(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    said = wrong_place(tmp_path / "empty")
    assert said is not None
    assert said.startswith(f"{tmp_path / 'empty'} holds no MiniMax-H3 model; its root holds model_index.json, ")


def test_an_export_that_is_not_complete(tmp_path: Path) -> None:
    partial = tmp_path / "OUT.partial"
    (partial / "FL2VA").mkdir(parents=True)
    assert wrong_place(partial) == f"{partial} is an export that is not complete; run the same export again"


def test_a_link_to_nothing(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    assert (
        wrong_place(tmp_path / "link") == f"{tmp_path / 'link'} is a link to {tmp_path / 'gone'}, which does not exist"
    )


def test_a_home_that_no_shell_filled_in(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    write_model(tmp_path / "H3", "FL2VA")
    assert wrong_place(Path("~/H3")) == f"~/H3 does not exist; did you mean {tmp_path / 'H3'}?"


class TestTask:
    """The engine opens the partition of the task."""

    @pytest.mark.parametrize("task", [None, "auto", "t2va", "fl2va", "T2VA"])
    def test_fl2va(self, model: Path, task: str | None) -> None:
        assert wrong_place(model, task=task) is None

    @pytest.mark.parametrize("place", ["", "FL2VA"])
    def test_that_is_not_there(self, model: Path, place: str) -> None:
        said = wrong_place(model / place, task="ref2va")
        assert said == f"{model} holds no Ref2VA/, which --task-type ref2va needs; it holds FL2VA/ (t2va, fl2va)"

    @pytest.mark.parametrize("task", ["auto", "t2va", "combined"])
    def test_ref2va_alone(self, tmp_path: Path, task: str | None) -> None:
        root = write_model(tmp_path / "H3", "Ref2VA")
        said = wrong_place(root, task=task)
        assert said is not None
        assert "holds no FL2VA/" in said
        assert said.endswith("it holds Ref2VA/ (ref2va)")
        assert wrong_place(root / "Ref2VA", task="auto") is None
        assert wrong_place(root) is None, "no partition was chosen"

    def test_a_partition_without_weights(self, model: Path) -> None:
        (model / "FL2VA" / "transformer" / "config.json").unlink()
        (model / "FL2VA" / "transformer").rmdir()
        said = wrong_place(model, task="t2va")
        assert said == f"{model} holds no FL2VA/transformer/, which --task-type t2va needs"


class TestHub:
    def test_a_name_while_offline(self) -> None:
        said = wrong_name("MiniMaxAI/MiniMax-H3", offline=True, cached=lambda name: False)
        assert said is not None
        assert said.startswith("MiniMaxAI/MiniMax-H3 is no folder here, not in the Hugging Face cache")
        assert "HF_HUB_OFFLINE" in said

    @pytest.mark.parametrize(("offline", "cached"), [(True, True), (False, False), (False, True)])
    def test_a_name_that_can_be_had(self, offline: bool, cached: bool) -> None:
        assert wrong_name("MiniMaxAI/MiniMax-H3", offline=offline, cached=lambda name: cached) is None

    def test_a_store(self) -> None:
        assert wrong_name("s3://bucket/H3", offline=True, cached=lambda name: False) is None

    @pytest.mark.parametrize("given", ["/x/H3", "./H3", "../H3", "~/H3", "a/b/H3", "H3/", "H3 2"])
    def test_what_is_no_name(self, given: str) -> None:
        said = wrong_name(given, offline=False, cached=lambda name: pytest.fail("asked"))
        assert said is not None
        assert "does not exist" in said

    def test_a_folder_is_no_name(self, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(model.parent)
        assert wrong_name("H3", offline=True, cached=lambda name: pytest.fail("asked")) is None
        said = wrong_name("H3/transformer", offline=False, cached=lambda name: pytest.fail("asked"))
        assert said == f"H3/transformer is a part of the model {model}; give {model}"
