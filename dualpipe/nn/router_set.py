"""The routers of a whole pipelined model, of which every rank holds some.

    routers = RouterSet(stages, balance=0.01, level="global", z=1e-3, num_chunks=8, group=group, replicas=dp * ep)
    for batch in batches:
        with routers.step():  # losses are added and loads counted
            pipeline.step(batch, num_chunks=8, ...)
        metrics = routers.metrics()  # of the whole model, on every rank

Every rank has statistics of all routers, those of other ranks' layers zero: so one all-reduce over all ranks both sums
the loads over data-parallel ranks and brings together the layers of the pipeline.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dualpipe.nn.router import BalancedRoutes, Router
from dualpipe.nn.router_losses import Level, RouterStatistics, RouterStep, reduce_statistics


class RouterSet:
    """Tells the routers in `stages` what to do in a step, and collects what all of the model's did.

    num_chunks: the micro-batches of a step on a rank.
    balance, level, z: losses as in `RouterStep`; level "global" takes the loads of the step before.
    bias_update_rate: after each step, of `Router.update_bias`, for the routers that have a correction bias.
    balanced: `BalancedRoutes` instead of the routers' own choice; balanced_stride: between the experts of a token.
    group: all ranks that train the model, None for one; replicas: how many of them hold each stage. A router must have
        the same name in its stage on all of those, and no other router this name.

    Raises `ValueError`, on all ranks, where names are not so, for a rate where there is no correction bias, and for a
    stride that leaves experts out.
    """

    def __init__(
        self,
        stages: Iterable[nn.Module],
        *,
        num_chunks: int,
        balance: float = 0.0,
        level: Level = "sequence",
        z: float = 0.0,
        bias_update_rate: float = 0.0,
        balanced: bool = False,
        balanced_stride: int = 1,
        group: dist.ProcessGroup | None = None,
        replicas: int = 1,
        device: torch.device | str | None = None,
    ) -> None:
        self._here = [pair for stage in stages for pair in stage.named_modules() if isinstance(pair[1], Router)]
        own = [(name, router.out_features, router.e_score_correction_bias is not None) for name, router in self._here]
        gathered = [own]
        if group is not None:
            gathered *= group.size()
            dist.all_gather_object(gathered, own, group=group)
        routers = [router for part in gathered for router in part]  # of the model, on all ranks
        counts = Counter(name for name, _, _ in routers)
        for name, found in counts.items():
            if found != replicas:
                raise ValueError(f"all ranks together have {found} routers named {name!r}, but replicas is {replicas}; "
                                 "give every layer a name of its own, the same on each replica")
        if bias_update_rate and not any(has_bias for _, _, has_bias in routers):
            raise ValueError(f"bias_update_rate is {bias_update_rate}, but no router of this model has a correction "
                             "bias; set it to 0")
        self.statistics = {name: RouterStatistics(experts, device=device) for name, experts, _ in routers}
        """those of the last step, by the router's name: of the whole model, in the same order on all ranks"""
        self._make_step = partial(RouterStep, num_chunks, balance, level, z=z)
        self._losses = {"balance_loss": bool(balance), "z_loss": bool(z)}
        self._rate, self._group, self._replicas = bias_update_rate, group, replicas
        if balanced:
            routes = BalancedRoutes(balanced_stride)
            for _, experts, _ in routers:
                routes.check(experts)
            for _, router in self._here:
                router.choice = routes

    @contextmanager
    def step(self) -> Iterator[None]:
        """What runs inside is one training step. Collective at its end, unless the model has no router."""
        for name, router in self._here:
            statistics = self.statistics[name]
            router.step = self._make_step(load_E=statistics.load_E, statistics=statistics)
        for statistics in self.statistics.values():
            statistics.reset()
        try:
            yield
        finally:
            for _, router in self._here:
                router.step = None
        if self._group is not None:
            reduce_statistics(list(self.statistics.values()), self._group, replicas=self._replicas)
        for name, router in self._here:
            if self._rate and router.e_score_correction_bias is not None:
                router.update_bias(self.statistics[name].load_E, self._rate)

    def state_tensors(self) -> dict[str, Tensor]:
        """By name what the next step goes by, of the routers here: what they counted in the last one."""
        return {f"routers/{name}": self.statistics[name].totals for name, _ in self._here}

    def metrics(self) -> dict[str, Tensor]:
        """What routers did in the last step: scalars on the device, none without a router. The host does not wait.

        load_max_over_mean: the largest of any router; dropped: the sum over routers; balance_loss and z_loss: the means
        over routers, without coefficients, where these are not zero.
        """
        every = self.statistics.values()
        if not every:
            return {}
        found = {
            "load_max_over_mean": torch.stack([each.max_over_mean for each in every]).max(),
            "dropped": torch.stack([each.dropped for each in every]).sum(),
        }
        for name, wanted in self._losses.items():
            if wanted:
                found[name] = torch.stack([getattr(each, name) for each in every]).mean()
        return found
