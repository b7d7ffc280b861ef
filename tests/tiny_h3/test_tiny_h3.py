"""The tiny checkpoint: reproducible, whole or absent, in the layout that the engine and the loaders rely on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from vllm_h3_quant.tiny_h3 import TinyH3, write_tiny_h3, writer
from vllm_h3_quant.tiny_h3.remote_code.audio_vae import MiniMaxH3AudioVAEModel
from vllm_h3_quant.tiny_h3.remote_code.video_vae import MiniMaxH3VideoVAEModel, frames_of_latents
from vllm_h3_quant.tiny_h3.spec import AUDIO_SAMPLES_PER_LATENT
from vllm_h3_quant.tiny_h3.tensors import RandomTensors, save_sharded

SMALL = TinyH3(layers=1, refiner_layers=1, encoder_layers=1, hidden=64, ffn=64)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_h3(tmp_path_factory.mktemp("small") / "h3", SMALL)


def contents(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def test_same_spec_gives_the_same_bytes(small: Path, tmp_path: Path) -> None:
    assert contents(write_tiny_h3(tmp_path / "again", SMALL)) == contents(small)


def test_seed_changes_weights_and_nothing_else(small: Path, tmp_path: Path) -> None:
    other = contents(write_tiny_h3(tmp_path / "other", TinyH3(**{**vars(SMALL), "seed": 1})))
    changed = {name for name, data in contents(small).items() if other[name] != data}
    weights = {name for name in other if name.endswith(".safetensors")}
    assert changed == weights | {"tiny_h3.json"}


def test_transformer_change_leaves_the_other_weights(small: Path, tmp_path: Path) -> None:
    other = contents(write_tiny_h3(tmp_path / "other", TinyH3(**{**vars(SMALL), "layers": 2})))
    unchanged = [name for name, data in contents(small).items() if other[name] == data]
    assert "FL2VA/text_encoder/model-00001-of-00002.safetensors" in unchanged
    assert "FL2VA/video_vae/source/diffusion_pytorch_model.safetensors" in unchanged


def test_reuse_keeps_the_folder_and_a_new_spec_replaces_it(tmp_path: Path) -> None:
    root = write_tiny_h3(tmp_path / "h3", SMALL)
    first = root.stat().st_ino
    assert write_tiny_h3(root, SMALL).stat().st_ino == first
    assert write_tiny_h3(root, SMALL, reuse=False).stat().st_ino != first
    assert json.loads((root / "FL2VA/transformer/config.json").read_text())["num_layers"] == 1
    write_tiny_h3(root, TinyH3(**{**vars(SMALL), "layers": 2}))
    assert json.loads((root / "FL2VA/transformer/config.json").read_text())["num_layers"] == 2
    assert [path.name for path in tmp_path.iterdir()] == ["h3"]


def test_changed_writer_replaces_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = write_tiny_h3(tmp_path / "h3", SMALL)
    first = root.stat().st_ino
    monkeypatch.setattr(writer, "_writer_digest", lambda: "another")
    assert write_tiny_h3(root, SMALL).stat().st_ino != first


def test_foreign_folder_is_refused_and_kept(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("precious")
    with pytest.raises(FileExistsError, match="no tiny H3 checkpoint"):
        write_tiny_h3(tmp_path, SMALL, reuse=False)
    assert (tmp_path / "mine.txt").read_text() == "precious"


def test_failed_write_leaves_nothing_or_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = write_tiny_h3(tmp_path / "kept", SMALL)
    before = contents(kept)

    def no_space(*_: object) -> None:
        raise OSError("no space")

    monkeypatch.setattr(writer, "write_audio_vae", no_space)
    for target in (tmp_path / "new", kept):
        with pytest.raises(OSError, match="no space"):
            write_tiny_h3(target, SMALL, reuse=False)
    assert contents(kept) == before
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"hidden": 200}, "hidden must be a multiple of 32, got 200; nearest: 192"),
        ({"ffn": 16}, "ffn must be a multiple of 32, got 16; nearest: 32"),
        ({"heads": 3}, "heads must be a multiple of 2"),
        ({"layers": 0}, "layers must be at least 1"),
        ({"shards": 0}, "shards must be at least 1"),
    ],
)
def test_sizes_that_two_ranks_cannot_share_are_refused(sizes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TinyH3(**sizes)


@pytest.mark.parametrize("shards", [1, 2, 5])
def test_adaln_bias_comes_before_its_weight(shards: int, tmp_path: Path) -> None:
    """The order of the real files, on which streaming quantization depends."""
    root = write_tiny_h3(tmp_path / "h3", TinyH3(**{**vars(SMALL), "shards": shards}))
    files = sorted((root / "FL2VA/transformer").glob("*.safetensors"))
    assert len(files) == shards
    order: list[str] = []
    for file in files:
        with safe_open(file, framework="pt") as tensors:
            order += tensors.offset_keys()
    for name in ("blocks.0.adaln_proj.linear", "final_layer.adaln_proj.linear", "condition_proj"):
        assert order.index(f"{name}.bias") < order.index(f"{name}.weight")


def test_index_names_every_tensor_where_it_is(small: Path) -> None:
    folder = small / "FL2VA/text_encoder"
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    found = {}
    for file in folder.glob("*.safetensors"):
        with safe_open(file, framework="pt") as tensors:
            found.update(dict.fromkeys(tensors.keys(), file.name))
    assert index["weight_map"] == found


def test_more_shards_than_tensors_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot split 1 tensors into 2 shards"):
        save_sharded({"a": torch.ones(1)}, tmp_path, "model", 2)


def test_tokenizer_gives_one_token_a_byte_and_the_ids_of_the_config(small: Path) -> None:
    from transformers import Qwen2TokenizerFast

    tokenizer = Qwen2TokenizerFast.from_pretrained(small / "FL2VA", subfolder="tokenizer")
    text = "naïve 猫!"
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert len(ids) == len(text.encode())
    assert tokenizer.decode(ids) == text
    config = json.loads((small / "FL2VA/text_encoder/config.json").read_text())
    assert tokenizer("<|image_pad|>")["input_ids"] == [config["image_token_id"]]
    assert tokenizer("<|video_pad|>")["input_ids"] == [config["video_token_id"]]
    assert max(tokenizer.get_vocab().values()) < config["text_config"]["vocab_size"]


@pytest.mark.parametrize(("latents", "frames"), [(1, 1), (2, 5), (7, 22), (32, 107), (37, 124)])
def test_video_vae_decodes_17n_plus_5_frames(small: Path, latents: int, frames: int) -> None:
    vae = MiniMaxH3VideoVAEModel.from_pretrained(str(small / "FL2VA/video_vae"))
    pixels = vae.model.decode_base(RandomTensors(3).normal(1, 24, latents, 2, 3, std=1.0, dtype=torch.float32))
    assert frames_of_latents(latents) == frames
    assert pixels.shape == (1, 3, frames, 32, 48)


def test_decoded_video_varies_in_space_and_time_and_is_rarely_clipped(small: Path) -> None:
    """A flat or saturated picture would hide what a method changes."""
    vae = MiniMaxH3VideoVAEModel.from_pretrained(str(small / "FL2VA/video_vae"))
    pixels = vae.model.decode_base(RandomTensors(3).normal(1, 24, 32, 4, 4, std=1.5, dtype=torch.float32))
    assert pixels.std(dim=2).mean() > 0.1
    assert pixels.std(dim=(3, 4)).mean() > 0.1
    assert (pixels.abs() >= 1).float().mean() < 0.1


def test_image_latents_have_the_width_of_video_latents(small: Path) -> None:
    from PIL import Image

    vae = MiniMaxH3VideoVAEModel.from_pretrained(str(small / "FL2VA/video_vae"))
    (latent,) = vae.model.encode_images(Image.linear_gradient("L").resize((48, 32)))
    assert latent.shape == (24, 1, 2, 3)
    assert latent.dtype == torch.float16


def test_audio_vae_decodes_unclipped_sound_that_follows_the_latents(small: Path) -> None:
    vae = MiniMaxH3AudioVAEModel.from_pretrained(str(small / "FL2VA/audio_vae"))
    latents = RandomTensors(3).normal(2, 32, 40, std=1.5, dtype=torch.float32)
    wave = vae.decode(latents).detach()
    assert wave.shape == (2, 1, 40 * AUDIO_SAMPLES_PER_LATENT)
    assert 0.05 < float(wave.std()) < 0.6
    assert float(wave.abs().max()) < 0.999
    assert not torch.allclose(wave[0], wave[1], atol=0.05)
