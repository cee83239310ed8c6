"""The arguments of a step: what a rank checks on its own, and what the ranks must agree on."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from math import prod
from typing import Any
from zlib import crc32

import torch
from torch import Tensor, nn

from dualpipe.pipeline.rank_stages import RankStages
from dualpipe.pipeline.side_inputs import SideSpec, validate_side_inputs
from dualpipe.pipeline.stage_program import Target


@dataclass(frozen=True)
class Batch:
    """A rank's share of a step's arguments, split into micro-batches; empty where this rank has no use for them.

    inputs, side, labels: tensors by micro-batch; side: in the order of `side_names`, the same on all ranks.
    """

    inputs: Sequence[tuple[Tensor, ...]]
    side: Sequence[tuple[Tensor, ...]]
    labels: Sequence[tuple[Tensor, ...]]
    criterion: Callable[..., Tensor] | None
    keep_outputs: bool
    side_names: tuple[str, ...] = ()

    def target(self, microbatch: int) -> Target:
        """Return what the outputs of a micro-batch are compared with."""
        labels = self.labels[microbatch] if self.labels else ()
        return Target(self.criterion, labels, self.keep_outputs)


@dataclass(frozen=True)
class StepArguments:
    """One rank's arguments of a step, reduced to what the ranks compare.

    batch_size, side_size, label_size: of the inputs, the side inputs and the labels, where this rank needs them.
    kind: checksum of what kernels are chosen by: dtypes and classes of shapes, autocast, the kind of step.
    """

    num_chunks: int
    grad: bool
    sync: bool
    training: list[bool]  # by module
    input_shapes: list[list[int]]
    side_shapes: dict[str, list[int]]
    batch_size: int | None
    side_size: int | None
    label_size: int | None
    kind: int


@dataclass(frozen=True)
class StepAgreement:
    """The conclusion from the arguments of all ranks.

    num_larger: the first micro-batches that are larger than the others. kind: a number for the kind of step; of steps
    of one kind the first loads the kernels of all.
    """

    num_chunks: int
    num_larger: int
    side_names: tuple[str, ...]
    kind: int


def split_batch(
    stages: RankStages, inputs: Sequence[Tensor | None], num_chunks: int | None,
    criterion: Callable[..., Tensor] | None, labels: Sequence[Tensor | None] | Tensor | None, return_outputs: bool,
    side: Mapping[str, Tensor | None] | None, *, sync: bool,
) -> tuple[Batch, StepArguments]:
    """Split this rank's arguments into micro-batches, and describe them for the other ranks.

    The arguments are those of `Pipeline.step`. Raises ValueError for what a rank can see to be wrong on its own.
    """
    num_chunks = _checked_num_chunks(num_chunks)
    side = validate_side_inputs(side)
    _check_device(stages)
    grad = torch.is_grad_enabled()
    is_first = 0 in stages.modules
    is_last = stages.count - 1 in stages.modules
    given = [tensor for tensor in inputs if tensor is not None]
    if is_last and criterion is None and grad:
        raise ValueError("criterion is required on the rank of the last stage; evaluate under torch.no_grad()")
    if is_first and not given:
        raise ValueError("inputs are required on the rank of the first stage, got none")
    own_inputs = dict(enumerate(inputs)) if is_first else None
    own_side = side if is_first and side else None
    own_labels = _by_number(labels) if is_last and criterion else None
    cut_inputs, batch_size = _split("input", own_inputs, num_chunks, stages)
    cut_side, side_size = _split("side input", own_side, num_chunks, stages)
    cut_labels, label_size = _split("label", own_labels, num_chunks, stages)
    batch = Batch(
        cut_inputs, cut_side, cut_labels, criterion if is_last else None, is_last and return_outputs,
    )
    autocast = torch.is_autocast_enabled(stages.device.type) and torch.get_autocast_dtype(stages.device.type)
    training = [module.training for module in stages.modules.values()]
    arguments = StepArguments(
        num_chunks=num_chunks,
        grad=grad,
        sync=sync,
        training=training,
        input_shapes=[list(tensor.shape) for tensor in given],
        side_shapes={name: list(tensor.shape) for name, tensor in side.items()},
        batch_size=batch_size,
        side_size=side_size,
        label_size=label_size,
        kind=_checksum(
            _kernel_classes(cut_inputs, cut_side, cut_labels), autocast, grad, sync, tuple(training), num_chunks),
    )
    return batch, arguments


@lru_cache(maxsize=1024)
def kernel_class(shape: tuple[int, ...]) -> tuple[tuple[int, bool], ...]:
    """Return what kernels are chosen by: the power of two of each size, and whether 16 divides it.

    Triton compiles a kernel anew for arguments that are 1, or multiples of 16, and the tiles of a GEMM go by the
    magnitude of its sizes; so shapes of one class run the same kernels. Kernels see the tokens of all sequences in one
    dimension, too.
    """
    sizes = (*shape, prod(shape[:2]), prod(shape))
    return tuple((size.bit_length(), size % 16 == 0) for size in sizes)


def _kernel_classes(*batches: Sequence[tuple[Tensor | None, ...]]) -> tuple[Any, ...]:
    """Return the dtypes and classes of the largest and the smallest micro-batch."""
    tensors = chain.from_iterable((*batch[0], *batch[-1]) for batch in batches if batch)
    return tuple([(tensor.dtype, kernel_class(tensor.shape)) for tensor in tensors if tensor is not None])


def compare_arguments(ranks: Sequence[StepArguments], *, first: int, last: int, spec: SideSpec) -> StepAgreement:
    """Return what follows from the arguments of all ranks; ValueError, with one text everywhere, where they disagree.

    first, last: the ranks of the first and the last stage; spec: what the stages of all ranks take.
    """
    require_same("num_chunks", [r.num_chunks for r in ranks])
    require_same("grad mode", [r.grad for r in ranks])
    require_same("sync", [r.sync for r in ranks])
    modes = [r.training for r in ranks]
    if len(set(chain(*modes))) > 1:
        raise ValueError(f"ranks disagree about train/eval mode: training of the stages, by rank: {modes}")
    require_same("the shapes of the inputs", [r.input_shapes or ranks[first].input_shapes for r in ranks])
    require_same("the side inputs and their shapes", [r.side_shapes or ranks[first].side_shapes for r in ranks])
    names = tuple(ranks[first].side_shapes)
    if names and spec.hooked:
        raise ValueError(f"side inputs {list(names)} do not go with overlapped_forward_backward, which has no argument "
                         "for them; return them from the first stage as tensors that all hand on, or give the stages "
                         "segments()")
    unused = [name for name in names if not spec.takes(name)]
    if unused:
        raise ValueError(f"no stage takes the side inputs {unused}; the stages' forwards name {list(spec.names)} when "
                         "the pipeline is built. Name them there as parameters behind the first")
    batch_size = ranks[first].batch_size
    assert batch_size is not None, "the rank of the first stage has inputs"
    for what, size in ((f"side inputs {list(names)}", ranks[first].side_size), ("labels", ranks[last].label_size)):
        if size not in (None, batch_size):
            raise ValueError(f"inputs have batch size {batch_size}, {what} {size}")
    num_chunks = ranks[first].num_chunks
    return StepAgreement(num_chunks, batch_size % num_chunks, names, _checksum(*[r.kind for r in ranks]))


def require_same(what: str, values: Sequence[Any]) -> None:
    """Raise ValueError unless all ranks' values are equal."""
    if any(value != values[0] for value in values):
        raise ValueError(f"ranks disagree about {what}: by rank {list(values)}")


