"""`Pipeline` runs any valid schedule with any number of stages on a rank; `DualPipeV` is its V-shaped case.

A step has three parts: the ranks agree on the arguments (a mistake on one raises on all), each interprets its program,
and they report whether it went well.
"""

from __future__ import annotations

import secrets
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from dualpipe.nn.deferral import WeightGradStore
from dualpipe.parallel.clipping import clip_grad_norm_
from dualpipe.parallel.fsdp.driver import ParametersStep, StageParameters, mesh_groups, process_groups
from dualpipe.parallel.tied import TiedGradients, tied_parameters
from dualpipe.pipeline.arguments import Batch, StepAgreement, StepArguments, compare_arguments, split_batch
from dualpipe.pipeline.construction import (
    PipelineAgreement,
    PipelineArguments,
    check_stages,
    checked_modules,
    compare_pipelines,
    tied_ends,
)
from dualpipe.pipeline.deferral_report import DeferralReport, StepProbe, shortfall
from dualpipe.pipeline.deferral_report.probe import ParameterWork
from dualpipe.pipeline.executor import Executor, Outputs
from dualpipe.pipeline.lower import Programs
from dualpipe.pipeline.p2p import P2PGroups, P2PMessages
from dualpipe.pipeline.rank_stages import RankStages
from dualpipe.pipeline.side_inputs import SideSpec
from dualpipe.pipeline.stage_program import OfferedSegments
from dualpipe.runtime.errors import RankLost
from dualpipe.runtime.ranks.agreement import Agreement, Outcome
from dualpipe.runtime.ranks.failure import FailureBoard, StepFailure
from dualpipe.runtime.ranks.process_groups import new_gloo_group
from dualpipe.runtime.recorder import Recorder
from dualpipe.schedule import Schedule
from dualpipe.schedule.builders import first_microbatches
from dualpipe.schedule.by_name.build import search_with_progress
from dualpipe.schedule.types import Step
from dualpipe.trace.tracer import PipelinePlace, Tracer


@dataclass(frozen=True)
class _ObservedStep:
    """The weight-gradient work of a step; defers: whether its schedule has a "W"."""

    work: tuple[ParameterWork, ...]
    num_chunks: int
    defers: bool

    def warn_of_little_deferred(self) -> None:
        """Warn the caller of `step` where a "W" has little to do."""
        text = shortfall(self.work) if self.defers else None
        if text is not None:
            warnings.warn(text, UserWarning, stacklevel=3)


@dataclass
class _Steps:
    """The steps of a pipeline: how many were begun, on all ranks alike, and the executor of the one that is running.

    Not attributes of the pipeline itself, as to assign one of a module takes 1 us.
    """

    begun: int = 0
    executor: Executor | None = None


