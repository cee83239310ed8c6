"""The training loop of one rank: batches, pipeline steps, optimizer updates, and the reports, checkpoints and checks.

Call path of a step: `Trainer._run_steps` -> `Trainer._step` -> `StepRunner.run_step` -> `Pipeline.step`.
"""

from __future__ import annotations

import gc
import math
import time
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
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
from dualpipe.train.config.fit import Resolved, keep_batch
from dualpipe.train.config.model_config import flops_per_token
from dualpipe.train.config.schema import Config
from dualpipe.train.data.loader import RunData
from dualpipe.train.data.token_stream import TokenBatch
from dualpipe.train.evaluate import evaluate
from dualpipe.train.export import check_export, export, is_exported
from dualpipe.train.guard import BadStep, Guard, StepReruns, StepSnapshot
from dualpipe.train.kernel_choice import choose_kernels
from dualpipe.train.launch.join import Job, join
from dualpipe.train.launch.watchdog import Watchdog
from dualpipe.train.metrics import MetricsWriter, Throughput, memory_bytes
from dualpipe.train.optim.lr_schedule import run_learning_rate
from dualpipe.train.profile import ProfiledSteps, Steps, TracedSteps, check_memory_snapshot, memory_snapshot
from dualpipe.train.rank_checks import RankChecks
from dualpipe.train.run_report import RunReport, count_parameters, describe_run, record_start
from dualpipe.train.saver import Saver, TrainingState, describe, find_saved_batch
from dualpipe.train.step import build_training
from dualpipe.train.step_health import StepHealth, StepWaits, measure_waits
from dualpipe.train.stop import RankReports, stop_message


