"""What fails on one rank raises on all, so that nobody waits for a rank that has given up.

Two ways of talking, both between hosts. Objects of any size go through a collective (`gather`, `first`, ...). Small
records, with which a pipeline's step begins and ends, go from each rank to each: so a rank that is gone is known by
its number (`together`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotYet
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import lru_cache
from time import perf_counter_ns
from types import SimpleNamespace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from dualpipe.runtime.background import in_background
from dualpipe.runtime.device import TOTALS, Traffic, current, nccl_options
from dualpipe.runtime.errors import PipelineError, RankLost, UpstreamFailed
from dualpipe.runtime.recorder import Recorder, rank_ranges

RECORD_BYTES = 8192
TURN = 2.0  # seconds for which ranks wait at a time for what takes long: less than any timeout of theirs
_TAG = 14  # gloo's, of records; any that nothing else uses
_CHARACTERS = 20_000  # of an error's text that travel to the other ranks
_RECORD_CHARACTERS = 1200  # the same in a record

_MIXED = (" Tensors of two dtypes meet: cast one of them. Where fully_shard was used: it casts neither buffers nor "
          "what a module of another dtype returns; dualpipe.parallel.shard does.")
_REMEDIES = {  # for errors of torch that say nothing of a pipeline
    "leaf Variable that requires grad": " A stage must not begin with an operation in place: its input is a leaf, from "
    "which the stage before gets its gradient, and so are parameters. Write x = x + 1 instead of x += 1.",
    "must have the same dtype": _MIXED,
    "same dtype, but got": _MIXED,
}

_LAST_WORD = timedelta(seconds=1)
_NEVER_SENT = 16  # gloo's tag, of a message that is waited for in vain on purpose
_GONE = "cannot be reached: "

T = TypeVar("T")


class RankSync:
    """The ranks of a process group that can carry objects (gloo); None: this process alone.

    members: those of the group in another order, by which they are numbered here (default: the group's).
    replicas: process groups of ranks outside, whose failures end `together` here too, and the other way round.
    """

    def __init__(
        self, group: ProcessGroup | None, members: Sequence[int] = (), replicas: Iterable[ProcessGroup] = ()
    ) -> None:
        self.size = 1 if group is None else group.size()
        self._members = list(members) or list(range(self.size))
        self.rank = 0 if group is None else self._members.index(group.rank())
        self._group: Any = group
        ranks: Sequence[int] = range(self.size)
        if isinstance(group, ProcessGroup):
            ranks = dist.get_process_group_ranks(group)
            Recorder.current().rank = dist.get_rank()
        self._global = tuple(ranks[member] for member in self._members)  # by which ranks are named
        self._replicas = [RankSync(other if "cpu" in backends(other) else gloo_beside(other)) for other in replicas]
        self._tell_back = True  # until `compare_replicas`
        self._cut_short = False

    @classmethod
    def of_mesh(cls, mesh: DeviceMesh | None, group: ProcessGroup | None = None) -> RankSync:
        """All ranks of a mesh that spans the default process group; None: this process alone.

        They talk in `group`, of the same ranks in the same order (default: the default one). Raises ValueError for a
        part of a mesh.
        """
        if mesh is None:
            return cls(None)
        if mesh.size() != dist.get_world_size():
            raise ValueError(f"the mesh has {mesh.size()} of {dist.get_world_size()} ranks; pass the whole one, from "
                             "build_mesh")
        return cls(group or dist.group.WORLD)

    # -- objects of any size

    def gather(self, work: Callable[[], T]) -> list[T]:
        """Do `work` on every rank and return what it gave (picklable), by rank.

        Raises ValueError where it did on some rank, and RuntimeError for any other error; on the rank itself from its
        own error, or an interrupt as it is.
        """
        return self._outcomes(work, everywhere=True)

    def agree(self, work: Callable[[], T]) -> T:
        """Do `work` on every rank and return what it gave here; raises as `gather` does."""
        result: list[T] = []
        self.gather(lambda: result.append(work()))
        return result[0]

    def first(self, work: Callable[[], T]) -> T:
        """Do `work` on rank 0 while the others wait, and return what it gave (picklable) on all.

        Raises everywhere what it raised: a ValueError as such, any other error as a RuntimeError that names it.
        """
        return self._outcomes(work, everywhere=False)[0]

    def first_in_turns(self, work: Callable[[], T]) -> T:
        """As `first`, for what may take longer than the group's timeout: rank 0 does it in a thread, and the ranks meet
        every `TURN` seconds until it is done. A rank that fails meanwhile does not wait for it."""
        if self.size == 1:
            return work()
        doing = in_background(work) if self.rank == 0 else Future[T]()

        def look() -> list[T]:
            try:
                return [doing.result(TURN)]
            except NotYet:
                if doing.done():  # a TimeoutError of its own
                    raise
                return []

        found: list[T] = []
        while not found:
            found = self.first(look)
        return found[0]

    def _outcomes(self, work: Callable[[], T], *, everywhere: bool) -> list[T]:
        """What `work` gave on all ranks, or on rank 0 alone."""
        if self.size == 1:
            return [work()]
        value = error = failure = None
        try:
            if everywhere or self.rank == 0:
                value = work()
        except BaseException as raised:  # told to the other ranks before it is raised here
            error, failure = raised, (isinstance(raised, ValueError), _said(raised)[:_CHARACTERS])
        outcomes: list[Any] = [(failure, value)]
        if everywhere:
            outcomes *= self.size
            self._collective(dist.all_gather_object, outcomes, (failure, value))
        else:
            source, cpu = self._members[0], torch.device("cpu")
            self._collective(dist.broadcast_object_list, outcomes, group_src=source, device=cpu)
        if error is not None and not isinstance(error, Exception):
            raise error
        texts = [failure and failure[1] for failure, _ in outcomes]
        if any(text is not None for text in texts):
            refused = all(failure[0] for failure, _ in outcomes if failure is not None)
            alone = refused and not everywhere  # rank 0's own, which need not be named
            text = texts[0] if alone else self._said_by(texts)
            raise (ValueError if refused else RuntimeError)(text) from error
        return [value for _, value in outcomes]

    def collect(self, value: T) -> list[T] | None:
        """The (picklable) values of all ranks, on rank 0 alone: for what would be too much to hold on each."""
        if self.size == 1:
            return [value]
        values: list[Any] | None = [None] * self.size if self.rank == 0 else None
        self._collective(dist.gather_object, value, values, group_dst=0)
        return values

    def hand_out(self, values: Sequence[T] | None) -> T:
        """To each rank its own of rank 0's (picklable) values."""
        if self.size == 1 and values is not None:
            return values[0]
        mine: list[Any] = [None]
        self._collective(dist.scatter_object_list, mine, None if values is None else list(values), src=0)
        return mine[0]

    def _collective(self, call: Callable[..., object], *args: Any, **options: Any) -> None:
        """After one that did not come to its end the next would take its messages for others."""
        if self._cut_short:
            raise RuntimeError("an earlier exchange between the ranks was cut short, by an interrupt, a timeout or the "
                               "loss of a rank; they can agree on nothing any more")
        self._cut_short = True
        with Recorder.current().collective("agree", f"all in {call.__name__}", self._global):
            call(*args, group=self._group, **options)
        self._cut_short = False

    def _names(self, ranks: Sequence[int]) -> str:
        """Ranks by their global numbers, and one by its place."""
        if len(ranks) > 1:
            return rank_ranges(self._global[rank] for rank in ranks)
        return Recorder.current().name(self._global[ranks[0]])

    def _said_by(self, texts: Iterable[str | None]) -> str:
        """The errors of ranks, in their order, each text once with the ranks that it comes from."""
        ranks_of: dict[str, list[int]] = {}
        for rank, text in enumerate(texts):
            if text is not None:
                ranks_of.setdefault(text, []).append(rank)
        return "; ".join(text if _names_ranks(text) else f"{self._names(ranks)}: {text}"
                         for text, ranks in ranks_of.items())

    # -- small records

    @contextmanager
    def together(
        self,
        kind: type[Exception],
        conclude: Callable[[list[Any]], Any] = list,
        *,
        where: Callable[[], str] = str,
        same_everywhere: Any = None,
    ) -> Iterator[SimpleNamespace]:
        """Where what is done inside fails on one rank, all raise `kind`, or PipelineError where one is gone.

        Inside, `told.value` is set to a JSON value for the others. Afterwards `told.conclusion` is what `conclude` has
        made of everybody's, by rank; a ValueError of it is raised like any other. `where()` says what an error came
        from; `same_everywhere` must be the same also among the replicas. An interrupt is told to the others like any
        error, and goes on as itself here.
        """
        told, error, text, failure = SimpleNamespace(value=None, conclusion=None), None, None, None
        try:
            yield told
        except BaseException as raised:
            error = raised
            text = None if isinstance(raised, UpstreamFailed) else f"{where()}{_said(raised)}"
        lost = isinstance(error, RankLost)
        try:
            records, failure = self._exchange(text, told.value, kind, lost)
            if failure is None:
                try:
                    told.conclusion = conclude([value for _, value in records])
                except ValueError as disagreement:  # the same on every rank
                    failure = disagreement
                except BaseException as raised:  # here alone
                    error = raised
                    failure = kind(f"{self._names([self.rank])}: {_said(raised)}")
                    if not self._tell_back:  # the others have begun what comes next
                        self.hang_up()
                        lost = True
            elsewhere = None if failure is None else str(failure)
            for replica in self._replicas:
                lost |= isinstance(failure, RankLost)
                peers, _ = replica._exchange(elsewhere, same_everywhere, lost=lost)
                # What a replica tells of another rank names that one itself.
                wrong = next((text if _names_ranks(text) else f"{replica._names([r])}: {text}"
                              for r, (text, _) in enumerate(peers) if text is not None), None)
                if wrong is None and any(value != peers[0][1] for _, value in peers):
                    wrong = f"data-parallel ranks disagree: by rank {[value for _, value in peers]}"
                elsewhere = elsewhere or wrong
            if self._tell_back:
                _, back = self._exchange(elsewhere, None, kind, lost or isinstance(failure, RankLost))
                elsewhere = elsewhere or (None if back is None else str(back))
            if error is not None and not isinstance(error, Exception):
                raise error
            if failure is None and elsewhere is not None:
                failure = (RankLost if of_lost(elsewhere) else kind)(elsewhere)
            if failure is None and error is not None:
                failure = PipelineError("a rank failed and could not report why")
            if failure is not None:
                # A step that lost a rank, as one in which a rank failed.
                raise PipelineError(str(failure)) if isinstance(failure, RankLost) else failure from error
        finally:
            error = failure = None  # this frame is in the error's traceback: the cycle would keep all its tensors

    def hang_up(self) -> None:
        """End the groups in which these ranks agree: those that wait there for this one raise at once."""
        hang_up([self._group, *(replica._group for replica in self._replicas)])

    def compare_replicas(self) -> None:
        """Find out whether every rank hears of a failure among the replicas by itself: where these differ in number,
        because a stage is not sharded, one tells the others here."""
        records, _ = self._exchange(None, [replica.size for replica in self._replicas])
        self._tell_back = any(record != records[0] for record in records)

    def _exchange(
        self, text: str | None, value: Any, kind: type[Exception] = PipelineError, lost: bool = False
    ) -> tuple[list[Any], Exception | None]:
        """Everybody's (error text, JSON value) by rank; and `kind`, the same on every rank, where there is a text,
        PipelineError where a rank could not be reached.

        Sent from each rank to each: one that is dead must not keep us from the others. lost: this rank has lost one by
        now, and does not wait for the others once more: they hear of it.
        """
        records: list[Any] = [[text and text[:_RECORD_CHARACTERS], value]] * self.size
        if self.size > 1:
            try:
                packed = pack_record(records[0])
            except Exception as unfit:  # too long or no JSON, on this rank alone: the others hear of it instead
                packed = pack_record([_said(unfit)[:_RECORD_CHARACTERS], None])
            records = [unpack_record(packed)] * self.size
            buffers = {peer: empty_record() for peer in range(self.size) if peer != self.rank}
            ends = [(peer, self._members[peer]) for peer in buffers]
            receives = [_attempt(self._group.recv, [buffers[peer]], end, _TAG) for peer, end in ends]
            sends = [_attempt(self._group.send, [packed], end, _TAG) for _, end in ends]
            recorder = Recorder.current()
            began = perf_counter_ns()
            for peer, *works in zip(buffers, receives, sends):
                try:
                    with recorder.wait("agree", "word", self._global[peer : peer + 1], RECORD_BYTES, since=began):
                        for work in works:
                            if isinstance(work, RuntimeError):
                                raise work
                            work.wait(*[_LAST_WORD] * lost)
                    records[peer] = unpack_record(buffers[peer])
                except RuntimeError as error:
                    records[peer], kind = [f"{_GONE}{error}", None], PipelineError
        texts = [text for text, _ in records]
        errors = [text for text in texts if text is not None]
        if all(map(of_lost, errors)):
            kind = RankLost
        return records, kind(self._said_by(texts)) if errors else None


def pack_record(record: Any) -> Tensor:
    """A JSON value as a (RECORD_BYTES,) uint8 tensor; ValueError where it is too long."""
    data = json.dumps(record, ensure_ascii=False).encode("utf-8", "backslashreplace")
    if len(data) > RECORD_BYTES:
        raise ValueError(f"a record of {len(data)} bytes exceeds the {RECORD_BYTES} that travel: {data[:200]!r}...")
    return torch.frombuffer(bytearray(data.ljust(RECORD_BYTES)), dtype=torch.uint8)


def unpack_record(buffer: Tensor) -> Any:
    """The inverse of `pack_record`; not to be changed, as equal records share it."""
    return _parsed(buffer.numpy().tobytes().rstrip())


_parsed = lru_cache(maxsize=64)(json.loads)  # a step's records are mostly those of the step before


def empty_record() -> Tensor:
    """A buffer to receive a record into."""
    return torch.empty(RECORD_BYTES, dtype=torch.uint8, device="cpu")


def _attempt(call: Callable[..., Any], *args: Any) -> Any:
    """The result of a call, or the RuntimeError that it raised."""
    try:
        return call(*args)
    except RuntimeError as error:
        return error


def hang_up(groups: Iterable[ProcessGroup | None]) -> None:
    """End groups after a failure of this rank alone, so that a rank which waits there raises now, not at its timeout.

    gloo closes all connections of a group where a wait times out: here one of a millisecond, for a message that nobody
    sends. NCCL's communicator is aborted on this rank; kernels of others that wait for it are left to their watchdog.
    """
    for group in groups:
        if not isinstance(group, ProcessGroup) or group.size() == 1:
            continue
        with suppress(Exception):  # it has ended already
            if "nccl" in backends(group).values():
                group.abort()
        with suppress(Exception):
            if "cpu" in backends(group):
                neighbour = (group.rank() + 1) % group.size()
                group.recv([empty_record()], neighbour, _NEVER_SENT).wait(timedelta(milliseconds=1))


def _names_ranks(text: str) -> bool:
    """Return True where an error's text begins with the rank it came up on, as "rank 3 (pp 1): " or "ranks 0-3: "."""
    return re.match(r"ranks? \d+([-, ]+\d+)*( \([^)]*\))?: ", text) is not None


def of_lost(text: str) -> bool:
    """Whether what a rank says of its failure is that it lost another one."""
    return _GONE in text or f"{RankLost.__name__}: " in text


def _said(error: BaseException) -> str:
    """A ValueError speaks for itself; others are named by their type."""
    try:
        text = str(error)
    except Exception as raised:
        text = f"(its text raised {type(raised).__name__})"
    text += next((remedy for phrase, remedy in _REMEDIES.items() if phrase in text), "")
    return text if isinstance(error, ValueError) else f"{type(error).__name__}: {text}"


def backends(group: ProcessGroup) -> dict[str, str]:
    """Backend by device type: the configuration is such as "cpu:gloo,cuda:nccl"."""
    return dict(entry.split(":") for entry in dist.get_backend_config(group).split(","))


def timeout_of(group: ProcessGroup) -> timedelta:
    """The timeout that the caller gave the process group; torch has no public call for it."""
    device = "cuda" if backends(group).get("cuda") == "nccl" else "cpu"
    return group._get_backend(torch.device(device)).options._timeout


def gloo_beside(group: ProcessGroup) -> ProcessGroup:
    """A group of the same ranks and timeout that can carry host tensors."""
    wanted = dist.get_process_group_ranks(group), TOTALS
    return create_groups([wanted], beside=group, timeout=timeout_of(group), backend="gloo")[0]


def create_groups(
    wanted: Sequence[tuple[Sequence[int], Traffic]], *, beside: ProcessGroup, timeout: timedelta,
    backend: str | None = None,
) -> list[ProcessGroup]:
    """A process group for each of these lists of ranks of the default group, and what it carries with NCCL.

    This rank is in all of them. Collective over `beside`: its ranks ask for as many groups each, those of one group for
    it at the same place. Ranks outside take no part, however many there are. NCCL's communicators are made at their
    first use, which no timeout ends: see before that all ranks are there. backend: by default the default group's.
    """
    world: Any = dist.group.WORLD
    nccl = "nccl" in (backend or dist.get_backend_config(world))
    # torch names such a group by its ranks and how many groups the process has: ranks that have fewer make up for it.
    have = len(dist.distributed_c10d._world.pg_names)
    most = torch.tensor(have, device="cpu" if "cpu" in backends(beside) else current())
    dist.all_reduce(most, dist.ReduceOp.MAX, group=beside)
    filling = [([dist.get_rank()], wanted[0][1])] * (int(most) - have)
    # Beside a default group that is bound to a device, torch splits each NCCL group off that, for which it needs all
    # ranks of the job, and where it makes a gloo group, it has all but the members do so.
    device, world.bound_device_id = world.bound_device_id, None
    try:
        created = [
            dist.new_group(list(ranks), timeout=timeout, backend=backend, use_local_synchronization=True,
                           pg_options=nccl_options(traffic, timeout) if nccl else None)
            for ranks, traffic in (*filling, *wanted)
        ]
    finally:
        world.bound_device_id = device
    return created[len(filling):]
