"""Which ranks compute slower than the others: by what each has recorded, without any wait for it.

Compared are the seconds of the host between ranks that have the same stages. Where there is one pipeline, and so no two
of them, each rank is compared with itself in the first interval, and how it has changed with how the others have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import log1p
from statistics import median

import torch
from torch import Tensor

from dualpipe.train.votes import Vote

LEAST = 0.05  # slower by less is nobody's business
DEVIATIONS = 4.0  # robust ones: from step to step, and between the others, beyond which it is no chance
_MORE_LOAD = 1.1
_NOTHING = 1e-9  # instead of zero, to divide by


def summary(votes: Sequence[Vote], places: int, seconds: float) -> dict[str, float]:
    """What metrics say of a step of `seconds`, of ranks in so many places of the pipeline; nothing on CUDA, of which
    the host's time says nothing, nor for one rank."""
    if len(votes) == 1 or not any(vote.compute for vote in votes):
        return {}
    found = {"waiting_share": sum(vote.wait for vote in votes) / len(votes) / seconds}
    if len(votes) > places:
        each, compute = len(votes) // places, [vote.compute for vote in votes]
        same_stages = [compute[first : first + each] for first in range(0, len(votes), each)]
        found["compute_max_over_median"] = max(max(ranks) / median(ranks) for ranks in same_stages)
    return found


class Stragglers:
    """Collects the votes of `interval` steps, and then says which ranks stand out.

    places: of the pipeline; its ranks are numbered place by place. name: of a rank.

    Dimension letters: S steps, R ranks.
    """

    def __init__(self, interval: int, places: int, name: Callable[[int], str]) -> None:
        self._interval, self._places, self._name = interval, places, name
        self._votes: list[list[tuple[float, ...]]] = []
        self._first: dict[str, Tensor] = {}  # medians (R,) of the first interval, where ranks are compared with it
        self._slow_since: dict[int, int] = {}  # of ranks that stand out, for how many steps

    def add(self, votes: Sequence[Vote]) -> str:
        """Add a step; at the end of an interval in which ranks stood out, what is to be said."""
        if not self._interval or len(votes) == 1 or not votes[0].compute:
            return ""
        self._votes.append([tuple(map(float, vote)) for vote in votes])
        if len(self._votes) < self._interval:
            return ""
        votes_SRF, self._votes = torch.tensor(self._votes, device="cpu"), []
        load_SR, others_SR, experts_SR = (
            votes_SRF[..., Vote._fields.index(name)] for name in ("load", "others", "experts")
        )
        load_R = _median(load_SR, 0)
        mean_R = torch.cat([load_R[group].mean().expand_as(load_R[group]) for group in self._groups(len(votes))])
        others_R, experts_R = self._excess("others", others_SR), self._excess("experts", experts_SR)
        said = []
        for rank, (others, experts) in enumerate(zip(others_R.tolist(), experts_R.tolist())):
            if not (others or experts):
                self._slow_since.pop(rank, None)
                continue
            steps = self._slow_since[rank] = self._slow_since.get(rank, 0) + self._interval
            load = float(load_R[rank] / mean_R[rank].clamp(min=_NOTHING))
            said.append(f"{self._name(rank)}: " + self._said(others, experts, bool(experts_SR.any()), load, steps))
        return "; ".join(said)

    def _said(self, others: float, experts: float, has_experts: bool, load: float, steps: int) -> str:
        slower = f"{max(others, experts):.0%} slower than the median for {steps} steps"
        if self._first:
            slower += f", as each was in the first {self._interval}"
        if others and (experts or not has_experts):
            return f"{slower}, all segments: suspect the device"
        if others:
            return f"{slower}, all segments but those of experts"
        if load > _MORE_LOAD:
            return f"{slower}, experts only: load {load:.1f}x"
        return f"{slower}, experts only, with no more tokens than others"

    def _groups(self, ranks: int) -> Iterator[slice]:
        """The ranks that are compared with each other."""
        each = ranks // self._places
        step = ranks if each == 1 else each
        return (slice(first, first + step) for first in range(0, ranks, step))

    def _excess(self, what: str, seconds_SR: Tensor) -> Tensor:
        """By how much each rank is slower than the others, (R,): 0 unless that is beyond noise."""
        steps, ranks = seconds_SR.shape
        if ranks == self._places:
            first_R = self._first.setdefault(what, _median(seconds_SR, 0))
            seconds_SR = seconds_SR / first_R.clamp(min=_NOTHING)
        found = []
        for group in self._groups(ranks):
            group_SR = seconds_SR[:, group]
            others_SR = group_SR.flip(1) if group_SR.shape[1] == 2 else _median(group_SR, 1)[:, None]
            ratio_SR = (group_SR / others_SR.clamp(min=_NOTHING)).clamp(min=_NOTHING).log()
            ratio_R = _median(ratio_SR, 0)
            by_chance_R = _deviation(ratio_SR) * 1.25 / steps**0.5  # the standard error of a median
            if len(ratio_R) > 3:
                by_chance_R = by_chance_R.clamp(min=_deviation(ratio_R))
            stands_out_R = ratio_R > (DEVIATIONS * by_chance_R).clamp(min=log1p(LEAST))
            found.append(ratio_R.expm1().where(stands_out_R, torch.zeros((), device="cpu")))
        return torch.cat(found)


def _median(values: Tensor, dim: int) -> Tensor:
    return values.quantile(0.5, dim)


def _deviation(values: Tensor) -> Tensor:
    """The median distance from the median, over the first dimension; scaled to be the standard deviation of what is
    normally distributed."""
    return 1.4826 * _median((values - _median(values, 0)).abs(), 0)
