"""A stand-in for `deep_ep` on CPU ranks with gloo: the published signatures of `Buffer`, with what they require.

Results are NaN until the event that comes with them is waited for. As DeepEP it sums in float32 and rounds to bfloat16.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class EventOverlap:
    """An event; `arrive` is what its coming does."""

    def __init__(self, arrive: Callable[[], object] = lambda: None) -> None:
        self._arrive = arrive

    def current_stream_wait(self) -> None:
        self._arrive()


class Config:
    """Sizes of buffers."""

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        return 2 * hidden_bytes * num_ranks

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        return 3 * hidden_bytes * num_ranks


class Buffer:
    """See `deep_ep.Buffer`. A handle is (rows for each rank, rows from each rank, tokens of the rows, their number)."""

    def __init__(
        self, group: dist.ProcessGroup, num_nvl_bytes: int = 0, num_rdma_bytes: int = 0, low_latency_mode: bool = False,
        num_qps_per_rank: int = 12, allow_nvlink_for_low_latency_mode: bool = True,
    ) -> None:
        self.group, self.rank, self.group_size = group, group.rank(), group.size()
        self.num_nvl_bytes, self.num_rdma_bytes = num_nvl_bytes, num_rdma_bytes
        self.calls: list[str] = []

    @staticmethod
    def capture() -> EventOverlap:
        return EventOverlap()

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        return Config()

    @staticmethod
    def get_combine_config(num_ranks: int) -> Config:
        return Config()

    def get_dispatch_layout(
        self, topk_idx: Tensor, num_experts: int, previous_event: EventOverlap | None = None,
        async_finish: bool = False, allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, Tensor | None, Tensor, Tensor, EventOverlap]:
        assert topk_idx.dtype is torch.int64
        _check_stream(previous_event, async_finish, allocate_on_comm_stream)
        self._num_experts = num_experts
        is_chosen = (topk_idx.unsqueeze(-1) == torch.arange(num_experts)).any(1)
        is_in_rank = is_chosen.unflatten(1, (self.group_size, num_experts // self.group_size)).any(-1)
        return is_in_rank.sum(0).int(), None, is_chosen.sum(0).int(), is_in_rank, EventOverlap()

    def dispatch(
        self, x: Tensor | tuple[Tensor, Tensor], handle: tuple | None = None, num_tokens_per_rank: Tensor | None = None,
        num_tokens_per_rdma_rank: Tensor | None = None, is_token_in_rank: Tensor | None = None,
        num_tokens_per_expert: Tensor | None = None, topk_idx: Tensor | None = None, topk_weights: Tensor | None = None,
        expert_alignment: int = 1, config: Config | None = None, previous_event: EventOverlap | None = None,
        async_finish: bool = False, allocate_on_comm_stream: bool = False,
    ) -> tuple[Any, ...]:
        _check_stream(previous_event, async_finish, allocate_on_comm_stream)
        parts = x if isinstance(x, tuple) else (x,)
        dtypes = (torch.float8_e4m3fn, torch.float32) if isinstance(x, tuple) else (torch.bfloat16,)
        assert [part.dtype for part in parts] == list(dtypes)
        assert all(part.is_contiguous() for part in parts)
        self.calls.append("dispatch again" if handle else "dispatch")
        ids = weights = pairs = None
        if handle is None:
            assert topk_weights.dtype is torch.float32
            assert num_tokens_per_rank is not None and num_tokens_per_expert is not None
            rows, token = is_token_in_rank.T.nonzero().unbind(1)  # by rank, then by token
            sent = num_tokens_per_rank.tolist()
            received = torch.empty(self.group_size, dtype=torch.int64)
            dist.all_to_all_single(received, torch.tensor(sent), group=self.group)
            handle = made = (sent, received.tolist(), token, len(topk_idx))
            local = self._num_experts // self.group_size
            is_local = topk_idx[token] // local == rows.unsqueeze(1)
            ids = self._exchanged((topk_idx[token] % local).where(is_local, -1), *handle[:2])
            weights = self._exchanged(topk_weights[token].where(is_local, 0), *handle[:2])
            pairs = (ids.unsqueeze(-1) == torch.arange(local)).sum((0, 1)).tolist()
        else:
            assert topk_idx is None and topk_weights is None
            made = None
        arrived = [self._exchanged(part[handle[2]], *handle[:2]) for part in parts]
        results = [torch.full_like(part.float(), torch.nan).to(part.dtype) for part in arrived]
        event = _copies(results, arrived)
        return tuple(results) if isinstance(x, tuple) else results[0], ids, weights, pairs, made, event

    def combine(
        self, x: Tensor, handle: tuple, topk_weights: Tensor | None = None, config: Config | None = None,
        previous_event: EventOverlap | None = None, async_finish: bool = False, allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, Tensor | None, EventOverlap]:
        _check_stream(previous_event, async_finish, allocate_on_comm_stream)
        assert x.dtype is torch.bfloat16
        assert x.is_contiguous()
        self.calls.append("combine")
        sent, received, token, num_tokens = handle
        sums = []
        for part in (x,) if topk_weights is None else (x, topk_weights):
            returned = self._exchanged(part, received, sent)
            total = torch.zeros(num_tokens, part.shape[1]).index_add(0, token, returned.float())
            sums.append(total.to(part.dtype))
        results = [torch.full_like(part, torch.nan) for part in sums]
        return results[0], None if topk_weights is None else results[1], _copies(results, sums)

    def _exchanged(self, rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
        out = torch.empty(sum(received), rows.shape[1], dtype=rows.dtype)
        dist.all_to_all_single(
            out.view(torch.uint8), rows.contiguous().view(torch.uint8), received, sent, group=self.group)
        return out


def _check_stream(previous_event: EventOverlap | None, async_finish: bool, allocate_on_comm_stream: bool) -> None:
    assert not allocate_on_comm_stream or (previous_event is not None and async_finish)


def _copies(results: list[Tensor], arrived: list[Tensor]) -> EventOverlap:
    def copy() -> None:
        for result, part in zip(results, arrived):
            result.copy_(part)

    return EventOverlap(copy)
