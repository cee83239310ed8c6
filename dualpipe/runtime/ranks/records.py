"""Small messages between the hosts of a group's ranks: records of any fields, and summaries that are combined.

A record goes from each rank to each, so that one that is gone is known by its number. A summary has a fixed size and is
combined in ceil(log2 N) rounds: in round k each rank sends what it knows to the rank 2^k behind it and combines what
comes from the rank 2^k before it (the dissemination algorithm; Hensgen, Finkel and Manber 1988). As combining is
idempotent, any number of ranks ends with the same result.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import lru_cache
from time import perf_counter_ns
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from dualpipe.runtime.errors import RankLost, describe_error, names_ranks
from dualpipe.runtime.recorder import Recorder

RECORD_BYTES = 8192
LONGEST = 1200  # characters of an error's text in a record
KNOWN_BITS = 256  # of a summary
_RECORD_TAG = 14  # gloo's; any that nothing else uses
_SUMMARY_TAG = 17
_LAYOUT = struct.Struct("<?QQQ32s")


@dataclass(frozen=True)
class Failure:
    """An error as other ranks are told of it. is_named: whether its text names the ranks that it came up on."""

    text: str
    is_named: bool = False

    @staticmethod
    def of(error: BaseException, longest: int = LONGEST) -> Failure:
        """Describe an error in at most `longest` characters."""
        return Failure(describe_error(error)[:longest], names_ranks(error))


@dataclass(frozen=True)
class Record:
    """A rank's message to each other one: its failure, if any, and a JSON value."""

    failure: Failure | None = None
    value: Any = None

    def pack(self) -> Tensor:
        """Return it as a (RECORD_BYTES,) uint8 tensor; TypeError or ValueError where it is no JSON or too long."""
        return pack_json({"failure": self.failure and asdict(self.failure), "value": self.value})

    @staticmethod
    def unpack(buffer: Tensor) -> Record:
        """Return the inverse of `pack`; its value is not to be changed, as equal records share it."""
        fields = unpack_json(buffer)
        failure = fields["failure"]
        return Record(None if failure is None else Failure(**failure), fields["value"])


@dataclass(frozen=True, slots=True)
class Summary:
    """A rank's word on itself, or, combined, that of all ranks.

    has_error: whether any has failed. lowest, highest: of numbers below 2^64 that must be equal. key: the lowest of
    numbers. known: of KNOWN_BITS bits those that all have set.
    """

    has_error: bool = False
    lowest: int = 0
    highest: int = 0
    key: int = 0
    known: int = (1 << KNOWN_BITS) - 1

    def combine(self, other: Summary) -> Summary:
        """Return what both have said."""
        return Summary(
            self.has_error or other.has_error,
            min(self.lowest, other.lowest),
            max(self.highest, other.highest),
            min(self.key, other.key),
            self.known & other.known,
        )

    def pack(self) -> Tensor:
        """Return it as a uint8 tensor of a fixed size."""
        known = self.known.to_bytes(KNOWN_BITS // 8, "little")
        data = _LAYOUT.pack(self.has_error, self.lowest, self.highest, self.key, known)
        return torch.frombuffer(bytearray(data), dtype=torch.uint8)

    @staticmethod
    def unpack(buffer: Tensor) -> Summary:
        """Return the inverse of `pack`."""
        has_error, lowest, highest, key, known = _LAYOUT.unpack(buffer.numpy().tobytes())
        return Summary(has_error, lowest, highest, key, int.from_bytes(known, "little"))


class HostMessages:
    """The ranks of a group that can carry host tensors (gloo); None: this process alone.

    members: the group's ranks in another order, by which they are numbered here (default: the group's).
    """

    def __init__(self, group: ProcessGroup | None, members: Sequence[int] = ()) -> None:
        self.size = 1 if group is None else group.size()
        self._members = list(members) or list(range(self.size))
        self.rank = 0 if group is None else self._members.index(group.rank())
        self.group: Any = group
        ranks: Sequence[int] = range(self.size)
        if isinstance(group, ProcessGroup):
            ranks = dist.get_process_group_ranks(group)
        self.global_ranks = tuple(ranks[member] for member in self._members)

    def combine(self, own: Summary) -> Summary:
        """Return what all ranks have said together. Raises RankLost where a rank is gone."""
        recorder = Recorder.current()
        combined = own
        distance = 1
        while distance < self.size:
            before = (self.rank - distance) % self.size
            behind = (self.rank + distance) % self.size
            arriving = torch.empty(_LAYOUT.size, dtype=torch.uint8, device="cpu")
            packed = combined.pack()
            with recorder.wait("agree", "word", self.global_ranks[before : before + 1], _LAYOUT.size):
                receive = self.group.recv([arriving], self._members[before], _SUMMARY_TAG)
                send = self.group.send([packed], self._members[behind], _SUMMARY_TAG)
                receive.wait()
            with recorder.wait("agree", "word", self.global_ranks[behind : behind + 1], _LAYOUT.size):
                send.wait()
            combined = combined.combine(Summary.unpack(arriving))
            distance *= 2
        return combined

    def exchange(self, record: Record, timeout: timedelta | None = None) -> list[Record | RankLost]:
        """Return everybody's record, by rank; in place of one that cannot be reached the RankLost.

        timeout: for each rank; default: the group's. TypeError or ValueError where this rank's is no JSON or too long.
        """
        packed = record.pack()
        records: list[Record | RankLost] = [Record.unpack(packed)] * self.size
        peers = [peer for peer in range(self.size) if peer != self.rank]
        buffers = {peer: empty_record() for peer in peers}
        began = perf_counter_ns()
        receives = {peer: self._post(self.group.recv, buffers[peer], peer) for peer in peers}
        sends = {peer: self._post(self.group.send, packed, peer) for peer in peers}
        waited = () if timeout is None else (timeout,)
        for peer in peers:
            ranks = self.global_ranks[peer : peer + 1]
            try:
                with Recorder.current().wait("agree", "word", ranks, RECORD_BYTES, since=began):
                    for work in (receives[peer], sends[peer]):
                        if isinstance(work, RuntimeError):
                            raise work
                        work.wait(*waited)
                records[peer] = Record.unpack(buffers[peer])
            except RankLost as lost:
                records[peer] = lost
        return records

    def _post(self, call: Any, tensor: Tensor, peer: int) -> Any:
        """Start a send or receive; return its work, or the RuntimeError that it raised."""
        try:
            return call([tensor], self._members[peer], _RECORD_TAG)
        except RuntimeError as error:
            return error


def pack_json(value: Any) -> Tensor:
    """Return a JSON value as a (RECORD_BYTES,) uint8 tensor; ValueError where it is too long."""
    data = json.dumps(value, ensure_ascii=False).encode("utf-8", "backslashreplace")
    if len(data) > RECORD_BYTES:
        raise ValueError(f"a record of {len(data)} bytes exceeds the {RECORD_BYTES} that travel: {data[:200]!r}...")
    return torch.frombuffer(bytearray(data.ljust(RECORD_BYTES)), dtype=torch.uint8)


def unpack_json(buffer: Tensor) -> Any:
    """Return the inverse of `pack_json`; not to be changed, as equal values share it."""
    return _parsed(buffer.numpy().tobytes().rstrip())


_parsed = lru_cache(maxsize=64)(json.loads)  # a step's records are mostly those of the step before


def empty_record() -> Tensor:
    """Return a buffer to receive a record into."""
    return torch.empty(RECORD_BYTES, dtype=torch.uint8, device="cpu")
