"""All routers of a rank's stages in a training step: what each is to do, and what those of the whole model did.

    routers = RouterSet(stages, num_microbatches=8, balance=0.01, level="global", z=1e-3, group=group,
                        replicas=dp * cp * ep)
    for batch in batches:
        with routers.step():  # losses are added and loads counted
            pipeline.step(batch, num_chunks=8, ...)
        metrics = routers.metrics()  # of the whole model, on every rank

Every rank has the counts of all routers, those of other ranks' layers zero: so one all-reduce over all ranks both sums
the loads over data-parallel ranks and brings together the layers of the pipeline. Nothing here waits for the device.

Dimension letters: E experts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dualpipe.nn.routing.losses import LOSSES, Level, RouterStep, load_of, losses_of, max_over_mean
from dualpipe.nn.routing.old_keywords import old_keywords
from dualpipe.nn.routing.router import Router
from dualpipe.runtime.recorder import Recorder


class RouterSet:
    """Tells the routers in `stages` what to do in a step, and collects what all of the model's did.

    num_microbatches, balance, level, z: as in `RouterStep`; level "global" takes the loads of the step before.
    bias_update_rate: after each step, of `Router.update_bias`, for the routers that have a correction bias.
    weight: as in `RouterStep`, where ranks share sequences. Balance losses on a sequence or a micro-batch need
        `dualpipe.parallel.experts.shared_loads` as well there, or are on this rank's tokens alone.
    group: all ranks that train the model, None for one; replicas: how many of them hold each stage. A router must have
        the same name in its stage on all of those, and no other router this name.

    `num_chunks`, the old name of `num_microbatches`, is taken with a DeprecationWarning.

    Raises `ValueError`, on all ranks, where names are not so, and for a rate where there is no correction bias.
    """

    @old_keywords({}, {"num_chunks": ("num_microbatches", "")})
    def __init__(
        self, stages: Iterable[nn.Module], *, num_microbatches: int, balance: float = 0.0, level: Level = "sequence",
        z: float = 0.0, bias_update_rate: float = 0.0, weight: float = 1.0, group: dist.ProcessGroup | None = None,
        replicas: int = 1, device: torch.device | str | None = None,
    ) -> None:
        self._here = [pair for stage in stages for pair in stage.named_modules() if isinstance(pair[1], Router)]
        own = [(name, router.out_features, router.e_score_correction_bias is not None) for name, router in self._here]
        gathered = [own]
        if group is not None:
            gathered *= group.size()
            dist.all_gather_object(gathered, own, group=group)
        routers = [router for part in gathered for router in part]  # of the model, on all ranks
        for name, found in Counter(name for name, _, _ in routers).items():
            if found != replicas:
                raise ValueError(f"all ranks together have {found} routers named {name!r}, but replicas is {replicas}; "
                                 "give every layer a name of its own, the same on each replica")
        if bias_update_rate and not any(has_bias for _, _, has_bias in routers):
            raise ValueError(f"bias_update_rate is {bias_update_rate}, but no router of this model has a correction "
                             "bias; set it to 0")
        sizes = {name: experts + len(LOSSES) for name, experts, _ in routers}
        self._packed = torch.zeros(sum(sizes.values()), dtype=torch.float64, device=device)
        self.totals = dict(zip(sizes, self._packed.split(list(sizes.values()))))
        """as in `RouterStep`, of the last step, by the router's name: of the whole model, in one order on all ranks"""
        self._own: Tensor | None = None  # 1 where `load` counts
        self._make_step = partial(RouterStep, num_microbatches, balance, level, z=z, weight=weight)
        no_load_E = torch.zeros(0, dtype=torch.int64, device="cpu")
        self._losses = list(self._make_step(load_E=no_load_E).coefficients)
        self._rate, self._group, self._replicas = bias_update_rate, group, replicas

    @contextmanager
    def step(self) -> Iterator[None]:
        """What runs inside is one training step. Collective at its end, unless the model has no router: there loads are
        summed and losses averaged over the ranks. The host does not wait for that on CUDA."""
        for name, router in self._here:
            totals = self.totals[name]
            router.step = self._make_step(load_E=load_of(totals).long(), totals=totals)
        self._packed.zero_()
        try:
            yield
        finally:
            for _, router in self._here:
                router.step = None
        if self._group is not None and self.totals:
            recorder = Recorder.current()
            with recorder.collective("routers", "the loads of the experts", recorder.members(self._group)):
                dist.all_reduce(self._packed, group=self._group)
            for totals in self.totals.values():
                losses_of(totals).div_(self._replicas)
        for name, router in self._here:
            if self._rate and router.e_score_correction_bias is not None:
                router.update_bias(load_of(self.totals[name]).long(), self._rate)

    def load(self, rank: int, size: int) -> Tensor:
        """How many tokens, of all replicas, experts got in the last step, of those in the stages here that are `rank`'s
        of `size` ranks with as many each: a scalar on the device. The host does not wait."""
        if self._own is None:
            self._own = torch.zeros_like(self._packed)
            own = dict(zip(self.totals, self._own.split([len(totals) for totals in self.totals.values()])))
            for name, router in self._here:
                each = router.out_features // size
                own[name][rank * each : (rank + 1) * each] = 1
        return (self._packed * self._own).sum()

    def changed_by_steps(self) -> list[Tensor]:
        """All that a step changes of the routers here and of what was counted, sharing memory."""
        biases = [router.e_score_correction_bias for _, router in self._here] if self._rate else []
        return [self._packed, *(bias for bias in biases if bias is not None)]

    def state_tensors(self) -> dict[str, Tensor]:
        """By name what the next step goes by, of the routers here: what they counted in the last one."""
        return {f"routers/{name}": self.totals[name] for name, _ in self._here}

    def metrics(self) -> dict[str, Tensor]:
        """What routers did in the last step: scalars on the device, none without a router. The host does not wait.

        load_max_over_mean: the largest of any router; dropped: tokens without a place at their expert, zero because no
        expert has a capacity here; the losses of `LOSSES`: the means over routers, without coefficients, where these
        are not zero.
        """
        every = self.totals.values()
        if not every:
            return {}
        load = torch.stack([max_over_mean(load_of(totals)) for totals in every]).max()
        means = torch.stack([losses_of(totals) for totals in every]).mean(0)
        losses = dict(zip(LOSSES, means.unbind()))
        found = {"load_max_over_mean": load, "dropped": load.new_zeros((), dtype=torch.int64)}
        return found | {name: losses[name] for name in self._losses}
