"""`Pipeline`, which runs any valid schedule with any number of stages on a rank, and `DualPipeV`, its V-shaped case.

A step has three parts: the ranks agree on the arguments (an error on one raises on all), every rank runs its program,
and the ranks wait for each other, so that a failure of one raises on all.
"""

from __future__ import annotations

import secrets
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from dualpipe.nn.accumulators import drop
from dualpipe.nn.deferral import WeightGradStore
from dualpipe.parallel.clipping import clip_grad_norm_
from dualpipe.parallel.fsdp.driver import ParametersStep
from dualpipe.parallel.fsdp.stage_parameters import StageParameters
from dualpipe.parallel.fsdp.unit_records import mesh_groups, process_groups
from dualpipe.parallel.tied import TiedGradients, tied_parameters
from dualpipe.pipeline.batch import (
    Batch,
    Labels,
    StepAgreement,
    StepArguments,
    compare_arguments,
    merge_side_inputs,
    one_of_two_names,
    split_batch,
)
from dualpipe.pipeline.compiled_stage import OfferedSegments, RankStages, SideSpec
from dualpipe.pipeline.construction import (
    PipelineAgreement,
    PipelineArguments,
    check_stages,
    compare_pipelines,
    tied_ends,
    trained_places,
    validate_modules,
)
from dualpipe.pipeline.deferral_report import DeferralReport, ParameterWork, StepProbe, shortfall
from dualpipe.pipeline.executor import Executor, Outputs
from dualpipe.pipeline.lower import ProgramCache
from dualpipe.pipeline.p2p import P2PGroups, P2PMessages
from dualpipe.runtime.errors import RankLost
from dualpipe.runtime.ranks.board import Board
from dualpipe.runtime.ranks.failure import FailureBoard, StepFailure
from dualpipe.runtime.ranks.process_groups import new_gloo_group
from dualpipe.runtime.recorder import Recorder
from dualpipe.schedule import Schedule
from dualpipe.schedule.builders import first_microbatches
from dualpipe.schedule.by_name import search_with_progress
from dualpipe.schedule.types import Kind, Step, v_placement
from dualpipe.trace.tracer import PipelinePlace, Tracer


@dataclass(frozen=True)
class _ObservedStep:
    """Weight-gradient work of a step. defers: the schedule of the step has a "W"."""

    work: tuple[ParameterWork, ...]
    num_chunks: int
    defers: bool

    def warn_of_little_deferred(self, rank: int) -> None:
        """Warn the caller of `step` if little of the work of a pipeline rank can wait for a "W"."""
        if not self.defers:
            return
        text = shortfall(rank, self.work)
        if text is not None:
            warnings.warn(text, UserWarning, stacklevel=3)


@dataclass
class _Steps:
    """State of a pipeline's steps; a class of its own, because setting an attribute of an nn.Module takes 1 us.

    begun: number of steps that have begun, the same on all ranks. executor: that of the running step.
    """

    begun: int = 0
    executor: Executor | None = None


