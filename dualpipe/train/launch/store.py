"""The meeting of a job's ranks: the store on rank 0's machine, and the network interfaces that they talk through.

The store has no passwords: who reaches its port can read and write it, and stop the job. So on one machine it listens
on the loopback interface alone.
"""

from __future__ import annotations

import fcntl
import ipaddress
import os
import socket
import struct
from contextlib import suppress
from datetime import timedelta

import torch.distributed as dist

from dualpipe.runtime.background import run_with_timeout
from dualpipe.runtime.rank_process import LISTENER, RankInfo, restart_count

_SIOCGIFADDR = 0x8915  # <linux/sockios.h>


def connect(info: RankInfo, timeout: timedelta, interface: str = "", prefix: str = "") -> dist.Store:
    """The store of the job, on rank 0's machine; ValueError where MASTER_ADDR and MASTER_PORT lead to none in time.

    interface: what rank 0 serves it on. Otherwise it does so on all interfaces, unless MASTER_ADDR is a loopback one.
    prefix: of all keys, for one of several process groups that meet in the same store one after the other.
    """
    address, port = (os.environ.get(name, "") for name in ("MASTER_ADDR", "MASTER_PORT"))
    if not address or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise ValueError(f"MASTER_ADDR = {address!r} and MASTER_PORT = {port!r} must be rank 0's host and a free port "
                         "there, 1 to 65535; set them on every rank, or start the job by torchrun")
    hosts_store = info.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"  # else torchrun does
    if interface and hosts_store:
        address = interface_address(interface)  # not by a name, which leads to a loopback address on the host itself

    def make() -> dist.TCPStore:
        listener = _listen(address, int(port), interface) if hosts_store else None
        return dist.TCPStore(address, int(port), info.world_size, hosts_store, timeout, False, multi_tenant=True,
                             master_listen_fd=listener)

    try:
        # torch waits without end for what accepts connections and says nothing, as a stopped process does.
        if (store := run_with_timeout(make, timeout.total_seconds(), "connect")) is None:
            raise TimeoutError(f"what is there has not answered for {timeout.total_seconds():g} s")
    except (OSError, dist.DistError) as error:
        line = str(error).partition("\n")[0]
        raise ValueError(f"rank {info.rank} cannot meet the others at MASTER_ADDR:MASTER_PORT = {address}:{port}; give "
                         f"rank 0's host and a port that is free there, the same on every rank ({line})") from error
    # torchrun's store has what ranks of an earlier start wrote.
    return dist.PrefixStore(f"start {restart_count()}{prefix and f' {prefix}'}", store)


def _listen(address: str, port: int, interface: str) -> int | None:
    """A descriptor that listens for rank 0's store: the launcher's, or one for an interface or this machine alone; None
    for torch to listen on all."""
    if (inherited := os.environ.pop(LISTENER, None)) is not None:
        return int(inherited)
    if not interface and not is_loopback(address):
        return None
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, port), family=family).detach()


def confine(info: RankInfo, interface: str) -> None:
    """Have gloo and NCCL use one network interface, unless the environment names others: the given one; without, gloo
    the loopback one, where all ranks have met on this machine. ValueError where there is none such."""
    if interface:
        interface_address(interface)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)
    elif info.local_world_size == info.world_size and is_loopback(os.environ.get("MASTER_ADDR", "")):
        interface = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), "")
    if interface:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)


def is_loopback(host: str) -> bool:
    """Return True if a host, as written, without asking for names, is this machine for itself alone."""
    with suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def interface_address(name: str) -> str:
    """The IPv4 address of a network interface; ValueError, which lists those there are, where it has none."""
    found = {}
    for _, each in socket.if_nameindex():
        with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
            asked = struct.pack("256s", each.encode()[:15])
            found[each] = socket.inet_ntoa(fcntl.ioctl(any_socket, _SIOCGIFADDR, asked)[20:24])
    if name not in found:
        there = ", ".join(f"{each} ({address})" for each, address in found.items())
        raise ValueError(f"parallel.interface = {name!r} is no network interface with an IPv4 address here; give one "
                         f"of {there or 'none'}, or leave it out")
    return found[name]
