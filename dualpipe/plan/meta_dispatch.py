"""Dispatch to experts on the meta device: the dispatchers of a run, over ranks that are pretended.

`dualpipe.parallel.experts` plans, packs and receives rows as in a run; only the all-to-all sends nothing, and notes its
bytes. The numbers of rows, which a run computes from the choices of its tokens, are real numbers here: those of tokens
that choose their experts at random, the same on all ranks.

Example: 8 of 128 experts on 8 ranks. A token has experts on 5.3 ranks on average. The tensor to send has 8 rows for
each token, as many as there can be, of which 5.3 are sent; as many are received.

Dimension letters: those of `dualpipe.parallel.experts.dispatcher` and `two_hop`.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from dualpipe.nn.routing.router import Router
from dualpipe.nn.segments import Pending
from dualpipe.parallel.all_to_all import AllToAll
from dualpipe.parallel.experts.dispatcher import ExpertParallel
from dualpipe.parallel.experts.interface import Dispatcher

TransferKind = Literal["dispatch", "recompute", "combine", "dispatch backward", "combine backward"]


class ExpertChoice(NamedTuple):
    """Choice of a token's experts at random: `top_k` of those in `topk_group` of `n_group` groups."""

    num_experts: int
    top_k: int
    n_group: int = 1
    topk_group: int = 1

    @staticmethod
    def of(gate: Router) -> ExpertChoice:
        """Return the choice of a router."""
        return ExpertChoice(gate.out_features, gate.top_k, gate.n_group, gate.topk_group)

    def expected_places(self, places: int) -> float:
        """Return how many ranks or nodes hold experts of a token on average, of `places` that share them evenly.

        The experts are in the places of `topk_group` groups alone. If a place has several groups, these are taken to be
        spread evenly over as many places as they can be in.
        """
        allowed = min(places, self.topk_group * max(1.0, places / self.n_group))
        candidates = self.num_experts * self.topk_group / self.n_group
        per_place = candidates / allowed
        # Probability that none of the experts is in a given place.
        none = prod(max(0.0, candidates - per_place - i) / (candidates - i) for i in range(self.top_k))
        return allowed * (1 - none)


class Transfer:
    """Communication of a layer.

    exchanges: bytes of the tensors that a rank sends, one after the other, to all ranks together, itself included.
    """

    def __init__(self, kind: TransferKind) -> None:
        self.kind = kind
        self.exchanges: list[int] = []

    @property
    def by_node(self) -> bool:
        """True if equal rows go to all ranks with experts of a token, so that two hops need one for each node first."""
        return self.kind in ("dispatch", "recompute", "combine backward")

    @property
    def is_dispatch(self) -> bool:
        """True if the rows, the first exchange, are those that FP8 dispatch quantizes."""
        return self.kind in ("dispatch", "recompute")


