"""What the ranks that share sequences send each other: rows of numbers for tokens, whose counts all of them know.

Dimension letters: B batch, T tokens, C numbers in a row.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from dualpipe.nn.attention import Context
from dualpipe.nn.segments import Pending
from dualpipe.nn.sequence_split import SequenceSplit
from dualpipe.parallel.all_to_all import AsyncAllToAll, CommStream, GroupAllToAll, PendingRows
from dualpipe.runtime import device


class SharedAttention(Protocol):
    """What is asked of an attention layer: see `dualpipe.models.decoder.Attention`."""

    num_heads: int
    num_kv_heads: int
    qk_dim: int
    v_dim: int
    window: int | None
    scale: float
    sinks: nn.Parameter | None
    peaks_A: Tensor | None
    shared: tuple[tuple[int, int], ...]

    def project(self, x_BSH: Tensor, context: Context) -> tuple[Tensor, ...]: ...

    def expand(self, *shared: Tensor) -> tuple[Tensor, Tensor]: ...

    def output(self, y_BASV: Tensor) -> Tensor: ...


class Sizes(NamedTuple):
    """Sizes of a micro-batch, which a rank must know that has failed, as others count on what it sends."""

    batch: int
    length: int  # of the whole sequence
    itemsize: int  # bytes of a number in a row


class SequenceRanks:
    """The ranks that share sequences. mesh: as `ContextParallel` takes it."""

    def __init__(self, mesh: DeviceMesh | AsyncAllToAll | None) -> None:
        self.split, self._latest, self._expected = SequenceSplit(), Sizes(0, 0, 0), 0
        # of a number in the rows of each layer, once all ranks know it: their dtypes may differ
        self._itemsizes: WeakKeyDictionary[SharedAttention, int] = WeakKeyDictionary()
        if mesh is not None and (mesh.size() if isinstance(mesh, DeviceMesh) else mesh.size) > 1:
            ranks = GroupAllToAll(mesh) if isinstance(mesh, DeviceMesh) else mesh
            self.stream, self.split = CommStream(ranks, "keys and values"), SequenceSplit(ranks.rank, ranks.size)

    @property
    def sent_bytes(self) -> int:
        """What this rank has sent to others."""
        return 0 if self.split.size == 1 else self.stream.sent_bytes

    def expect(self, batch: int, length: int, dtype: torch.dtype) -> None:
        """Say on all ranks what micro-batches come: rows, tokens of a whole one, dtype of keys and values. Otherwise
        the ranks tell each other once for each layer, in the first step, for which the host waits; on CPU, where it
        waits anyway, always. On a device a rank that has failed goes by the latest ones: others would wait for it in
        vain, until the timeout of the group, in a micro-batch of another size.
        """
        self._latest, self._expected = Sizes(batch, length, dtype.itemsize), dtype.itemsize

    def sizes(self, found: Sizes | None, attention: SharedAttention, pending: PendingRows) -> Sizes:
        """Those of a micro-batch in a layer, or where it has failed here (None) of the latest one; collective until one
        is known, and all zero if none is anywhere. Where they were found here, `pending` waits for the message."""
        known = self._itemsizes.get(attention, self._expected)
        if known and self.stream.device.type != "cpu":
            self._latest = found or self._latest._replace(itemsize=known)
        else:
            told, each = torch.tensor([found or (0, 0, 0)] * self.split.size, device="cpu"), [1] * self.split.size
            sent = told.to(self.stream.device)
            received = torch.empty_like(sent)
            with self.stream.beside(device.record(self.stream.device), sent, received):
                exchange = self.stream.start(received, sent, each, each)
            if found is None:
                self.stream.wait(exchange)
                self._latest = Sizes(*max(received.tolist()))
            else:  # not here: `forward` is called again after an error, and would send the sizes twice
                pending.add(exchange, sent)
                self._latest = found
        self._itemsizes[attention] = self._latest.itemsize
        return self._latest


class SequenceRows:
    """Communication of a layer's rows (B * T, C) with the micro-batch's `Context`, in the order of the ranks. tokens:
    how many go to each rank and come from each, for a length. Context for the backward: `Sizes`, and the dtype."""

    def __init__(
        self, ranks: SequenceRanks, attention: SharedAttention, width: int,
        tokens: Callable[[int], tuple[list[int], list[int]]],
    ) -> None:
        self._ranks, self._attention, self._width, self._tokens = ranks, attention, width, tokens
        self.group = ranks.stream.group

    def forward(self, inputs: tuple[Any, ...] | None) -> Pending:
        # What may fail comes before the first message, that of the sizes.
        pending = PendingRows(self._ranks.stream)
        found = dtype = counts = None
        if inputs is not None:
            rows, context = inputs
            found = Sizes(context.batch, context.length, rows.itemsize)
            dtype = rows.dtype
            counts = self._counts(found)
        sizes = self._ranks.sizes(found, self._attention, pending)
        pending.context = sizes, dtype
        there, here = counts or self._counts(sizes)
        return self._send(pending, inputs, there, here)

    def backward(self, context: tuple[Sizes, torch.dtype | None], gradients: tuple[Any, ...] | None) -> Pending:
        there, here = self._counts(context[0])
        pending = PendingRows(self._ranks.stream, besides=(None,), context=context)
        return self._send(pending, gradients, here, there)

    def again(self, context: tuple[Sizes, torch.dtype | None], inputs: tuple[Any, ...] | None) -> Pending:
        there, here = self._counts(context[0])
        return self._send(PendingRows(self._ranks.stream, context=context), inputs, there, here)

    def _counts(self, sizes: Sizes) -> tuple[list[int], list[int]]:
        """Rows that go to each rank in the forward, and that come from each."""
        if not sizes.length:
            return [0] * self._ranks.split.size, [0] * self._ranks.split.size
        there, here = self._tokens(sizes.length)
        return [tokens * sizes.batch for tokens in there], [tokens * sizes.batch for tokens in here]

    def _send(
        self, pending: PendingRows, given: tuple[Any, ...] | None, sent: list[int], received: list[int]
    ) -> Pending:
        """Rows there, or gradients back: where there is none here (None), other ranks may have one."""
        sizes, dtype = pending.context
        row_bytes = self._width * sizes.itemsize
        if given is None:
            return pending.send(None, row_bytes, sent, received, None)
        return pending.send(given[0], row_bytes, sent, received, dtype)
