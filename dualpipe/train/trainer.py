"""The training loop of one rank: data, model and optimizer of this rank, and one call of the pipeline per step."""

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
import torch.distributed as dist
from torch import Tensor

from dualpipe import Pipeline
from dualpipe.checkpoint import save_hf
from dualpipe.checkpoint.state import derive_random
from dualpipe.models.flops import flops_per_token
from dualpipe.nn.deferral import local
from dualpipe.parallel.context.context_parallel import ContextParallel
from dualpipe.parallel.mesh import DENSE
from dualpipe.runtime.device import Event, deterministic, model_name, new_stream, peak_tflops, record, to_host
from dualpipe.runtime.dtypes import dtype_of
from dualpipe.runtime.files import lock
from dualpipe.runtime.rank_process import RankInfo
from dualpipe.runtime.recorder import Recorder
from dualpipe.train.anomaly.guard import BadStep, Guard, Kept
from dualpipe.train.build import (
    build_model,
    build_optimizer,
    build_routers,
    check_export,
    check_positions,
    plan_run,
    slow_products,
    token_weight,
)
from dualpipe.train.build_schedule import build_schedule
from dualpipe.train.checkpointing import Saver, State, describe
from dualpipe.train.config.elastic import fit_run
from dualpipe.train.config.model_config import read_model_config
from dualpipe.train.config.schema import AUTO, Config
from dualpipe.train.data.loader import (
    Batch,
    Loader,
    check_tokenizer,
    evaluation_batches,
    open_splits,
    packed_directory,
    read_ahead,
    scan_splits,
)
from dualpipe.train.garbage_collection import GarbageCollection
from dualpipe.train.health.watchdog import Watchdog
from dualpipe.train.launch.distributed import Job, join
from dualpipe.train.loss import MicroBatchLoss, accepted, tokens_ahead
from dualpipe.train.metrics import MetricsWriter, StepMetrics, draw, memory_bytes, say, set_aside
from dualpipe.train.optim.optimizer import learning_rate
from dualpipe.train.optim.qk_clip import QKClip
from dualpipe.train.profiler import ProfiledSteps, check_memory_snapshot, memory_snapshot
from dualpipe.train.step_sync import StartUp, Votes, farewell
from dualpipe.train.tracing import Steps, TracedSteps


def train(
    config: Config, info: RankInfo, traced: Steps | None = None, *, profiled: Steps | None = None,
    snapshot: bool = False,
) -> int:
    """Train as rank `info` of the job; returns the exit status, 0 or what asked for an end (see `Vote`), and raises on
    failure. traced, profiled: steps to take a trace of, and to profile by torch; snapshot: of the memory of each
    rank's CUDA device."""
    recorder = Recorder(info.rank)
    start_up = StartUp(recorder)
    start_up.begin("meeting")
    with (
        recorder.activate(), deterministic(config.train.deterministic), Watchdog(recorder) as watchdog,
        join(config, info, watchdog) as job, ExitStack() as held,
    ):
        job.ranks.first(partial(_hold, Path(config.output.dir), held))
        config, note = job.ranks.first(partial(fit_run, config, job.ranks.size))
        if note and job.rank == 0:
            say(note)
        if snapshot:
            check_memory_snapshot(job.device)
            held.enter_context(memory_snapshot(Path(config.output.dir), job.rank))
        with Saver(config, job) as saver:
            status = Run(config, job, saver, start_up, traced, profiled).train()
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


