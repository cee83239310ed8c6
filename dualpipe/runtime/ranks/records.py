"""Small messages between the hosts of a group's ranks: records with any fields, and summaries that are combined.

Every rank sends a record to every other rank, so a missing rank is known by its number. A summary has a fixed size and
is combined in ceil(log2 N) rounds: in round k, each rank sends its summary to the rank 2^k after it and combines it
with that of the rank 2^k before it (the dissemination algorithm; Hensgen, Finkel and Manber 1988). Combining is
idempotent, so any number of ranks ends with the same result.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from time import perf_counter_ns
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from dualpipe.runtime.errors import RankLost, describe_error, names_ranks
from dualpipe.runtime.recorder import Recorder

RECORD_BYTES = 8192
MAX_TEXT = 1200  # characters of an error's text in a record
KNOWN_BITS = 256  # bits of `Summary.known`
_RECORD_TAG = 14  # gloo tags that no other message uses
_SUMMARY_TAG = 17
AGREEMENT = "an agreement message"  # the name of these messages in errors and traces
_LAYOUT = struct.Struct("<?QQQ32s")


@dataclass(frozen=True)
class Failure:
    """Description of an error for other ranks. is_named: the text names the failed ranks."""

    text: str
    is_named: bool = False

    @staticmethod
    def of(error: BaseException, max_length: int = MAX_TEXT) -> Failure:
        """Describe an error in at most `max_length` characters."""
        return Failure(describe_error(error)[:max_length], names_ranks(error))


@dataclass(frozen=True)
class Record:
    """Message of a rank to every other rank: its failure, if any, and a JSON value."""

    failure: Failure | None = None
    value: Any = None

    def pack(self) -> Tensor:
        """Return the record as a (RECORD_BYTES,) uint8 tensor; raises like `pack_json`."""
        return pack_json({"failure": self.failure and asdict(self.failure), "value": self.value})

    @staticmethod
    def unpack(buffer: Tensor) -> Record:
        """Return the record of a tensor from `pack`. Do not modify its value: equal records share it."""
        fields = unpack_json(buffer)
        failure = fields["failure"]
        return Record(None if failure is None else Failure(**failure), fields["value"])


class Summary(NamedTuple):
    """State of one rank, or combined state of several.

    Attributes:
        has_error: any rank has failed.
        lowest: minimum of numbers below 2^64 that must be equal.
        highest: maximum of the same numbers.
        key: minimum of numbers below 2^64 that may differ, for `RankSync.lowest`.
        known: KNOWN_BITS bits; those that all ranks have set.
    """

    has_error: bool = False
    lowest: int = 0
    highest: int = 0
    key: int = 0
    known: int = (1 << KNOWN_BITS) - 1

    def combine(self, other: Summary) -> Summary:
        """Return the combined state of both."""
        return Summary(
            self.has_error or other.has_error,
            min(self.lowest, other.lowest),
            max(self.highest, other.highest),
            min(self.key, other.key),
            self.known & other.known,
        )

    def pack(self) -> Tensor:
        """Return the summary as a uint8 tensor of a fixed size."""
        known = self.known.to_bytes(KNOWN_BITS // 8, "little")
        data = _LAYOUT.pack(self.has_error, self.lowest, self.highest, self.key, known)
        return torch.frombuffer(bytearray(data), dtype=torch.uint8)

    @staticmethod
    def unpack(buffer: Tensor) -> Summary:
        """Return the summary of a tensor from `pack`."""
        has_error, lowest, highest, key, known = _LAYOUT.unpack(buffer.numpy().tobytes())
        return Summary(has_error, lowest, highest, key, int.from_bytes(known, "little"))


class GroupMembers:
    """The ranks of a group, numbered in a chosen order.

    rank, size: this rank's number, and how many there are.
    global_ranks: the ranks in the job, in this order; they name the ranks in errors.

    Args:
        group: the process group; None: this process alone.
        members: the group's ranks in another order, which numbers the ranks of this object (default: the group's).
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


class HostMessages(GroupMembers):
    """Messages between the ranks of a group that can carry host tensors (gloo)."""

    def combine(self, summary: Summary) -> Summary:
        """Return the combined summary of all ranks. Raises RankLost if a rank is gone."""
        recorder = Recorder.current()
        combined = summary
        distance = 1
        while distance < self.size:
            before = (self.rank - distance) % self.size
            after = (self.rank + distance) % self.size
            arriving = torch.empty(_LAYOUT.size, dtype=torch.uint8, device="cpu")
            packed = combined.pack()
            with recorder.wait("agree", AGREEMENT, self.global_ranks[before : before + 1], _LAYOUT.size):
                receive = self.group.recv([arriving], self._members[before], _SUMMARY_TAG)
                send = self.group.send([packed], self._members[after], _SUMMARY_TAG)
                receive.wait()
            with recorder.wait("agree", AGREEMENT, self.global_ranks[after : after + 1], _LAYOUT.size):
                send.wait()
            combined = combined.combine(Summary.unpack(arriving))
            distance *= 2
        return combined

    def exchange(self, record: Record) -> list[Record | RankLost]:
        """Send a record to all ranks; return the records by rank, with a RankLost for a rank that cannot be reached.

        Raises TypeError or ValueError if the record is no JSON or too long.
        """
        packed = record.pack()
        records: list[Record | RankLost] = [Record.unpack(packed)] * self.size
        peers = [peer for peer in range(self.size) if peer != self.rank]
        buffers = {peer: empty_record() for peer in peers}
        began = perf_counter_ns()
        receives = {peer: self._post(self.group.recv, buffers[peer], peer) for peer in peers}
        sends = {peer: self._post(self.group.send, packed, peer) for peer in peers}
        for peer in peers:
            ranks = self.global_ranks[peer : peer + 1]
            try:
                with Recorder.current().wait("agree", AGREEMENT, ranks, RECORD_BYTES, since=began):
                    for work in (receives[peer], sends[peer]):
                        if isinstance(work, RuntimeError):
                            raise work
                        work.wait()
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
    """Return a JSON value as a (RECORD_BYTES,) uint8 tensor.

    Raises TypeError or ValueError if it is no JSON, and ValueError if it is too long.
    """
    data = json.dumps(value, ensure_ascii=False).encode("utf-8", "backslashreplace")
    if len(data) > RECORD_BYTES:
        text = f"a record of {len(data)} bytes exceeds the limit of {RECORD_BYTES}; shorten it: {data[:200]!r}..."
        raise ValueError(text)
    return torch.frombuffer(bytearray(data.ljust(RECORD_BYTES)), dtype=torch.uint8)


def unpack_json(buffer: Tensor) -> Any:
    """Return the value of a tensor from `pack_json`. Do not modify it: equal tensors share it."""
    return _parsed(buffer.numpy().tobytes().rstrip())


_parsed = lru_cache(maxsize=64)(json.loads)  # most records of a step equal those of the step before


def empty_record() -> Tensor:
    """Return a buffer to receive a record into."""
    return torch.empty(RECORD_BYTES, dtype=torch.uint8, device="cpu")
