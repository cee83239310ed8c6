"""`Pipeline` runs any valid schedule with any number of stages on a rank; `DualPipeV` is its V-shaped case.

A step has three parts: the ranks agree on the arguments (a mistake on one raises on all), each interprets its program,
and they report whether it went well.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from itertools import chain
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.profiler import record_function

from dualpipe.pipeline.arguments import StepArguments, agree, given, same, split
from dualpipe.pipeline.errors import PipelineError
from dualpipe.pipeline.interpreter import Batch, Interpreter, UpstreamFailed, overlaps_by_itself
from dualpipe.pipeline.program import Program, lower, one_at_a_time, streams
from dualpipe.pipeline.traffic import Traffic
from dualpipe.pipeline.transport import Transport
from dualpipe.pipeline.weight_grad_store import WeightGradStore
from dualpipe.schedule import Action, Schedule, build, validate

ERROR_CHARACTERS = 1200  # of an error's text that travel to the other ranks

Outputs = Tensor | tuple[Tensor, ...] | None


class Pipeline:
    """The ranks of `process_group` as a pipeline.

    modules: this rank's stages, in ascending order of stage number, all on one device. Stage 0 takes the step's inputs;
        every stage returns a tensor or a tuple of tensors, which are the arguments of the next.
    process_group: one rank per pipeline rank (default: the default group; without torch.distributed, a single rank).
    rank_mapping: `rank_mapping[i]` is the pipeline rank of the group's rank i (default: the same).
    schedule: a name for `dualpipe.schedule.build`, or a `Schedule`, which fixes the number of micro-batches.
    batch_dim: the dimension along which inputs, labels and outputs are split into micro-batches.

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
    ) -> None:
        if process_group is None and dist.is_available() and dist.is_initialized():
            process_group = dist.group.WORLD
        self.num_ranks = process_group.size() if process_group else 1
        identity = list(range(self.num_ranks))
        mapping = identity if rank_mapping is None else list(rank_mapping)
        valid = sorted(mapping) == identity
        members = [mapping.index(r) for r in identity] if valid else identity
        self.rank = members.index(process_group.rank()) if process_group else 0
        self.modules = tuple(modules)
        self.batch_dim = batch_dim
        self.weight_grad_store = WeightGradStore()
        self._schedule = schedule
        self._programs: dict[int, tuple[Program, Program]] = {}
        self._transport = Transport(process_group, members, self.rank)
        self._connect(mapping, valid)

    def _connect(self, mapping: list[int], valid: bool) -> None:
        """Agree on the construction, and create and use every process group once."""
        error, identity = None, None
        try:
            if not valid:
                raise ValueError(f"rank_mapping must be a permutation of 0..{self.num_ranks - 1}, got {mapping}")
            self.device = _common_device(self.modules)
            self._transport.check_device(self.device)
            schedule = self._build(getattr(self._schedule, "num_microbatches", 1))
            identity = schedule.name, crc32(repr(schedule).encode()), self.device.type, mapping
        except Exception as raised:
            error = raised
        records = self._share(ValueError, error, _text(error), [identity, overlaps_by_itself(self.modules)])
        same("(schedule, its checksum, device, rank_mapping)", [identity for identity, _ in records])
        self._pairs = any(overlaps for _, overlaps in records)
        self._placement = schedule.placement
        self._transport.connect(streams(schedule), self.device, own_groups=self.device.type != "cpu")

    def _build(self, num_microbatches: int) -> Schedule:
        """The schedule for a number of micro-batches; ValueError where it does not fit this rank's modules."""
        schedule = self._schedule
        if isinstance(schedule, str):
            options = {"stages_per_rank": len(self.modules)} if schedule == "interleaved_1f1b" else {}
            schedule = build(schedule, self.num_ranks, num_microbatches, **options)
        if schedule.num_ranks != self.num_ranks:
            raise ValueError(f"schedule {schedule.name!r} is for {schedule.num_ranks} ranks, got {self.num_ranks}")
        if schedule.num_microbatches != num_microbatches:
            raise ValueError(
                f"schedule {schedule.name!r} is for {schedule.num_microbatches} micro-batches, got {num_microbatches}"
            )
        validate(schedule)
        stages = schedule.rank_stages(self.rank)
        if len(stages) != len(self.modules):
            raise ValueError(
                f"rank {self.rank} has {len(self.modules)} modules, but schedule {schedule.name!r} gives it "
                f"{len(stages)} stages {stages}"
            )
        return schedule

    # -- a step

    def step(
        self,
        *inputs: Tensor | None,
        num_chunks: int = 0,
        criterion: Callable[..., Tensor] | None = None,
        labels: Sequence[Tensor] | None = (),
        return_outputs: bool = False,
    ) -> tuple[Tensor | None, Outputs]:
        """One batch through the pipeline: forward and backward, or forward only under `torch.no_grad()`.

        inputs: the arguments of stage 0, needed on its rank only; each is split along `batch_dim` into `num_chunks`
            micro-batches (evenly, or as `torch.tensor_split` does). Other ranks pass None or nothing.
        criterion, labels: `criterion(*outputs, *labels)` gives a micro-batch's scalar loss; needed on the rank of the
            last stage only (in a V that is the first rank), `criterion` always when training.
        return_outputs: whether to return the last stage's outputs.

        Returns (loss, outputs) on the rank of the last stage and (None, None) elsewhere: loss (num_chunks,), detached,
        or None without a criterion; outputs detached and joined along `batch_dim`, or None unless asked for.
        Gradients accumulate in `.grad`: the sum over micro-batches of the gradients of their losses.

        Raises, on every rank: ValueError for arguments that do not fit or on which ranks disagree; PipelineError where
        a rank failed during the step. After an error the pipeline can be used again if its process group still works;
        gradients are then undefined and should be zeroed.
        """
        error, arguments = None, None
        try:
            batch = self._batch(inputs, num_chunks, criterion, labels, return_outputs)
            arguments = StepArguments.of(inputs, num_chunks, labels, self.modules, self.batch_dim)
            program = self._program(num_chunks)
        except Exception as raised:
            error = raised
        records = self._share(ValueError, error, _text(error), arguments)
        batch_size = agree([StepArguments(*r) for r in records], first=self._placement[0], last=self._placement[-1])
        run = self._run(program, batch, num_larger=batch_size % num_chunks)
        return self._results(run, num_chunks)

    def _run(self, program: Program, batch: Batch, num_larger: int) -> Interpreter:
        store = self.weight_grad_store
        run = Interpreter(
            dict(zip(self._own_stages(), self.modules)),
            len(self._placement) - 1,
            program=program,
            traffic=Traffic(self._transport, program, num_larger=num_larger, device=self.device),
            store=store,
            batch=batch,
            annotate=self._annotation(),
        )
        error, text = None, None
        try:
            # Single-threaded: on CUDA, autograd's own threads would not see the running store.
            with store.activate(), torch.autograd.set_multithreading_enabled(False):
                run.run()
        except Exception as raised:
            error = raised
            text = None if isinstance(raised, UpstreamFailed) else f"{_describe(run.doing)}: {_text(raised)}"
        finally:
            store.clear()
        self._share(PipelineError, error, text, None)
        if error is not None:
            raise PipelineError("a rank failed and could not report why") from error
        return run

    def _results(self, run: Interpreter, num_chunks: int) -> tuple[Tensor | None, Outputs]:
        chunks = range(num_chunks)
        loss = torch.stack([run.losses[i].reshape(()) for i in chunks]) if run.losses else None
        if not run.outputs:
            return loss, None
        outputs = tuple(_join(parts, self.batch_dim) for parts in zip(*(run.outputs[i] for i in chunks)))
        return loss, outputs[0] if len(outputs) == 1 else outputs

    # -- arguments

    def _own_stages(self) -> tuple[int, ...]:
        return tuple(s for s, rank in enumerate(self._placement) if rank == self.rank)

    def _batch(
        self,
        inputs: Sequence[Tensor | None],
        num_chunks: int,
        criterion: Callable[..., Tensor] | None,
        labels: Sequence[Tensor] | None,
        return_outputs: bool,
    ) -> Batch:
        """This rank's micro-batches; ValueError for what it can see to be wrong on its own."""
        if not isinstance(num_chunks, int) or num_chunks < 1:
            raise ValueError(f"num_chunks must be an integer >= 1, got {num_chunks!r}")
        for module in self.modules:
            if (found := getattr(next(module.parameters(), None), "device", self.device)) != self.device:
                raise ValueError(f"a stage is on {found}, but the pipeline was built on {self.device}; build it anew")
        first, last = self._placement[0] == self.rank, self._placement[-1] == self.rank
        if last and criterion is None and torch.is_grad_enabled():
            raise ValueError("criterion is required on the rank of the last stage; evaluate under torch.no_grad()")
        if not isinstance(labels, list | tuple | None):
            raise ValueError(f"labels must be a tuple or a list of tensors, got {type(labels).__name__}")
        if first and not given(inputs):
            raise ValueError("inputs are required on the rank of the first stage, got none")
        return Batch(
            split("input", inputs, num_chunks, self.batch_dim, self.device) if first else (),
            split("label", labels or (), num_chunks, self.batch_dim, self.device) if last and criterion else (),
            criterion if last else None,
            last and return_outputs,
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
        return torch.cuda.nvtx.range if self.device.type == "cuda" else None

    def _share(self, kind: type[Exception], cause: Exception | None, error: str | None, value: Any) -> list[Any]:
        """Everybody's `value`. Where a rank has an error, or is gone, all raise with the same text."""
        records = self._transport.exchange([error and error[:ERROR_CHARACTERS], value])
        lost = {rank: r for rank, r in enumerate(records) if isinstance(r, RuntimeError)}
        errors = {rank: r[0] for rank, r in enumerate(records) if rank not in lost and r[0] is not None}
        errors |= {rank: f"cannot be reached: {r}" for rank, r in lost.items()}
        if errors:
            kind = PipelineError if lost else kind
            raise kind("; ".join(f"rank {rank}: {text}" for rank, text in sorted(errors.items()))) from cause
        return [value for _, value in records]


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
    ) -> None:
        super().__init__(
            modules,
            process_group=process_group,
            schedule=schedule,
            batch_dim=batch_dim,
            rank_mapping=rank_mapping,
        )

    def _build(self, num_microbatches: int) -> Schedule:
        schedule = super()._build(num_microbatches)
        ranks = range(schedule.num_ranks)
        if schedule.placement != (*ranks, *reversed(ranks)):
            where = f"schedule {schedule.name!r} has them on ranks {schedule.placement}"
            raise ValueError(f"DualPipeV needs stages placed in a V, {where}")
        return schedule


