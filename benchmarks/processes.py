"""Scripts that measure in a process of their own: a request in one file, a result in another."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any

POLL_S = 0.05
_ERROR = re.compile(r"(\[rank\d+\]: )?[\w.]+(Error|Exception): ")


class NotMeasured(RuntimeError):
    """A process did not give a result; the message is what the row says."""


def run(script: Path, requests: Sequence[Mapping[str, Any]], name: str, *, log: Path, limit: float) -> list[Any]:
    """The results of a script in as many processes at once as there are requests.

    Args:
        script: called with the file of its request and the file for its result.
        requests: one for each process.
        name: what the log is told before.
        log: file to which all that the processes say is appended.
        limit: seconds that they may take.

    Raises:
        NotMeasured: one failed, or they took longer than the limit; all have ended.
    """
    with tempfile.TemporaryDirectory() as scratch, log.open("ab") as stream:
        stream.write(f"== {name}\n".encode())
        stream.flush()
        begin = stream.tell()
        results = [Path(scratch) / f"result{index}.json" for index in range(len(requests))]
        commands = []
        for index, request in enumerate(requests):
            asked = Path(scratch) / f"request{index}.json"
            asked.write_text(json.dumps(request))
            commands.append([sys.executable, str(script), str(asked), str(results[index])])
        with ExitStack() as stack:
            processes = [stack.enter_context(_started(command, stream)) for command in commands]
            if not _wait(processes, limit):
                raise NotMeasured(f"took more than {limit:g} s, see {log}")
            code = next((process.returncode for process in processes if process.returncode), 0)
        if code == 0 and all(result.is_file() for result in results):
            return [json.loads(result.read_text()) for result in results]
    said = log.read_bytes()[begin:].decode(errors="replace").strip().splitlines()
    raise NotMeasured(f"exit code {code}, see {log}: {_reason(said)}")


def _reason(said: Sequence[str]) -> str:
    """The last error among lines, else the last of them: a progress bar may say more after an error."""
    errors = [line for line in said if _ERROR.match(line)]
    return (errors or said or ["it said nothing"])[-1][:200]


@contextmanager
def _started(command: Sequence[str], stream: IO[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(command, stdout=stream, stderr=subprocess.STDOUT)
    try:
        yield process
    finally:
        process.kill()  # nothing happens to one that has ended
        process.wait()  # until its memory is free again


def _wait(processes: Sequence[subprocess.Popen[bytes]], limit: float) -> bool:
    """Whether all ended, or one failed, within ``limit`` seconds."""
    deadline = time.monotonic() + limit
    while True:
        codes = [process.poll() for process in processes]
        if any(codes) or None not in codes:
            return True
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_S)
