"""The training loop of one rank: a batch, a step of the pipeline, an update; and what is said, saved and checked of it.

The way of a step: `Trainer._steps` -> `Trainer._step` -> `StepRunner.run_step` -> `Pipeline.step`.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dualpipe.checkpoint import save_hf
from dualpipe.models.flops import flops_per_token
from dualpipe.runtime.device import Event, deterministic, model_name, new_stream, record, to_host
from dualpipe.runtime.files import lock
from dualpipe.runtime.peak_tflops import peak_tflops
from dualpipe.runtime.rank_process import RankInfo
from dualpipe.runtime.recorder import Recorder
from dualpipe.train.anomaly.guard import BadStep, Guard, Kept
from dualpipe.train.build import check_export
from dualpipe.train.checkpointing import Saver, State, describe
from dualpipe.train.config.resolve import Resolved, keep_batch, saved_batch
from dualpipe.train.config.schema import AUTO, Config
from dualpipe.train.data.loader import Batch
from dualpipe.train.data.run_data import RunData
from dualpipe.train.evaluate import evaluate
from dualpipe.train.garbage_collection import GarbageCollection
from dualpipe.train.health.watchdog import Watchdog
from dualpipe.train.launch.distributed import Job, join
from dualpipe.train.metrics import MetricsWriter, StepMetrics, Throughput, draw, memory_bytes, say, set_aside
from dualpipe.train.observers.profiler import ProfiledSteps, check_memory_snapshot, memory_snapshot
from dualpipe.train.observers.step_window import Steps
from dualpipe.train.observers.tracing import TracedSteps
from dualpipe.train.optim.optimizer import learning_rate
from dualpipe.train.run_description import count_parameters, describe_run
from dualpipe.train.step_runner import StepRunner
from dualpipe.train.step_sync import StartUp, Votes, farewell


def train(
    config: Config, info: RankInfo, traced: Steps | None = None, *, profiled: Steps | None = None,
    snapshot: bool = False,
) -> int:
    """Train as rank `info` of the job; return the exit status: 0, or what asked for an end (see `Vote`).

    traced, profiled: steps to take a trace of, and to profile by torch. snapshot: record what allocates the memory of
    each rank's CUDA device. Raises on failure.
    """
    recorder = Recorder(info.rank)
    start_up = StartUp(recorder)
    start_up.begin("meeting")
    with (
        recorder.activate(), deterministic(config.train.deterministic), Watchdog(recorder) as watchdog,
        join(config, info, watchdog) as (job, resolved), ExitStack() as held,
    ):
        job.ranks.first(partial(_hold, Path(config.output.dir), held))
        resolved, note = keep_batch(resolved, job.ranks.first(partial(saved_batch, config)))
        if note and job.rank == 0:
            say(note)
        if snapshot:
            check_memory_snapshot(job.device)
            held.enter_context(memory_snapshot(Path(config.output.dir), job.rank))
        with Saver(resolved.config, job) as saver:
            trainer = Trainer(resolved, job, saver, start_up, traced=traced, profiled=profiled)
            status = trainer.train()
    return status


def _hold(folder: Path, held: ExitStack) -> None:
    """Make the output directory and let no other job write to it while `held` is open; ValueError where it cannot."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if (taken := lock(folder / ".metrics.lock", patience=10.0)) is not None:
            held.callback(taken.release)
    except OSError as error:
        cannot = f"cannot be {'written to' if folder.is_dir() else 'made'}: {error.strerror}"
        raise ValueError(f"output.dir = {str(folder)!r} {cannot}; choose another") from error


class QueuedStep(NamedTuple):
    """A training step that the device has been given, and its numbers, on their way to the host."""

    step: int  # from 1
    lr: float
    seconds: float  # of the host
    names: tuple[str, ...]
    # float64, by `names`, then all ranks' votes; on the host, in pinned memory where they come from a device
    numbers: Tensor
    began: Event | None
    arrived: Event | None  # after which the numbers may be read
    kept: Kept  # to run it again


