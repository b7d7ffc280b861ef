"""Run lines of the ``vllm`` command one after another, each in a fork of a process that has imported the engine.

    python forked_commands.py OUT_DIR '{"name": ["serve", ...], ...}'

Writes ``OUT_DIR/NAME.log``, output and errors, and ``OUT_DIR/NAME.status``, the exit status.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from pathlib import Path


def start(log: Path) -> int:
    """Fork; the process's number here, and 0 in the fork, whose output goes to the file."""
    pid = os.fork()
    if pid == 0:
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
    return pid


if __name__ == "__main__":
    # What `vllm serve --omni` imports on its way, which takes most of its time.
    import vllm_omni.entrypoints.openai.api_server  # noqa: F401
    from vllm.entrypoints.cli.main import main

    # A command collects garbage again and again, and would look at all of this each time.
    gc.freeze()
    out, lines = Path(sys.argv[1]), json.loads(sys.argv[2])
    for name, arguments in lines.items():
        pid = start(out / f"{name}.log")
        if pid == 0:
            sys.argv = ["vllm", *arguments]
            sys.exit(main())
        _, status = os.waitpid(pid, 0)
        (out / f"{name}.status").write_text(str(os.waitstatus_to_exitcode(status)))
