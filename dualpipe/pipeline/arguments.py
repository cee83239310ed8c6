"""The arguments of a step: what each rank checks on its own, and what the ranks must agree on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dualpipe.nn.segments import Segment
from dualpipe.parallel.reduced import check_ranks
from dualpipe.pipeline.side import Takes, checked_side


class Call(NamedTuple):
    """What the caller gave to `step` on this rank."""

    inputs: Sequence[Tensor | None]
    num_chunks: int
    criterion: Callable[..., Tensor] | None
    labels: Sequence[Tensor | None]
    return_outputs: bool
    sync: bool
    side: Mapping[str, Tensor]

    def checked(self) -> Call:
        """The same in these types, from all that a caller may give; ValueError for what does not fit."""
        labels = (self.labels,) if isinstance(self.labels, Tensor) else tuple(self.labels or ())
        return self._replace(
            num_chunks=checked_num_chunks(self.num_chunks), labels=labels, side=checked_side(self.side)
        )


class Batch(NamedTuple):
    """A rank's share of the step's arguments, split into micro-batches; empty where this rank has no use for them."""

    inputs: Sequence[tuple[Tensor, ...]]
    side: Sequence[tuple[Tensor, ...]]  # in the order of their names
    labels: Sequence[tuple[Tensor, ...]]
    criterion: Callable[..., Tensor] | None
    keep_outputs: bool
    segments: Mapping[int, Sequence[Segment]]  # of the stages that offer them


class StepArguments(NamedTuple):
    """One rank's arguments, reduced to what the ranks compare. Travels as JSON."""

    num_chunks: int
    grad: bool
    sync: bool
    training: list[bool]  # by module
    input_shapes: list[list[int]]
    side_shapes: list[list[Any]]  # [name, shape], by name
    batch_size: int | None  # of the inputs, the side inputs and the labels, where this rank needs them
    side_size: int | None
    label_size: int | None


class Construction(NamedTuple):
    """What a rank tells the others when it builds its pipeline. Travels as JSON."""

    agreed: list[Any]
    overlaps: bool
    takes: Takes
    double: bool  # whether any parameter is float64
    tied: list[list[list[int]]]  # as of `tied_ends`
    reduced: tuple[bool, list[str]]  # as of `check_stages`

    @staticmethod
    def conclude(ranks: Sequence[Construction]) -> tuple[bool, Takes, torch.dtype]:
        """Whether pairs run in turn, what the stages take, the dtype of norms; ValueError where ranks do not fit."""
        same("(schedule, its checksum, device, batch_dim, rank_mapping)", [r.agreed for r in ranks])
        check_ranks([r.reduced for r in ranks])
        embeddings, last = (list(chain.from_iterable(ends)) for ends in zip(*(r.tied for r in ranks)))
        if any(shape in last for shape in embeddings):
            raise ValueError("tie_word_embeddings is set, but the first and the last stage are on two ranks and would "
                             "train two weights; use a V-shaped schedule (dualpipev, zbv), or set it to False in their "
                             "config")
        takes = Takes.union(Takes(*r.takes) for r in ranks)
        return any(r.overlaps for r in ranks), takes, torch.float64 if any(r.double for r in ranks) else torch.float32


def is_permutation(mapping: Any, size: int) -> bool:
    """Whether `mapping` holds each of 0..size-1 once."""
    try:
        return sorted(mapping) == list(range(size))
    except TypeError:
        return False


def common_device(modules: Iterable[nn.Module]) -> torch.device | None:
    """The device of all parameters and buffers, None where there are none; ValueError where they are on several."""
    tensors = chain.from_iterable(chain(m.parameters(), m.buffers()) for m in modules)
    devices = {t.device for t in tensors}
    if len(devices) > 1 or any(d.type == "meta" for d in devices):
        raise ValueError(f"all stages of a rank must be on one real device, found {sorted(map(str, devices))}")
    return devices.pop() if devices else None


def tied_ends(first: nn.Module | None, last: nn.Module | None) -> list[list[list[int]]]:
    """Shapes of the first stage's embeddings and of the last one's matrices, where a config like one of transformers'
    ties them; none of a stage on another rank (None). ValueError where both are here, with weights of one shape, and
    share no Parameter."""
    ends = [[m.weight for m in first.modules() if isinstance(m, nn.Embedding)] if _ties(first) else [],
            [p for p in last.parameters() if p.dim() == 2] if _ties(last) else []]
    embeddings, matrices = ([list(shape) for shape in dict.fromkeys(w.shape for w in weights)] for weights in ends)
    if first is None or last is None:
        return [embeddings, matrices]
    shared = first is last or set(first.parameters()) & set(last.parameters())
    if not shared and any(shape in matrices for shape in embeddings):
        raise ValueError("tie_word_embeddings is set, but the first and the last stage share no Parameter and would "
                         "train two weights; give one the other's, or set it to False in their config")
    return [[], []]


