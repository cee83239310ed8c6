"""`Pipeline` runs any valid schedule with any number of stages on a rank; `DualPipeV` is its V-shaped case.

A step has three parts: the ranks agree on the arguments (a mistake on one raises on all), each interprets its program,
and they report whether it went well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from itertools import starmap
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.profiler import record_function

from dualpipe import device
from dualpipe.errors import PipelineError
from dualpipe.nn.deferral import WeightGradStore
from dualpipe.nn.segments import Segment, checked, communication_groups, has_communication
from dualpipe.parallel.clipping import clip_grad_norm_
from dualpipe.parallel.fsdp import ParametersStep, StageParameters, process_groups
from dualpipe.parallel.reduced import check_stages
from dualpipe.pipeline.arguments import (
    Batch,
    Call,
    Construction,
    StepArguments,
    agree,
    common_device,
    given,
    is_permutation,
    split,
    tied_ends,
)
from dualpipe.pipeline.consensus import Consensus
from dualpipe.pipeline.interpreter import Interpreter, overlaps_by_itself
from dualpipe.pipeline.program import Program, fitting, lower, one_at_a_time, streams
from dualpipe.pipeline.side import SideInputs, Takes
from dualpipe.pipeline.traffic import Traffic
from dualpipe.pipeline.transport import Replicas, Transport
from dualpipe.schedule import Action, Schedule

LISTS = list | tuple | nn.ModuleList | nn.Sequential

Outputs = Tensor | tuple[Tensor, ...] | None


class Pipeline(nn.Module):
    """The ranks of `process_group` as a pipeline; an nn.Module whose parameters are those of this rank's stages.

    modules: this rank's stages, in ascending order of stage number, all on one device; `module` holds them. Stage 0
        takes the step's inputs; every stage returns a tensor or a tuple of tensors, the arguments of the next.
    process_group: one rank per pipeline rank (default: the default group; without torch.distributed, a single rank).
    rank_mapping: `rank_mapping[i]` is the pipeline rank of the group's rank i (default: the same).
    schedule: a name for `dualpipe.schedule.build`, or a `Schedule`, which fixes the number of micro-batches.
    batch_dim: the dimension along which inputs, labels and outputs are split into micro-batches.
    overlap: whether the two actions of a pair run in turn, where stages have `segments()`; the results are the same.
    unreduced: trainable parameters, or modules, whose gradients you reduce over data-parallel ranks yourself: names as
        in their stage, with wildcards. Needed only beside others that FSDP2 has.

    Stages, or parts of them, that were given to FSDP2's `fully_shard` before are driven by the pipeline: gathered once
    a step, gradients accumulated in the policy's `reduce_dtype` and reduced when the stage is done. All data-parallel
    ranks must then take every step together.

    Raises ValueError on every rank where arguments of one of them do not fit.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        *,
        process_group: ProcessGroup | None = None,
        schedule: str | Schedule = "1f1b",
        batch_dim: int = 0,
        rank_mapping: Sequence[int] | None = None,
        overlap: bool = True,
        unreduced: Sequence[str] = (),
    ) -> None:
        super().__init__()
        if process_group is None and dist.is_initialized():
            process_group = dist.group.WORLD
        self.num_ranks = process_group.size() if process_group else 1
        identity = list(range(self.num_ranks))
        mapping = identity if rank_mapping is None else rank_mapping
        valid = is_permutation(mapping, self.num_ranks)
        members = [list(mapping).index(r) for r in identity] if valid else identity  # invalid: enough to say so
        self.rank = members.index(process_group.rank()) if process_group else 0
        self.batch_dim = batch_dim
        self._group, self._schedule = process_group, schedule
        self._programs: dict[int, tuple[Program, Program]] = {}
        self._transport = Transport(process_group, members, self.rank)
        stages = [m for m in _listed(modules) if isinstance(m, nn.Module)]
        replicas = Replicas(process_groups(stages, communication_groups(stages)))
        self._consensus = Consensus(self._transport, replicas)

        def check() -> tuple[Schedule, Construction]:
            if not valid:
                raise ValueError(f"rank_mapping must be a permutation of 0..{self.num_ranks - 1}, got {rank_mapping}")
            built = self._check_construction(modules)
            first, last = (self.module[i] if built.placement[i] == self.rank else None for i in (0, -1))
            hooked, takes = overlaps_by_itself(self.module), Takes.union(self._takes)
            return built, Construction(
                [built.name, crc32(repr(built).encode()), self.device.type, batch_dim, list(mapping)],
                (has_communication(filter(None, self._segments())) or hooked) and overlap,
                takes._replace(hooked=hooked),
                any(p.dtype is torch.float64 for p in self.module.parameters()),
                tied_ends(first, last),
                check_stages(self.module, self._parameters_of, unreduced),
            )

        built, (self._pairs, self._taken, self._norm_dtype) = self._consensus.reach(
            ValueError, check, lambda ranks: Construction.conclude(list(starmap(Construction, ranks)))
        )
        self._consensus.compare_replicas()
        self._placement, self._stages = built.placement, built.rank_stages(self.rank)
        self._transport.connect(streams(built), self.device)

    # -- construction

    def _check_construction(self, modules: Sequence[nn.Module]) -> Schedule:
        """The schedule, for the fewest micro-batches; ValueError for what does not fit."""
        if not isinstance(modules, LISTS) or not all(isinstance(module, nn.Module) for module in modules):
            kinds = [type(m).__name__ for m in modules] if isinstance(modules, list | tuple) else type(modules).__name__
            raise ValueError(f"modules must be a tuple of nn.Modules, got {kinds}")
        if len(set(modules)) < len(modules):
            names = [type(module).__name__ for module in modules]
            raise ValueError(f"one module is given twice in {names}; give each stage a module of its own, which may "
                             "share Parameters with another")
        self.module = nn.ModuleList(modules)
        self._parameters_of = [StageParameters(module) for module in self.module]
        self._takes = [Takes.of(module) for module in self.module]
        self.weight_grad_store = WeightGradStore()
        self.device = common_device(self.module) or self._transport.default_device()
        self._transport.check_device(self.device)
        return self._build(getattr(self._schedule, "num_microbatches", 1))

    def _build(self, num_microbatches: int) -> Schedule:
        """The schedule for a number of micro-batches; ValueError where it does not fit this rank's modules."""
        count = len(self.module)
        return fitting(self._schedule, num_microbatches, num_ranks=self.num_ranks, rank=self.rank, num_modules=count)

    def _segments(self) -> list[list[Segment] | None]:
        """Those of each stage that offers them."""
        found = zip(self.module, self._takes)
        return [checked(list(m.segments()), t.names) if hasattr(m, "segments") else None for m, t in found]

    # -- a step

    def step(
        self,
        *inputs: Tensor | None,
        num_chunks: int = 0,
        criterion: Callable[..., Tensor] | None = None,
        labels: Sequence[Tensor | None] | Tensor | None = (),
        return_outputs: bool = False,
        sync: bool = True,
        side: Mapping[str, Tensor | None] | None = None,
    ) -> tuple[Tensor | None, Outputs]:
        """One batch through the pipeline: forward and backward, or forward only under `torch.no_grad()`.

        inputs: the arguments of stage 0, needed on its rank only; each is split along `batch_dim` into `num_chunks`
            micro-batches (evenly, or as `torch.tensor_split` does). Other ranks pass None or nothing.
        criterion, labels: `criterion(*outputs, *labels)` gives a micro-batch's scalar loss; needed on the rank of the
            last stage only (in a V that is the first rank), `criterion` always when training. Inputs and labels that
            are None there are passed on as None.
        return_outputs: whether to return the last stage's outputs.
        sync: whether to reduce the gradients of sharded stages over their data-parallel ranks. Without, they are kept
            and accumulate until a step that does.
        side: tensors without a gradient that any stage may read, such as position ids, by name; split and given as
            inputs are, on the rank of stage 0. They go through all stages with the activations. A stage gets those that
            its `forward` names as parameters behind the first, or all for a `**kwargs`, by keyword; what `segments()`
            read of them is in their carry, None where it is not given. A name that no stage takes is an error, and
            so is any beside modules with `overlapped_forward_backward`.

        Returns (loss, outputs) on the rank of the last stage and (None, None) elsewhere: loss (num_chunks,), detached,
        or None without a criterion; outputs detached and joined along `batch_dim`, or None unless asked for.
        Gradients accumulate in `.grad`: the sum over micro-batches of the gradients of their losses, and of sharded
        stages their mean over data-parallel ranks, unless FSDP2 was told to divide by something else.

        Raises, on every rank: ValueError for arguments that do not fit or on which ranks disagree; PipelineError where
        a rank failed during the step. After an error the pipeline can be used again if its process group still works;
        after a PipelineError gradients are undefined and should be zeroed; those kept by `sync=False` are dropped.
        """
        (batch, program), (batch_size, side_names) = self._consensus.reach(
            ValueError,
            lambda: self._prepare(Call(inputs, num_chunks, criterion, labels, return_outputs, sync, side)),
            lambda ranks: agree(
                list(starmap(StepArguments, ranks)), self._placement[0], self._placement[-1], self._taken
            ),
            same_everywhere=[str(num_chunks), torch.is_grad_enabled(), bool(sync)],
        )
        run = self._interpreter(program, batch, side_names, num_larger=batch_size % int(num_chunks), sync=sync)
        try:
            result, _ = self._consensus.reach(
                PipelineError, lambda: (self._execute(run, int(num_chunks)), None), where=lambda: _describe(run.doing)
            )
        except BaseException:
            self._discard()
            raise
        return result

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> Tensor:
        """`torch.nn.utils.clip_grad_norm_` for the model of all ranks; every rank must call it, after a step.

        The norm is that of the gradients of all stages, and of parameters that are sharded over data- or expert-
        parallel ranks (DTensors) of all parts; what is tied or replicated counts once. Plain parameters are taken to
        have the same gradients in all data-parallel pipelines. The host waits for nothing before the scaling is queued.

        Returns the norm before as a scalar, the same on every rank. Raises ValueError where norm_type is not above 0 or
        max_norm below 0; with `error_if_nonfinite` RuntimeError for a norm that is not finite, gradients untouched.
        """
        return clip_grad_norm_(
            self.parameters(), max_norm, norm_type, error_if_nonfinite, group=self._group, device=self.device,
            dtype=self._norm_dtype,
        )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As of any module; gradients that steps with `sync=False` keep are dropped too."""
        super().zero_grad(set_to_none)
        self._discard()

    def _discard(self) -> None:
        for parameters in self._parameters_of:
            parameters.discard()

    def _prepare(self, call: Call) -> tuple[tuple[Batch, Program], StepArguments]:
        """This rank's micro-batches and program, and what the other ranks must know."""
        call = call.checked()
        batch = self._batch(call)
        arguments = StepArguments(
            call.num_chunks,
            torch.is_grad_enabled(),
            bool(call.sync),
            [module.training for module in self.module],
            [list(t.shape) for t in given(call.inputs)],
            [[name, list(t.shape)] for name, t in call.side.items()],
            self._size(call.inputs) if batch.inputs else None,
            self._size(call.side.values()) if batch.side else None,
            self._size(call.labels) if batch.labels else None,
        )
        return (batch, self._program(call.num_chunks)), arguments

    def _size(self, tensors: Iterable[Tensor | None]) -> int | None:
        return next((t.shape[self.batch_dim] for t in given(tensors)), None)

    def _interpreter(
        self, program: Program, batch: Batch, side_names: Sequence[str], *, num_larger: int, sync: bool
    ) -> Interpreter:
        train = torch.is_grad_enabled()
        return Interpreter(
            dict(zip(self._stages, self.module)),
            len(self._placement) - 1,
            parameters=ParametersStep(
                dict(zip(self._stages, self._parameters_of)), train=train, reduce=train and sync
            ),
            program=program,
            traffic=Traffic(self._transport, program, num_larger=num_larger, device=self.device),
            store=self.weight_grad_store,
            batch=batch,
            side=SideInputs(side_names, batch.side, dict(zip(self._stages, self._takes))),
            annotate=self._annotation(),
            autocast=self.device.type if torch.is_autocast_enabled(self.device.type) else None,
        )

    def _execute(self, run: Interpreter, num_chunks: int) -> tuple[Tensor | None, Outputs]:
        store = self.weight_grad_store
        try:
            # Single-threaded: on CUDA, autograd's own threads would not see the running store.
            with store.activate(), torch.autograd.set_multithreading_enabled(False):
                run.run()
        finally:
            store.clear()
        chunks = range(num_chunks)
        loss = torch.stack([run.losses[i].reshape(()) for i in chunks]) if run.losses else None
        if not run.outputs:
            return loss, None
        columns = zip(*(run.outputs[i] for i in chunks), strict=True)
        outputs = tuple(_join(parts, self.batch_dim) for parts in columns)
        return loss, outputs[0] if len(outputs) == 1 else outputs

    # -- arguments

    def _batch(self, call: Call) -> Batch:
        """This rank's micro-batches; ValueError for what it can see to be wrong on its own."""
        for module in self.module:
            if (found := getattr(next(module.parameters(), None), "device", self.device)) != self.device:
                raise ValueError(f"a stage is on {found}, but the pipeline was built on {self.device}; build it anew")
        first, last = self._placement[0] == self.rank, self._placement[-1] == self.rank
        if last and call.criterion is None and torch.is_grad_enabled():
            raise ValueError("criterion is required on the rank of the last stage; evaluate under torch.no_grad()")
        if first and not given(call.inputs):
            raise ValueError("inputs are required on the rank of the first stage, got none")
        cut = partial(split, num_chunks=call.num_chunks, dim=self.batch_dim, device=self.device)
        return Batch(
            cut("input", call.inputs) if first else (),
            cut("side input", list(call.side.values()), names=list(call.side)) if first and call.side else (),
            cut("label", call.labels) if last and call.criterion else (),
            call.criterion if last else None,
            last and call.return_outputs,
            {s: segments for s, segments in zip(self._stages, self._segments()) if segments is not None},
        )

    def _program(self, num_chunks: int) -> Program:
        """The lowered schedule; forward only where no gradients are wanted. Lowered once per number of chunks."""
        if num_chunks not in self._programs:
            schedule = self._build(num_chunks)
            program = lower(schedule if self._pairs else one_at_a_time(schedule), self.rank)
            self._programs[num_chunks] = program, program.forward_only()
        training, evaluation = self._programs[num_chunks]
        return training if torch.is_grad_enabled() else evaluation

    def _annotation(self) -> Callable[[str], AbstractContextManager] | None:
        if torch.autograd._profiler_enabled():
            return record_function  # asked for first: idle, it would cost 5 us an action
        return device.annotation(self.device)


