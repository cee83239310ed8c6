"""Rerun a step, find its first bad result, and keep the step in a bundle for `dualpipe replay BUNDLE`.

A `ResultWatch` measures every result of a step as it is made. Within a micro-batch, results depend on each other in one
chain: forward through the stages and the segments of each, then backward. A bad result makes all later results bad, on
whatever rank they are. So the origin is the first bad result in the chain, over all ranks. Ranks that exchange tokens
for experts are at the same place in the chain.

A bundle is a checkpoint of the state before the step, with the random state of every rank and the batch. `dualpipe
replay` repeats the step on the layout of its run, without the data of the run, and compares the results bit for bit.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Self, TypeVar

import torch
from torch import Tensor, nn

from dualpipe.checkpoint import Checkpoints, load
from dualpipe.checkpoint.manifest import Checkpoint
from dualpipe.models import read_hub_json
from dualpipe.nn.accumulators import local
from dualpipe.nn.attention import use_attention_kernel
from dualpipe.parallel.experts.one_hop import DispatchPlan
from dualpipe.parallel.fsdp.unit_records import own_hook
from dualpipe.pipeline.microbatch_state import SegmentRun
from dualpipe.quantized.quantize_model import quantized_part
from dualpipe.runtime.device import deterministic
from dualpipe.runtime.files import replace_file
from dualpipe.runtime.printing import say
from dualpipe.runtime.rank_process import RankInfo
from dualpipe.runtime.recorder import Observer, Recorder
from dualpipe.schedule import Action
from dualpipe.train.config.load import recorded_config
from dualpipe.train.config.model_config import model_from_dict
from dualpipe.train.config.schema import CheckpointConfig, Config, ExportConfig, InitConfig, replace_field
from dualpipe.train.data.loader import state_has_loss_mask
from dualpipe.train.data.token_stream import TokenBatch
from dualpipe.train.kernel_choice import KernelChoice, choose_kernels
from dualpipe.train.launch.join import join
from dualpipe.train.optim.optimizer import Optimizer
from dualpipe.train.saver import FrozenBase, TrainingState, describe, model_tensors, recorded_dtypes
from dualpipe.train.step import StepRunner, build_training

_MAX_SHOWN = 4  # names in a message
_MAX_SENT = 64  # names that a rank sends to the others
_AFTER_SEGMENTS = 1 << 30  # sorts after all segments of a stage
_INTEGER_DTYPES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by size in bytes
BUNDLES = "bundles"  # folder in output.dir
MAX_BUNDLES = 3  # newest bundles to keep
IN_RUN = "then"  # key in a bundle's manifest: results of the step in the run
RERUN_IN_RUN = "again"  # key in a bundle's manifest: results of its rerun in the run

K = TypeVar("K")

# -- measuring the results of a step


class ResultLocation(NamedTuple):
    """The place where a result was made. Locations sort in the order of the chain.

    order: sort key within a micro-batch.
    microbatch: its number.
    rank: global rank.
    label: text, such as "F(stage 1, micro-batch 0)".
    """

    order: tuple[int, ...]
    microbatch: int
    rank: int
    label: str

    @staticmethod
    def of(source: Action | SegmentRun, rank: int) -> ResultLocation:
        """Return the location of a result of an action, or of one of its segments, on a rank.

        An "I" has the location of the "B" that does the same work in another order.
        """
        is_forward = source.kind == "F"
        direction = 1 if is_forward else -1
        kind = "B" if source.kind == "I" else source.kind
        label = f"{kind}(stage {source.stage}, micro-batch {source.microbatch})"
        segment_order = _AFTER_SEGMENTS
        if isinstance(source, SegmentRun):
            segment_order = direction * source.number
            label = f"segment {source.number} of {label}"
        # A segment that is recomputed ("R") comes before its backward.
        order = (not is_forward, direction * source.stage, segment_order, kind != "R")
        return ResultLocation(order, source.microbatch, rank, label)


def first_location(locations: Iterable[ResultLocation | None]) -> ResultLocation | None:
    """Return the first location in the order of the chain; None if there is none."""
    return min((location for location in locations if location is not None), default=None)


class ResultWatch(Observer):
    """A context manager that measures the result of every action made inside. The host does not wait.

    Attributes:
        results: measurements by location.
        calls: for each location, the measured outputs of modules in `stages` since the result before it, by module
            name, in the order of the calls.

    Args:
        recorder: reports the results.
        measure: returns an integer or float scalar on the device for a tensor.
        stages: also measure the results of the actions' segments, and the outputs of all modules in these stages.
    """

    def __init__(
        self, recorder: Recorder, measure: Callable[[Tensor], Tensor], stages: Sequence[nn.Module] = ()
    ) -> None:
        self.results: dict[ResultLocation, Tensor] = {}
        self.calls: dict[ResultLocation, dict[str, Tensor]] = {}
        self._recorder = recorder
        self._measure = measure
        self._stages = stages
        self._current_calls: dict[str, Tensor] = {}

    def __enter__(self) -> Self:
        modules = [named_module for stage in self._stages for named_module in stage.named_modules()]
        # Own hooks, with which a head still runs in parts: the bits are those of a step without them.
        self._hooks = [module.register_forward_hook(own_hook(partial(self._record_call, name)))
                       for name, module in modules if name]
        self._recorder.subscribe(self)
        return self

    def __exit__(self, *raised: object) -> None:
        self._recorder.unsubscribe(self)
        for hook in self._hooks:
            hook.remove()

    def made(self, recorder: Recorder, what: object, results: tuple[object, ...]) -> None:
        """Measure the results of an action or a segment."""
        if not isinstance(what, Action | SegmentRun):
            return
        if isinstance(what, SegmentRun) and not self._stages:
            return
        value = self._measure_all(results)
        if value is None:
            return
        location = ResultLocation.of(what, self._recorder.rank)
        self.results[location] = value
        self.calls[location] = self._current_calls
        self._current_calls = {}

    def _record_call(self, name: str, module: nn.Module, inputs: object, outputs: object) -> None:
        """Forward hook: measure the outputs of a module."""
        value = self._measure_all(outputs)
        if value is not None:
            self._current_calls[name] = value

    def _measure_all(self, outputs: object) -> Tensor | None:
        """Return the sum of the measurements of all floating-point tensors in `outputs`, None without one."""
        values = outputs if isinstance(outputs, tuple) else (outputs,)
        plan = next((value for value in values if isinstance(value, DispatchPlan)), None)
        if plan is not None:
            # Rows for other ranks are in a buffer of the maximum size: those after the sent ones are not results.
            buffer_size = len(plan.ids)
            num_sent = int(plan.counts[:, 0].sum())
            values = tuple(value[:num_sent] if isinstance(value, Tensor) and value.shape[:1] == (buffer_size,)
                           else value for value in values)
        measured = [self._measure(value) for value in values
                    if isinstance(value, Tensor) and value.is_floating_point() and value.numel()]
        if not measured:
            return None
        return measured[0] if len(measured) == 1 else torch.stack(measured).sum()


def read_values(measured: dict[K, Tensor]) -> dict[K, Any]:
    """Return scalars on the device as Python numbers. The host waits for the device once."""
    if not measured:
        return {}
    return dict(zip(measured, torch.stack(list(measured.values())).tolist()))


@torch.no_grad()
def _count_nonfinite(tensor: Tensor) -> Tensor:
    """Return the number of elements that are infinite or NaN, an int64 scalar."""
    return (~tensor.isfinite()).sum()


@torch.no_grad()
def sum_in_fp32(tensor: Tensor) -> Tensor:
    """Return the sum of the elements, a float32 scalar: the cheapest test that all are finite.

    It is never finite if an element is not. Finite elements may overflow it, but hardly ever do.
    """
    return tensor.sum(dtype=torch.float32)


@torch.no_grad()
def checksum_bits(tensor: Tensor) -> Tensor:
    """Return the sum of the elements' bits as integers, modulo 2^64, an int64 scalar. Any flipped bit changes it."""
    quantized = quantized_part(tensor)
    if quantized is not None:
        tensor = quantized.block_rows
    plain = local(tensor.detach()).contiguous()
    return plain.view(_INTEGER_DTYPES[plain.element_size()]).sum(dtype=torch.int64)