class Pipeline(nn.Module):
    """The ranks of `process_group` as a pipeline; an nn.Module whose parameters are those of this rank's stages.

    modules: this rank's stages, in ascending order of stage number, all on one device; `module` holds them. Stage 0
        takes the step's inputs; every stage returns a tensor or a tuple of tensors, the arguments of the next.
    process_group: one rank per pipeline rank (default: the default group; without torch.distributed, a single rank).
    rank_mapping: `rank_mapping[i]` is the pipeline rank of the group's rank i (default: the same).
    schedule: a name for `dualpipe.schedule.build`, or a `Schedule`, which fixes the number of micro-batches. "auto" is
        searched for on the first rank, for all, in the first step with a number of micro-batches.
    batch_dim: the dimension along which inputs, labels and outputs are split into micro-batches.
    overlap: whether the two actions of a pair run in turn, where stages have `segments()`; the results are the same.
    unreduced: trainable parameters, or modules, whose gradients you reduce over data-parallel ranks yourself: names as
        in their stage, with wildcards. Needed only beside others that FSDP2 has.
    merge_weight_grads: where the schedule has actions "W" of a stage next to each other, compute the weight gradients
        of a `GroupedLinear` for all of their micro-batches in one GEMM, which reads and writes the accumulator once.
        On CPU the bits are the same; on CUDA the micro-batches are summed before they are added to the accumulator,
        so that float32 rounds in other places. Takes no more memory, as all of them wait for the first "W" anyway.

    Stages, or parts of them, that were given to FSDP2's `fully_shard` before are driven by the pipeline: gathered once
    a step, gradients accumulated in the policy's `reduce_dtype` and reduced when the stage is done. All data-parallel
    ranks must then take every step together.

    A parameter that both ends have on one rank, as in a V, they share. Where the ends are on two ranks, each stage with
    one has a method `tied_parameters()` that returns its copies; the pipeline then sums their gradients over both.

    Raises ValueError on every rank where arguments of one of them do not fit.
    """

    _only_v = False  # whether stages must be placed in a V

    def __init__(
        self, modules: Sequence[nn.Module], *, process_group: ProcessGroup | None = None,
        schedule: str | Schedule = "1f1b", batch_dim: int = 0, rank_mapping: Sequence[int] | None = None,
        overlap: bool = True, unreduced: Sequence[str] = (), merge_weight_grads: bool = True,
    ) -> None:
        super().__init__()
        if process_group is None and dist.is_initialized():
            process_group = dist.group.WORLD
        self.num_ranks = process_group.size() if process_group else 1
        self.batch_dim = batch_dim
        self.weight_grad_store = WeightGradStore()
        self._process_group = process_group
        self._loaded = set[int]()  # the kinds of steps whose kernels are loaded
        self._steps = _Steps()
        self._is_reordered = False  # whether steps run in another order, of one micro-batch
        self._observed: _ObservedStep | None = None  # the first training step in the schedule's order
        self._trace_groups: dict[ProcessGroup | None, ProcessGroup] = {}  # by those whose ranks are traced
        mapping, members = _mapping(rank_mapping, self.num_ranks)
        self.rank = members.index(process_group.rank()) if process_group else 0
        given: Any = process_group if isinstance(process_group, P2PGroups) else None  # such as one of threads
        self._p2p: P2PGroups = given or P2PGroups(process_group, members, self.rank)
        build = partial(self._build_stages, modules, schedule, mapping, overlap, unreduced)
        if sorted(mapping) != list(range(self.num_ranks)):
            build = partial(_refuse_mapping, rank_mapping, self.num_ranks)
        agreed = self._build(build, modules)
        self._norm_dtype = agreed.norm_dtype
        self._side = agreed.side
        self._programs.pairs = agreed.overlap
        self._programs.merges = merge_weight_grads
        self._connect(agreed.has_copies)

    def _build(
        self, build: Callable[[Sequence[OfferedSegments]], PipelineArguments], modules: Any
    ) -> PipelineAgreement:
        """Build the stages of this rank, and agree on the pipeline with the others; ValueError where one cannot."""
        stages = [m for m in modules if isinstance(m, nn.Module)] if isinstance(modules, Iterable) else []
        # Before anything can fail here alone: those that share the groups hear of it in them.
        offered = [OfferedSegments(stage) for stage in stages]
        replicas = process_groups(stages, [group for segments in offered for group in segments.groups])
        built: list[PipelineArguments] = []
        failed: list[Exception] = []
        try:
            built.append(build(offered))
        except Exception as raised:  # raised again where all ranks hear of it
            failed.append(raised)

        def own() -> PipelineArguments:
            if failed:
                raise failed.pop()
            return built[0]

        self._agreement = Agreement(self._p2p.messages(), replicas)
        outcome = self._agreement.compare(PipelineArguments, own, compare_pipelines)
        try:
            outcome.raise_problem()
            assert outcome.conclusion is not None, "without a problem there is a conclusion"
            return outcome.conclusion
        finally:
            del outcome  # this frame is in the traceback of its cause

    def _build_stages(
        self, modules: Any, schedule: str | Schedule, mapping: list[int], overlap: bool, unreduced: Sequence[str],
        offered: Sequence[OfferedSegments],
    ) -> PipelineArguments:
        """Build the stages of this rank; return what the ranks compare. ValueError for what does not fit here."""
        self.module, device = checked_modules(modules)
        parameters = [StageParameters(module) for module in self.module]
        specs = [SideSpec.of(module) for module in self.module]
        self.device = self._p2p.checked_device(device)
        self._programs = Programs(schedule, num_ranks=self.num_ranks, rank=self.rank, num_modules=len(self.module))
        built = self._programs.schedule()  # for the fewest micro-batches
        self._placement = built.placement
        ranks = range(self.num_ranks)
        if self._only_v and built.placement != (*ranks, *reversed(ranks)):
            where = f"schedule {built.name!r} has them on ranks {built.placement}"
            raise ValueError(f"DualPipeV needs stages placed in a V, {where}")
        numbers = built.rank_stages(self.rank)
        own = dict(zip(numbers, self.module))
        self._stages = RankStages(
            modules=own,
            specs=dict(zip(numbers, specs)),
            parameters=dict(zip(numbers, parameters)),
            borrowers={number: each.borrowers(own) for number, each in zip(numbers, parameters)},
            count=built.num_stages,
            device=self.device,
            batch_dim=self.batch_dim,
        )
        self._stages.compile_programs(dict(zip(numbers, offered)))
        can_overlap = self._stages.is_hooked or any(p.num_communications for p in self._stages.programs.values())
        reduces, missed = check_stages(list(self.module), parameters, unreduced)
        return PipelineArguments(
            schedule=built.name,
            schedule_checksum=crc32(repr(built).encode()),
            device=self.device.type,
            batch_dim=self.batch_dim,
            rank_mapping=mapping,
            overlap=bool(overlap) if can_overlap else None,
            side_specs=[list(spec) for spec in dict.fromkeys(specs)],  # each once: a record has little room
            is_hooked=self._stages.is_hooked,
            has_float64=any(p.dtype is torch.float64 for p in self.module.parameters()),
            reduces=reduces,
            unreduced=missed,
            **asdict(tied_ends(own.get(0), own.get(built.num_stages - 1))),
        )

    def _connect(self, has_copies: bool) -> None:
        """Open the links between stages, and what ends a step where a rank fails. has_copies: see `TiedGradients`."""
        self._agreement.compare_replicas()
        first, last = self._placement[0], self._placement[-1]
        ends = (first,) if has_copies else ()  # the ends exchange gradients as neighbours do
        self._p2p.connect((*self._placement, *ends), self.device)
        self._tied: TiedGradients | None = None
        if has_copies and self.rank in (first, last):
            stage, other = (0, last) if self.rank == first else (self._stages.count - 1, first)
            exchange = partial(self._p2p.exchange, other, around=(last, first))
            self._tied = TiedGradients(self._stages.modules[stage], exchange)
        key = self._agreement.lowest(secrets.randbits(63))
        groups = [*self._p2p.groups(), *self._agreement.groups, *mesh_groups(self.module),
                  *self._stages.known_groups]
        self._failure = StepFailure(FailureBoard(self._p2p.store, f"{key:x}"), groups)

    @contextmanager
    def in_order(self, *, deferred: bool) -> Iterator[None]:
        """Run the steps inside, of one micro-batch, with whole backwards, or with all weight gradients `deferred`: two
        orders of the same products. They give the same bits where each of these does."""
        kept = self._programs
        schedule = kept.schedule()  # of one micro-batch, unless it is a `Schedule` of more
        order = partial(_reordered, deferred=deferred)
        ranks = tuple(tuple(order(first_microbatches(steps, 1))) for steps in schedule.ranks)
        other = replace(schedule, num_microbatches=1, ranks=ranks)
        self._programs = Programs(other, num_ranks=self.num_ranks, rank=self.rank, num_modules=len(self.module))
        self._programs.pairs = kept.pairs
        self._programs.merges = kept.merges
        self._is_reordered = True
        try:
            yield
        finally:
            self._programs = kept
            self._is_reordered = False

    # -- a step

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse, with a ValueError: a pipeline takes whole steps."""
        raise ValueError("a pipeline is not called like a module, as it runs forward and backward at once; call "
                         "step(*inputs, num_chunks=..., criterion=..., labels=...), or for outputs alone step(*inputs, "
                         "num_chunks=..., return_outputs=True) under torch.no_grad()")

    def step(
        self, *inputs: Tensor | None, num_chunks: int | None = None, criterion: Callable[..., Tensor] | None = None,
        labels: Sequence[Tensor | None] | Tensor | None = (), return_outputs: bool = False, sync: bool = True,
        side: Mapping[str, Tensor | None] | None = None,
    ) -> tuple[Tensor | None, Outputs]:
        """Run one batch through the pipeline: forward and backward, or forward only under `torch.no_grad()`.

        inputs: the arguments of stage 0, needed on its rank only; each is split along `batch_dim` into `num_chunks`
            micro-batches (evenly, or as `torch.tensor_split` does). Other ranks pass None or nothing.
        num_chunks: how many; required on every rank. Losses and gradients are those of single micro-batches, and add
            up: a criterion that is a mean divides by `num_chunks`.
        criterion, labels: `criterion(*outputs, *labels)` gives a micro-batch's scalar loss; needed on the rank of the
            last stage only (in a V that is the first rank), `criterion` always when training. Inputs and labels that
            are None there are passed on as None.
        return_outputs: whether to return the last stage's outputs.
        sync: whether to reduce the gradients of sharded stages over their data-parallel ranks. Without, they are kept
            and accumulate until a step that does; what drops them is the pipeline's `zero_grad`, not an optimizer's.
        side: tensors without a gradient that any stage may read, such as position ids, by name; split and given as
            inputs are, on the rank of stage 0. They go through all stages with the activations. A stage gets those that
            its `forward` names as parameters behind the first, or all for a `**kwargs`, by keyword; what `segments()`
            read of them is in their carry, None where it is not given. A name that no stage takes is an error, and
            so is any beside modules with `overlapped_forward_backward`.

        Returns (loss, outputs) on the rank of the last stage and (None, None) elsewhere: loss (num_chunks,), detached,
        or None without a criterion; outputs detached and joined along `batch_dim`, or None unless asked for.
        Gradients accumulate in `.grad`: the sum over micro-batches of the gradients of their losses, and of sharded
        stages their mean over data-parallel ranks, unless FSDP2 was told to divide by something else.

        Raises, on every rank: ValueError for arguments that do not fit or on which ranks disagree, after which the
        pipeline can be used again; PipelineError where a rank failed during the step. It names the rank, and has ended
        the process groups of the step, so that no rank waits for another: later steps raise it again. On one rank
        alone, without any group, the pipeline can be used again; gradients are then undefined and should be zeroed.
        Gradients that `sync=False` has kept are dropped by a PipelineError.
        """
        self._failure.check()
        self._steps.begun += 1
        train = torch.is_grad_enabled()
        observed = self._observed
        split: list[Batch] = []

        def own_arguments() -> StepArguments:
            batch, arguments = split_batch(
                self._stages, inputs, num_chunks, criterion, labels, return_outputs, side, sync=bool(sync))
            self._prepare(arguments.num_chunks, train)
            split.append(batch)
            return arguments

        try:
            with self._failure.ending_step(self._running):
                agreed = self._agree(own_arguments, [str(num_chunks), train, bool(sync)])
                if agreed.conclusion is not None:
                    result = self._run(split.pop(), agreed.conclusion, train=train, sync=bool(sync))
        except BaseException:
            if self._steps.executor is not None:
                self._steps.executor.abandon()
            self._discard()
            raise
        finally:
            self._steps.executor = None
        try:
            agreed.raise_problem()
            if observed is None and self._observed is not None:
                self._observed.warn_of_little_deferred()
            return result
        finally:
            del agreed  # this frame is in the traceback of its cause: the cycle would keep the inputs

    def _prepare(self, num_chunks: int, train: bool) -> None:
        """Do what may fail on a rank alone, before the ranks agree on a step."""
        self._stages.compile_programs()
        if not self._programs.is_to_search(num_chunks):
            self._programs.program(num_chunks, train=train)
        for parameters in self._stages.parameters.values():
            parameters.check()

    def _agree(
        self, own_arguments: Callable[[], StepArguments], same_everywhere: list[Any]
    ) -> Outcome[StepAgreement]:
        """Agree on the arguments of a step."""
        compare = partial(
            compare_arguments, first=self._placement[0], last=self._placement[-1], spec=self._side)
        return self._agreement.compare(StepArguments, own_arguments, compare, same_everywhere=same_everywhere)

    def _run(
        self, batch: Batch, agreed: StepAgreement, *, train: bool, sync: bool
    ) -> tuple[Tensor | None, Outputs]:
        """Run a step on which the ranks have agreed."""
        num_chunks = agreed.num_chunks
        if self._programs.is_to_search(num_chunks):
            search = partial(search_with_progress, self.num_ranks, num_chunks)
            self._programs.add(self._p2p.ranks().first_in_turns(search))
        program = self._programs.program(num_chunks, train=train)
        messages = P2PMessages(
            self._p2p, program, num_larger=agreed.num_larger, device=self.device,
            by_host=self.device.type != "cpu" and agreed.kind not in self._loaded,
        )
        parameters = ParametersStep(
            self._stages.parameters, self._stages.borrowers, train=train, reduce=train and sync)
        if agreed.side_names:
            batch = replace(batch, side_names=agreed.side_names)
        executor = Executor(self._stages, batch, program, messages, parameters, self.weight_grad_store)
        self._steps.executor = executor
        if self._tied is not None and train:
            self._tied.begin()
        probe = None
        if train and self._observed is None and not self._is_reordered:
            probe = StepProbe(self._stages.modules)
        self.weight_grad_store.observer = probe
        try:
            result = executor.run()
        finally:
            self.weight_grad_store.observer = None
        if self._tied is not None and train and sync:
            self._tied.add()
        self._agreement.wait_for_all()  # so that a failure is raised on all ranks in the step in which it came up
        messages.finish()
        self._loaded.add(agreed.kind)
        if probe is not None:
            kinds = {action.kind for instruction in program.instructions for action in instruction.actions}
            self._observed = _ObservedStep(probe.work(), num_chunks, defers="W" in kinds)
        return result

    def _running(self) -> str:
        """Return the error prefix that names the running action."""
        executor = self._steps.executor
        return "" if executor is None else executor.running()

    def deferral_report(self) -> DeferralReport:
        """Return how much of this rank's weight-gradient work can wait for a "W", which parameters' cannot, and why.

        It is of the pipeline's first training step, which alone is watched; build the pipeline anew to see what a
        change does. Only this rank is asked. Raises ValueError before that step.
        """
        if self._observed is None:
            raise ValueError("deferral_report has no training step to report on; call it after a step(...) with "
                             "gradients, outside of torch.no_grad()")
        return DeferralReport.of(self.rank, self._observed.work, self._programs.schedule(self._observed.num_chunks))

    def trace(self, path: str | Path, *, group: ProcessGroup | None = None) -> Tracer:
        """For a `with` around steps, which all ranks enter and leave together: what they did, as a file for Perfetto
        and for `dualpipe trace`, which the first rank writes at the end.

        path: the file, in a folder that exists; group: the ranks to trace (default: those of this pipeline), such as
        those of all pipelines that train the model. An error inside goes on, with a note that names the file of what
        there was until then; of one that may be a rank's alone, each rank's own.
        """
        schedule = self._programs.schedule()
        ranks = self._p2p.global_ranks
        place = PipelinePlace(self.rank, ranks or (Recorder.current().rank,), schedule.name, schedule.placement)
        group = group or self._process_group
        if group is not None and group not in self._trace_groups:
            # Of its own: a step that fails ends the pipeline's groups, and its trace is written all the same.
            self._trace_groups[group] = new_gloo_group(group)
        return Tracer(Path(path), self._trace_groups.get(group), self.device, place,
                      lambda: self._steps.begun if WeightGradStore.current() is self.weight_grad_store else 0)

    @property
    def copied_parameters(self) -> list[nn.Parameter]:
        """The parameters of this rank that the first stage has as well, on another rank: they count there."""
        return [] if self._tied is None else tied_parameters(self._stages.modules.get(self._stages.count - 1))

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False) -> Tensor:
        """`torch.nn.utils.clip_grad_norm_` for the model of all ranks; every rank must call it, after a step.

        The norm is that of the gradients of all stages, and of parameters that are sharded over data- or expert-
        parallel ranks (DTensors) of all parts; what is tied or replicated counts once. Plain parameters are taken to
        have the same gradients in all data-parallel pipelines. The host waits for nothing before the scaling is queued.

        Returns the norm before as a scalar, the same on every rank. Raises ValueError where norm_type is not above 0 or
        max_norm below 0; with `error_if_nonfinite` RuntimeError for a norm that is not finite, gradients untouched.
        """
        self._failure.check()
        try:
            return clip_grad_norm_(
                self.parameters(), max_norm, norm_type, error_if_nonfinite, copies=self.copied_parameters,
                group=self._process_group, device=self.device, dtype=self._norm_dtype,
            )
        except RankLost as lost:
            with self._failure.ending_step(str):
                raise lost

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Like `nn.Module.zero_grad`; also drops gradients that steps with `sync=False` keep."""
        super().zero_grad(set_to_none)
        self._discard()

    def _discard(self) -> None:
        for parameters in self._stages.parameters.values():
            parameters.discard()
        if self._tied is not None:
            self._tied.discard()


