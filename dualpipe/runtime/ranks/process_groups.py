"""Process groups: backends, timeouts, and creation by the members alone.

gloo connects every rank of a group with every other when the group is made: with thousands of ranks, that is thousands
of sockets in each process. A group in which ranks run collectives alone connects two ranks at their first message
instead, and then runs a barrier. In it, each rank exchanges messages with the ranks at distances of 1, 2, 4, ... in
both directions; these connections are all that gloo's all-reduce, all-gather, reduce-scatter and broadcast use (torch
2.13). So nothing is connected later: gloo does not notice the end of a rank that it is still connecting to, and waits
for it until five times the timeout have passed (pytorch/gloo#520), as it does where it connects all ranks.
TORCH_GLOO_LAZY_INIT=0 makes it connect all ranks of these groups, too.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from dualpipe.runtime.device import current
from dualpipe.runtime.nccl import SHARDS, TOTALS, Traffic, nccl_options
from dualpipe.runtime.recorder import Recorder

_COLLECTIVES = (SHARDS, TOTALS)  # uses of groups in which ranks run collectives alone
_GLOO_THREAD = "gloo_tcp_loop"  # name of the thread that receives, and sends what the socket did not take at once
_call_numbers = [0]  # of the latest call of `create_groups` in this process: none may come again
_LAZY = "TORCH_GLOO_LAZY_INIT"  # torch's variable: 1 to connect two ranks of a gloo group at their first message
_SPARSE = "dualpipe: connected for collectives"  # torch's description of a group after `connect_neighbours`
_FULL = "dualpipe: all connected"  # and after `connect_all`


def is_first_rank() -> bool:
    """Return True on the first rank of the job, also before its process group exists: torchrun sets RANK."""
    rank = dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))
    return rank == 0


def backends(group: ProcessGroup) -> dict[str, str]:
    """Return the backends of a group by device type, such as {"cpu": "gloo", "cuda": "nccl"}."""
    return dict(entry.split(":") for entry in dist.get_backend_config(group).split(","))


def timeout_of(group: ProcessGroup) -> timedelta:
    """Return the timeout of a group, for which torch has no public call."""
    device = "cuda" if backends(group).get("cuda") == "nccl" else "cpu"
    return group._get_backend(torch.device(device)).options._timeout


@contextmanager
def connecting_lazily() -> Iterator[None]:
    """Make gloo groups in a `with` block that connect two ranks at their first message; see `connect_neighbours`.

    A value that the user has set in TORCH_GLOO_LAZY_INIT stays.
    """
    if _LAZY in os.environ or not _connects_lazily():
        yield
        return
    os.environ[_LAZY] = "1"  # torch reads it whenever it makes a group
    try:
        yield
    finally:
        del os.environ[_LAZY]


def _connects_lazily() -> bool:
    """Return True if gloo connects two ranks of groups for collectives at their first message.

    Of gloo's transports, plain TCP alone can: not libuv, which macOS and Windows have, nor TLS.
    """
    is_tcp = sys.platform == "linux" and "GLOO_DEVICE_TRANSPORT" not in os.environ
    return os.environ.get(_LAZY, "1" if is_tcp else "0") != "0"


def connect_neighbours(group: ProcessGroup) -> None:
    """Connect each rank of a gloo group with those that collectives send its messages to. Waits for all ranks.

    Does nothing where gloo has connected all ranks when the group was made.
    """
    if not _connects_lazily():
        return
    recorder = Recorder.current()
    gloo: Any = group._get_backend(torch.device("cpu"))
    with recorder.collective("meet", "all ranks", recorder.members(group)):
        gloo.barrier().wait(timeout_of(group))  # without it, five times as long: see above
    group._set_group_desc(_SPARSE)


def connect_all(group: ProcessGroup, device: torch.device) -> None:
    """Connect all ranks of a group with each other, by an all-to-all. Collective.

    gloo may have connected each rank with its neighbours alone; NCCL connects two ranks at their first all-to-all.
    """
    rows = torch.zeros(group.size(), device=device)
    dist.all_to_all_single(torch.empty_like(rows), rows, group=group)
    if group.group_desc == _SPARSE:
        group._set_group_desc(_FULL)


def connected_ranks(group: ProcessGroup) -> list[int]:
    """Return the ranks of a gloo group that this rank may be connected with, neighbours of barriers first."""
    rank = group.rank()
    size = group.size()
    distances = [2**power for power in range((size - 1).bit_length())]
    neighbours = [(rank + sign * distance) % size for distance in distances for sign in (1, -1)]
    others = [] if group.group_desc == _SPARSE else range(size)
    return [peer for peer in dict.fromkeys([*neighbours, *others]) if peer != rank]


def let_gloo_wait_its_turn() -> None:
    """Keep gloo's threads from interrupting this process's computing threads (Linux): by the policy SCHED_BATCH.

    gloo's thread polls for a connection's lock. A thread that is interrupted while it holds the lock, as it sends, has
    to wait until the poll has used up its time slice. On a machine with as many ranks as cores, one round trip in ten
    took 4.7 ms, and with this policy 0.15 ms; the median fell from 0.2 to 0.11 ms (2 ranks on 2 cores, Linux 6.18,
    torch 2.13).

    In turn, gloo's threads wait for the end of a computing thread's time slice: see `yield_to_gloo`.
    """
    for thread in gloo_threads():
        with suppress(OSError):  # the thread has ended, or the system does not allow it: slower, and nothing else
            os.sched_setscheduler(thread, os.SCHED_BATCH, os.sched_param(0))


def gloo_threads() -> list[int]:
    """Return the system's numbers of gloo's threads in this process; none where /proc is missing."""
    numbers = []
    threads = Path("/proc/self/task")
    for thread in threads.iterdir() if threads.is_dir() else ():
        with suppress(OSError):  # the thread has ended
            if (thread / "comm").read_text().strip() == _GLOO_THREAD:
                numbers.append(int(thread.name))
    return numbers


def yield_to_gloo() -> None:
    """Let gloo's threads run; call it after the start of a communication beside which this thread computes.

    They have what is left of a send, and all of an all-to-all, to do. Without it they wait for up to 8 ms. On 2 ranks
    and 2 cores, a step of 1F1B with stages of 2 ms took 64 ms without and 53 with it, and one of overlapped pairs with
    experts on both ranks 241 and 230 ms (Linux 6.18, torch 2.13).
    """
    os.sched_yield()


def new_gloo_group(group: ProcessGroup, traffic: Traffic = TOTALS) -> ProcessGroup:
    """Create a gloo group, which can carry host tensors, with the ranks and the timeout of `group`."""
    request = (dist.get_process_group_ranks(group), traffic)
    return create_groups([request], parent=group, timeout=timeout_of(group), backend="gloo")[0]


def create_groups(
    requests: Sequence[tuple[Sequence[int], Traffic]], *, parent: ProcessGroup, timeout: timedelta,
    backend: str | None = None,
) -> list[ProcessGroup]:
    """Create a process group for each request; collective over `parent`, while ranks outside of it take no part.

    This rank is in every requested group. All ranks of `parent` request the same number of groups, and the ranks of one
    group request it at the same index. NCCL makes a communicator at its first use, which waits forever if a rank is
    missing: make sure beforehand that all ranks are there.

    Args:
        requests: global ranks, and the use of the group, which sets the limits of NCCL and the connections of gloo.
        parent: a group that contains the ranks of all requests.
        timeout: of the new groups.
        backend: of the new groups; None: that of the default group.
    """
    world: Any = dist.group.WORLD
    uses_nccl = "nccl" in (backend or dist.get_backend_config(world))
    # torch names a group by its ranks and by the number of groups in the process: ranks with fewer groups add dummies.
    pg_map = dist.distributed_c10d._world.pg_map
    num_groups = len(dist.distributed_c10d._world.pg_names)
    # Such a name comes again after a group has been destroyed, and with it the addresses of that group's ranks in the
    # store: so each call has keys of its own there, with a number that none of its ranks has had before.
    backend_of_world, store = pg_map[world]
    device = "cpu" if "cpu" in backends(parent) else current()
    numbers = torch.tensor([num_groups, _call_numbers[-1] + 1], device=device)
    dist.all_reduce(numbers, dist.ReduceOp.MAX, group=parent)
    max_groups, number = numbers.tolist()
    _call_numbers[:] = [number]
    dummies = [([dist.get_rank()], requests[0][1])] * (max_groups - num_groups)
    # If the default group is bound to a device, torch makes NCCL groups by splitting its communicator, in which all
    # ranks of the job must take part. For a new gloo group too, torch calls the split on ranks that are not members.
    bound_device = world.bound_device_id
    world.bound_device_id = None
    pg_map[world] = (backend_of_world, dist.PrefixStore(f"dualpipe: groups {number}", store))
    groups = []
    try:
        for ranks, traffic in (*dummies, *requests):
            with connecting_lazily() if traffic in _COLLECTIVES else nullcontext():
                groups.append(dist.new_group(
                    list(ranks), timeout=timeout, backend=backend, use_local_synchronization=True,
                    pg_options=nccl_options(traffic, timeout) if uses_nccl else None,
                ))
    finally:
        world.bound_device_id = bound_device
        pg_map[world] = (backend_of_world, store)
    groups = groups[len(dummies):]
    for group, (_, traffic) in zip(groups, requests):
        if traffic in _COLLECTIVES and "gloo" in backends(group).values():
            connect_neighbours(group)
    let_gloo_wait_its_turn()
    return groups