def _ties(stage: nn.Module | None) -> bool:
    return bool(getattr(getattr(stage, "config", None), "tie_word_embeddings", False))


def checked_num_chunks(num_chunks: Any) -> int:
    """`num_chunks` as an int; ValueError unless it is an integer of 1 or more."""
    if not hasattr(num_chunks, "__index__") or int(num_chunks) < 1:
        raise ValueError(f"num_chunks must be an integer >= 1, got {num_chunks!r}")
    return int(num_chunks)


def given(tensors: Iterable[Tensor | None]) -> list[Tensor]:
    """Those that are not None."""
    return [t for t in tensors if t is not None]


def split(
    what: str,
    tensors: Sequence[Tensor | None],
    num_chunks: int,
    dim: int,
    device: torch.device,
    names: Sequence[object] | None = None,
) -> list[tuple[Tensor | None, ...]]:
    """The micro-batches, as `torch.tensor_split` cuts them; ValueError, with `what` and one of the `names` (default:
    numbers), where a tensor cannot be cut."""
    for name, tensor in zip(names or range(len(tensors)), tensors):
        if tensor is not None:
            _check_splittable(f"{what} {name!r}", tensor, num_chunks, dim, device)
    if len({t.shape[dim] for t in given(tensors)}) > 1:
        raise ValueError(f"{what}s differ in size along dimension {dim}: {[list(t.shape) for t in given(tensors)]}")
    chunks = [[None] * num_chunks if t is None else t.tensor_split(num_chunks, dim) for t in tensors]
    return list(zip(*chunks)) if chunks else [()] * num_chunks


def _check_splittable(name: str, tensor: Any, num_chunks: int, dim: int, device: torch.device) -> None:
    if not isinstance(tensor, Tensor):
        raise ValueError(f"{name} must be a tensor, got {type(tensor).__name__}")
    shape = list(tensor.shape)
    if not -tensor.dim() <= dim < tensor.dim():
        raise ValueError(f"{name} of shape {shape} has no dimension {dim} to split")
    if shape[dim] < num_chunks:
        raise ValueError(f"{name} of shape {shape} cannot be split into num_chunks={num_chunks} along dimension {dim}")
    if tensor.device != device:
        raise ValueError(f"{name} is on {tensor.device}, the stages on {device}; move it there")


def agree(ranks: Sequence[StepArguments], first: int, last: int, takes: Takes) -> tuple[int, list[str]]:
    """The size of the batch and the names of the side inputs; ValueError, with the same text on every rank, where the
    ranks disagree.

    first, last: the ranks of the first and the last stage; takes: what the stages of all ranks take.
    """
    same("num_chunks", [r.num_chunks for r in ranks])
    same("grad mode", [r.grad for r in ranks])
    same("sync", [r.sync for r in ranks])
    if len(set(chain.from_iterable(r.training for r in ranks))) > 1:
        modes = [r.training for r in ranks]
        raise ValueError(f"ranks disagree about train/eval mode: training of the stages, by rank: {modes}")
    same("the shapes of the inputs", [r.input_shapes or ranks[first].input_shapes for r in ranks])
    same("the side inputs and their shapes", [r.side_shapes or ranks[first].side_shapes for r in ranks])
    side_names = [name for name, _ in ranks[first].side_shapes]
    takes.check(side_names)
    batch_size, side_size, label_size = ranks[first].batch_size, ranks[first].side_size, ranks[last].label_size
    if side_size not in (None, batch_size):
        raise ValueError(f"inputs have batch size {batch_size}, side inputs {side_names} {side_size}")
    if label_size not in (None, batch_size):
        raise ValueError(f"inputs have batch size {batch_size}, labels {label_size}")
    return batch_size, side_names


def same(what: str, values: Sequence[Any]) -> None:
    """ValueError unless all ranks' values are equal."""
    if any(value != values[0] for value in values):
        raise ValueError(f"ranks disagree about {what}: by rank {list(values)}")
