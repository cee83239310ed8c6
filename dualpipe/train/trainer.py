"""The training loop of one rank: a batch, a step of the pipeline, an update; and what is said, saved and checked of it.

The way of a step: `Trainer._steps` -> `Trainer._step` -> `StepRunner.run_step` -> `Pipeline.step`.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dualpipe.runtime.device import Event, deterministic, model_name, record, to_host
from dualpipe.runtime.files import lock
from dualpipe.runtime.peak_tflops import peak_tflops
from dualpipe.runtime.printing import say
from dualpipe.runtime.rank_process import RankInfo
from dualpipe.runtime.recorder import Recorder
from dualpipe.train.anomaly.guard import BadStep, Guard
from dualpipe.train.anomaly.rank_checks import RankChecks
from dualpipe.train.anomaly.reruns import Kept, StepReruns
from dualpipe.train.checkpointing.saver import Saver
from dualpipe.train.checkpointing.training_state import TrainingState, describe
from dualpipe.train.config.model_config import flops_per_token
from dualpipe.train.config.resolve import Resolved, find_saved_batch, keep_batch
from dualpipe.train.config.schema import Config
from dualpipe.train.data.run_data import RunData
from dualpipe.train.data.token_stream import TokenBatch
from dualpipe.train.evaluate import evaluate
from dualpipe.train.export import check_export, export
from dualpipe.train.garbage_collection import GarbageCollection
from dualpipe.train.health.watchdog import Watchdog
from dualpipe.train.launch.distributed import Job, join
from dualpipe.train.metrics import MetricsWriter, Throughput, memory_bytes
from dualpipe.train.observers.profiler import ProfiledSteps, check_memory_snapshot, memory_snapshot
from dualpipe.train.observers.step_window import Steps
from dualpipe.train.observers.tracing import TracedSteps
from dualpipe.train.observers.windows import ObservedSteps
from dualpipe.train.optim.lr_schedule import run_learning_rate
from dualpipe.train.run_description import count_parameters, describe_run
from dualpipe.train.run_report import RunReport
from dualpipe.train.start_up import StartUp
from dualpipe.train.step.step_runner import StepRunner
from dualpipe.train.stop import StopVotes, farewell


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
        resolved, note = keep_batch(resolved, job.ranks.first(partial(find_saved_batch, config)))
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


@dataclass
class Progress:
    """The progress of a run. done: steps; status: what ended them before the last one, as an exit status."""

    done: int = 0
    status: int = 0


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
        config = resolved.config
        self.runner = runner = StepRunner(resolved, job, saver.source_dtypes)
        model = runner.model
        if config.export_directory is not None:
            job.ranks.first(partial(check_export, config, model))  # before the work of hours
        self.start_up.begin("data")
        self.data = RunData(
            config, job.ranks, job.place, runner.split, reads=model.has_first or model.has_last,
            vocab_size=model.config.vocab_size, mtp_depth=model.config.mtp_depth, device=job.device,
        )
        runner.weighs_targets = self.data.is_masked
        self.saver = saver
        self.state = TrainingState(model, runner.optimizer, runner.routers, self.data.loader)
        self.guard = Guard(config.guard, model.config, StepReruns(runner, self.state), saver, self.state)
        self.rank_checks = RankChecks(config.guard, runner, self.state)
        self.votes = StopVotes(job, config.train.time_limit)
        folder = Path(config.output.dir)
        self.observed = ObservedSteps(
            TracedSteps(traced, job, runner.pipeline, folder), ProfiledSteps(profiled, job.rank, job.device, folder))
        self.report = RunReport(Throughput(
            tokens=self.data.batch_size * config.train.sequence_length, ranks=job.ranks.size,
            flops_per_token=flops_per_token(model.config, config.train.sequence_length),
            peak_tflops=peak_tflops(model_name(job.device)) if config.train.dtype == "bf16" else None,
        ))
        self.progress = Progress()
        self.unread: deque[QueuedStep] = deque()  # at most two

    @property
    def config(self) -> Config:
        """The configuration of the run."""
        return self.runner.config

    @property
    def job(self) -> Job:
        """The job that this rank belongs to."""
        return self.runner.job

    def train(self) -> int:
        """Run all steps, with evaluations, then write the model in Hugging Face's form, where wanted, and the pictures.

        Returns 0, or the exit status with which a rank asked for an end before.
        """
        progress = self.progress
        try:
            self.start_up.begin("checkpoint")
            progress.done = self.saver.resume(self.state)
            self.start_up.begin("step")
            garbage = GarbageCollection(self.config.train.gc_interval)
            with self._writer() as self.report.writer, self.observed, garbage:
                while progress.done < self.config.train.steps and not progress.status:
                    try:
                        self._steps(garbage)
                    except BadStep as bad:
                        self._resolve(bad)
                self._stop_early()
            self.start_up.end()  # where no step was left
            if progress.status:
                return progress.status
            # Also where the last checkpoint could not be written, which is said at the end.
            export(self.config, self.runner.model, self.job)
        except OSError as error:
            if error.errno is None:  # a text of ours
                raise
            place = f"{error.strerror} (rank {self.job.rank}, after step {progress.done})"
            raise OSError(error.errno, place, error.filename) from error
        if self.runner.reports:
            self.report.draw(Path(self.config.output.dir), self.runner.schedule)
        return 0

    def _resolve(self, bad: BadStep) -> None:
        """Do what is to be done about a step that must not count, or raise FloatingPointError. Collective."""
        resolution = self.guard.resolve(bad)
        self.progress.done = resolution.done
        if resolution.went_back:
            self.report.go_back(resolution.done)
        self.report.say(f"WARNING: {resolution.text}")
        self._close_windows()

    def _writer(self) -> AbstractContextManager[MetricsWriter | None]:
        """The writer of metrics, having said what the run is; None on ranks that report nothing. Collective."""
        config, train, runner = self.config, self.config.train, self.runner
        parameters = count_parameters(runner)
        if not runner.reports:
            return nullcontext()
        writer = MetricsWriter(
            Path(config.output.dir), total_steps=train.steps, start_step=self.progress.done,
            log_interval=train.log_interval, print_interval=train.print_interval, wandb=config.metrics.wandb,
            settings=describe(config, runner.model),
        )
        if self.data.num_validation_tokens and len(self.data.sources) == 1:
            self.report.unigram = self.data.sources[0].unigram_loss(runner.model.config.vocab_size)
        for text in describe_run(runner, self.data, parameters, self.report.unigram):
            writer.say(text)
        if train.compile and self.progress.done < train.steps:
            writer.say(f"step {self.progress.done + 1} takes longer: it compiles attention and dense MLPs")
        return writer

    def _stop_early(self) -> None:
        """Save where a rank has asked for an end, and say how to go on."""
        done, status = self.progress.done, self.progress.status
        if status:
            saved = self.saver.save(self.state, done, now=True)
            if self.job.rank == 0:
                say(farewell(self.config, status, done, saved))

    def _steps(self, garbage: GarbageCollection) -> None:
        """Run all steps that are left, or until a rank asks for an end.

        Raises BadStep where one must not count, with nothing after it done.
        """
        steps, progress = self.config.train.steps, self.progress
        try:
            with self.data.training_batches(steps) as batches:
                while progress.done < steps and not progress.status:
                    self.observed.before(progress.done + 1)
                    self.unread.append(self._step(progress.done, batches))
                    progress.done += 1
                    garbage.after(progress.done)  # while the device computes
                    if len(self.unread) > 1:
                        self._write(self._read())  # the step before, while the device computes this one
                    if self._reads_now():
                        self._write(self._read_and_check())
                    self.saver.save(self.state, progress.done)
                    self._close_windows()
        except BaseException:
            with suppress(BadStep, RuntimeError):  # the latter where the device has failed
                # Without waiting, which could be for ranks that have failed.
                while self.unread and (self.unread[0].arrived is None or self.unread[0].arrived.query()):
                    self._write(self._read())
            raise

    def _write(self, metrics: dict[str, Any]) -> None:
        """Write a step's metrics, on the rank that reports."""
        self.report.write(metrics, self.guard.warnings(metrics))

    def _close_windows(self) -> None:
        """Write the trace and the profile, if their last step is done or the run ends."""
        progress = self.progress
        run_ends = bool(progress.status) or progress.done == self.config.train.steps
        self.observed.after(progress.done, run_ends=run_ends)

    def _evaluates(self) -> bool:
        """Return True if an evaluation is due after the last step."""
        interval, done = self.config.train.eval_interval, self.progress.done
        is_last = done == self.config.train.steps
        return bool(self.data.validation_windows) and (is_last or (interval > 0 and done % interval == 0))

    def _reads_now(self) -> bool:
        """Return True if the numbers of the last step are needed before the next one."""
        done = self.progress.done
        on_cpu = self.job.device.type == "cpu"
        is_last = done == self.config.train.steps
        something_is_due = self._evaluates() or self.rank_checks.is_due(done) or self.saver.is_due(done)
        trace_ends = self.observed.traced.ends(done)  # with the loads of this step
        return on_cpu or is_last or something_is_due or trace_ends or bool(self.progress.status)

    def _read_and_check(self) -> dict[str, Any]:
        """Read the last step's metrics, check the ranks and evaluate, where due."""
        recorder, done = self.runner.recorder, self.progress.done
        batch = self.unread[-1].kept.batch
        metrics = self._read()
        if self.rank_checks.is_due(done):
            with recorder.doing("check", "whether ranks compute right"):
                self.rank_checks.check(done, batch)
        if self._evaluates() and not self.progress.status:  # who asks for an end may not have the time
            with recorder.doing("evaluate"):
                metrics |= evaluate(self.runner, self.data, done)
        return metrics

    def _step(self, step: int, batches: Iterator[TokenBatch]) -> QueuedStep:
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
        lr = run_learning_rate(step, optimizer, self.config.train.steps)
        runner.update(lr, norm)
        found = {"grad_norm": norm}
        if self.config.guard.spike and self.job.group is not None:  # spikes are looked for on all ranks
            found["loss"] = runner.everywhere(None if losses is None else losses[0])
        elif losses is not None:
            found["loss"] = losses[0]
        if losses is not None:
            found |= {f"mtp_loss/{depth}": loss for depth, loss in enumerate(losses) if depth}
            found |= runner.routers.metrics()
            if runner.num_targets is not None:
                found["counted_tokens"] = runner.num_targets
        own = torch.stack([value.double() for value in found.values()])
        place = self.job.place
        load = runner.routers.load(place.rank("ep"), place.size("ep")) if self.observed.traced.is_open else 0.0
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
        votes = StopVotes.read(numbers[known:])
        self.progress.status = self.progress.status or int(max(vote.status for vote in votes))
        self.observed.traced.loads(queued.step, [float(vote.load) for vote in votes])
        remark = self.start_up.end()
        try:
            self.guard.check(queued.step, values, queued.kept)
        except BadStep:
            self.unread.clear()
            raise
        finally:
            self.report.remark(remark)
        if "counted_tokens" in values:
            values["counted_tokens"] = int(values["counted_tokens"])
        mtp_loss = [values.pop(name) for name in queued.names if name.startswith("mtp_loss/")]
        seconds = queued.began.elapsed_time(arrived) / 1e3 if queued.began and arrived else queued.seconds
        return {
            **values, **self.report.throughput.metrics(seconds), "mtp_loss": mtp_loss or None,
            "source_shares": self.data.source_shares(queued.step), "step": queued.step, "lr": queued.lr,
            "memory_bytes": memory_bytes(self.job.device),
        }
