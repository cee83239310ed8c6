"""Arguments of a step: validation on one rank, and agreement of all ranks."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from math import prod
from typing import Any, NamedTuple, cast
from zlib import crc32

import torch
from torch import Tensor, nn

from dualpipe.nn.segments import is_reserved
from dualpipe.parallel.fsdp.stage_parameters import modules_of
from dualpipe.pipeline.compiled_stage import RankStages, SideSpec, Target, takes_head_rows

Labels = Sequence[Tensor | None] | Tensor | None  # arguments of a loss function besides the outputs


class CallerTensor(NamedTuple):
    """Input or label with a graph of the caller, into which its gradient flows at the end of the step.

    leaves: its micro-batches, which are cut off from that graph and collect their gradients in `.grad`.
    """

    tensor: Tensor
    leaves: Sequence[Tensor]

    def gradient(self, dim: int) -> Tensor | None:
        """Join the gradients of the micro-batches along `dim`; None if there are none."""
        if all(leaf.grad is None for leaf in self.leaves):
            return None
        gradient = torch.zeros_like(self.tensor)
        for part, leaf in zip(gradient.tensor_split(len(self.leaves), dim), self.leaves):
            if leaf.grad is not None:
                part.add_(leaf.grad)
                leaf.grad = None
        return gradient


class Batch(NamedTuple):
    """Arguments of a step that this rank uses, split into micro-batches; those that it does not use are empty.

    Attributes:
        inputs: arguments of stage 0, by micro-batch.
        side: side inputs by micro-batch, in the order of `side_names`.
        labels: labels by micro-batch.
        criterion: the loss function; None without a loss, and on ranks other than that of the last stage.
        may_take_rows: see `Target`.
        keep_outputs: keep the outputs of the last stage for the caller.
        from_caller: the inputs and labels that require a gradient.
        autocast: the type of the stages' device if the caller has enabled autocast for it; otherwise None.
        side_names: names of the side inputs, the same on all ranks.
    """

    inputs: Sequence[tuple[Tensor, ...]]
    side: Sequence[tuple[Tensor, ...]]
    labels: Sequence[tuple[Tensor, ...]]
    criterion: Callable[..., Tensor] | None
    may_take_rows: bool
    keep_outputs: bool
    from_caller: Sequence[CallerTensor]
    autocast: str | None
    side_names: tuple[str, ...] = ()

    def target(self, microbatch: int) -> Target:
        """Return the criterion and the labels of a micro-batch."""
        labels = self.labels[microbatch] if self.labels else ()
        return Target(self.criterion, labels, self.may_take_rows, self.keep_outputs)


@dataclass(frozen=True)
class StepArguments:
    """Description of a rank's arguments of a step, which the ranks compare.

    batch_size, side_size, label_size: sizes of the inputs, side inputs and labels along the batch dimension; None if
    this rank does not use them. kernels: a checksum of everything that selects kernels: dtypes and classes of shapes,
    autocast, gradient mode.
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
    kernels: int


@dataclass(frozen=True)
class StepAgreement:
    """Conclusion from the arguments of all ranks.

    num_larger: number of micro-batches whose size is larger by one than that of the rest; they come first. kernels:
    checksum of the `kernels` of all ranks; steps with the same value run the same kernels, so only the first loads any.
    """

    num_chunks: int
    num_larger: int
    side_names: tuple[str, ...]
    kernels: int


def merge_side_inputs(
    mapping: Mapping[str, Tensor | None] | None, keywords: Mapping[str, Tensor | None]
) -> dict[str, Tensor]:
    """Return the side inputs that are not None, from the argument `side` of `Pipeline.step` and from its keywords.

    Raises ValueError if one is in both, and for an invalid side input.
    """
    if keywords:
        mapping = mapping or {}
        twice = sorted(keywords.keys() & mapping.keys())
        if twice:
            raise ValueError(f"side inputs {twice} are both in side and keyword arguments; pass each once")
        mapping = {**mapping, **keywords}
    return validate_side_inputs(mapping)


