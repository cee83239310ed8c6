"""Writing a rank's files by another process, from memory that both share, without holding the rank's interpreter.

It talks to its rank alone, so it needs no process group, and no port that another job might have. It dies with its
rank: what would be written afterwards, nobody could commit. Each save starts one: this file run as a script, which
imports no torch, and so takes 0.1 s and 20 MB.
"""

from __future__ import annotations

import json
import mmap
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from dualpipe.errors import die_with
from dualpipe.files import Written, write_files

Places = Mapping[str, tuple[int, int]]  # where the bytes of each file begin and end in the memory


def write_in_process(folder: Path, places: Places, checksum: str, memory: int, timeout: float) -> dict[str, Written]:
    """Write files into a folder as `write_files` does, from the file that the descriptor `memory` names.

    The system ends the process together with the thread that calls this. Raises RuntimeError where it has failed or
    died, TimeoutError where it is not done after `timeout` seconds.
    """
    command = [sys.executable, "-P", __file__, str(os.getpid()), str(memory)]
    job = json.dumps([str(folder), places, checksum])
    try:
        done = subprocess.run(command, pass_fds=[memory], input=job, stdout=subprocess.PIPE, text=True, timeout=timeout)
    except subprocess.TimeoutExpired:
        raise TimeoutError(f"the process that writes checkpoints gave no answer for {timeout:.0f} s; the next save "
                           "starts another") from None
    if done.returncode:
        raise RuntimeError(f"the process that writes checkpoints has died (exit status {done.returncode}); the next "
                           "save starts another")
    outcome = json.loads(done.stdout)
    if isinstance(outcome, str):
        raise RuntimeError(outcome)
    return {name: Written(*written) for name, written in outcome.items()}


def pieces(memory: mmap.mmap, places: Places) -> dict[str, list[memoryview]]:
    """The bytes of each file, for `write_files`."""
    return {name: [memoryview(memory)[start:stop]] for name, (start, stop) in places.items()}


def _main(parent: int, memory: int) -> None:
    die_with(parent)
    folder, places, checksum = json.load(sys.stdin)
    outcome: str | dict[str, Written]
    try:
        outcome = write_files(Path(folder), pieces(mmap.mmap(memory, os.fstat(memory).st_size), places), checksum)
    except Exception as error:
        outcome = f"{type(error).__name__}: {error}"
    json.dump(outcome, sys.stdout)


if __name__ == "__main__":
    _main(*map(int, sys.argv[1:]))
