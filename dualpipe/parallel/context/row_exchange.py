"""Rows of tokens, exchanged by the ranks that share sequences. All ranks know the number of rows in each direction.

Dimension letters: B batch, T tokens, C elements of a row.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from dualpipe.nn.attention import Context
from dualpipe.nn.attention.sequence_split import SequenceSplit
from dualpipe.nn.segments import Pending
from dualpipe.parallel.all_to_all import AsyncAllToAll, CommStream, GroupAllToAll, PendingRows, gradient_rows


class SharedAttention(Protocol):
    """Interface of an attention layer: see `dualpipe.models.decoder.Attention`."""

    num_heads: int
    num_kv_heads: int
    qk_dim: int
    v_dim: int
    window: int | None
    scale: float
    sinks: nn.Parameter | None
    max_logits_A: Tensor | None
    shared: tuple[tuple[int, int], ...]

    def project(self, x_BSH: Tensor, context: Context) -> tuple[Tensor, ...]:
        """Return the queries, and what `expand` takes."""

    def expand_kv(self, *shared: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values, made of what ranks share of them."""

    def output(self, y_BASV: Tensor) -> Tensor:
        """Return the layer's result, made of the heads' values."""


class SequenceRanks:
    """The ranks that share sequences. mesh: as `ContextParallel` takes it."""

    def __init__(self, mesh: DeviceMesh | AsyncAllToAll | None) -> None:
        self.split = SequenceSplit()
        if mesh is not None and (mesh.size() if isinstance(mesh, DeviceMesh) else mesh.size) > 1:
            ranks = GroupAllToAll(mesh) if isinstance(mesh, DeviceMesh) else mesh
            self.stream = CommStream(ranks, "keys and values")
            self.split = SequenceSplit(ranks.rank, ranks.size)

    @property
    def sent_bytes(self) -> int:
        """Bytes that this rank has sent to others."""
        return 0 if self.split.size == 1 else self.stream.sent_bytes


class _RowsContext(NamedTuple):
    """Values that the backward of `SequenceRows` needs."""

    batch: int
    length: int  # of the whole sequence
    dtype: torch.dtype


class SequenceRows:
    """Communication of a layer's rows (B * T, C), in the order of the ranks; its inputs are rows and a `Context`.

    width: C. tokens: returns, for the length of a sequence, the tokens sent to each rank and received from each.
    """

    def __init__(
        self, ranks: SequenceRanks, width: int, tokens: Callable[[int], tuple[list[int], list[int]]]
    ) -> None:
        self._stream = ranks.stream
        self._width = width
        self._tokens = tokens
        self.group = ranks.stream.group

    def forward(self, inputs: tuple[Tensor, Context]) -> Pending:
        """Start to send rows."""
        rows, sequence = inputs
        context = _RowsContext(sequence.batch, sequence.length, rows.dtype)
        sent, received = self._counts(context)
        return PendingRows(self._stream, context=context).send(rows, sent, received)

    def backward(self, context: _RowsContext, gradients: tuple[Tensor | None, ...]) -> Pending:
        """Start to send the gradients of received rows back."""
        received, sent = self._counts(context)
        d_rows = gradient_rows(gradients[0], (sum(sent), self._width), context.dtype, self._stream.device)
        return PendingRows(self._stream, extra=(None,)).send(d_rows, sent, received)

    def again(self, context: _RowsContext, inputs: tuple[Tensor, Context]) -> Pending:
        """Start to send rows once more, for a recomputation."""
        return self.forward(inputs)

    def _counts(self, context: _RowsContext) -> tuple[list[int], list[int]]:
        """Return the rows sent to each rank in the forward, and those received from each."""
        sent, received = self._tokens(context.length)
        return [tokens * context.batch for tokens in sent], [tokens * context.batch for tokens in received]