def local_gradients(stages: Iterable[nn.Module]) -> dict[str, Tensor]:
    """Return this rank's shards of the gradients, by parameter name."""
    return {name: local(param.grad) for stage in stages for name, param in stage.named_parameters()
            if param.grad is not None}


def _names_of_nonfinite(tensors: Mapping[str, Tensor]) -> list[str]:
    """Return the names of the tensors with an infinite or NaN element."""
    counts = {name: _count_nonfinite(tensor) for name, tensor in tensors.items()
              if tensor.is_floating_point() and tensor.numel()}
    return [name for name, count in read_values(counts).items() if count]


def find_origin(runner: StepRunner, watch: ResultWatch) -> str:
    """Return the rank and the action of the first non-finite result in a step, or "". Collective.

    watch: recorded `sum_in_fp32` of the step's results.
    """

    def first_on_rank() -> ResultLocation | None:
        sums = read_values(watch.results)
        return first_location(location for location, value in sums.items() if not math.isfinite(value))

    first = first_location(runner.job.ranks.gather(first_on_rank))
    return f"{runner.recorder.name(first.rank)}, {first.label}" if first else ""


# -- rerunning a step


class Rerun(NamedTuple):
    """The result of a rerun of a step, equal on all ranks.

    loss: loss of the step.
    norm: gradient norm.
    checksums: checksum of the gradients of every rank.
    origin: rank and place of the first non-finite result, or "".
    parameters: names, with ranks, of parameters that were not finite before the step.
    gradients: names, with ranks, of gradients that are not finite.
    """

    loss: float
    norm: float
    checksums: list[int]
    origin: str
    parameters: list[str]
    gradients: list[str]

    def to_record(self) -> dict[str, Any]:
        """Return loss, norm and checksums without rounding, as JSON for a bundle."""
        checksums = [f"{checksum:016x}" for checksum in self.checksums]
        return {"loss": self.loss.hex(), "norm": self.norm.hex(), "sums": checksums}

    def describe(self, first_origin: str = "") -> str:
        """Return the findings as text.

        Args:
            first_origin: rank and place of the first non-finite result in the step itself, or "" if unknown.
        """
        is_finite = math.isfinite(self.loss + self.norm)
        if is_finite and not (self.origin or self.parameters or self.gradients):
            rank = first_origin.partition(",")[0] or "a rank"
            first = f"first in {first_origin}, but " if first_origin else ""
            return (f"not repeatable: {first}in a rerun the whole step is finite; suspect the device or the memory of "
                    f"{rank}")
        findings = [f"first in {self.origin}"] if self.origin else []
        for kind, names in (("parameters before the step", self.parameters), ("gradients", self.gradients)):
            if names:
                more = f" and {len(names) - _MAX_SHOWN} more" if len(names) > _MAX_SHOWN else ""
                findings.append(f"{kind} that are not finite: {', '.join(names[:_MAX_SHOWN])}{more}")
        return "; ".join(findings)


