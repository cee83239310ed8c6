"""`Pipeline` runs any valid schedule with any number of stages on a rank; `DualPipeV` is its V-shaped case.

A step has three parts: the ranks agree on the arguments (a mistake on one raises on all), each interprets its program,
and they report whether it went well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from dualpipe.nn.deferral import WeightGradStore
from dualpipe.nn.segments import communication_groups, has_communication
from dualpipe.parallel.clipping import clip_grad_norm_
from dualpipe.parallel.fsdp.driver import ParametersStep, StageParameters, process_groups
from dualpipe.parallel.tied import TiedGradients, tied_parameters
from dualpipe.pipeline.arguments import (
    OwnStages,
    SideSpec,
    agree,
    check_stages,
    checked_modules,
    conclude,
    split_batch,
    tied_ends,
)
from dualpipe.pipeline.executor import Executor, Outputs
from dualpipe.pipeline.lower import Programs
from dualpipe.pipeline.p2p import P2PGroups, P2PMessages
from dualpipe.runtime.errors import PipelineError
from dualpipe.runtime.recorder import Recorder
from dualpipe.schedule import Schedule
from dualpipe.schedule.build import search_with_progress
from dualpipe.schedule.builders import first_microbatches
from dualpipe.schedule.types import Step
from dualpipe.trace.tracer import Place, Tracer


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
        overlap: bool = True, unreduced: Sequence[str] = (),
    ) -> None:
        super().__init__()
        if process_group is None and dist.is_initialized():
            process_group = dist.group.WORLD
        self.num_ranks = process_group.size() if process_group else 1
        identity = list(range(self.num_ranks))
        mapping = list(rank_mapping) if isinstance(rank_mapping, Iterable) else identity if rank_mapping is None else []
        valid = len(mapping) == self.num_ranks and all(rank in mapping for rank in identity)
        members = [mapping.index(rank) for rank in identity] if valid else identity  # invalid: enough to say so
        self.rank = members.index(process_group.rank()) if process_group else 0
        self.batch_dim, self._process_group = batch_dim, process_group
        self.weight_grad_store = WeightGradStore()
        self._loaded = set[int]()  # the kinds of steps whose kernels are loaded
        self._runs = 0  # steps that were begun, on all ranks alike
        given: Any = process_group if isinstance(process_group, P2PGroups) else None  # such as one of threads
        self._groups: P2PGroups = given or P2PGroups(process_group, members, self.rank)
        found = [m for m in modules if isinstance(m, nn.Module)] if isinstance(modules, Iterable) else []
        self._ranks = self._groups.sync(process_groups(found, communication_groups(found)))
        with self._ranks.together(ValueError, conclude) as told:
            if not valid:
                raise ValueError(f"rank_mapping must be a permutation of 0..{self.num_ranks - 1}, got {rank_mapping}")
            built = self._build(modules, schedule)
            own = self._own
            told.value = [
                [built.name, crc32(repr(built).encode()), self.device.type, batch_dim, mapping],
                bool(overlap) if has_communication(own.segments().values()) or own.hooked else None,
                list(dict.fromkeys(own.specs.values())),  # each once: a record has little room
                own.hooked,
                any(p.dtype is torch.float64 for p in self.module.parameters()),
                tied_ends(own.modules.get(0), own.modules.get(built.num_stages - 1)),
                check_stages(list(self.module), list(own.parameters.values()), unreduced),
            ]
        overlaps, spec, self._norm_dtype, ties = told.conclusion
        self._programs.pairs = overlaps is True
        self._agree = partial(agree, first=built.placement[0], last=built.placement[-1], spec=spec)
        self._ranks.compare_replicas()
        first, last = built.placement[0], built.placement[-1]
        self._groups.connect((*built.placement, *[first] * ties), self.device)
        self._tied: TiedGradients | None = None
        if ties and self.rank in (first, last):
            end, other = (0, last) if self.rank == first else (built.num_stages - 1, first)
            self._tied = TiedGradients(own.modules[end], partial(self._groups.exchange, other, around=(last, first)))

    def _build(self, modules: Sequence[nn.Module], schedule: str | Schedule) -> Schedule:
        """The schedule, for the fewest micro-batches; ValueError for what does not fit."""
        self.module, device = checked_modules(modules)
        parameters = [StageParameters(module) for module in self.module]
        specs = [SideSpec.of(module) for module in self.module]
        self.device = self._groups.checked_device(device)
        self._programs = Programs(schedule, num_ranks=self.num_ranks, rank=self.rank, num_modules=len(self.module))
        built = self._programs.schedule()
        ranks = range(self.num_ranks)
        if self._only_v and built.placement != (*ranks, *reversed(ranks)):
            where = f"schedule {built.name!r} has them on ranks {built.placement}"
            raise ValueError(f"DualPipeV needs stages placed in a V, {where}")
        numbers = built.rank_stages(self.rank)
        own = dict(zip(numbers, self.module))
        self._own = OwnStages(
            own, dict(zip(numbers, specs)), dict(zip(numbers, parameters)),
            {number: each.borrowers(own) for number, each in zip(numbers, parameters)}, built.num_stages, self.device,
            self.batch_dim,
        )
        return built

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
        try:
            yield
        finally:
            self._programs = kept

    # -- a step

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse, with a ValueError: a pipeline takes whole steps."""
        raise ValueError("a pipeline is not called like a module, as it runs forward and backward at once; call "
                         "step(*inputs, num_chunks=..., criterion=..., labels=...), or for outputs alone step(*inputs, "
                         "num_chunks=..., return_outputs=True) under torch.no_grad()")

    def step(
        self, *inputs: Tensor | None, num_chunks: int = 0, criterion: Callable[..., Tensor] | None = None,
        labels: Sequence[Tensor | None] | Tensor | None = (), return_outputs: bool = False, sync: bool = True,
        side: Mapping[str, Tensor | None] | None = None,
    ) -> tuple[Tensor | None, Outputs]:
        """One batch through the pipeline: forward and backward, or forward only under `torch.no_grad()`.

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

        Raises, on every rank: ValueError for arguments that do not fit or on which ranks disagree; PipelineError where
        a rank failed during the step. After an error the pipeline can be used again if its process group still works;
        after a PipelineError gradients are undefined and should be zeroed; those kept by `sync=False` are dropped.
        """
        self._runs += 1
        train = torch.is_grad_enabled()
        same = [str(num_chunks), train, bool(sync)]
        with self._ranks.together(ValueError, self._agree, same_everywhere=same) as told:
            batch = split_batch(self._own, inputs, num_chunks, criterion, labels, return_outputs, sync, side)
            chunks = batch.told.num_chunks
            if not self._programs.is_to_search(chunks):  # nothing may fail behind the agreement that can fail here
                self._programs.program(chunks, train=train)
            for stage_parameters in self._own.parameters.values():
                stage_parameters.check()
            told.value = batch.told
        num_larger, side_names, kind = told.conclusion
        if self._programs.is_to_search(chunks):
            self._programs.add(self._ranks.first_in_turns(partial(search_with_progress, self.num_ranks, chunks)))
        with self._or_hang_up():
            program = self._programs.program(chunks, train=train)
            by_host = self.device.type != "cpu" and kind not in self._loaded
            messages = P2PMessages(self._groups, program, num_larger=num_larger, device=self.device, by_host=by_host)
            parameters = ParametersStep(
                self._own.parameters, self._own.borrowers, train=train, reduce=train and sync)
            executor = Executor(self._own, batch, side_names, program, messages, parameters, self.weight_grad_store)
        try:
            with self._ranks.together(PipelineError, where=executor.where):
                if self._tied is not None and train:
                    self._tied.begin()
                result = executor.run()
        except BaseException:
            self._discard()
            raise
        self._loaded.add(kind)  # first: if what follows fails at one end, the ranks agree on the next step's transport
        if self._tied is not None and train and sync:  # now that no rank has failed
            with self._or_hang_up():
                self._tied.add()
        return result

    @contextmanager
    def _or_hang_up(self) -> Iterator[None]:
        """End the groups in which the ranks agree where what is done inside fails: nobody waits there for this one.

        On NCCL the links between stages are groups of their own, whose waits are left to its watchdog.
        """
        try:
            yield
        except BaseException:
            self._ranks.hang_up()
            raise

    def trace(self, path: str | Path, *, group: ProcessGroup | None = None) -> Tracer:
        """For a `with` around steps, which all ranks enter and leave together: what they did, as a file for Perfetto
        and for `dualpipe trace`, which the first rank writes at the end.

        path: the file, in a folder that exists; group: the ranks to trace (default: those of this pipeline), such as
        those of all pipelines that train the model. An error inside goes on, with a note that names the file of what
        there was until then; of one that may be a rank's alone, each rank's own.
        """
        schedule, ranks = self._programs.schedule(), self._groups.global_ranks
        place = Place(self.rank, ranks or (Recorder.current().rank,), schedule.name, schedule.placement)
        return Tracer(Path(path), group or self._process_group, self.device, place,
                      lambda: self._runs if WeightGradStore.current() is self.weight_grad_store else 0)

    @property
    def copied_parameters(self) -> list[nn.Parameter]:
        """Those of this rank that the first stage has as well, on another rank: they count there."""
        return [] if self._tied is None else tied_parameters(self._own.modules.get(self._own.count - 1))

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False) -> Tensor:
        """`torch.nn.utils.clip_grad_norm_` for the model of all ranks; every rank must call it, after a step.

        The norm is that of the gradients of all stages, and of parameters that are sharded over data- or expert-
        parallel ranks (DTensors) of all parts; what is tied or replicated counts once. Plain parameters are taken to
        have the same gradients in all data-parallel pipelines. The host waits for nothing before the scaling is queued.

        Returns the norm before as a scalar, the same on every rank. Raises ValueError where norm_type is not above 0 or
        max_norm below 0; with `error_if_nonfinite` RuntimeError for a norm that is not finite, gradients untouched.
        """
        return clip_grad_norm_(
            self.parameters(), max_norm, norm_type, error_if_nonfinite, copies=self.copied_parameters,
            group=self._process_group, device=self.device, dtype=self._norm_dtype,
        )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As of any module; gradients that steps with `sync=False` keep are dropped too."""
        super().zero_grad(set_to_none)
        self._discard()

    def _discard(self) -> None:
        for parameters in self._own.parameters.values():
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
        unreduced: Sequence[str] = (),
    ) -> None:
        super().__init__(
            modules, process_group=process_group, schedule=schedule, batch_dim=batch_dim, rank_mapping=rank_mapping,
            overlap=overlap, unreduced=unreduced,
        )
