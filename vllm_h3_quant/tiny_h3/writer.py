"""Writes the checkpoint as a whole or not at all, and keeps one that is already there."""

from __future__ import annotations

import hashlib
import json
import tempfile
from dataclasses import asdict
from importlib import resources
from pathlib import Path
from typing import Any

from vllm_h3_quant.tiny_h3.spec import TinyH3
from vllm_h3_quant.tiny_h3.tensors import RandomTensors, save_sharded
from vllm_h3_quant.tiny_h3.text_encoder import text_encoder_config, text_encoder_state
from vllm_h3_quant.tiny_h3.tokenizer import write_processor, write_tokenizer
from vllm_h3_quant.tiny_h3.transformer import transformer_config, transformer_state
from vllm_h3_quant.tiny_h3.vaes import write_audio_vae, write_video_vae

_STAMP = "tiny_h3.json"
_DEFAULT = TinyH3()


def write_tiny_h3(root: Path, spec: TinyH3 = _DEFAULT, *, reuse: bool = True) -> Path:
    """Write a tiny MiniMax-H3 checkpoint (about 50 MiB) at ``root`` and return ``root``.

    The files are written into a sibling folder that is then renamed, so ``root`` is never half a checkpoint.

    Args:
        root: folder of the checkpoint; its parent is created.
        spec: sizes and seed; the same spec gives the same bytes.
        reuse: keep a checkpoint that this version of the writer made from the same spec.

    Raises:
        FileExistsError: ``root`` holds something that this function did not write.
    """
    stamp = {"spec": asdict(spec), "writer": _writer_digest()}
    found = _read_stamp(root)
    if reuse and found == stamp:
        return root
    if found is None and root.exists() and (root.is_file() or any(root.iterdir())):
        raise FileExistsError(f"{root} exists and is no tiny H3 checkpoint; give a path that is free")
    root.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{root.name}-", dir=root.parent) as scratch:
        fresh = Path(scratch) / "fresh"
        _write(fresh, spec)
        (fresh / _STAMP).write_text(json.dumps(stamp, indent=1))
        if root.exists():
            root.rename(Path(scratch) / "stale")
        fresh.rename(root)
    return root


def _write(root: Path, spec: TinyH3) -> None:
    partition = root / "FL2VA"
    release = {
        "partition": "fl2va",
        "tasks": ["t2va", "fl2va"],
        "sigma_shift_scales": {"video": 12.0, "audio": 3.0},
    }
    config = transformer_config(spec)
    # The engine reads the class and the DiT's shape at the root before it chooses a partition.
    _write_json(root / "model_index.json", {"_class_name": "MiniMaxH3ModularPipeline"})
    _write_json(root / "transformer" / "config.json", {"_class_name": "MiniMaxH3Transformer3DModel", **config})
    _write_json(partition / "model_index.json", {"_class_name": "MiniMaxH3Pipeline", "_minimax_h3": release})
    _write_json(partition / "transformer" / "config.json", config)
    _write_json(partition / "text_encoder" / "config.json", text_encoder_config(spec))
    # One generator a component: a change of one leaves the bytes of the others as they were.
    dit, encoder, video, audio = (RandomTensors(4 * spec.seed + offset) for offset in range(4))
    dit_state = transformer_state(spec, dit)
    save_sharded(dit_state, partition / "transformer", "diffusion_pytorch_model", spec.shards)
    save_sharded(text_encoder_state(spec, encoder), partition / "text_encoder", "model", spec.shards)
    write_tokenizer(partition / "tokenizer")
    write_processor(partition / "processor")
    write_video_vae(partition / "video_vae", video)
    write_audio_vae(partition / "audio_vae", audio)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1))


def _read_stamp(root: Path) -> dict[str, Any] | None:
    path = root / _STAMP
    if not path.is_file():
        return None
    stamp: dict[str, Any] = json.loads(path.read_text())
    return stamp


def _writer_digest() -> str:
    """SHA-256 over this package's sources: any change of the writer makes a new checkpoint."""
    package = resources.files("vllm_h3_quant.tiny_h3")
    digest = hashlib.sha256()
    for folder in (package, package / "remote_code"):
        for source in sorted(folder.iterdir(), key=lambda entry: entry.name):
            if source.name.endswith(".py"):
                digest.update(source.name.encode() + source.read_bytes())
    return digest.hexdigest()