class _RankFindings(NamedTuple):
    """The findings of one rank in a rerun.

    origin: location of its first non-finite result.
    loss: None on ranks without the last stage.
    checksum: of its gradients.
    parameters: names of parameters that were not finite before the step.
    gradients: names of gradients that are not finite.
    """

    origin: ResultLocation | None
    loss: float | None
    checksum: int
    parameters: list[str]
    gradients: list[str]


def rerun_step(runner: StepRunner, batch: TokenBatch, step: int) -> Rerun:
    """Run a step from the state before it, and find what is not finite. Changes nothing but routers. Collective.

    Args:
        runner: runs the step.
        batch: of the step.
        step: counted from 1.
    """
    stages = runner.model.stages
    named_parameters = {name: local(param) for stage in stages for name, param in stage.named_parameters()}
    bad_parameters = _names_of_nonfinite(named_parameters)
    with ResultWatch(runner.recorder, _count_nonfinite, stages) as watch:
        losses = runner.run_step(batch, step)
    runner.drop_scores()
    gradients = local_gradients(stages)
    norm = float(runner.pipeline.clip_grad_norm_(math.inf))

    def collect_findings() -> _RankFindings:
        return _RankFindings(
            origin=_first_nonfinite(watch, losses, runner.recorder.rank),
            loss=None if losses is None else float(losses[0]),
            checksum=sum(int(checksum_bits(gradient)) for gradient in gradients.values()) % 2**64,
            parameters=bad_parameters[:_MAX_SENT],
            gradients=_names_of_nonfinite(gradients)[:_MAX_SENT],
        )

    by_rank = runner.job.ranks.gather(collect_findings)
    runner.pipeline.zero_grad()
    return _merge_findings(by_rank, norm, runner.recorder)


