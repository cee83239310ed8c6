"""The process that writes a rank's files beside it, from memory that both share.

It talks to its rank alone, so it needs no process group, and no port that another job might have. It dies with its
rank: what would be written afterwards, nobody could commit. It is this file run as a script, which imports no torch and
so is there in an instant, in 20 MB.
"""

from __future__ import annotations

import mmap
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from pathlib import Path

from dualpipe.files import Written, write_files
from dualpipe.lifetime import die_with

Images = Mapping[str, slice]  # where the bytes of each file are in the memory


class WriterProcess:
    """Writes from host memory without holding this process's interpreter.

    The system ends it together with the thread that has made it. timeout: seconds after which it is taken to hang.
    """

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-P", __file__, str(os.getpid()), str(theirs.fileno())]
        with theirs, _without_interrupts():
            self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
        self._connection = Connection(ours.detach())

    @property
    def alive(self) -> bool:
        """Whether it can be asked to write."""
        return self._process.poll() is None

    def write(self, folder: Path, images: Images, checksum: str, descriptor: int, size: int) -> dict[str, Written]:
        """Write files into a folder from the shared memory `descriptor` of `size` bytes, as `write_files` does.

        Raises RuntimeError where the process has failed or died, TimeoutError where it gives no answer.
        """
        try:
            self._connection.send((folder, images, checksum, size))
            send_handle(self._connection, descriptor, self._process.pid)
            if not self._connection.poll(self._timeout):
                self.close()
                raise TimeoutError(f"the process that writes checkpoints gave no answer for {self._timeout:.0f} s; the "
                                   "next save starts another")
            outcome = self._connection.recv()
        except TimeoutError:
            raise
        except (EOFError, OSError) as error:
            raise RuntimeError(f"the process that writes checkpoints has died (exit status {self._process.wait()}); "
                               "the next save starts another") from error
        if isinstance(outcome, str):
            raise RuntimeError(outcome)
        return outcome

    def close(self) -> None:
        """End the process."""
        self._connection.close()
        self._process.kill()
        self._process.wait()


def pieces(memory: mmap.mmap, images: Images) -> dict[str, list[memoryview]]:
    """The bytes of each file, for `write_files`."""
    return {name: [memoryview(memory)[place]] for name, place in images.items()}


def _serve(connection: Connection) -> None:
    """Write what the rank asks for, until it hangs up."""
    while True:
        try:
            folder, images, checksum, size = connection.recv()
        except (EOFError, ConnectionError):
            return
        descriptor = recv_handle(connection)
        outcome: str | dict[str, Written]
        try:
            outcome = write_files(folder, pieces(mmap.mmap(descriptor, size), images), checksum)
        except Exception as error:
            outcome = f"{type(error).__name__}: {error}"
        finally:
            os.close(descriptor)
        connection.send(outcome)


@contextmanager
def _without_interrupts() -> Iterator[None]:
    """A process that is started here never gets Ctrl-C, which is for the rank: it inherits what is blocked."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


if __name__ == "__main__":
    die_with(int(sys.argv[1]))
    _serve(Connection(int(sys.argv[2])))
