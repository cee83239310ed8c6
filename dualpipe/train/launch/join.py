"""A rank joins its job: the store, the check that all ranks have the same settings, process groups and mesh.

Ranks with different seeds, learning rates or models do not fail; they spoil the result. So before any process group
exists, rank 0 compares digests of all settings, through the store at MASTER_ADDR and MASTER_PORT. The settings
themselves are sent only if digests differ: a job of thousands of ranks sends 64 bytes per rank.

The store has no passwords: any process that reaches its port can read and write it, and stop the job. So for ranks on
one machine it listens on the loopback interface alone.
"""

from __future__ import annotations

import fcntl
import hashlib
import ipaddress
import json
import os
import socket
import struct
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from dualpipe import __version__
from dualpipe.parallel.mesh import Mesh, build_mesh
from dualpipe.runtime import device as cuda
from dualpipe.runtime.background import run_with_timeout
from dualpipe.runtime.nccl import TOTALS, nccl_options
from dualpipe.runtime.rank_process import LISTENER, RankInfo, allow_open_files, restart_count
from dualpipe.runtime.ranks.objects import StoreObjects
from dualpipe.runtime.ranks.process_groups import connect_neighbours, connecting_lazily
from dualpipe.runtime.ranks.rank_sync import RankSync
from dualpipe.runtime.recorder import Recorder, rank_ranges
from dualpipe.train.config.fit import Resolved, resolve
from dualpipe.train.config.schema import Config, ParallelConfig
from dualpipe.train.launch.watchdog import Watchdog

PATIENCE = timedelta(seconds=30)  # time that a failing rank waits for the others to arrive and read its error
_MAX_FIELDS = 8  # different settings in an error
_MAX_CHARACTERS = 80  # of a value in an error
_MAY_DIFFER = ("model.config", "output.dir", "parallel.interface")  # from node to node
_SIOCGIFADDR = 0x8915  # <linux/sockios.h>


@dataclass(eq=False)
class Job:
    """The device of this rank and the mesh of all ranks.

    Attributes:
        device: of this rank.
        mesh: of all ranks; None for a single rank.
        watchdog: of this rank; None without one.
        place: the mesh as this rank sees it: sizes, its coordinates, and the process groups that it belongs to.
        ranks: synchronizes all ranks.
        rank: global rank.
        group: process group of all ranks; None for a single rank.
    """

    device: torch.device
    mesh: DeviceMesh | None = None
    watchdog: Watchdog | None = None
    place: Mesh = field(init=False)
    ranks: RankSync = field(init=False)
    rank: int = field(init=False)
    group: dist.ProcessGroup | None = field(init=False)

    def __post_init__(self) -> None:
        self.place = Mesh.of(self.mesh)
        self.ranks = RankSync.of_mesh(self.mesh)
        self.rank = self.ranks.rank
        self.group = None if self.mesh is None else dist.group.WORLD


@contextmanager
def join(
    config: Config, info: RankInfo, watchdog: Watchdog | None = None, prefix: str = ""
) -> Iterator[tuple[Job, Resolved]]:
    """Join the other ranks of the job for the length of a `with` block, over gloo and, with CUDA devices, NCCL.

    Yields the job, and the configuration resolved for the number of ranks. prefix: see `connect`.

    Raises ValueError, on all ranks, if they were started with different settings, `config` does not fit their number,
    or one has no device; see `all_ranks_agree`.
    """
    layout = config.parallel
    store = open_store(layout, info, prefix)
    if watchdog is not None:
        watchdog.watch(store if info.world_size > 1 else None, info, Path(config.output.dir),
                       patience=config.watchdog.timeout or layout.timeout / 2, limit=layout.timeout)
    with all_ranks_agree(store, info, timedelta(seconds=layout.timeout)) as settings:
        settings.update(run_settings(config))
        resolved = resolve(config, info.world_size)
        settings.update((f"the model's {name}", value) for name, value in resolved.model.to_dict().items())
        device = prepare_device(layout, info, store, settings)
    with process_groups(resolved.config.parallel, info, store, device) as job:
        job.watchdog = watchdog
        yield job, resolved


def open_store(layout: ParallelConfig, info: RankInfo, prefix: str = "") -> dist.Store:
    """Return the store of the job, or one of this process for a single rank. prefix: see `connect`.

    Also sets the environment variables that CUDA reads when it starts: the next calls may start it.
    """
    if info.world_size == 1:
        return dist.HashStore()
    if layout.device != "cpu":
        cuda.set_environment()
    return connect(info, timedelta(seconds=layout.timeout), layout.interface, prefix)