def _reordered(steps: Iterable[Step], *, deferred: bool) -> Iterator[Step]:
    """The steps of a rank with "I" and at once "W" in place of every "B", or the other way round."""
    for step in steps:
        if kept := [action for action in step if action.kind != "W"]:
            yield tuple(a if a.kind == "F" else replace(a, kind="I" if deferred else "B") for a in kept)
        for action in kept if deferred else ():
            if action.kind != "F":
                yield (replace(action, kind="W"),)


def _mapping(rank_mapping: Any, num_ranks: int) -> tuple[list[int], list[int]]:
    """Return the mapping as a list, and the group's rank of each pipeline rank; any where the mapping is wrong."""
    identity = list(range(num_ranks))
    if rank_mapping is None:
        return identity, identity
    mapping = list(rank_mapping) if isinstance(rank_mapping, Iterable) else []
    is_permutation = len(mapping) == num_ranks and all(rank in mapping for rank in identity)
    return mapping, [mapping.index(rank) for rank in identity] if is_permutation else identity


def _refuse_mapping(rank_mapping: Any, num_ranks: int, offered: object) -> PipelineArguments:
    raise ValueError(f"rank_mapping must be a permutation of 0..{num_ranks - 1}, got {rank_mapping}")


class DualPipeV(Pipeline):
    """DeepSeek's DualPipeV: rank r of P holds stages r and 2P-1-r of a V, so the first rank has both ends.

    modules: this rank's two stages. schedule: "dualpipev", "zbv", or a `Schedule` whose stages are placed in a V.
    The other arguments and `step` are those of `Pipeline`; inputs, criterion and labels are needed on the first rank
    only. Keeps the signature of https://github.com/deepseek-ai/DualPipe.
    """

    _only_v = True

    def __init__(
        self, modules: Sequence[nn.Module], batch_dim: int = 0, process_group: ProcessGroup | None = None,
        rank_mapping: Sequence[int] | None = None, *, schedule: str | Schedule = "dualpipev", overlap: bool = True,
        unreduced: Sequence[str] = (), merge_weight_grads: bool = True,
    ) -> None:
        super().__init__(
            modules, process_group=process_group, schedule=schedule, batch_dim=batch_dim, rank_mapping=rank_mapping,
            overlap=overlap, unreduced=unreduced, merge_weight_grads=merge_weight_grads,
        )
