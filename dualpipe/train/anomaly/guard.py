"""What is done about bad numbers: steps whose loss or gradient is not finite or leaps, and ranks that compute wrong.

A step whose loss or gradient norm is infinite or NaN changes nothing: the device sees to that, also for the step that
is queued behind it, before the host knows. Then all ranks run its batch again to find where it begins, keep what it
takes to do so later (`replay`), and stop, leave it out, or go back to a checkpoint and leave out its data.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any, NamedTuple

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
from dualpipe.train.anomaly.localize import Spot, Watch, bits, named_gradients, on_host, run_again, total, write_bundle
from dualpipe.train.anomaly.spikes import SpikeDetector
from dualpipe.train.checkpointing.saver import Saver, State
from dualpipe.train.data.loader import Batch
from dualpipe.train.metrics import MetricsWriter
from dualpipe.train.step.step_runner import StepRunner

# A router has collapsed that is so near the limit, where one expert gets every token, for so many steps in a row:
# routers that start at the limit have left it by then.
NEAR, PATIENCE = 0.9, 50
_SHOWN = 8  # copies that differ


class Corrupted(FloatingPointError):
    """Ranks have other bits of what they must have the same of, or one gets others when it computes again."""


class BadStep(Exception):
    """A step, from 1, that must not count as it is. values: its metrics, kept: see `Kept`; why: what is wrong."""

    def __init__(self, step: int, values: Mapping[str, Any], kept: Kept, why: str = "") -> None:
        super().__init__(why)
        self.step, self.values, self.kept, self.why = step, values, kept, why


class Kept(NamedTuple):
    """What it takes to run a step again besides parameters, which it has not changed if it is to be."""

    batch: Batch
    random: RandomState
    routers: list[Tensor]
    watch: Watch  # of the step: sums of what its actions gave


class Guard:
    """The guard of a run, as `config.guard` says. Every rank calls the same methods at the same steps.

    runner: runs steps again; saver, state: for checkpoints to go back to.
    """

    def __init__(self, runner: StepRunner, saver: Saver, state: State) -> None:
        self.runner = runner
        self.saver = saver
        self.state = state
        self.settings = runner.config.guard
        self._state = runner.routers.changed_by_steps()
        model = runner.model.config
        self._load_limit = model.num_experts / model.num_experts_per_tok  # of load_max_over_mean
        self._in_row, self._until = 0, 0  # bad steps without a good one between; the last of them
        self._passed: Tensor | None = None  # 0 on the device, NaN once a queued step was not finite
        self._spiked, self._near = "", 0  # what was; steps in a row in which one expert got nearly every token
        self._spikes = SpikeDetector(self.settings.spike, spikes_count=self.settings.on_spike == "warn")

    # -- around a step, on the device

    def keep(self, batch: Batch) -> Kept:
        """What there is before a step; the host waits for nothing."""
        self._batch = batch
        watch = Watch(self.runner.recorder, total, kinds=(Action,))
        # Of torch alone: nothing else draws numbers in a step, and NumPy's state takes 120 us.
        return Kept(batch, RandomState.capture(), [each.clone() for each in self._state], watch)

    def judge(self, norm: Tensor) -> Tensor:
        """The norm that the optimizer goes by: NaN also where that of a step before was not finite, which the host does
        not know yet."""
        found = norm - norm  # 0, or NaN
        if self._passed is not None:
            found = found + self._passed.to(found.dtype)
        self._passed = found
        return norm + found

    def restore(self, kept: Kept) -> None:
        """Have routers and random numbers as they were before a step that changed nothing else."""
        torch._foreach_copy_(self._state, kept.routers)
        kept.random.restore()

    # -- once the host knows a step's numbers

    def check(self, step: int, values: Mapping[str, Any], kept: Kept) -> None:
        """Raise BadStep where a step must not count."""
        if not math.isfinite(values["grad_norm"]):
            raise BadStep(step, values, kept)
        if step >= self._until:
            self._in_row = 0
        self._spiked = self._spikes.find(step, values)
        if self._spiked and self.settings.on_spike == "rollback":
            raise BadStep(step, values, kept, self._spiked)

    def warnings(self, metrics: Mapping[str, Any]) -> Iterator[str]:
        """What there is to say of the step that was checked last."""
        if self._spiked:
            yield f"WARNING: {self._spiked}"
        load, limit = metrics.get("load_max_over_mean", 0.0), self._load_limit
        self._near = self._near + 1 if limit > 1 and load >= NEAR * limit else 0
        if self._near == PATIENCE:  # once in a collapse
            yield (f"WARNING: for {PATIENCE} steps one expert of some layer got nearly every token "
                   f"(load_max_over_mean {load:.2f}, at most {limit:g}): its router has collapsed; "
                   "raise router.balance, to 0.01 for a start")

    def everywhere(self, loss: Tensor | None) -> dict[str, Tensor]:
        """The loss on every rank where spikes are looked for, which all must see; else where it is known."""
        runner, job = self.runner, self.runner.job
        if self.settings.spike and job.group is not None:
            shared = torch.zeros(1, dtype=torch.float64, device=job.device)
            if runner.reports and loss is not None:
                shared[0] = loss
            runner.all_reduce("loss", "the loss", shared, job.group)
            return {"loss": shared[0]}
        return {} if loss is None else {"loss": loss}

    # -- what follows from a bad step

    def resolve(self, bad: BadStep, writer: MetricsWriter | None) -> int:
        """Return the steps that are done where the run goes on, or raise FloatingPointError. Collective."""
        loader, spiked = self.state.loader, bool(bad.why)
        self._passed = None
        policy = "rollback" if spiked else self.settings.on_nonfinite
        text = bad.why or self._found(bad)
        self._in_row, self._until = self._in_row + 1, bad.step
        self.saver.anomaly(bad.step)
        if policy == "stop" or self._in_row > self.settings.limit:
            if policy != "stop":
                text += f"\nthe run stops, as it is one more than guard.limit = {self.settings.limit} in a row"
            raise FloatingPointError("\n".join(filter(None, [text, self.saver.advice(bad.step)])))
        if policy == "skip":
            done = loader.step = bad.step
            self.saver.save(self.state, done)
            went_on = "left out: nothing is updated by it"
        else:
            taken = bad.step + loader.passed_over  # batches until now, with that of the bad step
            target = self.saver.go_back(self.state)
            if target is None:
                raise FloatingPointError(f"{text}\nthere is no checkpoint to go back to; set checkpoint.interval, or "
                                         'guard.on_nonfinite = "skip"')
            done = loader.step = target
            loader.passed_over = taken - target
            went_on = f"back to step {target}; the data of steps {target + 1} to {bad.step} is left out"
            if writer is not None:
                writer.go_back(target)
        if writer is not None:
            writer.say(f"WARNING: {text}\n{went_on}")
        return done

    def _found(self, bad: BadStep) -> str:
        """What was found about a step that is not finite, by running it again; its bundle is written."""
        runner, first = self.runner, bad.values
        self.restore(bad.kept)
        seen = [spot for spot, value in on_host(bad.kept.watch.results).items() if not math.isfinite(value)]
        spots = runner.job.ranks.gather(lambda: min(seen, default=None))
        then = min((spot for spot in spots if spot is not None), default=None)
        with runner.recorder.doing("check", "the step again"):
            again = run_again(runner, bad.kept.batch, bad.step)
        self.restore(bad.kept)
        loss = "" if math.isfinite(first["loss"]) or not runner.model.has_last else f", the loss {first['loss']}"
        lines = [f"the gradient norm is {first['grad_norm']} at step {bad.step}{loss}; lower optimizer.lr, lengthen "
                 "optimizer.warmup_steps, or check the data",
                 again.text(f"{runner.recorder.name(then.rank)}, {then.what}" if then else "")]
        try:
            path = write_bundle(runner, self.state, bad.step, bad.kept.batch, first, again)
            lines.append(f"all that the step takes is kept: dualpipe replay {path}")
        except OSError as error:  # such as a full disk: what is known must be said all the same
            lines.append(f"what the step takes could not be kept: {error}")
        self.restore(bad.kept)
        return "\n".join(lines)

    # -- ranks that compute wrong

    def is_due(self, step: int) -> bool:
        """Whether `check_ranks` has anything to do after this step."""
        intervals = self.settings.checksum_interval, self.settings.recheck_interval
        return any(interval and step % interval == 0 for interval in intervals)

    def check_ranks(self, step: int) -> None:
        """After this step, the last one, do what is due. Collective; raises Corrupted on every rank."""
        found: list[str] = []
        if (interval := self.settings.checksum_interval) and step % interval == 0:
            mine = compare_copies(self._tensors(), self.runner.job.place.group(*DENSE), self.runner.recorder)
            found = list(chain.from_iterable(self.runner.job.ranks.gather(lambda: mine)))
            found += self._compare_ends()
        if (interval := self.settings.recheck_interval) and step % interval == 0:
            found += self._compute_twice(step, step // interval % self.runner.config.train.num_chunks)
        if found:
            raise Corrupted(f"after step {step}: {'; '.join(dict.fromkeys(found))}; suspect its device or its memory, "
                            "and go on without it, from a checkpoint of before")

    def _compare_ends(self) -> list[str]:
        """Which ranks have other bits of a copy than those at the other end of their pipeline. Collective where the
        ends are on two ranks."""
        runner = self.runner
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
        found = {name: each for stage in self.runner.model.stages for name, each in stage.named_buffers()}
        return found | {name: each for name, each in self.state.tensors().items() if isinstance(each, Tensor)}

    def _compute_twice(self, step: int, number: int) -> list[str]:
        """Run a micro-batch of this step, the last one, through the pipeline with whole backwards, and again with
        weight gradients apart, which are the same products: what differs. Gradients are dropped."""
        runner, states, size = self.runner, RandomState.capture(), self.runner.config.train.micro_batch_size
        part = Batch(*(each[number * size : (number + 1) * size] for each in self._batch))
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