def _common_device(modules: Sequence[nn.Module]) -> torch.device:
    """The device of all parameters and buffers; without any, the one that the default group works on."""
    for module in modules:
        if not isinstance(module, nn.Module):
            raise ValueError(f"modules must be nn.Modules, got {type(module).__name__}")
    tensors = chain.from_iterable(chain(m.parameters(), m.buffers()) for m in modules)
    devices = {t.device for t in tensors}
    if len(devices) > 1 or any(d.type == "meta" for d in devices):
        raise ValueError(f"all stages of a rank must be on one real device, found {sorted(map(str, devices))}")
    if devices:
        return devices.pop()
    uses_cuda = dist.is_initialized() and dist.get_backend() == "nccl"
    return torch.device("cuda", torch.cuda.current_device()) if uses_cuda else torch.device("cpu")


def _join(parts: Sequence[Tensor], dim: int) -> Tensor:
    return torch.stack(parts) if parts[0].dim() <= max(dim, 0) else torch.cat(parts, dim)


def _text(error: Exception | None) -> str | None:
    """A ValueError speaks for itself; others are named by their type."""
    if error is None or type(error) is ValueError:
        return error and str(error)
    return f"{type(error).__name__}: {error}"


def _describe(actions: tuple[Action, ...]) -> str:
    if not actions:
        return "at the ends of the step"
    names = {"F": "forward", "B": "backward", "I": "input backward", "W": "weight gradients"}
    return " and ".join(f"{a} ({names[a.kind]} of stage {a.stage}, micro-batch {a.microbatch})" for a in actions)