def _checked_num_chunks(num_chunks: Any) -> int:
    remedy = ("the number of micro-batches into which the batch is split; their gradients add up, so divide a mean "
              "loss by it")
    if num_chunks is None:
        raise ValueError(f"num_chunks is required on every rank: {remedy}")
    if not hasattr(num_chunks, "__index__") or int(num_chunks) < 1:
        raise ValueError(f"num_chunks must be an integer >= 1, got {num_chunks!r}: give {remedy}")
    return int(num_chunks)


def _check_device(stages: RankStages) -> None:
    for module in stages.modules.values():
        param = _first_parameter(module)
        if param is not None and param.device != stages.device:
            raise ValueError(f"a stage is on {param.device}, but the pipeline was built on {stages.device}; build it "
                             "anew")


def _first_parameter(stage: nn.Module) -> nn.Parameter | None:
    """Return the first parameter of a stage; in a third of the time of `next(stage.parameters())`, in each step."""
    for module in stage.modules():
        for param in module._parameters.values():
            if param is not None:
                return param
    return None


def _by_number(labels: Sequence[Tensor | None] | Tensor | None) -> dict[int, Tensor | None]:
    """Return labels, one or several, by their numbers."""
    return dict(enumerate((labels,) if isinstance(labels, Tensor) else labels or ()))


@lru_cache(maxsize=1024)
def _checksum(*values: Hashable) -> int:
    return crc32(repr(values).encode())


def _split(
    what: str, tensors: Mapping[Any, Tensor | None] | None, num_chunks: int, stages: RankStages
) -> tuple[Sequence[tuple[Any, ...]], int | None]:
    """The micro-batches, as `torch.tensor_split` cuts them, and the size of the batch; none of None. ValueError, with
    `what` and its name or number, where a tensor cannot be cut."""
    if tensors is None:
        return (), None
    dim, given = stages.batch_dim, [(f"{what} {name!r}", t) for name, t in tensors.items() if t is not None]
    for name, tensor in given:
        if not isinstance(tensor, Tensor):
            raise ValueError(f"{name} must be a tensor, got {type(tensor).__name__}")
        shape = list(tensor.shape)
        if not -tensor.dim() <= dim < tensor.dim():
            raise ValueError(f"{name} of shape {shape} has no dimension {dim} to split")
        if shape[dim] < num_chunks:
            raise ValueError(f"{name} of shape {shape} cannot be split into num_chunks={num_chunks} along dimension "
                             f"{dim}")
        if tensor.device != stages.device:
            raise ValueError(f"{name} is on {tensor.device}, the stages on {stages.device}; move it there")
    if len({t.shape[dim] for _, t in given}) > 1:
        raise ValueError(f"{what}s differ in size along dimension {dim}: {[list(t.shape) for _, t in given]}")
    chunks = [[None] * num_chunks if t is None else t.tensor_split(num_chunks, dim) for t in tensors.values()]
    return list(zip(*chunks)) if chunks else [()] * num_chunks, given[0][1].shape[dim] if given else None