def one_of_two_names(name: str, value: Any, other_name: str, other: Any, *, default: Any = None) -> Any:
    """Return the value of an argument that has two names. Raises ValueError if a value was passed under both."""
    if other is default:
        return value
    if value is not default:
        raise ValueError(f"got {name} and {other_name}, two names of one argument; pass {name} only")
    return other


def split_batch(
    stages: RankStages, inputs: Sequence[Tensor | None], side: Mapping[str, Tensor], *, num_chunks: int | None,
    criterion: Callable[..., Tensor] | None, labels: Labels, return_outputs: bool, sync: bool,
) -> tuple[Batch, StepArguments]:
    """Split this rank's arguments into micro-batches, and describe them for the other ranks.

    Takes the arguments of `Pipeline.step`. Raises ValueError for arguments that are invalid on this rank alone.
    """
    num_chunks = _validate_num_chunks(num_chunks)
    _check_device(stages)
    grad = torch.is_grad_enabled()
    is_first = 0 in stages.modules
    is_last = stages.count - 1 in stages.modules
    input_tensors = [tensor for tensor in inputs if tensor is not None]
    if is_last and criterion is None and grad:
        raise ValueError("got no loss_fn (criterion), which is required on the rank of the last stage; pass one, or "
                         "evaluate under torch.no_grad()")
    if is_first and not input_tensors:
        raise ValueError("got no inputs, which are required on the rank of the first stage; pass them there")
    used_inputs = dict(enumerate(inputs)) if is_first else None
    used_side = side if is_first and side else None
    used_labels = _number_labels(labels) if is_last and criterion else None
    from_caller: list[CallerTensor] = []
    split_inputs, batch_size = _split("input", used_inputs, num_chunks, stages, from_caller)
    split_side, side_size = _split("side input", used_side, num_chunks, stages, from_caller)
    split_labels, label_size = _split("label", used_labels, num_chunks, stages, from_caller)
    device_type = stages.device.type
    autocast = device_type if torch.is_autocast_enabled(device_type) else None
    batch = Batch(
        inputs=split_inputs,
        side=split_side,
        labels=split_labels,
        criterion=criterion if is_last else None,
        may_take_rows=is_last and not return_outputs and takes_head_rows(criterion),
        keep_outputs=is_last and return_outputs,
        from_caller=from_caller,
        autocast=autocast,
    )
    training = [module.training for module in stages.modules.values()]
    classes = [  # of the largest and the smallest micro-batch
        (tensor.dtype, kernel_class(tensor.shape))
        for parts in (split_inputs, split_side, split_labels) if parts
        for tensor in (*parts[0], *parts[-1]) if tensor is not None
    ]
    arguments = StepArguments(
        num_chunks=num_chunks,
        grad=grad,
        sync=sync,
        training=training,
        input_shapes=[list(tensor.shape) for tensor in input_tensors],
        side_shapes={name: list(tensor.shape) for name, tensor in side.items()},
        batch_size=batch_size,
        side_size=side_size,
        label_size=label_size,
        kernels=_checksum(
            *classes, autocast and torch.get_autocast_dtype(autocast), grad, sync, *training, num_chunks),
    )
    return batch, arguments


@lru_cache(maxsize=1024)
def kernel_class(shape: tuple[int, ...]) -> tuple[tuple[int, bool], ...]:
    """Return the class of a shape. Shapes of one class run the same kernels.

    The class has, for every size, its number of bits, and True if 16 divides it: Triton compiles a kernel anew for
    arguments that are 1 or multiples of 16, and the tiles of a GEMM depend on the magnitude of its sizes. Kernels also
    see the tokens of all sequences as one dimension, so the products of the first two and of all sizes count too.
    """
    sizes = (*shape, prod(shape[:2]), prod(shape))
    return tuple((size.bit_length(), size % 16 == 0) for size in sizes)


