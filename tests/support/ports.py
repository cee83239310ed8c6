"""Ports for a process that starts to listen later than its number is chosen."""

from __future__ import annotations

import itertools
import os
import socket
from pathlib import Path

_offsets = itertools.count()


def free_ports(count: int) -> list[int]:
    """`count` ports of this host that are free and that the kernel gives to nobody who does not ask for them by number.

    A port of the ephemeral range, which `bind(("127.0.0.1", 0))` returns, may be taken by a gloo rank of another test
    before torchrun listens on it. torchrun then connects to that rank and waits for its answer without end, whatever
    its `read_timeout` is.
    """
    lowest_ephemeral = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    first, size = 10_000, lowest_ephemeral - 10_000
    found: list[int] = []
    while len(found) < count:
        # Processes that run side by side begin far apart: neighbouring ids differ by more ports than a test takes.
        port = first + (os.getpid() * 97 + next(_offsets)) % size
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        found.append(port)
    return found
