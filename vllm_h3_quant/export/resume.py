"""The folder in which an export grows, and what tells a second run which of it is finished.

``OUT.partial/progress.json`` holds the fingerprint of what is exported and, for each finished file, its size and
digests. A file is recorded once it is on the disk under its name.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import shutil
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType

from vllm_h3_quant.config.components import COMPONENTS
from vllm_h3_quant.errors import H3QuantError
from vllm_h3_quant.export.config import Request
from vllm_h3_quant.export.plan import PROGRESS, ExportPlan, package_versions
from vllm_h3_quant.export.source import Source
from vllm_h3_quant.loader.checkpoint import read_json
from vllm_h3_quant.loader.durable import UNFINISHED, durable, sync_folder
from vllm_h3_quant.loader.place import PARTIAL
from vllm_h3_quant.loader.shards import Written

_STEP = 2**24
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
"""What a file system without locks answers; there it is up to the user not to start two exports at once."""

Fingerprint = Mapping[str, str]
"""What an export's bytes follow from: each thing's name, as a message may call it, and its state."""


def fingerprint(source: Source, request: Request, export: ExportPlan, encoder_layers: int) -> dict[str, str]:
    """The fingerprint of an export. A source file counts by its size, time of change and, for weights, header."""
    found = {f"{package} version": told for package, told in package_versions().items()}
    for component in COMPONENTS:
        options = request.options(component)
        found[f"configuration of {component}"] = "none" if options is None else options.model_dump_json()
    found["number of decoder layers"] = str(encoder_layers)
    weights = {
        entry.file
        for shard in export.shards
        for entry in (*shard.plain.values(), *(e for linear in shard.linears.values() for e in linear.stored.entries))
    }
    for file in sorted({*weights, *export.copies.values(), *(source.root / path for path in export.last)}):
        found[f"file {file.relative_to(source.root).as_posix()}"] = _state(file, header=file in weights)
    return found


class Partial:
    """``OUT.partial``; a context manager that keeps a second export out of it.

    Args:
        out: the model's folder to be.
        fingerprint: of what is exported.

    Raises:
        H3QuantError: it holds an export of something else, or something that is no export, or another process
            writes it.
    """

    def __init__(self, out: Path, fingerprint: Fingerprint) -> None:
        self.out = out
        self.folder = partial_of(out)
        self._fingerprint = dict(fingerprint)
        self._finished: dict[str, Written] = {}

    def __enter__(self) -> Partial:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock = os.open(self.folder, os.O_RDONLY)
        try:
            self._take()
            self._read()
            self._save()
        except BaseException:
            os.close(self._lock)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if not self._finished and self.folder.is_dir():
            shutil.rmtree(self.folder)
        os.close(self._lock)

    def check_finished(self, checked: Callable[[int], None]) -> dict[str, Written]:
        """The finished files, whose bytes are still those that were written; what differs is forgotten.

        Args:
            checked: called with the number of bytes read after each piece.
        """
        self._finished = {
            name: written for name, written in self._finished.items() if self._is_whole(name, written, checked)
        }
        return dict(self._finished)

    @property
    def recorded(self) -> Mapping[str, Written]:
        """Files that an earlier run has recorded."""
        return self._finished

    def record(self, name: str, written: Written) -> None:
        """Remember that the file ``name`` is finished."""
        self._finished[name] = written
        self._save()

    def publish(self) -> None:
        """Give the folder its name."""
        (self.folder / (PROGRESS + UNFINISHED)).unlink(missing_ok=True)
        sync_folder(self.folder)
        self.folder.rename(self.out)
        sync_folder(self.out.parent)
        (self.out / PROGRESS).unlink()

    def _take(self) -> None:
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise H3QuantError(f"{self.folder}: another export writes it; wait for that or give another OUT") from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise

    def _save(self) -> None:
        files = {
            name: {"bytes": done.nbytes, "sha256": done.sha256, "tensors": dict(done.tensors)}
            for name, done in self._finished.items()
        }
        with durable(self.folder / PROGRESS) as stream:
            stream.write(json.dumps({"fingerprint": self._fingerprint, "finished": files}, indent=1).encode())

    def _read(self) -> None:
        file = self.folder / PROGRESS
        if not file.is_file():
            if any(entry.name != PROGRESS + UNFINISHED for entry in self.folder.iterdir()):
                raise H3QuantError(f"{self.folder} is no export that was interrupted; remove it or give another OUT")
            return
        content = read_json(file)
        begun, files = content.get("fingerprint"), content.get("finished")
        try:
            self._finished = {
                name: Written(int(told["bytes"]), str(told["sha256"]), dict(told["tensors"]))
                for name, told in files.items()  # type: ignore[union-attr]
            }
            then = {str(key): str(value) for key, value in begun.items()}  # type: ignore[union-attr]
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise H3QuantError(f"{file}: is no record of an export ({error!r}); remove {self.folder}") from None
        if not self._finished:
            return
        for key in dict.fromkeys((*then, *self._fingerprint)):
            was, now = then.get(key, "none"), self._fingerprint.get(key, "none")
            if was != now:
                raise H3QuantError(
                    f"{self.folder} was begun with another {key}: {was} then, {now} now; finish it as it was begun,"
                    " or remove it"
                )

    def _is_whole(self, name: str, written: Written, checked: Callable[[int], None]) -> bool:
        file = self.folder / name
        if not file.is_file() or file.stat().st_size != written.nbytes:
            return False
        digest = hashlib.sha256()
        with file.open("rb") as stream:
            while chunk := stream.read(_STEP):
                digest.update(chunk)
                checked(len(chunk))
        return digest.hexdigest() == written.sha256


def partial_of(out: Path) -> Path:
    """The folder in which the export ``out`` grows."""
    return out.with_name(out.name + PARTIAL)


def _state(file: Path, *, header: bool) -> str:
    found = file.stat()
    told = f"{found.st_size} bytes, changed at {found.st_mtime_ns} ns"
    if not header:
        return told
    with file.open("rb") as stream:
        length = stream.read(8)
        digest = hashlib.sha256(length + stream.read(struct.unpack("<Q", length)[0]))
    return f"{told}, header {digest.hexdigest()[:16]}"