def compare_arguments(ranks: Sequence[StepArguments], *, first: int, last: int, spec: SideSpec) -> StepAgreement:
    """Return the agreement from the arguments of all ranks.

    Raises ValueError if ranks disagree, with the same text on all of them.

    Args:
        ranks: arguments by rank.
        first: rank of the first stage.
        last: rank of the last stage.
        spec: side inputs that the stages of all ranks take.
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
    if names and spec.is_hooked:
        raise ValueError(f"got side inputs {list(names)}, for which overlapped_forward_backward has no argument; "
                         "return them from every stage as further outputs, or give the stages segments()")
    unused = [name for name in names if not spec.takes(name)]
    if unused:
        raise ValueError(f"no stage takes the side inputs {unused}; the stages' forwards had the parameters "
                         f"{list(spec.names)} when the pipeline was built: add those names after the first parameter")
    batch_size = ranks[first].batch_size
    assert batch_size is not None, "the rank of the first stage has inputs"
    for what, size in ((f"side inputs {list(names)}", ranks[first].side_size), ("labels", ranks[last].label_size)):
        if size not in (None, batch_size):
            raise ValueError(f"inputs have batch size {batch_size}, {what} {size}; pass one batch size for all")
    num_chunks = ranks[first].num_chunks
    return StepAgreement(num_chunks, batch_size % num_chunks, names, _checksum(*[r.kernels for r in ranks]))


def require_same(what: str, values: Sequence[Any]) -> None:
    """Raise ValueError, naming `what`, unless the values of all ranks are equal."""
    if any(value != values[0] for value in values):
        raise ValueError(f"ranks disagree about {what}: by rank {list(values)}")


def _validate_num_chunks(num_chunks: Any) -> int:
    """Return `num_chunks` as an integer. Raises ValueError if it is not an integer, or is below 1."""
    remedy = ("the number of micro-batches into which the batch is split; their gradients add up, so divide a mean "
              "loss by it")
    if num_chunks is None:
        raise ValueError(f"num_microbatches (num_chunks) is required on every rank: {remedy}")
    if not hasattr(num_chunks, "__index__") or int(num_chunks) < 1:
        raise ValueError(f"num_microbatches (num_chunks) must be an integer >= 1, got {num_chunks!r}: give {remedy}")
    return int(num_chunks)


def _check_device(stages: RankStages) -> None:
    """Raise ValueError if a stage has moved to another device since the pipeline was built."""
    for module in stages.modules.values():
        param = _first_parameter(module)
        if param is not None and param.device != stages.device:
            raise ValueError(f"a stage is on {param.device}, but the pipeline was built on {stages.device}; build the "
                             "pipeline anew")


def _first_parameter(stage: nn.Module) -> nn.Parameter | None:
    """Return the first parameter of a stage; None if it has none."""
    for module in modules_of(stage):
        for param in module._parameters.values():
            if param is not None:
                return param
    return None


def _number_labels(labels: Labels) -> dict[int, Tensor | None]:
    """Return one or several labels by their index."""
    if isinstance(labels, Tensor):
        return {0: labels}
    return dict(enumerate(labels or ()))


@lru_cache(maxsize=1024)
def _checksum(*values: Hashable) -> int:
    """Return a checksum of values, the same on every rank."""
    return crc32(repr(values).encode())


def _split(
    role: str, tensors: Mapping[Any, Tensor | None] | None, num_chunks: int, stages: RankStages,
    from_caller: list[CallerTensor],
) -> tuple[Sequence[tuple[Any, ...]], int | None]:
    """Split tensors into micro-batches like `torch.tensor_split`, into copies.

    Views of one tensor would share its version: changing one in place would make autograd refuse the backward of all
    others.

    Raises ValueError, naming the tensor, for one that cannot be split.

    Args:
        role: such as "input", for errors.
        tensors: the tensors by name or index; None if this rank does not use them.
        num_chunks: number of micro-batches.
        stages: the stages of this rank.
        from_caller: gets the tensors that require a gradient, in a training step.

    Returns:
        For each micro-batch, a tuple of its tensors (no tuples at all if `tensors` is None), and the size of the batch
        (None if there is no tensor).
    """
    if tensors is None:
        return (), None
    dim = stages.batch_dim
    batch_size: int | None = None
    chunks: list[Sequence[Tensor | None]] = []
    for name, tensor in tensors.items():
        if tensor is None:
            chunks.append([None] * num_chunks)
            continue
        _check_splittable(role, name, tensor, num_chunks, stages)
        if batch_size is None:
            batch_size = tensor.shape[dim]
        if tensor.shape[dim] != batch_size:
            shapes = [list(other.shape) for other in tensors.values() if isinstance(other, Tensor)]
            raise ValueError(f"{role}s differ in size along dimension {dim}: {shapes}; pass one batch size for all")
        parts = _parts(tensor, num_chunks, dim)
        chunks.append(parts)
        if parts[0].requires_grad:
            from_caller.append(CallerTensor(tensor, parts))
    by_microbatch = list(zip(*chunks)) if chunks else [()] * num_chunks
    return by_microbatch, batch_size


def _parts(tensor: Tensor, num_chunks: int, dim: int) -> Sequence[Tensor]:
    """Return the micro-batches of a tensor as leaves, which require a gradient in training if the tensor does."""
    whole = tensor.detach()
    parts: Sequence[Tensor]
    if type(tensor) is Tensor and tensor.is_contiguous():
        size, num_larger = divmod(tensor.shape[dim], num_chunks)
        sizes = [size + 1] * num_larger + [size] * (num_chunks - num_larger)
        split_copy = cast(Any, torch.split_with_sizes_copy)  # torch's stub says that it returns nothing
        parts = split_copy(whole, sizes, dim)
    else:  # twice as slow, but strides and subclasses are kept
        parts = [part.clone() for part in whole.tensor_split(num_chunks, dim)]
    if tensor.requires_grad and torch.is_grad_enabled():
        for part in parts:
            part.requires_grad_()
    return parts


def _check_splittable(role: str, name: Any, tensor: Any, num_chunks: int, stages: RankStages) -> None:
    """Raise ValueError, naming the tensor by its role and name, if it cannot be split into micro-batches."""
    dim = stages.batch_dim
    if not isinstance(tensor, Tensor):
        problem = f"must be a tensor, got {type(tensor).__name__}"
    elif not -tensor.dim() <= dim < tensor.dim():
        problem = f"of shape {list(tensor.shape)} has no dimension {dim} to split; see batch_dim"
    elif tensor.shape[dim] < num_chunks:
        problem = f"of shape {list(tensor.shape)} cannot be split into num_chunks={num_chunks} along dimension {dim}"
    elif tensor.device != stages.device:
        problem = f"is on {tensor.device}, the stages on {stages.device}; move it there"
    else:
        return
    raise ValueError(f"{role} {name!r} {problem}")


def validate_side_inputs(side: Any) -> dict[str, Tensor]:
    """Return the non-None side inputs, sorted by name. Raises ValueError for invalid ones."""
    if side is None:
        return {}
    if not isinstance(side, Mapping) or not all(isinstance(name, str) for name in side):
        keys = [type(key).__name__ for key in side] if isinstance(side, Mapping) else type(side).__name__
        raise ValueError(f"side must be a mapping from names to tensors, got {keys}")
    reserved = sorted(filter(is_reserved, side))
    if reserved:
        raise ValueError(f"side inputs are called {reserved}, names that the pipeline uses; choose other names")
    tensors = {name: side[name] for name in sorted(side) if side[name] is not None}
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise ValueError(f"side input {name!r} must be a tensor, got {type(tensor).__name__}")
        if tensor.layout is not torch.strided:
            raise ValueError(f"side input {name!r} must be dense, got {tensor.layout}")
        if tensor.requires_grad:
            raise ValueError(f"side input {name!r} requires grad, but side inputs get no gradient; detach it, or pass "
                             "it as an input that the stages return")
    return tensors
