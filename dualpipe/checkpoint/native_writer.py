"""The process that writes a rank's tensors beside it.

It talks to its rank alone, so it needs no process group, and no port that another job might have. It dies with its
rank: what would be written afterwards, nobody could commit.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from pathlib import Path

from torch.distributed.checkpoint.planner import SavePlan

from dualpipe.checkpoint.native_staging import HostMemory, Place, view
from dualpipe.checkpoint.native_store import Written, write_parts


class WriterProcess:
    """Writes from host memory without holding this process's interpreter. Make it in the main thread.

    The system ends it together with the thread that has made it.
    """

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-P", "-c", f"from {__name__} import main; main()"]
        with theirs:
            arguments = [str(theirs.fileno()), str(os.getpid())]
            self._process = subprocess.Popen(command + arguments, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
        self._connection = Connection(ours.detach())

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def write(self, folder: Path, plan: SavePlan, memory: HostMemory, places: Mapping[str, Place]) -> Written:
        """As `write_parts`, from a copy in `memory`; raises RuntimeError where the process has failed or died."""
        try:
            self._connection.send((folder, plan, memory.size, dict(places)))
            send_handle(self._connection, memory.descriptor, self._process.pid)
            outcome = self._connection.recv()
        except (EOFError, OSError) as error:
            raise RuntimeError(f"the process that writes checkpoints has died (exit status {self._process.wait()}); "
                               "the next save starts another") from error  # fmt: skip
        if isinstance(outcome, str):
            raise RuntimeError(outcome)
        return outcome

    def close(self) -> None:
        """End the process."""
        self._connection.close()
        self._process.kill()
        self._process.wait()


def serve(connection: Connection) -> None:
    """Write what the rank asks for, until it hangs up."""
    while True:
        try:
            folder, plan, size, places = connection.recv()
        except EOFError:
            return
        descriptor = recv_handle(connection)
        try:
            outcome = write_parts(folder, plan, view(mmap.mmap(descriptor, size), places))
        except Exception as error:
            outcome = f"{type(error).__name__}: {error}"
        finally:
            os.close(descriptor)
        connection.send(outcome)


def main() -> None:
    """Serve the rank that has started this process."""
    if sys.platform == "linux":
        set_parent_death_signal = 1  # PR_SET_PDEATHSIG of <sys/prctl.h>
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the rank
    descriptor, parent = map(int, sys.argv[1:])
    if os.getppid() == parent:  # or it had died before the signal was asked for
        serve(Connection(descriptor))
