"""Routers of a rank's stages in a training step: their settings, and the load counts and losses of the whole model.

    routers = RouterSet(stages, num_microbatches=8, balance=0.01, level="global", z=1e-3, group=group,
                        replicas=dp * cp * ep)
    for batch in batches:
        with routers.step():  # losses are added and loads counted
            pipeline.step(batch, num_chunks=8, ...)
        metrics = routers.metrics()  # of the whole model, on every rank

Every rank holds counts for all routers, zero for layers of other ranks. So one all-reduce over all ranks both sums the
loads over data-parallel ranks and collects the layers of the pipeline. The host never waits for the device.

Dimension letters: E experts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dualpipe.nn.routing.losses import LOSSES, RouterStep, load_of, losses_of, max_over_mean
from dualpipe.nn.routing.router import Router
from dualpipe.runtime.recorder import Recorder


class RouterSet:
    """Configures the routers in `stages` for a step, and collects the counts and losses of all routers of the model.

    Args:
        num_microbatches: see `RouterStep`.
        bias_update_rate: rate of `Router.update_bias` after each step, for routers with a correction bias.
        group: all ranks that train the model; None: this rank alone.
        replicas: number of ranks that hold each stage. A router must have the same name in its stage on all of them,
            and no other router may have this name.
        settings: of `RouterStep`: the coefficients balance and z, level ("global" uses the loads of the previous step),
            and weight and sequence_group, if ranks share sequences.

    Raises:
        TypeError: a setting that `RouterStep` does not have.
        ValueError: on all ranks, if names differ or repeat, or if there is a rate but no correction bias.
    """

    def __init__(
        self, stages: Iterable[nn.Module], *, num_microbatches: int, bias_update_rate: float = 0.0,
        group: dist.ProcessGroup | None = None, replicas: int = 1, device: torch.device | str | None = None,
        **settings: Any,
    ) -> None:
        self._local_routers = [
            (name, module) for stage in stages for name, module in stage.named_modules() if isinstance(module, Router)
        ]
        local_sizes = [
            (name, router.out_features, router.e_score_correction_bias is not None)
            for name, router in self._local_routers
        ]
        gathered = [local_sizes]
        if group is not None:
            gathered *= group.size()
            dist.all_gather_object(gathered, local_sizes, group=group)
        routers = [router for rank_routers in gathered for router in rank_routers]
        for name, count in Counter(name for name, _, _ in routers).items():
            if count != replicas:
                raise ValueError(f"all ranks together have {count} routers named {name!r}, but replicas is {replicas}; "
                                 "give every layer a name of its own, the same on each replica")
        if bias_update_rate and not any(has_bias for _, _, has_bias in routers):
            raise ValueError(f"bias_update_rate is {bias_update_rate}, but no router of this model has a correction "
                             "bias; set it to 0")
        sizes = {name: experts + len(LOSSES) for name, experts, _ in routers}
        self._packed = torch.zeros(sum(sizes.values()), dtype=torch.float64, device=device)
        self.totals = dict(zip(sizes, self._packed.split(list(sizes.values()))))
        """`RouterStep.totals` of the last step, of all routers of the model by name, in the same order on all ranks."""
        self._load_mask: Tensor | None = None  # 1 at the counts that `load` sums
        self._make_step = partial(RouterStep, num_microbatches, **settings)
        # A step for its coefficients only; the empty tensor stands for the loads that level "global" requires.
        step = self._make_step(load_E=torch.zeros(0, dtype=torch.int64, device="cpu"))
        self._losses = list(step.coefficients)
        self._rate = bias_update_rate
        self._group = group
        self._replicas = replicas

    @contextmanager
    def step(self, loss_scale: float | Tensor | None = None) -> Iterator[None]:
        """Set the routers up for the training step inside of the `with`, and collect its counts and losses at the end.

        loss_scale: see `RouterStep`; the same on every rank. Metrics are those of the losses without the scale.

        Leaving the `with` is a collective, unless the model has no router: it sums loads and averages losses over the
        ranks. On CUDA the host does not wait for it.
        """
        for name, router in self._local_routers:
            totals = self.totals[name]
            router.step = self._make_step(load_E=load_of(totals).long(), totals=totals, loss_scale=loss_scale)
        self._packed.zero_()
        try:
            yield
        finally:
            for _, router in self._local_routers:
                router.step = None
        if self._group is not None and self.totals:
            recorder = Recorder.current()
            with recorder.collective("routers", "the loads of the experts", recorder.members(self._group)):
                dist.all_reduce(self._packed, group=self._group)
            for totals in self.totals.values():
                losses_of(totals).div_(self._replicas)
        for name, router in self._local_routers:
            if self._rate and router.e_score_correction_bias is not None:
                router.update_bias(load_of(self.totals[name]).long(), self._rate)

    def load(self, rank: int, size: int) -> Tensor:
        """Return the number of tokens that the experts of an expert-parallel rank received in the last step.

        Counts tokens of all replicas, for the experts in this rank's stages that belong to expert-parallel rank `rank`
        of `size`; each has the same number of experts. Returns a scalar on the device; the host does not wait.
        """
        if self._load_mask is None:
            self._load_mask = torch.zeros_like(self._packed)
            sizes = [len(totals) for totals in self.totals.values()]
            masks = dict(zip(self.totals, self._load_mask.split(sizes)))
            for name, router in self._local_routers:
                experts_per_rank = router.out_features // size
                masks[name][rank * experts_per_rank : (rank + 1) * experts_per_rank] = 1
        return (self._packed * self._load_mask).sum()

    def changed_by_steps(self) -> list[Tensor]:
        """Return the tensors that a step changes: counts and correction biases, sharing memory."""
        biases = [router.e_score_correction_bias for _, router in self._local_routers] if self._rate else []
        return [self._packed, *(bias for bias in biases if bias is not None)]

    def state_tensors(self) -> dict[str, Tensor]:
        """Return the state that the next step reads, by name: the counts of this rank's routers in the last step."""
        return {f"routers/{name}": self.totals[name] for name, _ in self._local_routers}

    def metrics(self) -> dict[str, Tensor]:
        """Return the metrics of the last step: scalars on the device. Empty without routers. The host does not wait.

        load_max_over_mean: the largest load of an expert over the mean load, in the router where this is largest.
        dropped: number of tokens without room at their expert, zero because experts have no capacity limit. Losses of
        `LOSSES` with a coefficient that is not zero: means over routers, without coefficients.
        """
        all_totals = self.totals.values()
        if not all_totals:
            return {}
        load = torch.stack([max_over_mean(load_of(totals)) for totals in all_totals]).max()
        means = torch.stack([losses_of(totals) for totals in all_totals]).mean(0)
        losses = dict(zip(LOSSES, means.unbind()))
        metrics = {"load_max_over_mean": load, "dropped": load.new_zeros((), dtype=torch.int64)}
        return metrics | {name: losses[name] for name in self._losses}
