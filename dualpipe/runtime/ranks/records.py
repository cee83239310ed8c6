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
from dataclasses import dataclass
from functools import lru_cache
from time import perf_counter_ns
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from dualpipe.runtime.errors import RankLost
from dualpipe.runtime.recorder import Recorder

RECORD_BYTES = 8192
KNOWN_BITS = 256  # of a summary
_RECORD_TAG = 14  # gloo's; any that nothing else uses
_SUMMARY_TAG = 17
_LAYOUT = struct.Struct("<?QQQ32s")


@dataclass(frozen=True, slots=True)
class Summary:
    """What ranks say of themselves, and what all of them have said once it is combined.

    has_error: whether any has failed. lowest, highest: of numbers below 2^64 that must be equal. domain: the lowest of
    numbers. known: of KNOWN_BITS bits those that all have set.
    """

    has_error: bool = False
    lowest: int = 0
    highest: int = 0
    domain: int = 0
    known: int = (1 << KNOWN_BITS) - 1

    def combine(self, other: Summary) -> Summary:
        """Return what both have said."""
        return Summary(
            self.has_error or other.has_error,
            min(self.lowest, other.lowest),
            max(self.highest, other.highest),
            min(self.domain, other.domain),
            self.known & other.known,
        )

    def pack(self) -> Tensor:
        """Return it as a uint8 tensor of a fixed size."""
        known = self.known.to_bytes(KNOWN_BITS // 8, "little")
        data = _LAYOUT.pack(self.has_error, self.lowest, self.highest, self.domain, known)
        return torch.frombuffer(bytearray(data), dtype=torch.uint8)

    @staticmethod
    def unpack(buffer: Tensor) -> Summary:
        """Return the inverse of `pack`."""
        has_error, lowest, highest, domain, known = _LAYOUT.unpack(buffer.numpy().tobytes())
        return Summary(has_error, lowest, highest, domain, int.from_bytes(known, "little"))


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

    def exchange(self, record: Any, timeout: Any = None) -> list[Any]:
        """Return everybody's record, a JSON value, by rank; in place of one that cannot be reached the RankLost.

        timeout: for each rank, a timedelta; default: the group's.
        """
        packed = pack_record(record)
        records: list[Any] = [unpack_record(packed)] * self.size
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
                records[peer] = unpack_record(buffers[peer])
            except RankLost as lost:
                records[peer] = lost
        return records

    def _post(self, call: Any, tensor: Tensor, peer: int) -> Any:
        """Start a send or receive; return its work, or the RuntimeError that it raised."""
        try:
            return call([tensor], self._members[peer], _RECORD_TAG)
        except RuntimeError as error:
            return error


def pack_record(record: Any) -> Tensor:
    """Return a JSON value as a (RECORD_BYTES,) uint8 tensor; ValueError where it is too long."""
    data = json.dumps(record, ensure_ascii=False).encode("utf-8", "backslashreplace")
    if len(data) > RECORD_BYTES:
        raise ValueError(f"a record of {len(data)} bytes exceeds the {RECORD_BYTES} that travel: {data[:200]!r}...")
    return torch.frombuffer(bytearray(data.ljust(RECORD_BYTES)), dtype=torch.uint8)


def unpack_record(buffer: Tensor) -> Any:
    """Return the inverse of `pack_record`; not to be changed, as equal records share it."""
    return _parsed(buffer.numpy().tobytes().rstrip())


_parsed = lru_cache(maxsize=64)(json.loads)  # a step's records are mostly those of the step before


def empty_record() -> Tensor:
    """Return a buffer to receive a record into."""
    return torch.empty(RECORD_BYTES, dtype=torch.uint8, device="cpu")