def _first_nonfinite(watch: ResultWatch, losses: Tensor | None, rank: int) -> ResultLocation | None:
    """Return the location of this rank's first non-finite result, with the innermost module that made it."""
    nonfinite = [location for location, count in read_values(watch.results).items() if count]
    if losses is not None and not bool(losses.isfinite().all()):
        nonfinite.append(ResultLocation((0, _AFTER_SEGMENTS), 0, rank, "the loss"))  # after all forwards
    first = first_location(nonfinite)
    if first is None:
        return None
    counts = read_values(watch.calls.get(first, {}))
    module = next((name for name, count in counts.items() if count), "")  # inner modules return before outer ones
    return first._replace(label=f"{first.label}, in {module}") if module else first


def _merge_findings(by_rank: Sequence[_RankFindings], norm: float, recorder: Recorder) -> Rerun:
    """Return the result of a rerun from the findings of all ranks. Names start with those of the origin's rank."""
    first = first_location(findings.origin for findings in by_rank)
    ranks = list(range(len(by_rank)))
    if first is not None:
        ranks.remove(first.rank)
        ranks.insert(0, first.rank)
    return Rerun(
        loss=next(findings.loss for findings in by_rank if findings.loss is not None),
        norm=norm,
        checksums=[findings.checksum for findings in by_rank],
        origin=f"{recorder.name(first.rank)}, {first.label}" if first else "",
        parameters=[f"{name} on {recorder.name(rank)}" for rank in ranks for name in by_rank[rank].parameters],
        gradients=[f"{name} on {recorder.name(rank)}" for rank in ranks for name in by_rank[rank].gradients],
    )


# -- bundles


def write_bundle(
    runner: StepRunner, state: TrainingState, kernels: KernelChoice, step: int, batch: TokenBatch,
    values: Mapping[str, Any], rerun: Rerun,
) -> Path:
    """Write all that a rerun of a step needs, and return the path of the bundle. Collective.

    Args:
        runner: the step runner of the run.
        state: the current state, which must be that before the step.
        kernels: of the run. The bundle has them in [model], because a replay that timed them for "auto" again could
            choose others, with other bits.
        step: counted from 1.
        batch: of the step.
        values: metrics of the step.
        rerun: result of its rerun.

    Raises:
        OSError: on all ranks, if the bundle cannot be written.
    """
    config = replace_field(runner.config, "model", "expert_gemm", kernels.expert_gemm.library)
    config = replace_field(config, "model", "attention", kernels.attention.kernel)
    model = runner.model
    job = runner.job
    losses = job.ranks.gather(lambda: values["loss"])
    loss = next((loss for loss in losses if not math.isnan(loss)), math.nan)  # NaN on ranks without the last stage
    first_run = {"loss": float(loss).hex(), "norm": float(values["grad_norm"]).hex()}
    loader = state.loader.state_dict() | {"step": step - 1}
    timeout = timedelta(seconds=config.parallel.timeout)
    folder = Path(config.output.dir, BUNDLES).absolute()
    with Checkpoints(folder, job.mesh, keep_last=MAX_BUNDLES, timeout=timeout, finite=False) as bundles:
        bundle = bundles.save(
            dict(state.tensors()) | _batch_tensors(runner, batch), step=step, plan=model.plan,
            config=describe(config, model),
            extra={
                "loader": loader, "base": state.base.to_record(), IN_RUN: first_run, RERUN_IN_RUN: rerun.to_record(),
            },
        )
    path = folder / bundle.name
    model_config = json.dumps(model.config.to_dict(), indent=2)
    job.ranks.first(lambda: replace_file(path / "config.json", model_config))
    return path


def _batch_tensors(runner: StepRunner, batch: TokenBatch) -> dict[str, Tensor]:
    """Return the tensors of a batch that the stages of this rank read, by names that no other rank uses."""
    first = runner.model.has_first
    last = runner.model.has_last
    tensors: dict[str, Tensor] = {}
    if first:
        tensors |= {"tokens": batch.tokens, "positions": batch.positions}
    if last:
        tensors["targets"] = batch.targets
    if first and not last and runner.model.config.mtp_depth > 0:  # MTP layers read the next tokens from the targets
        tensors["ahead"] = batch.targets
    return {f"bundle/{name}-{runner.job.place.replica}": tensor for name, tensor in tensors.items()}


