"""A step without a pipeline: of the uncut model, and of its stages one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from dualpipe.pipeline.stage_program import as_tuple
from dualpipe.pipeline.stage_runner import run_backward
from dualpipe.train.model_parity.models.cut_model import ComparedModel, NamedStage, Tensors
from dualpipe.train.parity_errors import Difference, difference


class Batch(NamedTuple):
    """Inputs and labels of one pipeline's step, or of one of its micro-batches."""

    inputs: tuple[Tensor, ...]
    labels: tuple[Tensor, ...]

    def split(self, num_chunks: int) -> list[Batch]:
        """Return the micro-batches, as `Pipeline.step` cuts them."""
        inputs = [tensor.tensor_split(num_chunks) for tensor in self.inputs]
        labels = [tensor.tensor_split(num_chunks) for tensor in self.labels]
        return [Batch(tuple(part[m] for part in inputs), tuple(part[m] for part in labels)) for m in range(num_chunks)]

    def double(self) -> Batch:
        """Return floating-point tensors in float64, others as they are."""
        return Batch(tuple(_double(tensor) for tensor in self.inputs), tuple(_double(tensor) for tensor in self.labels))


class Boundary(NamedTuple):
    """A place where a tensor leaves a stage: kind "F" for its outputs, "B" for the gradients of its inputs."""

    kind: str
    stage: int
    microbatch: int


class UncutStep(NamedTuple):
    """The results of a step. losses: (replicas, micro-batches); gradients: by the uncut model's names."""

    losses: Tensor
    gradients: dict[str, Tensor]


def make_batches(model: ComparedModel, replicas: int, dtype: torch.dtype, device: torch.device) -> list[Batch]:
    """Return the batch of each pipeline. Raises ValueError for fewer rows than micro-batches."""
    batches = []
    for replica in range(replicas):
        inputs, labels = model.make_batch(replica)
        batch = Batch(_prepared(inputs, dtype, device), _prepared(labels, dtype, device))
        for tensor in (*batch.inputs, *batch.labels):
            rows = tensor.shape[0] if tensor.dim() else 0
            if rows < model.num_chunks:
                raise ValueError(f"the batch has a tensor of shape {list(tensor.shape)}, whose first dimension must be "
                                 f"at least the {model.num_chunks} micro-batches")
        batches.append(batch)
    return batches