class MetaDispatcher(Dispatcher):
    """Dispatcher of the first of `ep` ranks.

    Args:
        num_experts: number of experts on all ranks.
        ep: number of ranks, 2 or more.
        nodes: number of nodes that these ranks are on, if rows are dispatched in two hops; 1: in one hop.
        n_group: number of groups of experts.
        topk_group: number of groups that the experts of a token are chosen from.

    Attributes:
        transfers: communications so far.
    """

    def __init__(self, num_experts: int, ep: int, *, nodes: int = 1, n_group: int = 1, topk_group: int = 1) -> None:
        super().__init__(num_experts)
        self.transfers: list[Transfer] = []
        self._ranks = ep
        self._nodes = nodes
        self._groups = (n_group, topk_group)
        parallel = ExpertParallel(
            num_experts, _NotingAllToAll(ep, self.transfers), dispatch="two_hop" if nodes > 1 else "all_to_all",
            ranks_per_node=ep // nodes)
        self._dispatcher = parallel.dispatcher()
        self.dispatch = _NotedDispatch(self._dispatcher.dispatch, "dispatch", self.transfers)
        combine = _NotedCommunication(self._dispatcher.combine, "combine", self.transfers)
        self.combine = combine  # type: ignore[assignment]  # `recompute` is never called

    def plan(self, x_TH: Tensor, weights_TK: Tensor, experts_TK: Tensor) -> tuple[Tensor, Tensor, Any]:
        """Return rows, weights and the plan of the run's dispatcher, with numbers of rows."""
        rows, weights, plan = self._dispatcher.plan(x_TH, weights_TK, experts_TK)
        return rows, weights, plan._replace(counts=self._row_counts(*experts_TK.shape))

    def finish(self, rows: Tensor, plan: Any) -> Tensor:
        """Return the hidden states (T, H): the sum of the combined rows (S, H) of each token."""
        return self._dispatcher.finish(rows, plan)

    def _row_counts(self, num_tokens: int, top_k: int) -> Tensor:
        """Return the counts of a plan on the CPU: for each rank its rows and (row, expert) pairs, and those of hops."""
        choice = ExpertChoice(self._num_experts, top_k, *self._groups)
        if top_k * choice.n_group > choice.num_experts * choice.topk_group:  # the router does not use its groups
            choice = ExpertChoice(self._num_experts, top_k)
        rows = _divide(num_tokens * choice.expected_places(self._ranks), self._ranks)
        columns = [rows, _divide(num_tokens * top_k, self._ranks)]
        if self._nodes > 1:
            per_node = self._ranks // self._nodes
            rows_by_node = _divide(num_tokens * choice.expected_places(self._nodes), self._nodes)
            columns.append([rows_by_node[rank // per_node] for rank in range(self._ranks)])
            columns += [
                [rows[rank - rank % per_node + place] for rank in range(self._ranks)] for place in range(per_node)]
        return torch.tensor(columns, device="cpu").T


def _divide(total: float, places: int) -> list[int]:
    """Return the whole numbers, as equal as can be, whose sum is `total` rounded."""
    share, rest = divmod(round(total), places)
    return [share + (place < rest) for place in range(places)]


class PretendedAllToAll(AllToAll):
    """All-to-all of one of `size` ranks on meta, which sends nothing."""

    def __init__(self, size: int, rank: int = 0) -> None:
        self.group = None
        self.rank = rank
        self.size = size
        self.device = torch.device("meta")

    def start(self, received: Tensor, sent: Tensor, received_rows: Sequence[int], sent_rows: Sequence[int]) -> Any:
        """Return work that has ended."""
        return _Ended()


class _NotingAllToAll(PretendedAllToAll):
    """All-to-all of the first of `size` ranks, which all send alike. It notes bytes in the last of `transfers`."""

    def __init__(self, size: int, transfers: Sequence[Transfer]) -> None:
        super().__init__(size)
        self._transfers = transfers

    def start(self, received: Tensor, sent: Tensor, received_rows: Sequence[int], sent_rows: Sequence[int]) -> Any:
        """Note the bytes. Numbers of rows, which alone are not on meta, arrive: this rank's own."""
        if sent.is_meta:
            self._transfers[-1].exchanges.append(sent.nbytes)
        else:
            received.copy_(sent)
        return _Ended()


class _Ended:
    """Work that has ended."""

    def wait(self) -> None:
        """Return at once."""


class _NotedCommunication:
    """Communication that appends a `Transfer` when it starts."""

    group: dist.ProcessGroup | None = None

    def __init__(
        self, communication: Any, name: Literal["dispatch", "combine"], transfers: list[Transfer]
    ) -> None:
        self._communication = communication
        self._name = name
        self._transfers = transfers

    def forward(self, inputs: tuple[Any, ...]) -> Pending:
        self._transfers.append(Transfer(self._name))
        return self._communication.forward(inputs)

    def backward(self, context: Any, gradients: tuple[Tensor | None, ...]) -> Pending:
        self._transfers.append(Transfer("dispatch backward" if self._name == "dispatch" else "combine backward"))
        return self._communication.backward(context, gradients)


class _NotedDispatch(_NotedCommunication):
    """Dispatch, which can be recomputed."""

    def recompute(self, context: Any, inputs: tuple[Any, ...]) -> Pending:
        self._transfers.append(Transfer("recompute"))
        return self._communication.recompute(context, inputs)