def prepare_device(
    layout: ParallelConfig, info: RankInfo, store: dist.Store, settings: dict[str, Any]
) -> torch.device:
    """Return the device of this rank, and restrict communication to `layout.interface`.

    Adds to `settings` what all ranks must share for their communication; see `all_ranks_agree`. Raises ValueError if
    this machine lacks the device or the interface.
    """
    if layout.ep > 1:  # tokens go to experts by nodes, which all ranks must see alike
        settings["parallel.ranks_per_node (else LOCAL_WORLD_SIZE)"] = layout.ranks_per_node or info.local_world_size
    confine(info, layout.interface)
    device = choose_device(info, layout.device, store)
    settings["kind of device"] = device.type
    settings["TORCH_GLOO_LAZY_INIT"] = os.environ.get("TORCH_GLOO_LAZY_INIT", "")  # where it differs, gloo crashes
    return device


@contextmanager
def process_groups(
    layout: ParallelConfig, info: RankInfo, store: dist.Store, device: torch.device
) -> Iterator[Job]:
    """Make the process groups of all ranks and their mesh, and end them after the `with` block. Yields the job.

    layout: for the number of ranks, with parallel.dp.
    """
    cuda.select(device)
    if info.world_size == 1:
        yield Job(device)
        return
    timeout = timedelta(seconds=layout.timeout)
    on_cuda = device.type == "cuda"
    with connecting_lazily():
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if on_cuda else "gloo", store=store, rank=info.rank, world_size=info.world_size,
            timeout=timeout, pg_options=nccl_options(TOTALS, timeout) if on_cuda else None,
        )
    world = dist.group.WORLD
    assert world is not None, "init_process_group has just made it"
    # Wait for all ranks: if one failed before the others connect, torch would log a broken store on them.
    connect_neighbours(world)
    mesh = build_mesh(layout.pp, layout.dp, layout.ep, device, cp=layout.cp, dp_replicate=layout.dp_replicate,
                      timeout=timeout, ranks_per_node=layout.ranks_per_node or info.local_world_size)
    yield Job(device, mesh)
    dist.destroy_process_group()  # not after an error: it would wait for the other ranks


def choose_device(info: RankInfo, kind: str, store: dist.Store) -> torch.device:
    """Return the device of this rank.

    Args:
        kind: "cpu", "cuda", or "auto" for CUDA if torch finds any CUDA device.
        store: of the job, in which ranks enter the UUID of their only CUDA device. A launcher may make a single device
            visible to each rank, and a different one to every rank (SLURM's --gpus-per-task,
            CUDA_VISIBLE_DEVICES=$LOCAL_RANK, a container per rank).

    Raises ValueError if this machine has fewer CUDA devices than ranks. "auto" does not fall back to the CPU then: a
    job for GPUs would continue a hundred times slower, or with some of its ranks on CPU.
    """
    devices = cuda.count() if kind != "cpu" else 0
    if devices >= info.local_world_size:
        return torch.device("cuda", info.local_rank)
    if devices == 1:
        is_free = store.add(f"device {cuda.properties(0).uuid}", 1) == 1  # no other rank uses it
        if is_free:
            return torch.device("cuda", 0)
    if kind == "cuda" or devices:
        raise ValueError(
            f"parallel.device = {kind!r}, but torch finds {devices} CUDA devices here for {info.local_world_size} "
            "ranks; start fewer ranks, set parallel.device = 'cpu', or, if they are on several machines, set "
            "LOCAL_RANK and LOCAL_WORLD_SIZE"
        )
    return torch.device("cpu")


# -- the same settings on all ranks


def run_settings(config: Config) -> Iterator[tuple[str, Any]]:
    """Yield the settings, by name, that all ranks of a run must share besides the model: configuration and code.

    Settings that may differ from node to node are left out: the path of the model's config.json, whose content is
    compared, the network interface, and output.dir, unless it contains the checkpoints, which all ranks write.
    """
    for table, fields in asdict(config).items():
        for name, value in fields.items():
            if f"{table}.{name}" not in _MAY_DIFFER:
                yield f"{table}.{name}", value
    if config.checkpoint.interval and config.checkpoint.mode != "off":
        yield "the directory of checkpoints", str(config.checkpoint_directory)
    yield "version of torch", str(torch.__version__)
    yield "version of dualpipe", __version__
    # Keyed by module path, so that no file counts twice: once installed, kernels and models are inside dualpipe.
    sources: dict[Path, Path] = {}
    for package in ("dualpipe", "dualpipe.kernels", "dualpipe.models"):
        folder = Path(find_spec(package).submodule_search_locations[0])  # type: ignore[union-attr, index]
        sources |= {Path(*package.split("."), path.relative_to(folder)): path for path in folder.rglob("*.py")}
    digest = hashlib.sha256()
    for name, path in sorted(sources.items()):
        digest.update(f"{name}\0".encode() + path.read_bytes() + b"\0")
    yield "sources of dualpipe (digest)", digest.hexdigest()[:16]


