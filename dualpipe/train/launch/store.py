"""The rendezvous of a job's ranks: the store on rank 0's machine, and the network interfaces of gloo and NCCL.

The store has no passwords: any process that reaches its port can read and write it, and stop the job. So for ranks on
one machine it listens on the loopback interface alone.
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
    """Connect to the store of the job, on rank 0's machine at MASTER_ADDR and MASTER_PORT.

    Args:
        interface: network interface on which rank 0 serves the store. By default all interfaces, or the loopback
            interface alone if MASTER_ADDR is a loopback address.
        prefix: of all keys, to tell process groups apart that use the same store one after the other.

    Raises ValueError if the variables are invalid or the store does not answer in time.
    """
    address = os.environ.get("MASTER_ADDR", "")
    port = os.environ.get("MASTER_PORT", "")
    if not address or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise ValueError(f"MASTER_ADDR = {address!r} and MASTER_PORT = {port!r} must be rank 0's host and a free port "
                         "there, 1 to 65535; set them on every rank, or start the job by torchrun")
    hosts_store = info.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"  # else torchrun does
    if interface and hosts_store:
        address = interface_address(interface)  # the host's name may resolve to a loopback address on the host itself

    def make() -> dist.TCPStore:
        listener = _listen(address, int(port), interface) if hosts_store else None
        return dist.TCPStore(address, int(port), info.world_size, hosts_store, timeout, False, multi_tenant=True,
                             master_listen_fd=listener)

    try:
        # torch has no timeout for a server that accepts connections and never answers, such as a stopped process.
        store = run_with_timeout(make, timeout.total_seconds(), "connect")
        if store is None:
            raise TimeoutError(f"the server there has not answered for {timeout.total_seconds():g} s")
    except (OSError, dist.DistError) as error:
        line = str(error).partition("\n")[0]
        raise ValueError(f"rank {info.rank} cannot reach the store at MASTER_ADDR:MASTER_PORT = {address}:{port}; give "
                         f"rank 0's host and a port that is free there, the same on every rank ({line})") from error
    # The store of torchrun outlives a restart: it holds keys of earlier starts.
    return dist.PrefixStore(f"start {restart_count()}{prefix and f' {prefix}'}", store)


def _listen(address: str, port: int, interface: str) -> int | None:
    """Return a listening socket for rank 0's store; None to let torch listen on all interfaces.

    It is inherited from the launcher, or bound to an interface or the loopback address.
    """
    inherited = os.environ.pop(LISTENER, None)
    if inherited is not None:
        return int(inherited)
    if not interface and not is_loopback(address):
        return None
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, port), family=family).detach()


def confine(info: RankInfo, interface: str) -> None:
    """Restrict gloo and NCCL to one network interface, unless the environment names others.

    Without `interface` only gloo is restricted: to the loopback interface, if all ranks are on this machine and
    MASTER_ADDR is a loopback address. Raises ValueError if this machine lacks the interface.
    """
    if interface:
        interface_address(interface)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)
    elif info.local_world_size == info.world_size and is_loopback(os.environ.get("MASTER_ADDR", "")):
        interface = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), "")
    if interface:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)


def is_loopback(host: str) -> bool:
    """Return True if `host` is a loopback address or "localhost". It does not resolve names."""
    with suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def interface_address(name: str) -> str:
    """Return the IPv4 address of a network interface.

    Raises ValueError, which lists the interfaces of this machine, if `name` is not among them.
    """
    addresses = {}
    for _, interface in socket.if_nameindex():
        with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
            request = struct.pack("256s", interface.encode()[:15])
            addresses[interface] = socket.inet_ntoa(fcntl.ioctl(any_socket, _SIOCGIFADDR, request)[20:24])
    if name not in addresses:
        choices = ", ".join(f"{interface} ({address})" for interface, address in addresses.items())
        raise ValueError(f"parallel.interface = {name!r} is no network interface with an IPv4 address here; give one "
                         f"of {choices or 'none'}, or leave it out")
    return addresses[name]
