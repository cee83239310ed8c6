"""What is done about bad numbers: steps whose loss or gradient is not finite or leaps, and ranks that compute wrong.

A step whose loss or gradient norm is infinite or NaN changes nothing: the device sees to that, also for the step that
is queued behind it, before the host knows. Then all ranks run its batch again to find where it begins, keep what it
takes to do so later (`replay`), and stop, leave it out, or go back to a checkpoint and leave out its data.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from itertools import chain
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from dualpipe.nn.deferral import local
from dualpipe.parallel.mesh import DENSE
from dualpipe.parallel.tied import tied_parameters
from dualpipe.runtime.device import random_state, set_random_state
from dualpipe.runtime.recorder import Recorder
from dualpipe.schedule import Action
from dualpipe.train.anomaly.localize import Spot, Watch, bits, named_gradients, on_host, run_again, total, write_bundle
from dualpipe.train.data.loader import Batch
from dualpipe.train.metrics import MetricsWriter

if TYPE_CHECKING:
    from dualpipe.train.trainer import Run

# A router has collapsed that is so near the limit, where one expert gets every token, for so many steps in a row:
# routers that start at the limit have left it by then.
NEAR, PATIENCE = 0.9, 50
WINDOW, FEWEST = 128, 32  # steps that a spike is told from
_SHOWN = 8  # copies that differ
_MAD = 1.4826  # by which a normal distribution's standard deviation is larger than its median absolute deviation


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
    random: tuple[Tensor, Tensor | None]
    routers: list[Tensor]
    watch: Watch  # of the step: sums of what its actions gave


class Guard:
    """The guard of a run, as `config.guard` says. Every rank calls the same methods at the same steps."""

    def __init__(self, run: Run) -> None:
        self.run, self.settings = run, run.config.guard
        self._state = run.routers.changed_by_steps()
        self._in_row, self._until = 0, 0  # bad steps without a good one between; the last of them
        self._passed: Tensor | None = None  # 0 on the device, NaN once a queued step was not finite
        self._spiked, self._near = "", 0  # what was; steps in a row in which one expert got nearly every token
        self._history: dict[str, deque[float]] = {name: deque(maxlen=WINDOW) for name in ("loss", "grad_norm")}

    # -- around a step, on the device

    def keep(self, batch: Batch) -> Kept:
        """What there is before a step; the host waits for nothing."""
        self._batch = batch
        watch = Watch(self.run.recorder, total, kinds=(Action,))
        return Kept(batch, _random_states(), [each.clone() for each in self._state], watch)

    def mark(self, losses: Tensor | None) -> None:
        """Where a loss is not finite, make a gradient so: by the norm of all gradients every rank gets to know. None of
        a copy, which the norm leaves out."""
        if losses is not None:
            loss, copies = losses.sum(), set(self.run.pipeline.copied_parameters)
            grads = (local(p.grad) for p in self.run.optimizer.parameters if p.grad is not None and p not in copies)
            if (grad := next((g for g in grads if g.numel()), None)) is not None:
                grad[(0,) * grad.dim()].add_((loss - loss).to(grad.dtype))

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
        _restore_random(kept.random)

    # -- once the host knows a step's numbers

    def check(self, step: int, values: Mapping[str, Any], kept: Kept) -> None:
        """Raise BadStep where a step must not count."""
        if not math.isfinite(values["grad_norm"]):
            raise BadStep(step, values, kept)
        if step >= self._until:
            self._in_row = 0
        self._spiked = self._spike(step, values) if self.settings.spike else ""
        if self._spiked and self.settings.on_spike == "rollback":
            raise BadStep(step, values, kept, self._spiked)

    def warnings(self, metrics: Mapping[str, Any]) -> Iterator[str]:
        """What there is to say of the step that was checked last."""
        if self._spiked:
            yield f"WARNING: {self._spiked}"
        load, limit = metrics.get("load_max_over_mean", 0.0), self.run.load_limit
        self._near = self._near + 1 if limit > 1 and load >= NEAR * limit else 0
        if self._near == PATIENCE:  # once in a collapse
            yield (f"WARNING: for {PATIENCE} steps one expert of some layer got nearly every token "
                   f"(load_max_over_mean {load:.2f}, at most {limit:g}): its router has collapsed; "
                   "raise router.balance, to 0.01 for a start")

    def _spike(self, step: int, values: Mapping[str, Any]) -> str:
        """What is unusual about a step's numbers. Those of a step that counts are among those of later ones, so that
        what stays at another level is usual in the end."""
        found = []
        for name, history in self._history.items():
            value = values[name]
            middle = median(history) if history else value
            spread = _MAD * median(abs(each - middle) for each in history) if history else 0.0
            score = (value - middle) / max(spread, 1e-3 * abs(middle), 1e-12)
            if is_spike := len(history) >= FEWEST and not score <= self.settings.spike:
                found.append(f"{name} {value:.4g} is {score:.3g} robust deviations above the median {middle:.4g} of "
                             f"the last {len(history)} steps")
            if not is_spike or self.settings.on_spike == "warn":
                history.append(value)
        return f"step {step}: {' and '.join(found)}" if found else ""

    def everywhere(self, loss: Tensor | None) -> dict[str, Tensor]:
        """The loss on every rank where spikes are looked for, which all must see; else where it is known."""
        run = self.run
        if self.settings.spike and run.job.group is not None:
            shared = torch.zeros(1, dtype=torch.float64, device=run.job.device)
            if run.reports and loss is not None:
                shared[0] = loss
            with run.recorder.collective("loss", "the loss", run.recorder.members(run.job.group)):
                dist.all_reduce(shared, group=run.job.group)
            return {"loss": shared[0]}
        return {} if loss is None else {"loss": loss}

    # -- what follows from a bad step

    def resolve(self, bad: BadStep, writer: MetricsWriter | None) -> None:
        """Set where the run goes on, or raise FloatingPointError. Collective."""
        run, spiked = self.run, bool(bad.why)
        self._passed = None
        policy = "rollback" if spiked else self.settings.on_nonfinite
        text = bad.why or self._found(bad)
        self._in_row, self._until = self._in_row + 1, bad.step
        run.saver.anomaly(bad.step)
        if policy == "stop" or self._in_row > self.settings.limit:
            if policy != "stop":
                text += f"\nthe run stops, as it is one more than guard.limit = {self.settings.limit} in a row"
            raise FloatingPointError("\n".join(filter(None, [text, run.saver.advice(bad.step)])))
        if policy == "skip":
            run.done = run.loader.step = bad.step
            run.saver.save(run.state, run.done)
            went_on = "left out: nothing is updated by it"
        else:
            taken = bad.step + run.loader.passed_over  # batches until now, with that of the bad step
            target = run.saver.go_back(run.state)
            if target is None:
                raise FloatingPointError(f"{text}\nthere is no checkpoint to go back to; set checkpoint.interval, or "
                                         'guard.on_nonfinite = "skip"')
            run.done = run.loader.step = target
            run.loader.passed_over = taken - target
            went_on = f"back to step {target}; the data of steps {target + 1} to {bad.step} is left out"
            if writer is not None:
                writer.go_back(target)
        if writer is not None:
            writer.say(f"WARNING: {text}\n{went_on}")

    def _found(self, bad: BadStep) -> str:
        """What was found about a step that is not finite, by running it again; its bundle is written."""
        run, first = self.run, bad.values
        self.restore(bad.kept)
        seen = [spot for spot, value in on_host(bad.kept.watch.results).items() if not math.isfinite(value)]
        spots = run.job.ranks.gather(lambda: min(seen, default=None))
        then = min((spot for spot in spots if spot is not None), default=None)
        with run.recorder.doing("check", "the step again"):
            again = run_again(run, bad.kept.batch, bad.step)
        self.restore(bad.kept)
        loss = "" if math.isfinite(first["loss"]) or not run.model.has_last else f", the loss {first['loss']}"
        lines = [f"the gradient norm is {first['grad_norm']} at step {bad.step}{loss}; lower optimizer.lr, lengthen "
                 "optimizer.warmup_steps, or check the data",
                 again.text(f"{run.recorder.name(then.rank)}, {then.what}" if then else "")]
        try:
            path = write_bundle(run, bad.step, bad.kept.batch, first, again)
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
            mine = compare_copies(self._tensors(), self.run.job.place.group(*DENSE), self.run.recorder)
            found = [text for texts in self.run.job.ranks.gather(lambda: mine) for text in texts] + self._compare_ends()
        if (interval := self.settings.recheck_interval) and step % interval == 0:
            found += self._compute_twice(step, step // interval % self.run.config.train.num_chunks)
        if found:
            raise Corrupted(f"after step {step}: {'; '.join(dict.fromkeys(found))}; suspect its device or its memory, "
                            "and go on without it, from a checkpoint of before")

    def _compare_ends(self) -> list[str]:
        """Which ranks have other bits of a copy than those at the other end of their pipeline. Collective where the
        ends are on two ranks."""
        placement, place, recorder = self.run.schedule.placement, self.run.job.place, self.run.recorder
        if placement[0] == placement[-1]:
            return []
        tied = list(chain.from_iterable(map(tied_parameters, self.run.model.stages)))
        states = self.run.optimizer.state_tensors() if tied else {}
        kept = chain.from_iterable((parameter, *states[parameter].values()) for parameter in tied)
        mine = [int(bits(tensor)) for tensor in kept if isinstance(tensor, Tensor)]
        held: dict[int, dict[int, list[int]]] = {}  # by replica and rank
        for rank, (replica, values) in enumerate(self.run.job.ranks.gather(lambda: (place.replica, mine))):
            if values:
                held.setdefault(replica, {})[rank] = values
        return [f"{' or '.join(map(recorder.name, ends))} has wrong bits of what both ends of a pipeline have"
                for ends in held.values() if len(set(map(tuple, ends.values()))) > 1]

    def _tensors(self) -> dict[str, Tensor]:
        """All that a rank has of the model and its optimizer, by name."""
        found = {name: each for stage in self.run.model.stages for name, each in stage.named_buffers()}
        return found | {name: each for name, each in self.run.state.tensors().items() if isinstance(each, Tensor)}

    def _compute_twice(self, step: int, number: int) -> list[str]:
        """Run a micro-batch of this step, the last one, through the pipeline with whole backwards, and again with
        weight gradients apart, which are the same products: what differs. Gradients are dropped."""
        run, states, size = self.run, _random_states(), self.run.config.train.micro_batch_size
        part = Batch(*(each[number * size : (number + 1) * size] for each in self._batch))
        found: list[dict[Spot, int]] = []
        sums: list[dict[str, Tensor]] = []
        for deferred in (False, True):
            with run.pipeline.in_order(deferred=deferred), Watch(run.recorder, bits, kinds=(Action,)) as watch:
                run.forward_backward(part, run.criterion(step), num_chunks=1)
            found.append(on_host(watch.results))
            sums.append({name: bits(grad) for name, grad in named_gradients(run.model.stages).items()})
            run.pipeline.zero_grad()
            _restore_random(states)
        if run.qk_clip is not None:
            run.qk_clip.forget()
        spot = min((spot for spot, value in found[0].items() if found[1].get(spot) != value), default=None)
        names = [name for name, value in sums[0].items() if int(value) != int(sums[1].get(name, value + 1))]
        each = run.job.ranks.gather(lambda: (spot, names[:1]))
        if first := min((spot for spot, _ in each if spot is not None), default=None):
            what = first.what.replace("micro-batch 0", f"micro-batch {number}")  # it was run alone
            return [f"{run.recorder.name(first.rank)} got other bits for {what} when it computed that again"]
        return [f"{run.recorder.name(rank)} got other bits for the gradient of {name} when it computed micro-batch "
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


def _random_states() -> tuple[Tensor, Tensor | None]:
    """The states of torch alone: nothing else draws numbers in a step, and NumPy's takes 120 us."""
    return torch.get_rng_state(), random_state()


def _restore_random(states: tuple[Tensor, Tensor | None]) -> None:
    torch.set_rng_state(states[0])
    if states[1] is not None:
        set_random_state(states[1])
