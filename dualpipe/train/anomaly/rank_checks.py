"""Ranks that compute wrong: copies whose bits differ, and a micro-batch that gives other bits when it is run twice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from itertools import chain

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from dualpipe.parallel.mesh import DENSE
from dualpipe.parallel.tied import tied_parameters
from dualpipe.runtime.device import RandomState
from dualpipe.runtime.recorder import Recorder
from dualpipe.schedule import Action
from dualpipe.train.anomaly.localize import Spot, Watch, bits, named_gradients, on_host
from dualpipe.train.checkpointing.training_state import TrainingState
from dualpipe.train.config.schema import GuardConfig
from dualpipe.train.data.token_stream import TokenBatch
from dualpipe.train.step.step_runner import StepRunner

_SHOWN = 8  # copies that differ


class Corrupted(FloatingPointError):
    """Ranks have other bits of what they must have the same of, or one gets others when it computes again."""


class RankChecks:
    """Checks, as `config.guard` says, that ranks compute right. Every rank calls the same methods at the same steps."""

    def __init__(self, settings: GuardConfig, runner: StepRunner, state: TrainingState) -> None:
        self._settings = settings
        self._runner = runner
        self._state = state

    def is_due(self, step: int) -> bool:
        """Return True if `check` has anything to do after this step."""
        intervals = self._settings.checksum_interval, self._settings.recheck_interval
        return any(interval and step % interval == 0 for interval in intervals)

    def check(self, step: int, batch: TokenBatch) -> None:
        """After this step, the last one, whose batch is given, do what is due. Collective; raises Corrupted on every
        rank."""
        found: list[str] = []
        if (interval := self._settings.checksum_interval) and step % interval == 0:
            mine = compare_copies(self._tensors(), self._runner.job.place.group(*DENSE), self._runner.recorder)
            found = list(chain.from_iterable(self._runner.job.ranks.gather(lambda: mine)))
            found += self._compare_ends()
        if (interval := self._settings.recheck_interval) and step % interval == 0:
            found += self._compute_twice(batch, step, step // interval % self._runner.config.train.num_chunks)
        if found:
            raise Corrupted(f"after step {step}: {'; '.join(dict.fromkeys(found))}; suspect its device or its memory, "
                            "and go on without it, from a checkpoint of before")

    def _compare_ends(self) -> list[str]:
        """Which ranks have other bits of a copy than those at the other end of their pipeline. Collective where the
        ends are on two ranks."""
        runner = self._runner
        placement, place, recorder = runner.schedule.placement, runner.job.place, runner.recorder
        if placement[0] == placement[-1]:
            return []
        tied = list(chain.from_iterable(map(tied_parameters, runner.model.stages)))
        states = runner.optimizer.state_tensors() if tied else {}
        kept = chain.from_iterable((parameter, *states[parameter].values()) for parameter in tied)
        mine = [int(bits(tensor)) for tensor in kept if isinstance(tensor, Tensor)]
        held: dict[int, dict[int, list[int]]] = {}  # by replica and rank
        for rank, (replica, values) in enumerate(runner.job.ranks.gather(lambda: (place.replica, mine))):
            if values:
                held.setdefault(replica, {})[rank] = values
        return [f"{' or '.join(map(recorder.name, ends))} has wrong bits of what both ends of a pipeline have"
                for ends in held.values() if len(set(map(tuple, ends.values()))) > 1]

    def _tensors(self) -> dict[str, Tensor]:
        """All that a rank has of the model and its optimizer, by name."""
        found = {name: each for stage in self._runner.model.stages for name, each in stage.named_buffers()}
        return found | {name: each for name, each in self._state.tensors().items() if isinstance(each, Tensor)}

    def _compute_twice(self, batch: TokenBatch, step: int, number: int) -> list[str]:
        """Run a micro-batch of this step, the last one, through the pipeline with whole backwards, and again with
        weight gradients apart, which are the same products: what differs. Gradients are dropped."""
        runner, states, size = self._runner, RandomState.capture(), self._runner.config.train.micro_batch_size
        part = TokenBatch(*(each[number * size : (number + 1) * size] for each in batch))
        found: list[dict[Spot, int]] = []
        sums: list[dict[str, Tensor]] = []
        for deferred in (False, True):
            with (
                runner.pipeline.in_order(deferred=deferred),
                Watch(runner.recorder, bits, kinds=(Action,)) as watch,
            ):
                runner.forward_backward(part, runner.criterion(step), num_microbatches=1)
            found.append(on_host(watch.results))
            sums.append({name: bits(grad) for name, grad in named_gradients(runner.model.stages).items()})
            runner.pipeline.zero_grad()
            states.restore()
        runner.drop_scores()
        spot = min((spot for spot, value in found[0].items() if found[1].get(spot) != value), default=None)
        names = [name for name, value in sums[0].items() if int(value) != int(sums[1].get(name, value + 1))]
        each = runner.job.ranks.gather(lambda: (spot, names[:1]))
        if first := min((spot for spot, _ in each if spot is not None), default=None):
            what = first.what.replace("micro-batch 0", f"micro-batch {number}")  # it was run alone
            return [f"{runner.recorder.name(first.rank)} got other bits for {what} when it computed that again"]
        return [f"{runner.recorder.name(rank)} got other bits for the gradient of {name} when it computed micro-batch "
                f"{number} again" for rank, (_, names) in enumerate(each) for name in names]


def compare_copies(tensors: Mapping[str, Tensor], replicas: ProcessGroup | None, recorder: Recorder) -> list[str]:
    """Which ranks have other bits than the rest of what they must have the same of: plain tensors over `replicas`, and
    DTensors over the dimensions of their mesh along which they are replicated. Collective over these."""
    held: dict[ProcessGroup, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        groups = [replicas]
        if isinstance(tensor, DTensor):
            placed = enumerate(tensor.placements)
            groups = [tensor.device_mesh.get_group(i) for i, place in placed if place.is_replicate()]
        for group in groups:
            if group is not None and group.size() > 1:
                held.setdefault(group, {})[name] = tensor
    found = []
    for group, named in held.items():
        ranks, mine = recorder.members(group), torch.stack([bits(tensor) for tensor in named.values()])
        everybodys = [torch.empty_like(mine) for _ in ranks]
        with recorder.collective("checksums", "checksums", ranks, mine.nbytes):
            dist.all_gather(everybodys, mine, group=group)
        for name, values in zip(named, torch.stack(everybodys, 1).tolist()):
            (most, count), *others = Counter(values).most_common()
            if others:
                tied = 2 * count <= len(ranks)
                wrong = [recorder.name(rank) for rank, value in zip(ranks, values) if value != most or tied]
                found.append(f"{' or '.join(wrong)} has wrong bits of {name}, of which ranks "
                             f"{', '.join(map(str, ranks))} must have the same")
    return found[:_SHOWN]