@contextmanager
def all_ranks_agree(store: dist.Store, info: RankInfo, timeout: timedelta) -> Iterator[dict[str, Any]]:
    """Compare the settings of all ranks at the end of a `with` block, and raise an error of the block on all ranks.

    Yields a dictionary, to be filled with the settings that must be the same on all ranks, as JSON values.

    Raises ValueError, with the same text on every rank, if settings differ (naming fields, ranks and values) or the
    block raised one on any rank; TimeoutError if ranks are missing. An error that is no ValueError stays itself on its
    own rank.
    """
    settings: dict[str, Any] = {"number of ranks": info.world_size}
    error: Exception | None = None
    try:
        yield settings
    except Exception as raised:  # sent to the other ranks first, and raised below
        error = raised
    text = ""
    if error is not None:
        text = (str(error) if isinstance(error, ValueError) else "") or repr(error)
    objects = StoreObjects(store, info.rank, info.world_size, topic="settings", timeout=timeout)
    problem = ""
    try:
        with Recorder.current().collective("meet", "the settings of all ranks", range(info.world_size)):
            _compare(RankSync(None, objects=objects), _Record(settings, text))
    except ValueError as refusal:
        problem = str(refusal)
        with suppress(TimeoutError, dist.DistError):  # rank 0 serves the store, so it stays until others have read
            objects.gather("read", PATIENCE)
    if error is not None and not isinstance(error, ValueError):
        raise error
    if problem:
        raise ValueError(problem) from error


class _Record(NamedTuple):
    """The settings of a rank, as far as it got, and the text of its error, "" without one."""

    settings: Mapping[str, Any]
    error: str


def _compare(ranks: RankSync, record: _Record) -> None:
    """Compare the records of all ranks on rank 0. Raises ValueError on all ranks if there is a problem in them."""
    text = json.dumps(record, sort_keys=True, default=str)
    digest = "failed" if record.error else hashlib.sha256(text.encode()).hexdigest()
    digests = set(ranks.collect(digest) or ())
    if ranks.first(lambda: len(digests) == 1 and "failed" not in digests):
        return
    records = [_Record(*fields) for fields in ranks.collect(record) or ()]
    ranks.first(lambda: _raise_problems(records))


def _raise_problems(records: Sequence[_Record]) -> None:
    """Raise ValueError about different settings and errors. records: of each rank."""
    problems = []
    differences = list(_differences([record.settings for record in records]))
    if differences:
        shown = ", ".join(differences[:_MAX_FIELDS])
        more = f" (and {len(differences) - _MAX_FIELDS} more)" if len(differences) > _MAX_FIELDS else ""
        problems.append(f"the ranks were started with different settings: {shown}{more}; start all with the same "
                        "command, files and versions")
    ranks_by_error = defaultdict(list)
    for rank, record in enumerate(records):
        ranks_by_error[record.error].append(rank)
    for error, ranks in ranks_by_error.items():
        if error:
            problems.append(error if len(ranks) == len(records) else f"{rank_ranges(ranks)}: {error}")
    if problems:
        raise ValueError("; ".join(problems))


def _differences(settings: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield a text for each setting that differs between ranks, with its values. settings: of each rank."""
    for name in dict.fromkeys(chain.from_iterable(settings)):
        ranks_by_value = defaultdict(list)
        for rank, rank_settings in enumerate(settings):
            if name in rank_settings:
                ranks_by_value[repr(rank_settings[name])].append(rank)
        if len(ranks_by_value) > 1:
            values = ", ".join(f"{value[:_MAX_CHARACTERS]} on {rank_ranges(ranks)}"
                               for value, ranks in ranks_by_value.items())
            yield f"{name} is {values}"


# -- the store, and the network interface


def connect(info: RankInfo, timeout: timedelta, interface: str = "", prefix: str = "") -> dist.Store:
    """Connect to the store of the job, on rank 0's machine at MASTER_ADDR and MASTER_PORT.

    Also raises this process's limit of open files, which all later connections need.

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
    allow_open_files()
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