class Run:
    """Everything that one rank needs to train. The rank of the last stage knows the loss and writes the metrics; of
    several pipelines (`parallel.dp`, `cp` and `ep`) that of the first.

    On CUDA the host does not wait for a step: it reads the numbers when it has given the device the next one, or before
    anything is evaluated or saved. A gradient that is not finite leaves the parameters as they were, which the device
    sees to; the next step may be under way when the host comes to know.
    """

    def __init__(
        self, config: Config, job: Job, saver: Saver, start_up: StartUp | None = None, traced: Steps | None = None,
        profiled: Steps | None = None,
    ) -> None:
        self.config, self.job, self.saver, self.recorder = config, job, saver, Recorder.current()
        self.start_up = start_up or StartUp(self.recorder)
        self.start_up.begin("model")
        train, parallel = config.train, config.parallel
        derive_random(train.seed, 0, job.rank)
        self.schedule = build_schedule(config, job.ranks)
        model_config = read_model_config(config)
        self.context = ContextParallel(job.place.part("cp"), method=parallel.cp_method)
        self.split = self.context.split
        self.model = build_model(
            model_config, self.schedule, job.place.rank("pp"), seed=train.seed, dtype=dtype_of(train.dtype),
            device=job.device, mesh=job.mesh, recompute=config.memory.recompute, compiled=train.compile,
            layers_per_stage=parallel.layers_per_stage, from_hf=config.init.from_hf if saver.source is None else "",
            plan=plan_run(config, model_config, saver.source_dtypes, job.mesh), products=config.dtypes.products,
            fp8_weight_grad=config.dtypes.fp8_weight_grad, fp8_dispatch=config.dtypes.fp8_dispatch,
            context=self.context,
        )
        self.reports = self.model.has_last and not job.place.replica
        self.folder = Path(config.output.dir)
        if config.export_directory is not None:
            job.ranks.first(partial(check_export, config, self.model))  # before the work of hours
        self.start_up.begin("data")
        self._open_data()
        self.start_up.begin("model")
        self.optimizer = build_optimizer(config, self.model)
        limit, dense = config.optimizer.qk_clip, job.place.group(*DENSE)
        self.qk_clip = QKClip(self.model.stages, limit, group=dense, device=job.device) if limit else None
        self.recorder.made("parameters", *self.optimizer.parameters)
        self.routers = build_routers(
            config, self.model.stages, group=job.group, device=job.device, context=self.context)
        self.pipeline = Pipeline(
            self.model.stages, process_group=job.place.group("pp"), schedule=self.schedule, overlap=parallel.overlap
        )
        self.state = State(self.model, self.optimizer, self.routers, self.loader)
        self.chunks = train.num_chunks / token_weight(self.split, train.sequence_length)  # what losses are divided by
        self.flops_per_token = flops_per_token(model_config, train.sequence_length).both
        self.peak_tflops = peak_tflops(model_name(job.device)) if train.dtype == "bf16" else None
        self.load_limit = model_config.num_experts / model_config.num_experts_per_tok  # of load_max_over_mean
        self.done, self.status = 0, 0  # steps; what ended them before the last one, as an exit status
        self.votes = Votes(job, train.time_limit)
        self.remarks: list[str] = []  # to be said with the next step that is written
        self.unread: deque[QueuedStep] = deque()  # at most two
        self.guard, self.traced = Guard(self), TracedSteps(self, traced)
        self.profiled = ProfiledSteps(self, profiled)
        self.garbage = GarbageCollection(train.gc_interval)
        self.copying = new_stream(job.device)
        self.unigram: float | None = None  # what a unigram model of the held-out text would reach

    def _open_data(self) -> None:
        train, data, place = self.config.train, self.config.data, self.job.place
        packed = partial(packed_directory, tokenizer=data.tokenizer, cache=self.folder, text_key=data.text_key)

        def prepare() -> tuple[Path, Path | None]:
            paths = packed(data.path), packed(data.validation_path) if data.validation_path else None
            scan_splits(*paths, data.validation_fraction, cache=self.folder)
            return paths

        paths = self.job.ranks.first(prepare)
        one_sequence = train.sequence_length + 1 if train.eval_batches else 0
        self.splits = open_splits(*paths, data.validation_fraction, at_least=one_sequence, cache=self.folder)
        for stream in self.splits:
            stream.packed.check_vocabulary(self.model.config.vocab_size)
        own = train.micro_batch_size * train.num_chunks if self.model.has_first or self.model.has_last else 0
        rows = range(own * place.batch_shard, own * (place.batch_shard + 1))  # of the global batch, for this pipeline
        self.columns = self.split.own(train.sequence_length) if self.split.size > 1 else None  # of a sequence
        self.batch_size = train.micro_batch_size * train.num_chunks * self.config.parallel.batch_shards
        sizes: dict[str, Any] = {"sequence_length": train.sequence_length, "batch_size": self.batch_size}
        read: dict[str, Any] = {"columns": self.columns, "depth": self.model.config.mtp_depth,
                                "separate_documents": data.separate_documents}
        self.loader = Loader(self.splits.train, **sizes, seed=train.seed, rows=rows, **read)
        held_out = self.splits.held_out
        whole = 0 if data.validation_path else self.splits.train.num_tokens + held_out.num_tokens
        self.held_out = (  # where windows start, by batch
            evaluation_batches(held_out, **sizes, limit=train.eval_batches, rows=rows, fraction_of=whole)
            if held_out.num_documents else []
        )
        self.read_held_out = partial(held_out.read_windows, window=train.sequence_length + 1, **read)

    def train(self) -> int:
        """All steps, with evaluations, then, where wanted, the model in Hugging Face's form, and the pictures; unless
        a rank asks for an end before, whose exit status is returned."""
        try:
            self.start_up.begin("checkpoint")
            self.done = self.saver.resume(self.state)
            self.start_up.begin("step")
            with self._writer() as writer, self.traced, self.profiled, self.garbage:
                while self.done < self.config.train.steps and not self.status:
                    try:
                        self._steps(writer)
                    except BadStep as bad:
                        self.guard.resolve(bad, writer)
                        self.traced.after()
                        self.profiled.after()
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
        if self.reports:
            draw(self.folder, self.schedule, unigram=self.unigram)
        return 0

    def _export(self) -> None:
        """Write the model in Hugging Face's form, where that is wanted."""
        target, settings = self.config.export_directory, self.config.export
        if target is None:
            return
        with self.recorder.doing("export", str(target)):
            if settings.to_hf == AUTO:
                self.job.ranks.first(partial(set_aside, target))
            save_hf(self.model.stages, target, self.job.mesh, self.model.plan, quantized=settings.quantized,
                    source=self.config.init.from_hf or None)
        if self.job.rank == 0:
            say(f"the model: {target}")

    def _writer(self) -> AbstractContextManager[MetricsWriter | None]:
        """What reports the steps, having said what the run is; None on ranks that report nothing."""
        config, train, schedule, (text, held_out) = self.config, self.config.train, self.schedule, self.splits
        own = set(self.optimizer.parameters).difference(self.pipeline.copied_parameters)
        parameters = torch.tensor(sum(local(parameter).numel() for parameter in own), device=self.job.device)
        if self.job.group is not None:
            dist.all_reduce(parameters, group=self.job.group)
        if not self.reports:
            return nullcontext()
        writer = MetricsWriter(
            self.folder, total_steps=train.steps, start_step=self.done, log_interval=train.log_interval,
            print_interval=train.print_interval, wandb=config.metrics.wandb, settings=describe(config, self.model),
        )
        ranks = f"{schedule.num_ranks} {self.job.device.type} rank{'s' if schedule.num_ranks > 1 else ''}"
        if config.parallel.replicas > 1:
            ranks = f"{config.parallel.replicas} x {ranks}"
        if config.parallel.ep > 1:
            ranks += f", experts over {config.parallel.ep}"
        if config.parallel.cp > 1:
            counts = dict.fromkeys(self.split.counts(train.sequence_length))
            ranks += f", sequences over {config.parallel.cp} ({' or '.join(map(str, counts))} tokens each)"
        writer.say(
            f"{self.model.config.model_type}: {int(parameters):,} parameters in {schedule.num_stages} stages on "
            f"{ranks}, schedule {schedule.name}, {train.dtype}\n"
            f"data: {text.num_tokens:,} tokens in {text.num_documents:,} documents to train on, "
            f"{held_out.num_tokens:,} in {held_out.num_documents:,} held out\n"
            "load_max_over_mean in the metrics: 1 where all experts get as many tokens, "
            f"{self.load_limit:g} (experts / top_k) where one gets every token"
        )
        total, fraction = text.num_tokens + held_out.num_tokens, config.data.validation_fraction
        if held_out.num_tokens == train.sequence_length + 1 > fraction * total and not config.data.validation_path:
            writer.say(
                f"{held_out.num_tokens} of {total} tokens are held out, so that there is a sequence to evaluate on: "
                f"data.validation_fraction = {fraction:g} would be {int(fraction * total)}"
            )
        if self.held_out and held_out.num_tokens < self.batch_size * (train.sequence_length + 1):
            writer.say("evaluations read sequences that overlap: the held-out text has fewer tokens than a batch")
        if held_out.num_tokens:
            self.unigram = self.splits.unigram_loss(self.model.config.vocab_size)
            writer.say(f"a unigram model of the same text has a held-out loss of {self.unigram:.4f} nats per token")
        tokens = train.micro_batch_size * train.sequence_length * config.parallel.ep // config.parallel.cp
        for slow in slow_products(self.model, tokens, self.job.device):
            writer.say(f"WARNING: slower in FP8 than in bfloat16, see dtypes.products and rules: {slow}")
        for warning in (check_positions(config), check_tokenizer(text.packed, config.init.from_hf)):
            if warning:
                writer.say(f"WARNING: {warning}")
        if train.compile and self.done < train.steps:
            writer.say(f"step {self.done + 1} takes longer: it compiles attention and dense MLPs")
        return writer

    def _stop_early(self) -> None:
        """Where a rank has asked for an end, save, and say how to go on."""
        if self.status:
            saved = self.saver.save(self.state, self.done, now=True)
            if self.job.rank == 0:
                say(farewell(self.config, self.status, self.done, saved))

    def _steps(self, writer: MetricsWriter | None) -> None:
        """All steps that are left, or until a rank asks for an end; raises BadStep where one must not count, with
        nothing after it done."""
        train, on_cpu = self.config.train, self.copying is None
        try:
            with self.loader.batches(train.steps, self.copying) as batches:
                while self.done < train.steps and not self.status:
                    self.traced.before(self.done + 1)
                    self.profiled.before(self.done + 1)
                    self.unread.append(self._step(self.done, batches))
                    self.done += 1
                    self.garbage.after(self.done)  # while the device computes
                    if len(self.unread) > 1:
                        self._write(writer, self._read())  # the step before, while the device computes this one
                    is_last, every = self.done == train.steps, train.eval_interval
                    evaluates = bool(self.held_out) and (is_last or (every > 0 and self.done % every == 0))
                    checks = self.guard.is_due(self.done)
                    saves, traced = self.saver.is_due(self.done), self.traced.ends(self.done)  # with its loads
                    if on_cpu or is_last or evaluates or checks or saves or traced or self.status:
                        metrics = self._read()
                        evaluates = evaluates and not self.status  # who asks for an end may not have the time
                        if checks:
                            with self.recorder.doing("check", "whether ranks compute right"):
                                self.guard.check_ranks(self.done)
                        with self.recorder.doing("evaluate") if evaluates else nullcontext():
                            found = self._evaluate() if evaluates else {}
                        self._write(writer, metrics | found)
                    self.saver.save(self.state, self.done)
                    self.traced.after()
                    self.profiled.after()
        except BaseException:
            with suppress(BadStep, RuntimeError):  # the latter where the device has failed
                # Without waiting, which could be for ranks that have failed.
                while self.unread and (self.unread[0].arrived is None or self.unread[0].arrived.query()):
                    self._write(writer, self._read())
            raise

    def _step(self, step: int, batches: Iterator[Batch]) -> QueuedStep:
        """Give the device a training step, counted from 0. The host does not wait."""
        start, began, o = time.perf_counter(), record(self.job.device, timed=True), self.config.optimizer
        self.recorder.step = step + 1
        with self.recorder.doing("data", "the next batch"):
            batch = next(batches)
        kept = self.guard.keep(batch)
        with kept.watch, self.routers.step():
            losses = self.forward_backward(batch, self.criterion(step + 1))
        loss = None if losses is None else losses[0]
        self.guard.mark(losses)
        norm = self.guard.judge(self.pipeline.clip_grad_norm_(o.clip_norm or math.inf))
        lr = learning_rate(
            step, peak=o.lr, total_steps=self.config.train.steps, warmup_steps=o.warmup_steps, schedule=o.schedule,
            min_ratio=o.min_lr_ratio, decay_fraction=o.decay_fraction,
        )
        with self.recorder.doing("optimizer"):
            self.optimizer.step(lr, norm)
            if self.qk_clip is not None:
                self.qk_clip(self.optimizer, norm)
        self.optimizer.zero_grad()
        found = {"grad_norm": norm} | self.guard.everywhere(loss)
        if losses is not None:
            found |= {f"mtp_loss/{depth}": each for depth, each in enumerate(losses) if depth} | self.routers.metrics()
        own = torch.stack([value.double() for value in found.values()])
        place = self.job.place
        load = self.routers.load(place.rank("ep"), place.size("ep")) if self.traced.is_taking else 0.0
        numbers, arrived = to_host(torch.cat([own, self.votes.cast(load)]), timed=True)
        return QueuedStep(step + 1, lr, time.perf_counter() - start, tuple(found), numbers, began, arrived, kept)

    def _read(self) -> dict[str, Any]:
        """Wait for the numbers of the first step that is unread; its metrics. BadStep, on every rank, where it must not
        count; then nothing is unread."""
        if (arrived := self.unread[0].arrived) is not None:
            with self.recorder.doing("device", "what the device was given to be done"):
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
            if self.reports and remark:
                self.remarks.append(remark)
        mtp_loss = [values.pop(name) for name in queued.names if name.startswith("mtp_loss/")]
        seconds = queued.began.elapsed_time(arrived) / 1e3 if queued.began and arrived else queued.seconds
        tokens_per_second = self.batch_size * self.config.train.sequence_length / seconds
        tflops = tokens_per_second * self.flops_per_token / 1e12 / self.job.ranks.size
        return {
            **values, "mtp_loss": mtp_loss or None, "step": queued.step, "lr": queued.lr,
            "tokens_per_second": tokens_per_second,
            "tflops_per_rank": tflops, "mfu": self.peak_tflops and tflops / self.peak_tflops,
            "memory_bytes": memory_bytes(self.job.device),
        }

    def _write(self, writer: MetricsWriter | None, metrics: dict[str, Any]) -> None:
        if writer is None:
            return
        writer.write(StepMetrics(**metrics))
        for text in (*self.remarks, *self.guard.warnings(metrics)):
            writer.say(text)
        self.remarks.clear()

    def criterion(self, step: int) -> MicroBatchLoss:
        """That of a step, counted from 1, or of as many of its micro-batches as are run."""
        return MicroBatchLoss(self.chunks, self.config.mtp.weight_of(step, self.config.train.steps))

    def forward_backward(self, batch: Batch, criterion: MicroBatchLoss, num_chunks: int = 0) -> Tensor | None:
        """Run the pipeline once, on `num_chunks` micro-batches (default: those of a step); on the ranks of the last
        stage the mean losses of all pipelines, (1,) or of each depth of multi-token prediction (1 + D,), None
        elsewhere. criterion: used for this alone."""
        first, last = self.model.has_first, self.model.has_last
        inputs, labels = (batch.tokens,) if first else (), (batch.targets,) if last else ()
        positions = batch.positions if self.config.data.separate_documents else None
        if positions is None and self.split.size > 1:  # whose stages tell by them which tokens of a row are theirs
            positions = torch.arange(batch.positions.shape[1], device=self.job.device).expand_as(batch.positions)
        losses, _ = self.pipeline.step(
            *inputs, num_chunks=num_chunks or self.config.train.num_chunks, criterion=criterion if last else None,
            labels=labels, side={"positions": positions, "ahead": tokens_ahead(batch.targets)} if first else None,
        )
        if losses is None:
            return None
        loss = torch.stack(criterion.noted).sum(0).float() if criterion.noted else losses.sum().float().unsqueeze(0)
        self._sum("loss", "the loss of all pipelines", loss, self.job.place.group(*DENSE))
        return loss / self.config.parallel.replicas

    def _sum(self, kind: str, what: str, tensor: Tensor, group: dist.ProcessGroup | None) -> None:
        """Add the other ranks' to the tensor."""
        if group is not None:
            with self.recorder.collective(kind, what, self.recorder.members(group)):
                dist.all_reduce(tensor, group=group)

    @torch.no_grad()
    def _evaluate(self) -> dict[str, Any]:
        """Means over the held-out batches, by the names of `StepMetrics`; none on ranks without the last stage."""
        losses, drafts = [], []
        for stage in self.model.stages:
            stage.eval()
        with read_ahead(self.read_held_out, self.held_out, self.copying) as ahead:
            for batch in ahead:
                criterion = self.criterion(self.done)
                loss = self.forward_backward(batch, criterion)
                if loss is not None:
                    losses.append(loss)
                if criterion.greedy:
                    drafts.append(self._accepted(criterion))
        for stage in self.model.stages:
            stage.train()
        if not losses:
            return {}
        mean = torch.stack(losses).mean(0)
        found: dict[str, Any] = {"eval_loss": mean[0].item()}
        if drafts:
            both = torch.stack(drafts).sum(0)
            self._sum("drafts", "accepted drafts", both, self.job.place.group(*DENSE))
            found |= {"eval_mtp_loss": mean[1:].tolist(), "acceptance_length": 1 + (both[0] / both[1]).item()}
        return found

    def _accepted(self, criterion: MicroBatchLoss) -> Tensor:
        """See `accepted`; what the model says of tokens of other context-parallel ranks is fetched from them."""
        greedy, targets = map(torch.cat, zip(*criterion.greedy))
        length = self.config.train.sequence_length
        columns = torch.cat([torch.arange(*each, device=greedy.device) for each in self.split.chunks(length)])
        main = greedy.new_zeros(len(greedy), length)
        main[:, columns] = greedy[..., 0]
        self._sum("drafts", "the likeliest tokens", main, self.job.place.group("cp"))
        return accepted(greedy, targets, main, columns)