# -- dualpipe replay


def read_bundle(path: str | Path) -> Config:
    """Return the configuration to replay a bundle with: that of its run, with the bundle's model, resuming from it.

    Raises ValueError if `path` is not a bundle, or its config.json was changed.
    """
    path = Path(path).resolve()
    manifest = Checkpoint.read(path).manifest
    extra = manifest.extra if isinstance(manifest.extra, dict) else {}
    if not isinstance(manifest.config, dict) or not {IN_RUN, RERUN_IN_RUN} <= extra.keys():
        raise ValueError(f"{path} is a checkpoint, not a bundle; give a folder in `bundles` of output.dir")
    config = recorded_config(manifest.config["run"])
    backend = config.model.backend
    file, hub = read_hub_json(path)
    if model_from_dict(hub, backend) != model_from_dict(manifest.config["model"], backend):
        raise ValueError(f"{file} has changed: it is not the model of the bundle's manifest; restore it")
    model = replace(config.model, config=str(path))
    checkpoint = CheckpointConfig(resume=str(path))
    init = config.init if config.lora.is_enabled else InitConfig()  # the frozen base of adapters is not in the bundle
    return replace(config, init=init, export=ExportConfig(), model=model, checkpoint=checkpoint)


def replay(config: Config, info: RankInfo) -> int:
    """Replay the step as rank `info` and return the exit status: 0 if it gives the same bits, else 1.

    config: from `read_bundle`. Rank 0 prints the result.
    """
    manifest = Checkpoint.read(Path(config.checkpoint.resume)).manifest
    in_run = manifest.extra[IN_RUN]
    rerun_in_run = manifest.extra[RERUN_IN_RUN]
    recorder = Recorder(info.rank)
    with (
        recorder.activate(), deterministic(config.train.deterministic), join(config, info) as (job, resolved)
    ):
        FrozenBase.find(resolved.config, job.ranks).check(config.checkpoint.resume, manifest)
        runner, optimizer = build_training(resolved, job, recorded_dtypes(manifest))
        runner.counts_targets |= state_has_loss_mask(manifest.extra["loader"])
        kernels = choose_kernels(runner)
        recorder.step = manifest.step
        batch = _load_state(runner, optimizer, config.checkpoint.resume)
        with use_attention_kernel(kernels.attention):
            rerun = rerun_step(runner, batch, manifest.step)
        result = rerun.to_record()
        is_same = result == rerun_in_run and _agrees(result, in_run)
        if job.rank == 0:
            say(f"replay of step {manifest.step}: {rerun.describe()}")
            for name, recorded in (("step in the run", in_run), ("rerun in the run", rerun_in_run)):
                numbers = ", ".join(f"{key} {float.fromhex(recorded[key])}" for key in ("loss", "norm"))
                verdict = "the same bits" if _agrees(result, recorded) else "other bits"
                say(f"{name}: {numbers}; the replay gives {verdict}")
            say("reproduced" if is_same else f"NOT reproduced: loss {rerun.loss}, norm {rerun.norm}")
    return 0 if is_same else 1


def _load_state(runner: StepRunner, optimizer: Optimizer, path: str) -> TokenBatch:
    """Load the state before the step from the bundle at `path`, and return the batch of this rank. Collective."""
    train = runner.config.train
    model = runner.model
    split = runner.split
    length = train.sequence_length
    num_rows = train.micro_batch_size * train.num_chunks if model.has_first or model.has_last else 0
    num_tokens = split.counts(length)[split.rank]  # of a sequence, on this context-parallel rank
    depths = (1 + model.config.mtp_depth,) if model.config.mtp_depth else ()
    zeros = partial(torch.zeros, dtype=torch.int64, device=runner.job.device)
    batch = TokenBatch(
        tokens=zeros(num_rows, num_tokens), targets=zeros(num_rows, num_tokens, *depths),
        positions=zeros(num_rows, length))
    tensors = model_tensors(model, optimizer) | runner.routers.state_tensors()
    load(path, tensors | _batch_tensors(runner, batch), mesh=runner.job.mesh)
    optimizer.round_parameters()
    return batch


def _agrees(result: Mapping[str, object], recorded: Mapping[str, object]) -> bool:
    """Return True if `result` has the same bits as every recorded value."""
    return all(result[name] == value for name, value in recorded.items())
