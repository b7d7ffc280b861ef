"""Files that are there as a whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from vllm_h3_quant.errors import H3QuantError

UNFINISHED = ".tmp"
"""What a file's name ends in while it is written."""


@contextmanager
def durable(file: Path) -> Iterator[BinaryIO]:
    """A stream whose bytes appear as ``file`` once all of them are on the disk.

    Raises:
        H3QuantError: the disk is full or refuses.
    """
    unfinished = file.with_name(file.name + UNFINISHED)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with unfinished.open("wb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        unfinished.rename(file)
        sync_folder(file.parent)
    except BaseException as error:
        unfinished.unlink(missing_ok=True)
        if isinstance(error, OSError):
            where = error.filename or file
            told = error.strerror or error
            raise H3QuantError(f"{where}: {told}, while {file} was written; nothing of that file is kept") from None
        raise


def sync_folder(folder: Path) -> None:
    """Put the names in ``folder`` on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
