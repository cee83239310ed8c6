"""The comparison of a pipelined step in bfloat16 with the uncut model's, by the errors of both against float64.

As routes are replayed, a router that chooses wrongly would not be seen. So the choices are counted that each model
would have made otherwise.
"""

from __future__ import annotations

from itertools import chain
from typing import NamedTuple

from dualpipe.runtime.device import deterministic
from dualpipe.runtime.recorder import Recorder
from dualpipe.train.launch.distributed import Job
from dualpipe.train.model_parity.bf16.models import BF16, ReplayedModels
from dualpipe.train.model_parity.bf16.rounding import (
    BOUNDS,
    MicrobatchSums,
    StageAccumulation,
    measure_gradients,
    measure_losses,
)
from dualpipe.train.model_parity.bf16.routes import Replay, RouteCount
from dualpipe.train.model_parity.bf16.search import OriginSearch
from dualpipe.train.model_parity.models.cut_model import ComparedModel
from dualpipe.train.model_parity.models.origin import Origin
from dualpipe.train.model_parity.models.pipelined import ActionResults
from dualpipe.train.parity_errors import Accumulation, Rounding, accumulation_failures, rounding_failures

MORE_TURNED = 8  # choices, or 1%, that a module of the pipeline may turn besides twice those of the uncut model


class RouteReport(NamedTuple):
    """The choices of each module, in the uncut model and in the pipeline. unreplayed: the modules that did not choose
    in the pipeline, which has them too."""

    uncut: dict[str, RouteCount]
    pipelined: dict[str, RouteCount]
    unreplayed: list[str]

    def failures(self) -> list[str]:
        """Return the first module that turns more choices than rounding explains, as text."""
        for name, found in self.pipelined.items():
            expected = self.uncut[name].turned / self.uncut[name].made * found.made
            if found.turned > 2 * expected + max(MORE_TURNED, found.made / 100):
                return [f"{name} would choose {found} experts otherwise than in float64, and {self.uncut[name]} in the "
                        "uncut model"]
        return []


class Bf16Report(NamedTuple):
    """The result of a comparison in bfloat16, the same on every rank. failures: the bounds that are exceeded; origin:
    the first place, None where it is not known."""

    rounding: list[Rounding]
    accumulation: list[Accumulation]
    routes: RouteReport
    failures: list[str]
    origin: Origin | None


class Bf16Comparison:
    """A model in bfloat16, uncut and in a pipeline, against float64. Collective over all ranks, as is `run`.

    Raises ValueError, on all ranks, where stages have other weights than the uncut model, or hand on another dtype.
    """

    def __init__(self, model: ComparedModel, job: Job) -> None:
        self._job = job
        self._num_chunks = model.num_chunks
        self._models = ReplayedModels(model, job)
        # One for a micro-batch, and two for a replica.
        self._num_additions = model.num_chunks + 2 * job.place.replicas

    def run(self) -> Bf16Report:
        """Compare a step, and its gradients with those of its micro-batches."""
        models = self._models
        ranks = self._job.ranks
        replica = self._job.place.replica
        ranks.agree(models.check_weights)
        with deterministic():
            exact = ranks.agree(models.record)
            narrow, uncut_replay = ranks.agree(lambda: models.train_uncut(BF16))
            observer = ActionResults()
            with Recorder.current().observed_by(observer):
                losses, replay = models.train()
            ranks.agree(lambda: self._check_dtypes(observer))
            gradients = models.pipelined.gradients()
            own = [] if replica else measure_gradients(gradients, narrow, exact)  # pipeline 0 has the same ones
            if losses is not None:
                own.append(measure_losses(self._name_of_losses(), losses, replica, narrow, exact))
            own_sums = self._accumulate()
            rounding = list(chain.from_iterable(ranks.gather(lambda: own)))
            sums = list(chain.from_iterable(ranks.gather(lambda: own_sums)))
            routes = self._count_routes(uncut_replay, replay)
            search = OriginSearch(models, self._job, self._num_chunks, self._num_additions)
            origin = search.run(rounding, sums, exact, observer)
        measured = [each.rounding for each in rounding]
        added = [each.accumulation for each in sums]
        failures = [*rounding_failures(measured, BOUNDS), *accumulation_failures(added), *routes.failures()]
        return Bf16Report(measured, added, routes, failures, origin)

    def _check_dtypes(self, observer: ActionResults) -> None:
        """Raise ValueError where a stage hands on another dtype than bfloat16."""
        last = self._models.pipelined.schedule.num_stages - 1
        for boundary, tensors in observer.results.items():
            if boundary.kind != "F" or boundary.stage == last:  # which may return float32 logits
                continue
            others = {tensor.dtype for tensor in tensors if tensor.is_floating_point()} - {BF16}
            if others:
                raise ValueError(f"stage {boundary.stage} hands on {others.pop()}, and --dtype bf16 wants "
                                 "torch.bfloat16; have place(stages, mesh, dtype) give its policy that dtype")

    def _name_of_losses(self) -> str:
        name = "loss of the micro-batches"
        return f"{name} of pipeline {self._job.place.replica}" if self._job.place.replicas > 1 else name

    def _accumulate(self) -> list[StageAccumulation]:
        """Return how far the gradients of the last step are from the sums of its micro-batches', in pipeline 0.
        Collective."""
        step = self._models.pipelined.gradients()
        sums = MicrobatchSums()
        for microbatch in range(self._num_chunks):
            self._models.train([microbatch])
            sums.add(self._models.pipelined.gradients())
        return [] if self._job.place.replica else sums.measure(step, self._num_additions)

    def _count_routes(self, uncut: Replay, pipelined: Replay) -> RouteReport:
        """Return the choices of all ranks. Collective."""
        names = list(uncut.counts)
        own_modules = set(self._models.modules.values())
        unreplayed = {name for name in names if name in own_modules and name not in pipelined.counts}
        of_all = self._job.ranks.gather(lambda: (pipelined.counts, unreplayed))
        total: dict[str, RouteCount] = {}
        for name in names:
            counts = [of_rank[name] for of_rank, _ in of_all if name in of_rank]
            if counts:
                total[name] = RouteCount(sum(each.made for each in counts), sum(each.turned for each in counts))
        missing = set(chain.from_iterable(of_rank for _, of_rank in of_all))
        return RouteReport(uncut.counts, total, [name for name in names if name in missing])
