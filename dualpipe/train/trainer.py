"""The training loop of one rank: batches, pipeline steps, optimizer updates, and the reports, checkpoints and checks.

Call path of a step: `Trainer._run_steps` -> `Trainer._step` -> `StepRunner.run_step` -> `Pipeline.step`.
"""

from __future__ import annotations

import gc
import math
import time
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from dualpipe.nn.attention import use_attention_kernel
from dualpipe.runtime.device import Event, deterministic, model_name, peak_tflops, record, to_host
from dualpipe.runtime.files import lock
from dualpipe.runtime.printing import say
from dualpipe.runtime.rank_process import RankInfo, process_age
from dualpipe.runtime.recorder import Recorder
from dualpipe.runtime.storage import check_shared
from dualpipe.train.config.fit import Resolved
from dualpipe.train.config.model_config import flops_per_token
from dualpipe.train.config.schema import Config
from dualpipe.train.data.run_data import RunData
from dualpipe.train.data.token_stream import TokenBatch
from dualpipe.train.describe_run import count_parameters, describe_run, record_start, unigram_loss
from dualpipe.train.evaluate import evaluate
from dualpipe.train.export import check_export, export, is_exported
from dualpipe.train.guard import BadStep, Guard, StepSnapshot
from dualpipe.train.kernel_choice import choose_kernels
from dualpipe.train.launch.join import Job, join
from dualpipe.train.launch.watchdog import Watchdog
from dualpipe.train.metrics import MetricsWriter, NoMetrics, StepMetrics, Throughput, draw, memory_bytes
from dualpipe.train.optim.lr_schedule import learning_rate
from dualpipe.train.profile import (
    ProfiledSteps,
    Steps,
    StepWindow,
    TracedSteps,
    check_memory_snapshot,
    memory_snapshot,
)
from dualpipe.train.rank_checks import RankChecks
from dualpipe.train.saver import FrozenBase, Saver, TrainingState, describe
from dualpipe.train.step import build_training
from dualpipe.train.step_health import StepHealth, measure_waits
from dualpipe.train.stop import RankReports, stop_message


def train(
    config: Config, info: RankInfo, traced: Steps | None = None, *, profiled: Steps | None = None,
    snapshot: bool = False,
) -> int:
    """Train as rank `info` of the job. Raises on failure.

    Returns 0 after the last step, or the exit status of the stop that a rank requested (see `stop.Report`).

    Args:
        traced: steps to trace.
        profiled: steps to profile with torch.profiler.
        snapshot: write a snapshot of the allocations on the rank's CUDA device.
    """
    recorder = Recorder(info.rank)
    start_up = StartUp(recorder)
    start_up.begin("rendezvous")
    with (
        recorder.activate(), deterministic(config.train.deterministic), Watchdog(recorder) as watchdog,
        join(config, info, watchdog) as (job, resolved), ExitStack() as resources,
    ):
        job.ranks.first(partial(_lock_output, Path(config.output.dir), resources))
        if snapshot:
            check_memory_snapshot(job.device)
            resources.enter_context(memory_snapshot(Path(config.output.dir), job.rank))
        with Saver(config, job) as saver:
            resolved = saver.keep_batch(resolved)
            trainer = Trainer(resolved, job, saver, start_up, traced=traced, profiled=profiled)
            status = trainer.train()
    return status


