"""Dispatch in two hops: a token is sent once to each node that has experts of it, and forwarded within the node.

    hop 1    from rank (n, p) to rank (m, p)    one row for each token and node: to the same place in each node
    hop 2    from rank (m, p) to rank (m, q)    one row for each token and rank, within the node

On 8 nodes of 8 ranks, a token of DeepSeek-V3 has experts on 7.4 ranks on average, but on at most 4 nodes, on average on
3.6: its router chooses from `topk_group` = 4 groups of experts, and each node has whole groups.

Results and gradients have the same bits as with one hop (`one_hop`). The experts receive the same rows in the same
order: by the rank of the token, then by the token. Rows that return are sent directly, one for each token and rank, and
summed by the rank of the token, in rank order. A sum within the node before they return would round differently. So two
hops save bytes in the forward of the dispatch and in the backward of the combine, where all rows of a token are equal;
the forward of the combine and the backward of the dispatch send as many bytes between nodes as one hop.

Both hops are all-to-alls over the whole group, with zero rows for all but the ranks of the hop: no groups are added.
The row counts of both hops are exchanged together, so that the host waits once, as with one hop. On a device the second
hop follows the first on the side stream; on the CPU it starts when the pipeline advances the communication.

Example: 4 experts on 2 nodes of 2 ranks. A token of rank 0 with experts 2 and 3 is sent to rank 2 once, with ids [0, 1]
on the node; rank 2 keeps it with ids [0, -1] and forwards it to rank 3 with ids [-1, 0].

Dimension letters: those of `dispatcher`, and N nodes, P ranks of a node, B = min(K, N) nodes of a token at most, A rows
that a rank sends in the first hop, F rows that it receives there, C rows that it sends in the second hop.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dualpipe.kernels import sort_tokens
from dualpipe.kernels.quantize import quantize_rows
from dualpipe.kernels.routing import find_destinations
from dualpipe.nn.segments import Pending
from dualpipe.parallel.all_to_all import CommStream, PendingRows, gradient_rows, row_bytes_of
from dualpipe.parallel.experts.interface import DispatchSizes, HopCounts, Hops
from dualpipe.parallel.experts.one_hop import (
    AllToAllDispatcher,
    Combine,
    CombineContext,
    Dispatch,
    DispatchContext,
    DispatchPlan,
    NodeRows,
    PendingDispatch,
    dequantized,
)
from dualpipe.runtime import device


class TwoHopDispatcher(AllToAllDispatcher):
    """Dispatcher over an `AllToAll` between several nodes, by two hops."""

    def __init__(self, num_experts: int, stream: CommStream, fp8_rows: int | None = None) -> None:
        super().__init__(num_experts, stream, fp8_rows)
        self._per_node = len(stream.node)
        self.dispatch = _TwoHopDispatch(stream, self._local, fp8_rows)
        self.combine = _TwoHopCombine(stream)  # type: ignore[assignment]  # `recompute` is never called

    def _with_node_rows(
        self, plan: DispatchPlan, weights_TK: Tensor, experts_TK: Tensor, ranks_TD: Tensor
    ) -> DispatchPlan:
        """Return the plan with the rows of the first hop.

        Each rank gets two more counts: of the rows for its node, and of those for each rank of its node.
        """
        num_nodes = self._ranks // self._per_node
        nodes = find_destinations(experts_TK, weights_TK, num_nodes, self._local * self._per_node)
        tokens = sort_tokens(nodes.ranks, num_nodes)
        # The first of a token's rows for ranks of the node.
        node_of_rank_TD = torch.div(ranks_TD, self._per_node, rounding_mode="floor")
        is_in_node_TBD = nodes.ranks.unsqueeze(2) == node_of_rank_TD.unsqueeze(1)
        first_TB = is_in_node_TBD.to(torch.uint8).argmax(-1)
        rows_TB = plan.tokens.inverse.view(ranks_TD.shape).gather(1, first_TB)
        wide_TK = weights_TK.to(nodes.weights.dtype)
        node_rows = NodeRows(
            rows_TB.flatten().index_select(0, tokens.order), wide_TK.index_select(0, tokens.gather),
            nodes.local_experts.flatten(0, 1).index_select(0, tokens.order))
        rows_for_node_G = nodes.counts[:, 0].repeat_interleave(self._per_node, output_size=self._ranks)
        rows_for_rank_NP = plan.counts[:, 0].view(num_nodes, 1, self._per_node)
        rows_within_GP = rows_for_rank_NP.expand(-1, self._per_node, -1).reshape(self._ranks, self._per_node)
        counts = torch.cat((plan.counts, rows_for_node_G.unsqueeze(1), rows_within_GP), 1)
        return plan._replace(counts=counts, node_rows=node_rows)


class _TwoHopDispatch(Dispatch):
    """Communication of rows and weights to their experts by two hops; the gradients return by one."""

    def _start(self, inputs: tuple[Tensor, Tensor, DispatchPlan]) -> PendingDispatch:
        return _PendingTwoHopDispatch(self._stream, self._num_experts, inputs, self._fp8_rows)

    def recompute(self, context: DispatchContext, inputs: tuple[Tensor, Tensor, DispatchPlan]) -> Pending:
        """Send the rows alone: row counts, permutations, weights and choices are known from the forward."""
        hops = context.sizes.hops
        assert hops is not None, "a dispatch in two hops sets them"
        block = self._fp8_rows
        if block is None:
            extra = (context.weights_RK, context.received)
            return _RepeatedTwoHopRows(self._stream, hops, inputs[0], None, lambda rows: (rows, *extra))
        return _RepeatedTwoHopRows(
            self._stream, hops, inputs[0], block,
            lambda elements, scales: dequantized(
                elements, scales, block, context.dtype, context.weights_RK, context.received))


class _TwoHopCombine(Combine):
    """Communication that returns rows by one hop. In its backward the gradients of a token go to its ranks by two."""

    def backward(self, context: CombineContext, gradients: tuple[Tensor | None, ...]) -> Pending:
        sizes = context.sizes
        hops = sizes.hops
        assert hops is not None, "a dispatch in two hops sets them"
        shape = (sum(sizes.sent), context.width)
        d_rows_SH = gradient_rows(gradients[0], shape, context.dtype, self._stream.device)
        return _RepeatedTwoHopRows(self._stream, hops, d_rows_SH, None, lambda rows: (rows, None))


class _TwoHopRows(PendingRows):
    """Rows in flight by two hops. A subclass sets the counts and the order, and sends the first hop."""

    _counts: HopCounts
    _order: Tensor
    _is_forwarded = False

    def advance(self) -> None:
        """Start the second hop, once. On the CPU the host waits for the first."""
        if self._is_forwarded:
            return
        self._is_forwarded = True
        if self._is_on_host:
            while self._exchanges:
                self._stream.wait(self._exchanges.pop(0)[0])
        arrived = self._received
        self._received = []
        for rows in self._forwarded(arrived):  # on a device the side stream runs them after the first hop
            self.send(rows, self._counts.second_sent, self._counts.second_received)
        if self._is_on_host:
            return
        (_, _, title), _ = self._exchanges.pop()
        with self._stream.beside(self._ready):
            self._received = [take_rows(rows, self._order) for rows in self._received]
            self._exchanges = [((None, device.record(self._stream.device), title), None)]

    def _forwarded(self, arrived: list[Tensor]) -> list[Tensor]:
        """Return the rows of the second hop. arrived: the received tensors of the first."""
        raise NotImplementedError

    def receive(self) -> list[Tensor]:
        """Return the received tensors, in the order of the ranks of their tokens."""
        received = super().receive()
        return [take_rows(rows, self._order) for rows in received] if self._is_on_host else received

    @property
    def _is_on_host(self) -> bool:
        return self._stream.device.type != "cuda"


class _RepeatedTwoHopRows(_TwoHopRows):
    """Rows of a plan in flight, to the same ranks as in an earlier dispatch.

    block: elements under a scale if the rows are sent in FP8. results: called with the received tensors by `wait`.
    """

    def __init__(
        self, stream: CommStream, hops: Hops, rows_SH: Tensor, block: int | None,
        results: Callable[..., tuple[Any, ...]],
    ) -> None:
        super().__init__(stream)
        self._counts = hops.counts
        self._order = hops.order
        self._second_rows = hops.second_rows
        self._results = results
        with stream.beside(self._ready, rows_SH, hops.first_rows):
            rows_AH = take_rows(rows_SH, hops.first_rows)
            parts = [rows_AH] if block is None else list(quantize_rows(rows_AH, block))
        for part in parts:
            self.send(part, hops.counts.first_sent, hops.counts.first_received)

    def _forwarded(self, arrived: list[Tensor]) -> list[Tensor]:
        with self._stream.beside(self._ready):
            return [take_rows(rows, self._second_rows) for rows in arrived]

    def wait(self) -> tuple[tuple[Any, ...], Any]:
        """Return the results, without a context."""
        self.advance()
        return self._results(*self.receive()), None


class _PendingTwoHopDispatch(_TwoHopRows, PendingDispatch):
    """Dispatch in flight: the row counts of both hops, then the rows with weights and choices, which are forwarded."""

    def advance(self) -> None:
        """Start both hops, unless that was done."""
        self.start_rows()
        super().advance()

    def _send_rows(
        self, sizes: DispatchSizes, sent: list[list[int]], received: list[list[int]]
    ) -> DispatchSizes:
        """Send the rows of the first hop."""
        assert self._inputs is not None, "inputs are kept until wait"
        stream = self._stream
        rows, _, plan = self._inputs
        assert plan.node_rows is not None, "the plan of a dispatch in two hops has them"
        self._counts = _hop_counts(stream, sent, received)
        with stream.beside(self._ready):
            total = sum(sizes.received)
            self._order = _order_by_rank(self._received_records[:, 0], len(stream.node), total)
        num_rows = sum(self._counts.first_sent)
        source_A, weights_AK, ids_AK = (part[:num_rows] for part in plan.node_rows)
        self._first_rows = source_A
        with stream.beside(self._ready, rows, source_A):
            rows_AH = take_rows(rows, source_A)
        rows_AH, packed = self._packed_rows(rows_AH, weights_AK, ids_AK)
        self.send(rows_AH, self._counts.first_sent, self._counts.first_received)
        self.send(packed, self._counts.first_sent, self._counts.first_received)
        return sizes

    def _forwarded(self, arrived: list[Tensor]) -> list[Tensor]:
        """Return the rows for each rank of the node, with weights and choices of its experts, and store the hops."""
        sizes = self._sizes
        inputs = self._inputs
        assert sizes is not None and inputs is not None, "the first hop comes first"
        stream = self._stream
        rows_FH, packed = arrived
        with stream.beside(self._ready):
            weights_FK, ids_FK, scales = self._unpacked(packed, inputs)
            ranks_FK = torch.div(ids_FK, self._num_experts, rounding_mode="floor")  # within the node; -1 stays -1
            all_ranks_P = torch.arange(len(stream.node), dtype=torch.int32, device=stream.device)
            is_destination_FP = (ranks_FK.unsqueeze(-1) == all_ranks_P).any(1)
            tokens = sort_tokens(all_ranks_P.where(is_destination_FP, -1), len(stream.node))
            tokens = tokens.cut(sum(self._counts.second_sent))
            rows_C = tokens.gather
            rank_C = tokens.order % len(stream.node)
            is_elsewhere_CK = ranks_FK.index_select(0, rows_C) != rank_C.unsqueeze(1)
            # In place: the results stay contiguous, so that they can be viewed as bytes.
            ids_CK = ids_FK.index_select(0, rows_C).remainder_(self._num_experts).masked_fill_(is_elsewhere_CK, -1)
            weights_CK = weights_FK.index_select(0, rows_C).masked_fill_(is_elsewhere_CK, 0)
            parts = [part.view(torch.uint8) for part in (weights_CK, ids_CK)]
            packed = torch.cat([*parts, scales.index_select(0, rows_C)], 1)
            self._sizes = sizes._replace(hops=Hops(self._counts, self._first_rows, rows_C, self._order))
            return [take_rows(rows_FH, rows_C), packed]


def _hop_counts(stream: CommStream, sent: list[list[int]], received: list[list[int]]) -> HopCounts:
    """Return the row counts of both hops. sent, received: for each rank its record, see `PendingDispatch`.

    A record holds the number of rows for the rank, that of their (row, expert) pairs, the number of rows for its node,
    those for each rank of its node, and the row format.
    """
    per_node = len(stream.node)
    ranks = range(stream.size)
    is_first = [(rank - stream.all_to_all.rank) % per_node == 0 for rank in ranks]  # ranks of the first hop
    is_second = [rank in stream.node for rank in ranks]  # ranks of the second hop
    return HopCounts(
        [sent[rank][2] if is_first[rank] else 0 for rank in ranks],
        [received[rank][2] if is_first[rank] else 0 for rank in ranks],
        [sum(received[source][3 + rank % per_node] for source in ranks if is_first[source]) if is_second[rank] else 0
         for rank in ranks],
        [sum(record[0] for record in received[rank % per_node :: per_node]) if is_second[rank] else 0
         for rank in ranks])


def _order_by_rank(counts_G: Tensor, per_node: int, total: int) -> Tensor:
    """Return the permutation (R,) of received rows to the order of the ranks of their tokens.

    The second hop receives them sorted by the place of that rank in its node, then by its node.

    counts_G: the number of rows from each rank. total: their sum.
    """
    counts_PN = counts_G.view(-1, per_node).T.flatten()
    starts_PN = counts_PN.cumsum(0) - counts_PN
    ends_G = counts_G.cumsum(0)
    shift_G = starts_PN.view(per_node, -1).T.flatten() - (ends_G - counts_G)
    rows_R = torch.arange(total, device=counts_G.device)
    return rows_R + shift_G.index_select(0, torch.searchsorted(ends_G, rows_R, right=True))


def take_rows(rows: Tensor, index: Tensor) -> Tensor:
    """Return `rows[index]`, for any dtype, moved in words of up to 8 bytes."""
    row_bytes = row_bytes_of(rows)
    word = next(word for word in (torch.int64, torch.int32, torch.int16, torch.uint8) if row_bytes % word.itemsize == 0)
    return rows.contiguous().view(torch.uint8).view(word).index_select(0, index).view(torch.uint8).view(rows.dtype)
