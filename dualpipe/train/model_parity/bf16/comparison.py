"""Comparison of a pipelined and an unpipelined step in bfloat16, by the errors of both against float64.

Routes are replayed, which would hide a router that chooses wrongly. So the comparison counts the choices that the
models would have made differently.
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
    StageRounding,
    measure_gradients,
    measure_losses,
)
from dualpipe.train.model_parity.bf16.routes import Replay, RouteCount
from dualpipe.train.model_parity.bf16.search import OriginSearch
from dualpipe.train.model_parity.models.cut_model import ComparedModel
from dualpipe.train.model_parity.models.origin import Origin
from dualpipe.train.model_parity.models.pipelined import ActionResults
from dualpipe.train.parity_errors import Accumulation, Rounding, accumulation_failures, rounding_failures

# A module of the pipeline may change twice as many choices as in the unpipelined model, and this many (or 1%) more.
MORE_CHANGED = 8


class RouteReport(NamedTuple):
    """The choices of all modules, by name.

    unpipelined, pipelined: choices in the two models. unreplayed: modules that made no choice in the pipeline.
    """

    unpipelined: dict[str, RouteCount]
    pipelined: dict[str, RouteCount]
    unreplayed: list[str]

    def failures(self) -> list[str]:
        """Return a text about the first module that changes more choices than rounding explains, if there is one."""
        for name, count in self.pipelined.items():
            unpipelined = self.unpipelined[name]
            expected = unpipelined.changed / unpipelined.made * count.made
            if count.changed > 2 * expected + max(MORE_CHANGED, count.made / 100):
                return [f"{name} would choose {count} experts differently than in float64, and {unpipelined} in the "
                        "unpipelined model"]
        return []


class Bf16Report(NamedTuple):
    """The result of a comparison in bfloat16, the same on every rank.

    failures: texts about exceeded bounds; origin: the first place that differs, None if nothing does.
    """

    rounding: list[Rounding]
    accumulation: list[Accumulation]
    routes: RouteReport
    failures: list[str]
    origin: Origin | None


class Bf16Comparison:
    """A model in bfloat16, unpipelined and in a pipeline, against float64. Construction and `run` are collective.

    Raises ValueError, on all ranks, if stages have other weights than the unpipelined model, or another output dtype.
    """

    def __init__(self, model: ComparedModel, job: Job) -> None:
        self._job = job
        self._num_chunks = model.num_chunks
        self._models = ReplayedModels(model, job)
        self.note = self._models.note
        # One per micro-batch, and two per replica.
        self._num_additions = model.num_chunks + 2 * job.place.replicas

    def run(self) -> Bf16Report:
        """Compare a step with float64, and its gradients with the sums over its micro-batches."""
        models = self._models
        ranks = self._job.ranks
        replica = self._job.place.replica
        ranks.agree(models.check_weights)
        with deterministic():
            exact = ranks.agree(models.record)
            narrow, unpipelined_replay = ranks.agree(lambda: models.train_unpipelined(BF16))
            observer = ActionResults()
            with Recorder.current().observed_by(observer):
                losses, replay = models.train()
            ranks.agree(lambda: self._check_dtypes(observer))
            gradients = models.pipelined.gradients()
            rank_rounding: list[StageRounding] = []
            if not replica:  # the other pipelines have the same gradients as pipeline 0
                rank_rounding = measure_gradients(gradients, narrow, exact)
            if losses is not None:
                rank_rounding.append(measure_losses(self._name_of_losses(), losses, replica, narrow, exact))
            rank_sums = self._compare_with_microbatches()
            stage_rounding = list(chain.from_iterable(ranks.gather(lambda: rank_rounding)))
            stage_sums = list(chain.from_iterable(ranks.gather(lambda: rank_sums)))
            routes = self._count_routes(unpipelined_replay, replay)
            search = OriginSearch(models, self._job, self._num_chunks, self._num_additions)
            origin = search.run(stage_rounding, stage_sums, exact, observer)
        rounding = [error.rounding for error in stage_rounding]
        accumulation = [error.accumulation for error in stage_sums]
        failures = [*rounding_failures(rounding, BOUNDS), *accumulation_failures(accumulation), *routes.failures()]
        return Bf16Report(rounding, accumulation, routes, failures, origin)

    def _check_dtypes(self, observer: ActionResults) -> None:
        """Raise ValueError if the outputs of a stage are not in bfloat16."""
        last = self._models.pipelined.schedule.num_stages - 1
        for boundary, tensors in observer.results.items():
            if boundary.kind != "F" or boundary.stage == last:  # the last stage may return float32 logits
                continue
            others = {tensor.dtype for tensor in tensors if tensor.is_floating_point()} - {BF16}
            if others:
                raise ValueError(f"the outputs of stage {boundary.stage} are {others.pop()}, but --dtype bf16 needs "
                                 "torch.bfloat16; make place(stages, mesh, dtype) use that dtype in its policy")

    def _name_of_losses(self) -> str:
        name = "loss of the micro-batches"
        return f"{name} of pipeline {self._job.place.replica}" if self._job.place.replicas > 1 else name

    def _compare_with_microbatches(self) -> list[StageAccumulation]:
        """Compare the gradients of the last step with the sums over its micro-batches. Collective.

        The result is [] on ranks outside of pipeline 0.
        """
        step = self._models.pipelined.gradients()
        sums = MicrobatchSums()
        for microbatch in range(self._num_chunks):
            self._models.train([microbatch])
            sums.add(self._models.pipelined.gradients())
        return [] if self._job.place.replica else sums.measure(step, self._num_additions)

    def _count_routes(self, unpipelined: Replay, pipelined: Replay) -> RouteReport:
        """Return the choices summed over all ranks. Collective."""
        names = list(unpipelined.counts)
        rank_modules = set(self._models.modules.values())
        rank_unreplayed = {name for name in names if name in rank_modules and name not in pipelined.counts}
        gathered = self._job.ranks.gather(lambda: (pipelined.counts, rank_unreplayed))
        totals: dict[str, RouteCount] = {}
        for name in names:
            counts = [rank_counts[name] for rank_counts, _ in gathered if name in rank_counts]
            if counts:
                totals[name] = RouteCount(sum(count.made for count in counts), sum(count.changed for count in counts))
        unreplayed = set(chain.from_iterable(rank_names for _, rank_names in gathered))
        return RouteReport(unpipelined.counts, totals, [name for name in names if name in unreplayed])
