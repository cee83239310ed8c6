"""Listening sockets of processes, from /proc."""

from __future__ import annotations

import os
import socket
from pathlib import Path


def listening(port: int | None = None, pid: int | str = "self") -> list[str]:
    """Return the addresses that a process listens at, by /proc/net: all, or those of a port."""
    sockets, found = set(), []
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            sockets.add(os.readlink(entry))
        except OSError:  # closed since
            continue
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *_, inode = line.split()[:10]
            address, _, number = local.partition(":")
            if state == "0A" and f"socket:[{inode}]" in sockets and port in (None, int(number, 16)):
                found.append(_readable(address))
    return found


def _readable(address: str) -> str:
    """Format an address such as "0100007F", whose words of four bytes are each in the machine's order."""
    words = [bytes.fromhex(address[i:i + 8])[::-1] for i in range(0, len(address), 8)]
    return socket.inet_ntop(socket.AF_INET if len(words) == 1 else socket.AF_INET6, b"".join(words))