def _double(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


def _prepared(tensors: Tensors, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, ...]:
    """Return tensors on the device, floating-point ones in the dtype of the model."""
    found = as_tuple(tensors)
    return tuple(t.detach().to(device, dtype if t.is_floating_point() else None) for t in found)


def microbatches(model: ComparedModel, batches: Sequence[Batch], only: int | None) -> Iterator[tuple[int, int, Batch]]:
    """Yield replica, number and micro-batch, of all pipelines. only: the one of each pipeline that has a loss."""
    for replica, batch in enumerate(batches):
        for number, microbatch in enumerate(batch.split(model.num_chunks)):
            if only is None or number == only:
                yield replica, number, microbatch


def train_whole(
    model: ComparedModel, whole: nn.Module, batches: Sequence[Batch], only: int | None = None,
    before_microbatch: Callable[[int, int], None] | None = None,
) -> UncutStep:
    """Run forward and backward of the uncut model, one micro-batch after the other; gradients are the mean over
    pipelines, and accumulate in at least float32.

    only: the micro-batch whose loss counts; the others are left out. before_microbatch: called with the number of the
    pipeline and of the micro-batch.
    """
    begin = before_microbatch or _nothing
    whole.zero_grad()
    accumulate_wide([whole])
    losses = torch.zeros(len(batches), model.num_chunks, dtype=torch.float64, device="cpu")
    for replica, number, microbatch in microbatches(model, batches, only):
        begin(replica, number)
        outputs = as_tuple(whole(*microbatch.inputs))
        loss = _checked(model.compute_loss(*outputs, *microbatch.labels))
        _run_backward([loss], [torch.full_like(loss, 1 / len(batches))])
        losses[replica, number] = loss.detach().double()
    return UncutStep(losses, _gradients(whole))


def _checked(loss: object) -> Tensor:
    """Return a micro-batch's loss. Raises ValueError for what gradients cannot be computed of."""
    if not isinstance(loss, Tensor) or loss.dim() or not loss.requires_grad:
        kind = type(loss).__name__
        if isinstance(loss, Tensor):
            requires = "requires" if loss.requires_grad else "requires no"
            kind = f"tensor of shape {list(loss.shape)} that {requires} gradient"
        raise ValueError(f"the loss of a micro-batch is a {kind}; loss(*outputs, *labels) must return a scalar tensor "
                         "that requires a gradient")
    return loss


def _run_backward(roots: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
    """Run autograd as a pipeline does: torch.autograd.backward switches function modes off, which must see what a
    checkpoint computes once more."""
    run_backward([get_gradient_edge(root) for root in roots], gradients)


def accumulate_wide(modules: Iterable[nn.Module]) -> None:
    """Have gradients accumulate in at least float32."""
    for parameter in chain.from_iterable(module.parameters() for module in modules):
        if parameter.requires_grad:
            parameter.grad_dtype = torch.promote_types(parameter.dtype, torch.float32)  # type: ignore[attr-defined]


def _gradients(whole: nn.Module) -> dict[str, Tensor]:
    """Return gradients by all names of the parameters, zeros where there is none."""
    found = {}
    for name, parameter in whole.named_parameters(remove_duplicate=False):
        if parameter.requires_grad:
            found[name] = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
    return found


class StagesInSequence:
    """All stages in one process, one after the other, each with a backward of its own, as in a pipeline.

    The stages are neither sharded nor overlapped: what differs from the uncut model in them is due to the cut, and
    what differs from them in a pipeline is not.
    """

    def __init__(self, model: ComparedModel, stages: Sequence[NamedStage]) -> None:
        self._model = model
        self._stages = stages
        self.boundaries: dict[Boundary, list[Tensor]] = {}  # of the pipeline `replica` of the last `train`

    @property
    def stages(self) -> Sequence[NamedStage]:
        """All stages, in their order."""
        return self._stages

    def train(
        self, batches: Sequence[Batch], replica: int, after_forward: Callable[[int, int], None] | None = None,
        before_microbatch: Callable[[int, int], None] | None = None,
    ) -> UncutStep:
        """Run a step of all pipelines; keep the boundaries of one.

        after_forward: called with stage and micro-batch after each forward of that pipeline. before_microbatch: see
        `train_whole`.
        """
        begin = before_microbatch or _nothing
        self.boundaries = {}
        losses = torch.zeros(len(batches), self._model.num_chunks, dtype=torch.float64, device="cpu")
        for stage in self._stages:
            stage.module.zero_grad()
        for number_of_pipeline, microbatch, batch in microbatches(self._model, batches, None):
            begin(number_of_pipeline, microbatch)
            is_kept = number_of_pipeline == replica
            call = after_forward if is_kept and after_forward is not None else _nothing
            loss, boundaries = self._train_microbatch(microbatch, batch, 1 / len(batches), call)
            losses[number_of_pipeline, microbatch] = loss
            if is_kept:
                self.boundaries |= boundaries
        return UncutStep(losses, self._sum_gradients())

    def _train_microbatch(
        self, microbatch: int, batch: Batch, scale: float, after_forward: Callable[[int, int], None]
    ) -> tuple[Tensor, dict[Boundary, list[Tensor]]]:
        """Run one micro-batch; boundaries are those of its loss, gradients of parameters are multiplied by `scale`."""
        boundaries: dict[Boundary, list[Tensor]] = {}
        arrived: list[tuple[Tensor, ...]] = []
        left: list[tuple[Tensor, ...]] = []
        tensors = batch.inputs
        for stage in self._stages:
            tensors = tuple(_leaf(tensor, needs_grad=stage.number > 0) for tensor in tensors)
            arrived.append(tensors)
            tensors = as_tuple(stage.module(*tensors))
            after_forward(stage.number, microbatch)
            left.append(tensors)
            boundaries[Boundary("F", stage.number, microbatch)] = [tensor.detach() for tensor in tensors]
        loss = self._model.compute_loss(*tensors, *batch.labels)
        roots: list[Tensor] = [loss]
        gradients: list[Tensor] = [torch.full_like(loss, scale)]
        for stage in reversed(self._stages):
            _run_backward(roots, gradients)
            leaves = [tensor for tensor in arrived[stage.number] if tensor.requires_grad]
            found = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves]
            boundaries[Boundary("B", stage.number, microbatch)] = [gradient / scale for gradient in found]
            if stage.number > 0:
                before = left[stage.number - 1]
                pairs = list(zip([t for t in before if t.is_floating_point()], found))
                roots = [root for root, _ in pairs if root.requires_grad]
                gradients = [gradient for root, gradient in pairs if root.requires_grad]
        return loss.detach(), boundaries

    def _sum_gradients(self) -> dict[str, Tensor]:
        """Return gradients by the uncut model's names; those of several copies of one parameter are added."""
        found: dict[str, Tensor] = {}
        counted: set[nn.Parameter] = set()
        for stage in self._stages:
            for own, parameter in stage.module.named_parameters(remove_duplicate=False):
                if parameter.grad is None or parameter in counted:
                    continue
                counted.add(parameter)
                name = stage.names[own]
                found[name] = found[name] + parameter.grad if name in found else parameter.grad.clone()
        return found


def _nothing(stage_or_replica: int, microbatch: int) -> None:
    """Stand for a caller that wants to know nothing."""


def _leaf(tensor: Tensor, *, needs_grad: bool) -> Tensor:
    """Return a tensor as it arrives in a stage: cut off from the stage before."""
    found = tensor.detach()
    return found.requires_grad_() if needs_grad and found.is_floating_point() else found


def tied_names(whole: nn.Module) -> dict[str, list[str]]:
    """Return, for each name of a parameter, all names of it."""
    groups: dict[nn.Parameter, list[str]] = {}
    for name, parameter in whole.named_parameters(remove_duplicate=False):
        groups.setdefault(parameter, []).append(name)
    return {name: names for names in groups.values() for name in names}


def sum_by_first_name(gradients: Mapping[str, Tensor], tied: Mapping[str, list[str]]) -> dict[str, Tensor]:
    """Return gradients by the first of each parameter's names; a tied one may have another in each stage."""
    found: dict[str, Tensor] = {}
    for name, gradient in gradients.items():
        first = tied[name][0]
        found[first] = found[first] + gradient if first in found else gradient
    return found


def compare_by_first_name(
    gradients: Mapping[str, Tensor], expected: Mapping[str, Tensor], tied: Mapping[str, list[str]], floor: float
) -> list[Difference]:
    """Measure the gradients that `sum_by_first_name` returns against the uncut model's, zeros where there is none.

    floor: the norm that a gradient counts as at least.
    """
    return [difference(name, gradients.get(name, torch.zeros_like(gradient)), gradient, floor)
            for name, gradient in expected.items() if tied[name][0] == name]


def names_of(stages: Iterable[NamedStage]) -> set[str]:
    """Return the uncut model's names of all parameters of some stages."""
    return {name for stage in stages for name in stage.names.values()}
