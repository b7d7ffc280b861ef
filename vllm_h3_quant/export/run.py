"""An export from its first check to the folder's final name."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from vllm_h3_quant.errors import H3QuantError
from vllm_h3_quant.export.config import Request
from vllm_h3_quant.export.plan import ExportPlan, plan_export
from vllm_h3_quant.export.resume import Partial, fingerprint
from vllm_h3_quant.export.source import open_source
from vllm_h3_quant.export.weights import write_shard
from vllm_h3_quant.loader.durable import durable
from vllm_h3_quant.loader.inspect import ENCODER_LAYERS
from vllm_h3_quant.loader.manifest import write_manifest
from vllm_h3_quant.loader.reader import close_files
from vllm_h3_quant.loader.shards import Written
from vllm_h3_quant.loader.staging import release

_STEP = 2**24


class Watcher(Protocol):
    """Is told how an export goes."""

    def begin(self, what: str, nbytes: int, layers: int) -> None:
        """``what`` starts: so many bytes, in so many layers."""

    def passed(self, nbytes: int) -> None:
        """So many bytes more are done."""

    def finished(self, path: str, layer: bool) -> None:
        """A file is on the disk; whether it was a layer."""


class Unwatched:
    """A :class:`Watcher` that does nothing."""

    def begin(self, what: str, nbytes: int, layers: int) -> None:
        pass

    def passed(self, nbytes: int) -> None:
        pass

    def finished(self, path: str, layer: bool) -> None:
        pass


@dataclass(frozen=True)
class Exported:
    """A finished export.

    Attributes:
        out: its folder.
        nbytes: of all files.
        kept: files that an earlier run had finished.
        notes: what each component became, a line each.
    """

    out: Path
    nbytes: int
    kept: int
    notes: tuple[str, ...]


def export(
    model: Path,
    out: Path,
    request: Request,
    *,
    encoder_layers: int = ENCODER_LAYERS,
    device: torch.device | None = None,
    watcher: Watcher | None = None,
) -> Exported:
    """Write ``model``, quantized as ``request`` says, as the folder ``out``.

    Until all of it is there it grows in ``OUT.partial``, which a second call with the same arguments finishes.

    Args:
        model: root of a model, or one partition of it.
        out: a folder that is not there, or empty.
        request: what becomes of each component.
        encoder_layers: how many decoder layers of the text encoder the engine reads.
        device: where weights are quantized: a GPU if there is one, when None. The bytes are the same.
        watcher: is told how it goes.

    Raises:
        H3QuantError: ``out`` is taken, the model cannot be exported as asked, ``OUT.partial`` is of another export,
            or the disk is too small.
    """
    _check_free(out)
    watcher = watcher or Unwatched()
    device = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        source = open_source(model)
        _check_apart(source.root, out)
        plan = plan_export(source, request, encoder_layers)
        with Partial(out, fingerprint(source, request, plan, encoder_layers)) as partial:
            recorded = partial.recorded
            if recorded:
                watcher.begin("Checking", sum(written.nbytes for written in recorded.values()), 0)
            kept = partial.check_finished(watcher.passed)
            written = _write(plan, partial, kept, device, watcher)
    finally:
        close_files()
        release()
    return Exported(out, sum(file.nbytes for file in written.values()), len(kept), tuple(plan.notes))


def _check_free(out: Path) -> None:
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise H3QuantError(f"{out} exists and is not empty; remove it or give another OUT")


def _check_apart(root: Path, out: Path) -> None:
    if out.resolve().is_relative_to(root.resolve()):
        raise H3QuantError(f"{out} lies in {root}, whose files are copied; give an OUT beside it")


def _write(
    plan: ExportPlan, partial: Partial, kept: Mapping[str, Written], device: torch.device, watcher: Watcher
) -> dict[str, Written]:
    shards = [shard for shard in plan.shards if shard.path not in kept]
    copies = {path: file for path, file in plan.copies.items() if path not in kept}
    small = {**plan.indexes, **plan.last}
    nbytes = sum(shard.nbytes for shard in shards) + sum(file.stat().st_size for file in copies.values())
    _check_space(partial.folder, nbytes + sum(map(len, small.values())))
    watcher.begin("Exporting", nbytes, sum(shard.layer for shard in shards))
    written = dict(kept)
    for shard in shards:
        written[shard.path] = write_shard(shard, partial.folder / shard.path, device, watcher.passed)
        partial.record(shard.path, written[shard.path])
        watcher.finished(shard.path, shard.layer)
    for path, file in copies.items():
        written[path] = _copy(file, partial.folder / path, watcher.passed)
        partial.record(path, written[path])
        watcher.finished(path, False)
    for path, content in small.items():
        written[path] = Written(len(content), hashlib.sha256(content).hexdigest(), {})
    for path, content in plan.indexes.items():
        _put(partial.folder / path, content)
    write_manifest(partial.folder, written)
    for path, content in plan.last.items():
        _put(partial.folder / path, content)
    partial.publish()
    return written


def _check_space(folder: Path, nbytes: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < nbytes:
        raise H3QuantError(
            f"{folder.parent}: the export takes {nbytes / 2**30:.2f} GiB more, {free / 2**30:.2f} GiB are free; free"
            " space or give an OUT on another disk"
        )


def _copy(file: Path, target: Path, passed: Callable[[int], None]) -> Written:
    digest, nbytes = hashlib.sha256(), 0
    with file.open("rb") as source, durable(target) as stream:
        while chunk := source.read(_STEP):
            digest.update(chunk)
            stream.write(chunk)
            nbytes += len(chunk)
            passed(len(chunk))
    return Written(nbytes, digest.hexdigest(), {})


def _put(file: Path, content: bytes) -> None:
    with durable(file) as stream:
        stream.write(content)