class Pipeline(nn.Module):
    """A pipeline over the ranks of a process group; an nn.Module with the parameters of this rank's stages.

    Stages, or parts of them, that are sharded by FSDP2's `fully_shard` are driven by the pipeline: gathered once per
    step, with gradients accumulated in the `reduce_dtype` of FSDP2's policy and reduced when the stage is done. All
    data-parallel ranks must then take every step together.

    If the first and the last stage are on one rank, as in a V, they share tied Parameters. If they are on two ranks,
    both have a method `tied_parameters()` that returns their copies, and the pipeline sums the gradients of the copies.

    Raises ValueError on every rank if the arguments of any rank are invalid.

    Args:
        modules: this rank's stages, in ascending order of stage number, all on one device; `module` holds them. Stage 0
            takes the inputs of a step; every stage returns a tensor or a tuple of tensors, the arguments of the next.
        process_group: one rank per pipeline rank (default: the default group; without torch.distributed, a single
            rank).
        schedule: a name for `dualpipe.schedule.build`, or a `Schedule`, which fixes the number of micro-batches. With
            "auto", the first rank searches for a schedule in the first step with each number of micro-batches, and all
            ranks run it.
        batch_dim: dimension along which inputs, labels and outputs are split into micro-batches.
        rank_mapping: `rank_mapping[i]` is the pipeline rank of the group's rank i (default: the same).
        overlap: overlap the two actions of a pair, for stages with `segments()`; the results are the same.
        unreduced: names in their stage, with wildcards, of trainable parameters or modules whose gradients the caller
            reduces over data-parallel ranks. Needed only if FSDP2 shards other parameters.
        merge_weight_grads: compute the weight gradients of a `GroupedLinear` for several micro-batches in one GEMM,
            which reads and writes the accumulator once, if the schedule has their actions "W" next to each other. The
            bits are the same on CPU; on CUDA the micro-batches are summed before they are added to the accumulator, so
            that float32 rounds in other places. It takes no more memory: the operands of all these micro-batches are
            alive before the first "W" also without merging.
    """

    _only_v = False  # True: stages must be placed in a V

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
        self._loaded = set[int]()  # kinds of steps (`StepAgreement.kind`) whose kernels are loaded
        self._steps = _Steps()
        self._is_in_order = False  # True inside of `in_order`
        self._observed: _ObservedStep | None = None  # the first training step outside of `in_order`
        self._trace_groups: dict[ProcessGroup | None, ProcessGroup] = {}  # gloo groups, by the group that is traced
        mapping, members = _parse_mapping(rank_mapping, self.num_ranks)
        self.rank = members.index(process_group.rank()) if process_group else 0
        # Tests pass connections between threads in place of a process group.
        connections: Any = process_group if isinstance(process_group, P2PGroups) else None
        self._p2p: P2PGroups = connections or P2PGroups(process_group, members, self.rank)
        agreement = self._build(modules, schedule, rank_mapping, mapping, overlap, unreduced)
        self._norm_dtype = agreement.norm_dtype
        self._side = agreement.side
        self._programs.overlaps_pairs = agreement.overlap
        self._programs.merges = merge_weight_grads
        self._connect(agreement.has_copies)

    def _build(
        self, modules: Any, schedule: str | Schedule, rank_mapping: Any, mapping: list[int], overlap: bool,
        unreduced: Sequence[str],
    ) -> PipelineAgreement:
        """Build the stages of this rank, and agree with all ranks. Raises ValueError if any rank fails."""
        stages = [m for m in modules if isinstance(m, nn.Module)] if isinstance(modules, Iterable) else []
        # First collect the groups of replicas, ranks of other pipelines that take every step with this rank:
        # if the stages cannot be built, they must learn of it too.
        offered = [OfferedSegments(stage) for stage in stages]
        replicas = process_groups(stages, [group for segments in offered for group in segments.groups])
        arguments: PipelineArguments | Exception
        try:
            if sorted(mapping) != list(range(self.num_ranks)):
                raise ValueError(f"rank_mapping must be a permutation of 0..{self.num_ranks - 1}, got {rank_mapping}")
            arguments = self._build_stages(modules, schedule, mapping, overlap, unreduced, offered)
        except Exception as error:  # raised again below, on all ranks
            arguments = error
        self._ranks = self._p2p.ranks(replicas)
        outcome = self._ranks.compare(PipelineArguments, arguments, compare_pipelines)
        try:
            outcome.raise_problem()
            assert outcome.conclusion is not None, "without a problem there is a conclusion"
            return outcome.conclusion
        finally:
            del arguments, outcome  # breaks a reference cycle: the traceback of the error refers to this frame

    def _build_stages(
        self, modules: Any, schedule: str | Schedule, mapping: list[int], overlap: bool, unreduced: Sequence[str],
        offered: Sequence[OfferedSegments],
    ) -> PipelineArguments:
        """Build the stages of this rank; return their description. Raises ValueError for invalid ones."""
        self.module, device = validate_modules(modules)
        parameters = [StageParameters(module) for module in self.module]
        specs = [SideSpec.of(module) for module in self.module]
        self.device = self._p2p.resolve_device(device)
        self._programs = ProgramCache(schedule, num_ranks=self.num_ranks, rank=self.rank, num_modules=len(self.module))
        built_schedule = self._programs.schedule()  # for the smallest number of micro-batches
        self._placement = built_schedule.placement
        if self._only_v and built_schedule.placement != v_placement(self.num_ranks):
            raise ValueError(f"schedule {built_schedule.name!r} has stages on ranks {built_schedule.placement}, but "
                             "DualPipeV needs stages placed in a V; use Pipeline")
        numbers = built_schedule.rank_stages(self.rank)
        stages = dict(zip(numbers, self.module))
        self._stages = RankStages(
            modules=stages,
            specs=dict(zip(numbers, specs)),
            parameters=dict(zip(numbers, parameters)),
            users={number: stage.used_by(stages) for number, stage in zip(numbers, parameters)},
            count=built_schedule.num_stages,
            device=self.device,
            batch_dim=self.batch_dim,
        )
        self._stages.compile_stages(dict(zip(numbers, offered)))
        communicates = any(stage.num_communications for stage in self._stages.compiled.values())
        self._unreduced = unreduced
        self._checked_places = trained_places(self.module)
        reduces, not_reduced = check_stages(list(self.module), parameters, unreduced)
        return PipelineArguments(
            schedule=built_schedule.name,
            schedule_checksum=crc32(repr(built_schedule).encode()),
            device=self.device.type,
            batch_dim=self.batch_dim,
            rank_mapping=mapping,
            overlap=bool(overlap) if self._stages.is_hooked or communicates else None,
            side_specs=[list(spec) for spec in dict.fromkeys(specs)],  # no duplicates: the size of a message is limited
            is_hooked=self._stages.is_hooked,
            has_float64=any(p.dtype is torch.float64 for p in self.module.parameters()),
            reduces=reduces,
            not_reduced=not_reduced,
            **asdict(tied_ends(stages.get(0), stages.get(built_schedule.num_stages - 1))),
        )

    def _connect(self, has_copies: bool) -> None:
        """Open the links between stages, and set up the end of a failed step. has_copies: see `PipelineAgreement`."""
        self._ranks.compare_replicas()
        first = self._placement[0]
        last = self._placement[-1]
        # With copies, the first and the last rank exchange gradients like neighbours.
        placement = (*self._placement, first) if has_copies else self._placement
        self._p2p.connect(placement, self.device)
        self._tied: TiedGradients | None = None
        if has_copies and self.rank in (first, last):
            stage = 0 if self.rank == first else self._stages.count - 1
            peer = last if self.rank == first else first
            exchange = partial(self._p2p.exchange, peer, around=(last, first))
            self._tied = TiedGradients(self._stages.modules[stage], exchange)
        # The key of this pipeline's failures in the job's store, the same on all ranks that share a process group, and
        # another for every other `Pipeline`: each rank draws a random number, and the lowest is the key.
        key = self._ranks.lowest(secrets.randbits(63))
        groups = [*self._p2p.groups(), *self._ranks.groups, *mesh_groups(self.module),
                  *self._stages.known_groups]
        self._failure = StepFailure(FailureBoard(Board(self._p2p.store), f"{key:x}"), groups)

    @contextmanager
    def in_order(self, *, deferred: bool) -> Iterator[None]:
        """Make the steps inside of a `with` run one micro-batch, with all weight gradients deferred, or none.

        For checks that compare the two: forwards and backwards keep the order of the schedule, and the same GEMMs run
        with and without `deferred`, so that the results are bitwise equal if every GEMM is deterministic.

        deferred: run every backward as an "I" followed by its "W"; False: run every backward as a "B".
        """
        programs = self._programs
        schedule = programs.schedule()  # of one micro-batch, unless it is a `Schedule` of more
        ranks = tuple(
            tuple(_join_backwards(first_microbatches(steps, 1), deferred=deferred)) for steps in schedule.ranks)
        single = replace(schedule, num_microbatches=1, ranks=ranks)
        self._programs = ProgramCache(single, num_ranks=self.num_ranks, rank=self.rank, num_modules=len(self.module))
        self._programs.overlaps_pairs = programs.overlaps_pairs
        self._programs.merges = programs.merges
        self._is_in_order = True
        try:
            yield
        finally:
            self._programs = programs
            self._is_in_order = False

    # -- a step

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Raise ValueError, for `copy`, `pickle` and `torch.save`: a pipeline holds the connections of its rank."""
        raise ValueError(f"a {type(self).__name__} cannot be copied or pickled, as it holds the connections of its "
                         "rank; copy its stages, pipe.module, as in AveragedModel(pipe.module)")

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Raise ValueError: a pipeline runs whole steps."""
        raise ValueError("a pipeline is not called like a module, as it runs forward and backward at once; call "
                         "step(*inputs, num_chunks=..., criterion=..., labels=...), or for outputs alone step(*inputs, "
                         "num_chunks=..., return_outputs=True) under torch.no_grad()")

    def step(
        self, *inputs: Tensor | None, num_microbatches: int | None = None, loss_fn: Callable[..., Tensor] | None = None,
        target: Labels = (), return_outputs: bool = False, sync: bool = True,
        side: Mapping[str, Tensor | None] | None = None, num_chunks: int | None = None,
        criterion: Callable[..., Tensor] | None = None, labels: Labels = (), **side_inputs: Tensor | None,
    ) -> tuple[Tensor | None, Outputs]:
        """Run one batch through the pipeline: forward and backward, or forward only under `torch.no_grad()`.

        `torch.inference_mode()` counts as `torch.no_grad()`. Gradients accumulate in `.grad`: the sum of the gradients
        of the losses of all micro-batches, and for sharded stages the mean of these sums over data-parallel ranks,
        unless FSDP2 was told to divide by something else. A parameter that no rank has used has none.

        Args:
            inputs: arguments of stage 0, needed on its rank only; each is split along `batch_dim` into
                micro-batches (evenly, or like `torch.tensor_split`). Other ranks pass None or nothing. An input that
                is None on the rank of stage 0 is passed on as None. Where inputs or targets require a gradient, one
                backward runs into the graph that they come from, at the end of the step.
            num_microbatches: number of micro-batches; required on every rank. Losses and gradients are those of single
                micro-batches, and add up: a loss function that is a mean divides by `num_microbatches`.
            loss_fn: `loss_fn(*outputs, *target)` returns the scalar loss of a micro-batch. Needed on the rank of the
                last stage only (in a V that is the first rank), there always in training. A tensor with a graph
                that it uses for several micro-batches must be a target, because every backward frees its graph.
            target: a tensor or several, arguments of the loss function, needed and split like the inputs, on the rank
                of the last stage.
            num_chunks, criterion, labels: DeepSeek's names of `num_microbatches`, `loss_fn` and `target`, which are
                those of torch.distributed.pipelining; pass either name.
            return_outputs: return the outputs of the last stage.
            sync: reduce the gradients of sharded stages over their data-parallel ranks. If False, gradients are kept
                and accumulate until a step with True; `zero_grad` of the pipeline drops them, that of an optimizer does
                not.
            side: tensors without a gradient that any stage may read, such as position ids, by name; needed and split
                like the inputs. They go through all stages with the activations. A stage gets, by keyword, those
                whose names are parameters of its `forward` after the first, or all if `forward` has `**kwargs`.
                Segments read the same side inputs by name; one that was not passed is None. A name that no stage takes
                is an error, and so are side inputs with `overlapped_forward_backward`.
            side_inputs: side inputs as keyword arguments, for names that are not parameters of `step`:
                `step(x, position_ids=positions, ...)`.

        Returns:
            (loss, outputs) on the rank of the last stage, and (None, None) elsewhere. loss: (num_microbatches,),
            detached, or None without a loss function. outputs: detached and joined along `batch_dim`, or None unless
            asked for.

        Raises:
            ValueError: arguments are invalid, or ranks disagree about them; raised on every rank. The pipeline can be
                used again.
            PipelineError: a rank failed during the step; raised on every rank, naming the failed one. The process
                groups of the step have ended, so that no rank waits for another: later steps raise this error again. A
                single rank, without any group, can use the pipeline again; its gradients are then undefined and should
                be zeroed. Gradients that `sync=False` has kept are dropped.
        """
        self._failure.check()
        self._steps.begun += 1
        train = torch.is_grad_enabled()
        observed_before = self._observed
        number = num_chunks if num_microbatches is None else num_microbatches
        batch: Batch | None = None
        arguments: StepArguments | BaseException | None = None
        # Under torch.inference_mode a step is one under no_grad: FSDP2's gathered parameters, made in the first step,
        # must be tensors that a later step can train.
        no_inference = torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext()
        try:
            with no_inference, torch.set_grad_enabled(train), self._failure.ending_step(self._running):
                try:
                    batch, arguments = split_batch(
                        self._stages, inputs, merge_side_inputs(side, side_inputs),
                        num_chunks=one_of_two_names("num_microbatches", num_microbatches, "num_chunks", num_chunks),
                        criterion=one_of_two_names("loss_fn", loss_fn, "criterion", criterion),
                        labels=one_of_two_names("target", target, "labels", labels, default=()),
                        return_outputs=return_outputs, sync=bool(sync),
                    )
                    self._prepare(arguments.num_chunks, train)
                except BaseException as error:  # raised again below, on all ranks
                    arguments = error
                outcome = self._ranks.compare(
                    StepArguments, arguments, self._compare_arguments,
                    same_everywhere=[str(number), train, bool(sync)])
                if batch is not None and outcome.conclusion is not None:
                    result = self._run(batch, outcome.conclusion, train=train, sync=bool(sync))
        except BaseException:
            if self._steps.executor is not None:
                self._steps.executor.abandon()
            self._discard()
            raise
        finally:
            self._steps.executor = None
            # Breaks a cycle that would keep the inputs: the traceback of an error refers to this frame.
            arguments = None
        try:
            outcome.raise_problem()
            if observed_before is None and self._observed is not None:
                self._observed.warn_of_little_deferred(self.rank)
            return result
        finally:
            del outcome  # breaks the same cycle

    def _prepare(self, num_chunks: int, train: bool) -> None:
        """Prepare a step: the work that may fail on one rank alone, before the ranks agree."""
        self._stages.compile_stages()
        if not self._programs.needs_search(num_chunks):
            self._programs.program(num_chunks, train=train)
        for parameters in self._stages.parameters.values():
            parameters.check()
        places = trained_places(self.module)
        if not places <= self._checked_places:  # a module was put into a stage since
            check_stages(list(self.module), [*self._stages.parameters.values()], self._unreduced)
            self._checked_places = places

    def _compare_arguments(self, ranks: list[StepArguments]) -> StepAgreement:
        """Compare the arguments of all ranks. Raises ValueError if they do not fit together."""
        return compare_arguments(ranks, first=self._placement[0], last=self._placement[-1], spec=self._side)

    def _run(
        self, batch: Batch, agreement: StepAgreement, *, train: bool, sync: bool
    ) -> tuple[Tensor | None, Outputs]:
        """Run a step on which the ranks have agreed."""
        num_chunks = agreement.num_chunks
        if self._programs.needs_search(num_chunks):
            search = partial(search_with_progress, self.num_ranks, num_chunks)
            self._programs.add(self._ranks.first_in_turns(search))
        program = self._programs.program(num_chunks, train=train)
        messages = P2PMessages(
            self._p2p, program, num_larger=agreement.num_larger, device=self.device,
            by_host=self.device.type != "cpu" and agreement.kernels not in self._loaded,
        )
        parameters_step = ParametersStep(
            self._stages.parameters, self._stages.users, train=train, reduce=train and sync)
        if agreement.side_names:
            batch = batch._replace(side_names=agreement.side_names)
        executor = Executor(self._stages, batch, program, messages, parameters_step, self.weight_grad_store)
        self._steps.executor = executor
        if self._tied is not None and train:
            self._tied.begin()
        probe = None
        if train and self._observed is None and not self._is_in_order:
            probe = StepProbe(self._stages.modules)
        self.weight_grad_store.observer = probe
        try:
            result = executor.run()
        finally:
            self.weight_grad_store.observer = None
        unused = parameters_step.unused()
        if self._tied is not None and train and sync:
            self._tied.add(unused)
        # Waits for all ranks, so that a failure is raised on all of them in the step in which it has occurred.
        parameters_step.drop_unused(unused, self._ranks.wait_for_all)
        messages.finish()
        parameters_step.run_hooks()
        self._loaded.add(agreement.kernels)
        if probe is not None:
            kinds = {action.kind for instruction in program.instructions for action in instruction.actions}
            self._observed = _ObservedStep(probe.work(), num_chunks, defers="W" in kinds)
        return result

    def _running(self) -> str:
        """Return the error prefix that names the running action."""
        executor = self._steps.executor
        return "" if executor is None else executor.running()

    def deferral_report(self) -> DeferralReport:
        """Return the share of this rank's weight-gradient work that can wait for a "W", and the reasons for the rest.

        Only the pipeline's first training step is observed: build the pipeline anew to see the effect of a change.
        Other ranks take no part. Raises ValueError before that step.
        """
        if self._observed is None:
            raise ValueError("deferral_report has no training step to report on; call it after a step(...) with "
                             "gradients, outside of torch.no_grad()")
        return DeferralReport.of(self.rank, self._observed.work, self._programs.schedule(self._observed.num_chunks))

    def trace(self, path: str | Path, *, group: ProcessGroup | None = None) -> Tracer:
        """Return a context manager that traces steps, which all ranks enter and leave together.

        At the end, the first rank writes a file for Perfetto and for `dualpipe trace`. After an error, a note on the
        error names the file with the trace until then. If the error may be on this rank only, that file has the trace
        of this rank alone.

        Args:
            path: the file, in an existing folder.
            group: the ranks to trace, such as those of all pipelines that train the model (default: those of this
                pipeline).
        """
        schedule = self._programs.schedule()
        ranks = self._p2p.global_ranks
        place = PipelinePlace(
            self.rank, ranks or (Recorder.current().rank,), schedule.name, schedule.placement,
            schedule.messages_in_flight,
        )
        group = group or self._process_group
        if group is not None and group not in self._trace_groups:
            # A failed step ends the pipeline's groups, and its trace is still written, over this group.
            self._trace_groups[group] = new_gloo_group(group)

        def running_step() -> int:
            """Return the number of the running step; 0 outside of a step of this pipeline."""
            is_running = WeightGradStore.current() is self.weight_grad_store  # only a running step activates its store
            return self._steps.begun if is_running else 0

        return Tracer(Path(path), self._trace_groups.get(group), self.device, place, running_step)

    @property
    def copied_parameters(self) -> list[nn.Parameter]:
        """Return this rank's copies of tied parameters, if it has the last stage and another rank has the first.

        Gradient norms and parameter counts include the parameters of the first stage, and not these copies.
        """
        return [] if self._tied is None else tied_parameters(self._stages.modules.get(self._stages.count - 1))

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False) -> Tensor:
        """Clip the gradients of the whole model, like `torch.nn.utils.clip_grad_norm_`; every rank must call it.

        The norm is that of the gradients of all stages, with all parts of sharded parameters (DTensors) of data- and
        expert-parallel ranks; tied and replicated parameters count once. Plain parameters must have the same gradients
        in all data-parallel pipelines. The host waits for nothing before the scaling is queued.

        Returns the norm before clipping as a scalar, the same on every rank. Raises ValueError unless norm_type is
        above 0 and max_norm is at least 0. With `error_if_nonfinite`, raises RuntimeError for a norm that is not finite
        and leaves the gradients unchanged.
        """
        self._failure.check()
        try:
            return clip_grad_norm_(
                self.parameters(), max_norm, norm_type, error_if_nonfinite, copies=self.copied_parameters,
                group=self._process_group, device=self.device, dtype=self._norm_dtype,
            )
        except RankLost as lost:
            # Raises PipelineError in its place, on all ranks. Outside of a step no action runs: `str()` returns an
            # empty prefix.
            with self._failure.ending_step(str):
                raise lost

    def named_parameters(self, *args: Any, **options: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Like `nn.Module.named_parameters`; between steps always the sharded ones, which have the gradients.

        A stage that was called outside of a step has gathered its parameters, and has those in place of them.
        """
        if self._steps.executor is None:
            for parameters in self._stages.parameters.values():
                parameters.reshard()
        return super().named_parameters(*args, **options)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Like `nn.Module.zero_grad`; also drops gradients that steps with `sync=False` keep."""
        if set_to_none:
            drop(self.parameters())
        else:
            super().zero_grad(set_to_none=False)
        self._discard()

    def _discard(self) -> None:
        """Drop gradients kept by `sync=False`."""
        for parameters in self._stages.parameters.values():
            parameters.discard()
        if self._tied is not None:
            self._tied.discard()


def _join_backwards(steps: Iterable[Step], *, deferred: bool) -> Iterator[Step]:
    """Yield the steps of a rank with whole backwards, or with an "I" followed by its "W" in place of each backward."""
    for step in steps:
        actions = [action for action in step if action.kind != "W"]
        if not actions:
            continue
        backward_kind: Kind = "I" if deferred else "B"
        yield tuple(action if action.kind == "F" else replace(action, kind=backward_kind) for action in actions)
        if deferred:
            for action in actions:
                if action.kind != "F":
                    yield (replace(action, kind="W"),)


def _parse_mapping(rank_mapping: Any, num_ranks: int) -> tuple[list[int], list[int]]:
    """Return the mapping as a list, and the group's rank of each pipeline rank, which is arbitrary if it is invalid."""
    identity = list(range(num_ranks))
    if rank_mapping is None:
        return identity, identity
    mapping = list(rank_mapping) if isinstance(rank_mapping, Iterable) else []
    is_permutation = len(mapping) == num_ranks and all(rank in mapping for rank in identity)
    return mapping, [mapping.index(rank) for rank in identity] if is_permutation else identity


class DualPipeV(Pipeline):
    """DeepSeek's DualPipeV: rank r of P holds stages r and 2P-1-r of a V, so the first rank has both ends.

    The signature is that of https://github.com/deepseek-ai/DualPipe. `step` is that of `Pipeline`; inputs, criterion
    and labels are needed on the first rank only.

    Args:
        modules: this rank's two stages.
        batch_dim: see `Pipeline`, like all further arguments.
        schedule: "dualpipev", "zbv", or a `Schedule` whose stages are placed in a V.
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