def _lock_output(folder: Path, resources: ExitStack) -> None:
    """Create the output directory and lock it against other jobs until `resources` is closed.

    Raises ValueError if the directory cannot be created or written to.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file_lock = lock(folder / ".metrics.lock", patience=10.0)
    except OSError as error:
        problem = "cannot be written to" if folder.is_dir() else "cannot be made"
        raise ValueError(f"output.dir = {str(folder)!r} {problem}: {error.strerror}; choose another") from error
    if file_lock is not None:
        resources.callback(file_lock.release)


class QueuedStep(NamedTuple):
    """A step that was queued on the device, with its values on their way to the host.

    Attributes:
        step: counted from 1.
        lr: learning rate.
        host_seconds: time of the host to queue the step.
        names: names of the leading elements of `numbers`, by field of `StepMetrics`.
        numbers: float64 on the host, pinned if copied from a device: the values, then the report of all ranks.
        start_event: recorded on the device before the step; None on CPU.
        copy_event: recorded after the copy of `numbers`, which may be read then; None on CPU.
        snapshot: of the state before the step, for a rerun.
    """

    step: int
    lr: float
    host_seconds: float
    names: tuple[str, ...]
    numbers: Tensor
    start_event: Event | None
    copy_event: Event | None
    snapshot: StepSnapshot

    @property
    def has_arrived(self) -> bool:
        """True if the host can read the numbers without waiting."""
        return self.copy_event is None or self.copy_event.query()

    def seconds(self) -> float:
        """Return the duration of the step: on the device if it has events, else on the host."""
        if self.start_event is None or self.copy_event is None:
            return self.host_seconds
        return self.start_event.elapsed_time(self.copy_event) / 1e3


class Trainer:
    """The training of one rank.

    In each pipeline, only the rank with the last stage knows the loss. With several pipelines (`parallel.dp`, `cp` and
    `ep`), that rank of pipeline 0 writes the metrics.

    On CUDA the host does not wait for a step: it reads the values of a step after it has queued the next one, or before
    an evaluation or a checkpoint. The device leaves the parameters unchanged if a gradient is not finite, because the
    next step may already run when the host learns of it.

    Attributes:
        done: number of completed steps.
        status: exit status of a stop that a rank has requested; 0 without one.
        queued: steps whose values the host has not read, at most two.
        remarks: lines to print after the metrics of the step that was read last.
    """

    def __init__(
        self, resolved: Resolved, job: Job, saver: Saver, start_up: StartUp | None = None, *,
        traced: Steps | None = None, profiled: Steps | None = None,
    ) -> None:
        """Build model, data and checks. Collective.

        start_up: measures the time to the first step. traced, profiled: see `train`. Raises ValueError, on all ranks,
        if the configuration cannot be trained.
        """
        self.start_up = start_up or StartUp()
        self.start_up.begin("model")
        config = resolved.config
        runner, optimizer = build_training(resolved, job, saver.source_dtypes)
        model = runner.model
        self.config = config
        self.job = job
        self.runner = runner
        self.is_exported = job.ranks.first(partial(is_exported, config, saver.source))
        if config.export_directory is not None and not self.is_exported:
            check_export(config, model, job.ranks)  # before hours of training
            check_shared(config.export_directory.parent, job.ranks)
        self.kernels = choose_kernels(runner)
        self.start_up.begin("data")
        self.data = RunData(
            config, job.ranks, job.place, runner.split, reads=model.has_first or model.has_last,
            vocab_size=model.config.vocab_size, mtp_depth=model.config.mtp_depth, device=job.device,
        )
        runner.counts_targets |= self.data.has_loss_mask
        self.saver = saver
        self.state = TrainingState(
            model, optimizer, runner.routers, self.data.loader, FrozenBase.find(config, job.ranks))
        self.guard = Guard(runner, self.state, self.kernels, saver)
        self.rank_checks = RankChecks(runner, self.state)
        self.rank_reports = RankReports(job, config.train.time_limit)
        self.throughput = Throughput(
            tokens=self.data.batch_size * config.train.sequence_length, ranks=job.ranks.size,
            flops_per_token=flops_per_token(model.config, config.train.sequence_length, config.lora),
            peak_tflops=peak_tflops(model_name(job.device)) if config.train.dtype == "bf16" else None,
        )
        self.health = StepHealth(
            config, runner.schedule, job.place.rank("pp"), runner.recorder,
            max_load=model.config.num_experts / model.config.num_experts_per_tok)
        folder = Path(config.output.dir)
        self.observers: list[StepWindow] = [
            TracedSteps(traced, runner, folder), ProfiledSteps(profiled, job.rank, job.device, folder)]
        self.writer: MetricsWriter | NoMetrics = NoMetrics()
        self.remarks: list[str] = []
        self.done = 0
        self.status = 0
        self.queued: deque[QueuedStep] = deque()

    @property
    def is_finished(self) -> bool:
        """True after the last step, and once a rank has requested a stop."""
        return self.done >= self.config.train.steps or self.status != 0

    def train(self) -> int:
        """Run all steps and evaluations, then export the model if requested, and draw the pictures.

        Returns 0, or the exit status with which a rank requested an earlier stop.
        """
        with self._located_os_errors():
            self.start_up.begin("checkpoint")
            first = self.saver.resume(self.state)
            self.done = first
            self.start_up.begin("step")
            unigram = unigram_loss(self.runner, self.data)
            with ExitStack() as resources:
                resources.enter_context(use_attention_kernel(self.kernels.attention))
                self.writer = self._open_writer(unigram)
                resources.enter_context(self.writer)
                for observer in self.observers:
                    resources.enter_context(observer)
                garbage = resources.enter_context(GarbageCollection(self.config.train.gc_interval))
                while not self.is_finished:
                    try:
                        self._run_steps(garbage)
                    except BadStep as bad:
                        self._resolve(bad)
                if self.status:
                    self._save_at_stop()
            self.start_up.end()  # for a run that had no step left
            if self.status:
                return self.status
            if self.is_exported and first == self.done:
                self._say_exported()
            elif self.config.export_directory is not None:
                # Even if the last checkpoint could not be written: that is reported at the end.
                export(self.config, self.runner.model, self.job, self.saver.path_of(self.done))
        if self.runner.reports:
            draw(Path(self.config.output.dir), self.runner.schedule, unigram=unigram)
        return 0

    # -- the loop

    def _run_steps(self, garbage: GarbageCollection) -> None:
        """Run the remaining steps, until a rank requests a stop.

        Raises BadStep for a bad step. The step queued behind a non-finite one has not changed the parameters either.
        """
        try:
            with self.data.training_batches(self.config.train.steps) as batches:
                while not self.is_finished:
                    step = self.done + 1
                    for observer in self.observers:
                        observer.before(step)
                    queued = self._step(step, batches)
                    self.queued.append(queued)
                    self.done = step
                    garbage.after(step)  # while the device computes
                    if len(self.queued) > 1:
                        self._write(self._read())  # the step before, while the device computes this one
                    if self._needs_values_now():
                        metrics = self._read()
                        if self.rank_checks.is_due(step):
                            with self.runner.recorder.doing("check", "the results of all ranks"):
                                self.rank_checks.check(step, queued.snapshot.batch)
                        if self._is_evaluation_due() and not self.status:  # after a stop request there may be no time
                            with self.runner.recorder.doing("evaluate"):
                                metrics |= evaluate(self.runner, self.data, step)
                        self._write(metrics)
                    self.saver.save(self.state, step)
                    self._close_observers()
        except BaseException:
            # The values of other steps may depend on ranks that have failed: they are not waited for.
            with suppress(BadStep, RuntimeError):  # RuntimeError: the device has failed
                while self.queued and self.queued[0].has_arrived:
                    self._write(self._read())
            raise

    def _step(self, step: int, batches: Iterator[TokenBatch]) -> QueuedStep:
        """Queue a step, counted from 1, on the device: batch, pipeline step, clip, update. The host does not wait."""
        runner = self.runner
        settings = self.config.optimizer
        start_time = time.perf_counter()
        start_event = record(self.job.device, timed=True)
        runner.recorder.step = step
        with runner.recorder.doing("data", "the next batch"):
            batch = next(batches)
        data_wait = time.perf_counter() - start_time
        snapshot = self.guard.snapshot(batch)
        with snapshot.watch:  # records sums of the results of the step's actions
            losses = runner.run_step(batch, step)
        norm = self.guard.propagate_nan(runner.pipeline.clip_grad_norm_(settings.clip_norm or math.inf))
        lr = learning_rate(step - 1, settings, self.config.train.steps)
        runner.update(self.state.optimizer, lr, norm)
        values = self._step_values(norm, losses)
        reports = self.rank_reports.gather(data_wait)
        packed = torch.cat([torch.stack([value.double() for value in values.values()]), reports])
        numbers, copy_event = to_host(packed, timed=True)
        host_seconds = time.perf_counter() - start_time
        return QueuedStep(step, lr, host_seconds, tuple(values), numbers, start_event, copy_event, snapshot)

    def _step_values(self, norm: Tensor, losses: Tensor | None) -> dict[str, Tensor]:
        """Return the values of a step that this rank knows: scalars on the device, by field of `StepMetrics`."""
        values = {"grad_norm": norm}
        if self.config.guard.spike and self.job.group is not None:  # all ranks look for spikes
            values["loss"] = self.runner.broadcast_loss(None if losses is None else losses[0])
        elif losses is not None:
            values["loss"] = losses[0]
        if losses is not None:
            values |= {f"mtp_loss/{depth}": loss for depth, loss in enumerate(losses) if depth}
            values |= self.runner.routers.metrics()
            if self.runner.num_targets is not None:
                values["counted_tokens"] = self.runner.num_targets
        return values

    def _needs_values_now(self) -> bool:
        """Return True if the values of the last step are needed before the next step."""
        on_cpu = self.job.device.type == "cpu"
        check_is_due = self.rank_checks.is_due(self.done)
        save_is_due = self.saver.is_due(self.done)
        return on_cpu or self.is_finished or self._is_evaluation_due() or check_is_due or save_is_due

    def _is_evaluation_due(self) -> bool:
        """Return True if an evaluation is due after the last completed step."""
        interval = self.config.train.eval_interval
        is_last = self.done == self.config.train.steps
        return bool(self.data.validation_windows) and (is_last or (interval > 0 and self.done % interval == 0))

    def _read(self) -> dict[str, Any]:
        """Wait for the values of the oldest queued step and return its metrics, by field of `StepMetrics`.

        Raises BadStep, on every rank, for a bad step, and discards the steps after it.
        """
        copy_event = self.queued[0].copy_event
        if copy_event is not None:
            with self.runner.recorder.doing("device", "the work queued on the device"):
                copy_event.synchronize()  # orders: the step and the copy of its numbers, then the host
        queued = self.queued.popleft()
        numbers = queued.numbers.tolist()
        values = {"loss": math.nan} | dict(zip(queued.names, numbers))  # NaN on ranks that do not know the loss
        report = RankReports.decode(numbers[len(queued.names):])
        self.status = self.status or report.exit_status
        self.remarks.append(self.start_up.end())
        try:
            self.remarks.append(self.guard.check(queued.step, values, queued.snapshot))
        except BadStep:
            self.queued.clear()
            raise
        seconds = queued.seconds()
        if self.runner.reports:
            waits = measure_waits(self.runner.recorder.entries()) if copy_event is None else None
            load = values.get("load_max_over_mean")
            self.remarks += self.health.lines(
                seconds, starved=report.starved, data_wait=report.data_wait, load=load, waits=waits)
        if "counted_tokens" in values:
            values["counted_tokens"] = int(values["counted_tokens"])
        mtp_loss = [values.pop(name) for name in queued.names if name.startswith("mtp_loss/")]
        return {
            **values, **self.throughput.metrics(seconds), "mtp_loss": mtp_loss or None,
            "source_shares": self.data.source_shares(queued.step), "step": queued.step, "lr": queued.lr,
            "memory_bytes": memory_bytes(self.job.device),
        }

    def _write(self, metrics: dict[str, Any]) -> None:
        """Write the metrics of a step, then the remarks about it."""
        self.writer.write(StepMetrics.of(metrics))
        for text in filter(None, self.remarks):
            self.writer.say(text)
        self.remarks.clear()

    def _close_observers(self) -> None:
        """Let the observers write their files if their last step is done or the run ends."""
        for observer in self.observers:
            observer.after(self.done, run_ends=self.is_finished)

    # -- before and after the loop

    def _open_writer(self, unigram: float | None) -> MetricsWriter | NoMetrics:
        """Print the description of the run and return the writer of its metrics. Collective.

        unigram: validation loss of a unigram model, or None.
        """
        config = self.config
        train = config.train
        parameters = count_parameters(self.runner)
        if not self.runner.reports:
            return NoMetrics()
        folder = Path(config.output.dir)
        settings = describe(config, self.runner.model)
        writer = MetricsWriter(
            folder, total_steps=train.steps, start_step=self.done, log_interval=train.log_interval,
            print_interval=train.print_interval, wandb=config.metrics.wandb, settings=settings,
        )
        record_start(folder, self.done, settings)
        for text in describe_run(self.runner, self.data, self.kernels, parameters, unigram):
            writer.say(text)
        if train.compile and not self.is_finished:
            writer.say(f"step {self.done + 1} takes longer: it compiles attention and dense MLPs")
        return writer

    @contextmanager
    def _located_os_errors(self) -> Iterator[None]:
        """Add the rank and the step to an OSError of the operating system that is raised inside the `with` block."""
        try:
            yield
        except OSError as error:
            if error.errno is None:  # raised by this library, with a complete message
                raise
            text = f"{error.strerror} (rank {self.job.rank}, after step {self.done})"
            raise OSError(error.errno, text, error.filename) from error

    def _resolve(self, bad: BadStep) -> None:
        """Let the guard skip a bad step or roll back; it may raise FloatingPointError. Collective."""
        self.done, text = self.guard.resolve(bad)
        if self.done < bad.step:  # rolled back
            self.writer.go_back(self.done)
        self.writer.say(f"WARNING: {text}")
        self._close_observers()

    def _save_at_stop(self) -> None:
        """Save a checkpoint after a requested stop, and print how to continue the run."""
        checkpoint = self.saver.save_now(self.state, self.done)
        if self.job.rank == 0:
            say(stop_message(self.config, self.status, self.done, checkpoint))

    def _say_exported(self) -> None:
        """Say on rank 0 that the model was exported before."""
        if self.job.rank == 0:
            say(f"the model: {self.config.export_directory}, exported before from the same checkpoint")


class StartUp:
    """Measures the seconds of each phase, from the start of this process to the end of the first step."""

    def __init__(self, recorder: Recorder | None = None) -> None:
        """Count the age of the process as the phase "imports", so construct this object after all imports.

        recorder: by default the active recorder of this thread.
        """
        self._recorder = recorder or Recorder.current()
        self._seconds = {"imports": process_age()}
        self._phase = ""
        self._phase_start = time.perf_counter()

    def begin(self, phase: str = "") -> None:
        """End the current phase, if any, and begin `phase`, unless it is empty."""
        now = time.perf_counter()
        if self._phase:
            elapsed = now - self._phase_start
            self._seconds[self._phase] = self._seconds.get(self._phase, 0.0) + elapsed
            self._recorder.end()
        self._phase = phase
        self._phase_start = now
        if phase:
            self._recorder.begin("start", phase)

    def end(self) -> str:
        """End the last phase and return a summary of all; return "" if it has ended before."""
        if not self._phase:
            return ""
        self.begin()
        phases = ", ".join(f"{phase} {seconds:.1f}" for phase, seconds in self._seconds.items())
        return f"first step {process_age():.1f} s after the start: {phases}"


class GarbageCollection:
    """Collects Python's garbage after every `interval` steps and at no other time; with 0, whenever Python does.

    Python collects whenever a process has allocated enough objects, which is at a different time on every rank. A rank
    that pauses for it holds up its pipeline.

    Use it as a context manager around all steps; at the end it restores Python's collector. Objects that exist at the
    start are frozen, that is exempt from collection, which makes a collection short.
    """

    def __init__(self, interval: int) -> None:
        self._interval = interval
        self._was_enabled = False

    def __enter__(self) -> Self:
        if self._interval:
            self._was_enabled = gc.isenabled()
            gc.disable()
            gc.collect()
            gc.freeze()
        return self

    def __exit__(self, *_: object) -> None:
        if self._interval:
            gc.unfreeze()
            if self._was_enabled:
                gc.enable()

    def after(self, step: int) -> None:
        """Collect garbage if it is due after `step`, counted from 1."""
        if self._interval and step % self._interval == 0:
            gc.collect()