class DualPipeV(Pipeline):
    """DeepSeek's DualPipeV: rank r of P holds stages r and 2P-1-r of a V, so the first rank has both ends.

    modules: this rank's two stages. schedule: "dualpipev", "zbv", or a `Schedule` whose stages are placed in a V.
    The other arguments and `step` are those of `Pipeline`; inputs, criterion and labels are needed on the first rank
    only. Keeps the signature of https://github.com/deepseek-ai/DualPipe.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        batch_dim: int = 0,
        process_group: ProcessGroup | None = None,
        rank_mapping: Sequence[int] | None = None,
        *,
        schedule: str | Schedule = "dualpipev",
        overlap: bool = True,
        unreduced: Sequence[str] = (),
    ) -> None:
        super().__init__(
            modules,
            process_group=process_group,
            schedule=schedule,
            batch_dim=batch_dim,
            rank_mapping=rank_mapping,
            overlap=overlap,
            unreduced=unreduced,
        )

    def _build(self, num_microbatches: int) -> Schedule:
        schedule = super()._build(num_microbatches)
        ranks = range(schedule.num_ranks)
        if schedule.placement != (*ranks, *reversed(ranks)):
            where = f"schedule {schedule.name!r} has them on ranks {schedule.placement}"
            raise ValueError(f"DualPipeV needs stages placed in a V, {where}")
        return schedule


def _join(parts: Sequence[Tensor], dim: int) -> Tensor:
    return torch.stack(parts) if parts[0].dim() <= max(dim, 0) else torch.cat(parts, dim)


def _listed(modules: Any) -> Sequence[Any]:
    """What can be a sequence of modules as one; nothing of what cannot."""
    return modules if isinstance(modules, LISTS) else ()


def _describe(actions: tuple[Action, ...]) -> str:
    if not actions:
        return "at the ends of the step: "
    names = {"F": "forward", "B": "backward", "I": "input backward", "W": "weight gradients"}
    return " and ".join(f"{a} ({names[a.kind]} of stage {a.stage}, micro-batch {a.microbatch})" for a in actions) + ": "