def train(
    config: Config, info: RankInfo, traced: Steps | None = None, *, profiled: Steps | None = None,
    snapshot: bool = False,
) -> int:
    """Train as rank `info` of the job. Raises on failure.

    Returns 0 after the last step, or the exit status of the stop that a rank requested (see `RankReport`).

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
        resolved, note = keep_batch(resolved, job.ranks.first(partial(find_saved_batch, config)))
        if note and job.rank == 0:
            say(note)
        if snapshot:
            check_memory_snapshot(job.device)
            resources.enter_context(memory_snapshot(Path(config.output.dir), job.rank))
        with Saver(resolved.config, job) as saver:
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
    """A training step that was queued on the device, with its values on their way to the host."""

    step: int  # counted from 1
    lr: float
    host_seconds: float  # time of the host to queue the step
    names: tuple[str, ...]  # names of the leading elements of `values`
    # float64: one value for each of `names`, then the reports of all ranks; on the host, pinned if copied from a device
    values: Tensor
    start_event: Event | None  # recorded on the device before the step
    copy_event: Event | None  # recorded after the copy of `values`, which may be read then
    rerun_state: StepSnapshot  # for a rerun of the step
    waits: StepWaits | None  # measured on CPU by the rank that reports: its waits for other ranks; else None


@dataclass
class Progress:
    """The progress of a run. done: completed steps; status: exit status of a requested stop, 0 while there is none."""

    done: int = 0
    status: int = 0


class Trainer:
    """The training of one rank.

    In each pipeline, only the rank with the last stage knows the loss. With several pipelines (`parallel.dp`, `cp` and
    `ep`), that rank of pipeline 0 writes the metrics.

    On CUDA the host does not wait for a step: it reads the values of a step after it has queued the next one, or before
    an evaluation or a checkpoint. The device leaves the parameters unchanged if a gradient is not finite, because the
    next step may already run when the host learns of it.
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
        self.runner = runner
        model = runner.model
        self.is_exported = job.ranks.first(partial(is_exported, config, saver.source))
        if config.export_directory is not None and not self.is_exported:
            job.ranks.first(partial(check_export, config, model))  # before hours of training
            check_shared(config.export_directory.parent, job.ranks)
        self.kernels = choose_kernels(runner)
        self.start_up.begin("data")
        self.data = RunData(
            config, job.ranks, job.place, runner.split, reads=model.has_first or model.has_last,
            vocab_size=model.config.vocab_size, mtp_depth=model.config.mtp_depth, device=job.device,
        )
        runner.counts_targets |= self.data.has_loss_mask
        self.saver = saver
        self.state = TrainingState(model, optimizer, runner.routers, self.data.loader)
        self.guard = Guard(config.guard, model.config, StepReruns(runner, self.state, self.kernels), saver, self.state)
        self.rank_checks = RankChecks(config.guard, runner, self.state)
        self.rank_reports = RankReports(job, config.train.time_limit)
        folder = Path(config.output.dir)
        self.traced = TracedSteps(traced, job, runner.pipeline, folder)
        self.profiled = ProfiledSteps(profiled, job.rank, job.device, folder)
        self.report = RunReport(Throughput(
            tokens=self.data.batch_size * config.train.sequence_length, ranks=job.ranks.size,
            flops_per_token=flops_per_token(model.config, config.train.sequence_length),
            peak_tflops=peak_tflops(model_name(job.device)) if config.train.dtype == "bf16" else None,
        ))
        self.health = StepHealth(
            config, runner.schedule, job.place.rank("pp"), list(map(runner.recorder.name, range(job.ranks.size))),
            max_load=model.config.num_experts / model.config.num_experts_per_tok)
        self.progress = Progress()
        self.unread: deque[QueuedStep] = deque()  # steps whose values the host has not read, at most two

    @property
    def config(self) -> Config:
        """The configuration of the run."""
        return self.runner.config

    @property
    def job(self) -> Job:
        """The job that this rank belongs to."""
        return self.runner.job

    def train(self) -> int:
        """Run all steps and evaluations, then export the model if requested, and draw the pictures.

        Returns 0, or the exit status with which a rank requested an earlier stop.
        """
        progress = self.progress
        with self._located_os_errors():
            self.start_up.begin("checkpoint")
            first = self.saver.resume(self.state)
            progress.done = first
            self.start_up.begin("step")
            garbage = GarbageCollection(self.config.train.gc_interval)
            with (
                use_attention_kernel(self.kernels.attention), self._open_writer() as writer, self.traced, self.profiled,
                garbage,
            ):
                self.report.writer = writer
                while progress.done < self.config.train.steps and not progress.status:
                    try:
                        self._run_steps(garbage)
                    except BadStep as bad:
                        self._resolve(bad)
                self._save_at_stop()
            self.start_up.end()  # for a run that had no step left
            if progress.status:
                return progress.status
            if self.is_exported and first == progress.done:
                self._say_exported()
            elif self.config.export_directory is not None:
                # Even if the last checkpoint could not be written: that is reported at the end.
                export(self.config, self.runner.model, self.job, self.saver.path_of(progress.done))
        if self.runner.reports:
            self.report.draw(Path(self.config.output.dir), self.runner.schedule)
        return 0

    def _say_exported(self) -> None:
        """Say on rank 0 that the model was exported before."""
        if self.job.rank == 0:
            say(f"the model: {self.config.export_directory}, exported before from the same checkpoint")

    @contextmanager
    def _located_os_errors(self) -> Iterator[None]:
        """Add the rank and the step to an OSError of the operating system that is raised inside the `with` block."""
        try:
            yield
        except OSError as error:
            if error.errno is None:  # raised by this library, with a complete message
                raise
            text = f"{error.strerror} (rank {self.job.rank}, after step {self.progress.done})"
            raise OSError(error.errno, text, error.filename) from error

    def _resolve(self, bad: BadStep) -> None:
        """Let the guard skip a bad step or roll back; it may raise FloatingPointError. Collective."""
        resolution = self.guard.resolve(bad)
        self.progress.done = resolution.done
        if resolution.rolled_back:
            self.report.go_back(resolution.done)
        self.report.say(f"WARNING: {resolution.text}")
        self._close_windows()

    def _open_writer(self) -> AbstractContextManager[MetricsWriter | None]:
        """Print the description of the run and return the writer of its metrics.

        The writer is None on ranks that report nothing. Collective.
        """
        config = self.config
        train = config.train
        runner = self.runner
        parameters = count_parameters(runner)
        if not runner.reports:
            return nullcontext()
        settings = describe(config, runner.model)
        writer = MetricsWriter(
            Path(config.output.dir), total_steps=train.steps, start_step=self.progress.done,
            log_interval=train.log_interval, print_interval=train.print_interval, wandb=config.metrics.wandb,
            settings=settings,
        )
        record_start(Path(config.output.dir), self.progress.done, settings)
        if self.data.num_validation_tokens and len(self.data.sources) == 1:
            self.report.unigram = self.data.sources[0].unigram_loss(runner.model.config.vocab_size)
        for text in describe_run(runner, self.data, parameters, self.report.unigram):
            writer.say(text)
        if self.kernels.expert_gemm.text:
            writer.say(self.kernels.expert_gemm.text)
        if self.job.device.type == "cuda":
            writer.say(str(self.kernels.attention))
        if train.compile and self.progress.done < train.steps:
            writer.say(f"step {self.progress.done + 1} takes longer: it compiles attention and dense MLPs")
        return writer

    def _save_at_stop(self) -> None:
        """Save a checkpoint if a rank has requested a stop, and print how to continue the run."""
        progress = self.progress
        if not progress.status:
            return
        checkpoint = self.saver.save(self.state, progress.done, now=True)
        if self.job.rank == 0:
            say(stop_message(self.config, progress.status, progress.done, checkpoint))

    def _run_steps(self, garbage: GarbageCollection) -> None:
        """Run the remaining steps, until a rank requests a stop.

        Raises BadStep for a bad step. The step queued behind a non-finite one has not changed the parameters either.
        """
        steps = self.config.train.steps
        progress = self.progress
        try:
            with self.data.training_batches(steps) as batches:
                while progress.done < steps and not progress.status:
                    self.traced.before(progress.done + 1)
                    self.profiled.before(progress.done + 1)
                    self.unread.append(self._step(progress.done, batches))
                    progress.done += 1
                    garbage.after(progress.done)  # while the device computes
                    if len(self.unread) > 1:
                        self._write(self._read())  # the step before, while the device computes this one
                    if self._needs_values_now():
                        self._write(self._read_and_check())
                    self.saver.save(self.state, progress.done)
                    self._close_windows()
        except BaseException:
            with suppress(BadStep, RuntimeError):  # RuntimeError: the device has failed
                self._write_arrived()
            raise

    def _write_arrived(self) -> None:
        """Write the metrics of steps whose values have reached the host.

        It does not wait for the values of other steps, which may depend on ranks that have failed.
        """
        while self.unread and _has_arrived(self.unread[0]):
            self._write(self._read())

    def _write(self, metrics: dict[str, Any]) -> None:
        """Write the metrics of a step, on the rank that reports."""
        self.report.write(metrics, self.guard.warnings(metrics))

    def _close_windows(self) -> None:
        """Write the trace and the profile if their last step is done or the run ends."""
        progress = self.progress
        run_ends = bool(progress.status) or progress.done == self.config.train.steps
        self.traced.after(progress.done, run_ends=run_ends)
        self.profiled.after(progress.done, run_ends=run_ends)

    def _is_evaluation_due(self) -> bool:
        """Return True if an evaluation is due after the last completed step."""
        interval = self.config.train.eval_interval
        done = self.progress.done
        is_last = done == self.config.train.steps
        return bool(self.data.validation_windows) and (is_last or (interval > 0 and done % interval == 0))

    def _needs_values_now(self) -> bool:
        """Return True if the values of the last step are needed before the next step."""
        done = self.progress.done
        on_cpu = self.job.device.type == "cpu"
        is_last = done == self.config.train.steps
        something_is_due = self._is_evaluation_due() or self.rank_checks.is_due(done) or self.saver.is_due(done)
        trace_ends = self.traced.ends(done)  # the trace contains the expert loads of this step
        return on_cpu or is_last or something_is_due or trace_ends or bool(self.progress.status)

    def _read_and_check(self) -> dict[str, Any]:
        """Read the last step's metrics, then compare ranks and evaluate if either is due."""
        recorder = self.runner.recorder
        done = self.progress.done
        batch = self.unread[-1].rerun_state.batch
        metrics = self._read()
        if self.rank_checks.is_due(done):
            with recorder.doing("check", "the results of all ranks"):
                self.rank_checks.check(done, batch)
        if self._is_evaluation_due() and not self.progress.status:  # after a stop request there may be no time
            with recorder.doing("evaluate"):
                metrics |= evaluate(self.runner, self.data, done)
        return metrics

    def _step(self, step: int, batches: Iterator[TokenBatch]) -> QueuedStep:
        """Queue a training step, counted from 0, on the device. The host does not wait for it."""
        runner = self.runner
        settings = self.config.optimizer
        start_time = time.perf_counter()
        start_event = record(self.job.device, timed=True)
        runner.recorder.step = step + 1
        with runner.recorder.doing("data", "the next batch"):
            batch = next(batches)
        data_wait = time.perf_counter() - start_time
        rerun_state = self.guard.snapshot(batch)
        with rerun_state.watch:  # records sums of the results of the step's actions
            losses = runner.run_step(batch, step + 1)
        norm = self.guard.poison_norm(runner.pipeline.clip_grad_norm_(settings.clip_norm or math.inf))
        lr = run_learning_rate(step, settings, self.config.train.steps)
        runner.update(self.state.optimizer, lr, norm)
        values = self._step_values(norm, losses)
        reports = self._gather_reports(data_wait)
        packed = torch.cat([torch.stack([value.double() for value in values.values()]), reports])
        numbers, copy_event = to_host(packed, timed=True)
        host_seconds = time.perf_counter() - start_time
        waits = measure_waits(runner.recorder.entries()) if runner.reports and copy_event is None else None
        return QueuedStep(
            step + 1, lr, host_seconds, tuple(values), numbers, start_event, copy_event, rerun_state, waits)

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

    def _gather_reports(self, data_wait: float) -> Tensor:
        """Return the `RankReport` of every rank, on the device. Collective."""
        load: Tensor | float = 0.0
        if self.traced.is_open:
            place = self.job.place
            load = self.runner.routers.load(place.rank("ep"), place.size("ep"))
        return self.rank_reports.gather(load, data_wait)

    def _read(self) -> dict[str, Any]:
        """Wait for the values of the oldest unread step and return its metrics.

        Raises BadStep, on every rank, for a bad step, and discards the steps after it.
        """
        copy_event = self.unread[0].copy_event
        if copy_event is not None:
            with self.runner.recorder.doing("device", "the work queued on the device"):
                copy_event.synchronize()  # orders: the step and the copy of its values, then the host
        queued = self.unread.popleft()
        numbers = queued.values.tolist()
        num_values = len(queued.names)
        values = {"loss": math.nan} | dict(zip(queued.names, numbers))  # NaN on ranks that do not know the loss
        reports = RankReports.decode(numbers[num_values:])
        self.progress.status = self.progress.status or int(max(report.exit_status for report in reports))
        self.traced.loads(queued.step, [float(report.load) for report in reports])
        start_up_times = self.start_up.end()
        try:
            self.guard.check(queued.step, values, queued.rerun_state)
        except BadStep:
            self.unread.clear()
            raise
        finally:
            self.report.remark(start_up_times)
        if "counted_tokens" in values:
            values["counted_tokens"] = int(values["counted_tokens"])
        seconds = _duration(queued)
        if self.runner.reports:
            data_waits = [float(report.data_wait) for report in reports]
            load = values.get("load_max_over_mean")
            for line in self.health.lines(
                self.job.rank, seconds, data_waits=data_waits, load=load, waits=queued.waits
            ):
                self.report.remark(line)
        mtp_loss = [values.pop(name) for name in queued.names if name.startswith("mtp_loss/")]
        return {
            **values, **self.report.throughput.metrics(seconds), "mtp_loss": mtp_loss or None,
            "source_shares": self.data.source_shares(queued.step), "step": queued.step, "lr": queued.lr,
            "memory_bytes": memory_bytes(self.job.device),
        }


def _has_arrived(queued: QueuedStep) -> bool:
    """Return True if the host can read the values of a step without waiting."""
    return queued.copy_event is None or queued.copy_event.query()


def _duration(queued: QueuedStep) -> float:
    """Return the seconds that a step took: on the device if it has events, else on the host."""
    if queued.start_event is None or queued.copy_event is None:
        return queued.host_seconds
    return queued.start_event.elapsed_time(queued.copy_event) / 1e3


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
