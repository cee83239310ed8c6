"""Exchange of token rows between the ranks that share sequences; all ranks know the row counts from the length.

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
from dualpipe.parallel.all_to_all import AllToAll, CommStream, PendingRows, gradient_rows


class SharedAttention(Protocol):
    """Interface of an attention layer whose keys and values ranks exchange; see `dualpipe.models.decoder.Attention`."""

    num_heads: int
    num_kv_heads: int
    qk_dim: int
    v_dim: int
    window: int | None
    scale: float
    sinks: nn.Parameter | None
    max_logits_A: Tensor | None
    shared: tuple[tuple[int, int], ...]  # heads and head dimension of each tensor that `expand_kv` takes

    def project(self, x_BSH: Tensor, context: Context) -> tuple[Tensor, ...]:
        """Return the queries, followed by the tensors that `expand_kv` takes."""

    def expand_kv(self, *shared: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values from the tensors that ranks exchange: these themselves, or a latent."""

    def output(self, y_BASV: Tensor) -> Tensor:
        """Return the layer's output from the outputs of the heads."""


class SequenceRanks:
    """Ranks that share sequences, and the part of this rank. mesh: see `ContextParallel`."""

    def __init__(self, mesh: DeviceMesh | AllToAll | None) -> None:
        self.split = SequenceSplit()
        if mesh is not None and (mesh.size() if isinstance(mesh, DeviceMesh) else mesh.size) > 1:
            ranks = AllToAll(mesh) if isinstance(mesh, DeviceMesh) else mesh
            self.stream = CommStream(ranks, "keys and values")
            self.split = SequenceSplit(ranks.rank, ranks.size)

    @property
    def sent_bytes(self) -> int:
        """Number of bytes that this rank has sent to others."""
        return 0 if self.split.size == 1 else self.stream.sent_bytes


class _RowsContext(NamedTuple):
    """Context of `SequenceRows` for its backward."""

    batch: int
    length: int  # of the whole sequence
    dtype: torch.dtype


class SequenceRows:
    """Communication of a layer's rows (B * T, C), in rank order; its inputs are the rows and a `Context`.

    width: C. token_counts: returns, for the length of a sequence, the numbers of tokens sent to each rank and received
    from each.
    """

    def __init__(
        self, ranks: SequenceRanks, width: int, token_counts: Callable[[int], tuple[list[int], list[int]]]
    ) -> None:
        self._stream = ranks.stream
        self._width = width
        self._token_counts = token_counts
        self.group = ranks.stream.group

    def forward(self, inputs: tuple[Tensor, Context]) -> Pending:
        """Start to send rows."""
        rows, sequence = inputs
        context = _RowsContext(sequence.batch, sequence.length, rows.dtype)
        sent, received = self._counts(context)
        return PendingRows(self._stream, context=context).send(rows, sent, received)

    def backward(self, context: _RowsContext, gradients: tuple[Tensor | None, ...]) -> Pending:
        """Start to return the gradients of received rows."""
        received, sent = self._counts(context)
        d_rows = gradient_rows(gradients[0], (sum(sent), self._width), context.dtype, self._stream.device)
        return PendingRows(self._stream, extra=(None,)).send(d_rows, sent, received)

    def recompute(self, context: _RowsContext, inputs: tuple[Tensor, Context]) -> Pending:
        """Start to repeat the exchange, for a recomputation."""
        return self.forward(inputs)

    def _counts(self, context: _RowsContext) -> tuple[list[int], list[int]]:
        """Return the numbers of rows sent to each rank in the forward, and received from each."""
        sent, received = self._token_counts(context.length)
        return [tokens * context.batch for tokens in sent], [tokens * context.batch for tokens in received]