class Trainer:
    """Everything that one rank needs to train. The rank of the last stage knows the loss and writes the metrics; of
    several pipelines (`parallel.dp`, `cp` and `ep`) that of the first.

    On CUDA the host does not wait for a step: it reads the numbers when it has given the device the next one, or before
    anything is evaluated or saved. A gradient that is not finite leaves the parameters as they were, which the device
    sees to; the next step may be under way when the host comes to know.
    """

    def __init__(
        self, resolved: Resolved, job: Job, saver: Saver, start_up: StartUp | None = None, *,
        traced: Steps | None = None, profiled: Steps | None = None,
    ) -> None:
        """start_up: times the start; traced, profiled: see `train`.

        Raises ValueError, on all ranks, for what cannot be trained so.
        """
        self.start_up = start_up or StartUp()
        self.start_up.begin("model")
        self.config = config = resolved.config
        self.runner = runner = StepRunner(resolved, job, saver.source_dtypes)
        model = runner.model
        if config.export_directory is not None:
            job.ranks.first(partial(check_export, config, model))  # before the work of hours
        self.start_up.begin("data")
        self.data = RunData(
            config, job.ranks, job.place, runner.split, reads=model.has_first or model.has_last,
            vocab_size=model.config.vocab_size, mtp_depth=model.config.mtp_depth,
        )
        self.saver = saver
        self.state = State(model, runner.optimizer, runner.routers, self.data.loader)
        self.guard = Guard(runner, saver, self.state)
        self.votes = Votes(job, config.train.time_limit)
        folder = Path(config.output.dir)
        self.traced = TracedSteps(traced, job, runner.pipeline, folder)
        self.profiled = ProfiledSteps(profiled, job.rank, job.device, folder)
        self.copying = new_stream(job.device)
        self.throughput = Throughput(
            tokens=self.data.batch_size * config.train.sequence_length, ranks=job.ranks.size,
            flops_per_token=flops_per_token(model.config, config.train.sequence_length).both,
            peak_tflops=peak_tflops(model_name(job.device)) if config.train.dtype == "bf16" else None,
        )
        self.done = 0  # steps
        self.status = 0  # what ended them before the last one, as an exit status
        self.unread: deque[QueuedStep] = deque()  # at most two
        self.remarks: list[str] = []  # to be said with the next step that is written
        self.unigram: float | None = None  # the held-out loss of a unigram model, where the run reports

    @property
    def job(self) -> Job:
        """The job that this rank belongs to."""
        return self.runner.job

    def train(self) -> int:
        """Run all steps, with evaluations, then write the model in Hugging Face's form, where wanted, and the pictures.

        Returns 0, or the exit status with which a rank asked for an end before.
        """
        try:
            self.start_up.begin("checkpoint")
            self.done = self.saver.resume(self.state)
            self.start_up.begin("step")
            garbage = GarbageCollection(self.config.train.gc_interval)
            with self._writer() as writer, self.traced, self.profiled, garbage:
                while self.done < self.config.train.steps and not self.status:
                    try:
                        self._steps(writer, garbage)
                    except BadStep as bad:
                        self.done = self.guard.resolve(bad, writer)
                        self._close_windows()
                self._stop_early()
            self.start_up.end()  # where no step was left
            if self.status:
                return self.status
            self._export()  # also where the last checkpoint could not be written, which is said at the end
        except OSError as error:
            if error.errno is None:  # a text of ours
                raise
            place = f"{error.strerror} (rank {self.job.rank}, after step {self.done})"
            raise OSError(error.errno, place, error.filename) from error
        if self.runner.reports:
            draw(Path(self.config.output.dir), self.runner.schedule, unigram=self.unigram)
        return 0

    def _export(self) -> None:
        """Write the model in Hugging Face's form, where that is wanted."""
        target, settings, model = self.config.export_directory, self.config.export, self.runner.model
        if target is None:
            return
        with self.runner.recorder.doing("export", str(target)):
            if settings.to_hf == AUTO:
                self.job.ranks.first(partial(set_aside, target))
            save_hf(model.stages, target, self.job.mesh, model.plan, quantized=settings.quantized,
                    source=self.config.init.from_hf or None)
        if self.job.rank == 0:
            say(f"the model: {target}")

    def _writer(self) -> AbstractContextManager[MetricsWriter | None]:
        """The writer of metrics, having said what the run is; None on ranks that report nothing. Collective."""
        config, train, runner = self.config, self.config.train, self.runner
        parameters = count_parameters(runner)
        if not runner.reports:
            return nullcontext()
        writer = MetricsWriter(
            Path(config.output.dir), total_steps=train.steps, start_step=self.done, log_interval=train.log_interval,
            print_interval=train.print_interval, wandb=config.metrics.wandb,
            settings=describe(config, runner.model),
        )
        if self.data.splits.held_out.num_tokens:
            self.unigram = self.data.splits.unigram_loss(runner.model.config.vocab_size)
        for text in describe_run(runner, self.data, parameters, self.unigram):
            writer.say(text)
        if train.compile and self.done < train.steps:
            writer.say(f"step {self.done + 1} takes longer: it compiles attention and dense MLPs")
        return writer

    def _stop_early(self) -> None:
        """Where a rank has asked for an end, save, and say how to go on."""
        if self.status:
            saved = self.saver.save(self.state, self.done, now=True)
            if self.job.rank == 0:
                say(farewell(self.config, self.status, self.done, saved))

    def _steps(self, writer: MetricsWriter | None, garbage: GarbageCollection) -> None:
        """Run all steps that are left, or until a rank asks for an end.

        Raises BadStep where one must not count, with nothing after it done.
        """
        steps = self.config.train.steps
        try:
            with self.data.loader.batches(steps, self.copying) as batches:
                while self.done < steps and not self.status:
                    self.traced.before(self.done + 1)
                    self.profiled.before(self.done + 1)
                    self.unread.append(self._step(self.done, batches))
                    self.done += 1
                    garbage.after(self.done)  # while the device computes
                    if len(self.unread) > 1:
                        self._write(writer, self._read())  # the step before, while the device computes this one
                    if self._reads_now():
                        self._write(writer, self._read_and_check())
                    self.saver.save(self.state, self.done)
                    self._close_windows()
        except BaseException:
            with suppress(BadStep, RuntimeError):  # the latter where the device has failed
                # Without waiting, which could be for ranks that have failed.
                while self.unread and (self.unread[0].arrived is None or self.unread[0].arrived.query()):
                    self._write(writer, self._read())
            raise

    def _close_windows(self) -> None:
        """Write the trace and the profile, if their last step is done or the run ends."""
        run_ends = bool(self.status) or self.done == self.config.train.steps
        self.traced.after(self.done, run_ends=run_ends)
        self.profiled.after(self.done, run_ends=run_ends)

    def _evaluates(self) -> bool:
        """Return True if an evaluation is due after the last step."""
        interval = self.config.train.eval_interval
        is_last = self.done == self.config.train.steps
        return bool(self.data.held_out) and (is_last or (interval > 0 and self.done % interval == 0))

    def _reads_now(self) -> bool:
        """Return True if the numbers of the last step are needed before the next one."""
        on_cpu = self.copying is None
        is_last = self.done == self.config.train.steps
        something_is_due = self._evaluates() or self.guard.is_due(self.done) or self.saver.is_due(self.done)
        trace_ends = self.traced.ends(self.done)  # with the loads of this step
        return on_cpu or is_last or something_is_due or trace_ends or bool(self.status)

    def _read_and_check(self) -> dict[str, Any]:
        """Read the last step's metrics, check the ranks and evaluate, where due."""
        recorder = self.runner.recorder
        metrics = self._read()
        if self.guard.is_due(self.done):
            with recorder.doing("check", "whether ranks compute right"):
                self.guard.check_ranks(self.done)
        if self._evaluates() and not self.status:  # who asks for an end may not have the time
            with recorder.doing("evaluate"):
                metrics |= evaluate(self.runner, self.data, self.done, self.copying)
        return metrics

    def _step(self, step: int, batches: Iterator[Batch]) -> QueuedStep:
        """Give the device a training step, counted from 0. The host does not wait."""
        runner, optimizer = self.runner, self.config.optimizer
        start, began = time.perf_counter(), record(self.job.device, timed=True)
        runner.recorder.step = step + 1
        with runner.recorder.doing("data", "the next batch"):
            batch = next(batches)
        kept = self.guard.keep(batch)
        with kept.watch:
            losses = runner.run_step(batch, step + 1)
        norm = self.guard.judge(runner.pipeline.clip_grad_norm_(optimizer.clip_norm or math.inf))
        lr = learning_rate(
            step, peak=optimizer.lr, total_steps=self.config.train.steps, warmup_steps=optimizer.warmup_steps,
            schedule=optimizer.schedule, min_ratio=optimizer.min_lr_ratio, decay_fraction=optimizer.decay_fraction,
        )
        runner.update(lr, norm)
        found = {"grad_norm": norm} | self.guard.everywhere(None if losses is None else losses[0])
        if losses is not None:
            found |= {f"mtp_loss/{depth}": loss for depth, loss in enumerate(losses) if depth}
            found |= runner.routers.metrics()
        own = torch.stack([value.double() for value in found.values()])
        place = self.job.place
        load = runner.routers.load(place.rank("ep"), place.size("ep")) if self.traced.is_open else 0.0
        numbers, arrived = to_host(torch.cat([own, self.votes.cast(load)]), timed=True)
        return QueuedStep(step + 1, lr, time.perf_counter() - start, tuple(found), numbers, began, arrived, kept)

    def _read(self) -> dict[str, Any]:
        """Wait for the numbers of the first step that is unread; return its metrics.

        Raises BadStep, on every rank, where it must not count; then nothing is unread.
        """
        if (arrived := self.unread[0].arrived) is not None:
            with self.runner.recorder.doing("device", "what the device was given to be done"):
                arrived.synchronize()  # orders: the step and the copy of its numbers, then the host
        queued = self.unread.popleft()
        numbers, known = queued.numbers.tolist(), len(queued.names)
        values = {"loss": math.nan} | dict(zip(queued.names, numbers))  # NaN where it is not known
        votes = Votes.read(numbers[known:])
        self.status = self.status or int(max(vote.status for vote in votes))
        self.traced.loads(queued.step, [float(vote.load) for vote in votes])
        remark = self.start_up.end()
        try:
            self.guard.check(queued.step, values, queued.kept)
        except BadStep:
            self.unread.clear()
            raise
        finally:
            if self.runner.reports and remark:
                self.remarks.append(remark)
        mtp_loss = [values.pop(name) for name in queued.names if name.startswith("mtp_loss/")]
        seconds = queued.began.elapsed_time(arrived) / 1e3 if queued.began and arrived else queued.seconds
        return {
            **values, **self.throughput.metrics(seconds), "mtp_loss": mtp_loss or None, "step": queued.step,
            "lr": queued.lr, "memory_bytes": memory_bytes(self.job.device),
        }

    def _write(self, writer: MetricsWriter | None, metrics: dict[str, Any]) -> None:
        """Write a step's metrics, and say what there is to say of it, on the rank that reports."""
        if writer is None:
            return
        writer.write(StepMetrics(**metrics))
        for text in (*self.remarks, *self.guard.warnings(metrics)):
            writer.say(text)
        self.remarks.clear()
