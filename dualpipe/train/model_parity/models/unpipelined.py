"""A step without a pipeline: of the unpipelined model, and of its stages in sequence."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from dualpipe.pipeline.arguments import validate_side_inputs
from dualpipe.pipeline.compiled_stage import SideSpec, as_tuple
from dualpipe.pipeline.stage_runner import run_backward
from dualpipe.runtime.device import RandomState
from dualpipe.train.model_parity.models.cut_model import ComparedModel, NamedStage
from dualpipe.train.parity_errors import Difference, difference


class Batch(NamedTuple):
    """Inputs, labels and side inputs of a step of one pipeline, or of a micro-batch."""

    inputs: tuple[Tensor, ...]
    labels: tuple[Tensor, ...]
    side: dict[str, Tensor]

    def map(self, function: Callable[[Tensor], Tensor]) -> Batch:
        """Return the batch with a function applied to every tensor."""
        return Batch(
            inputs=tuple(function(tensor) for tensor in self.inputs),
            labels=tuple(function(tensor) for tensor in self.labels),
            side={name: function(tensor) for name, tensor in self.side.items()},
        )

    def split(self, num_chunks: int) -> list[Batch]:
        """Return the micro-batches, split like in `Pipeline.step`."""
        return [self.map(lambda tensor, m=m: tensor.tensor_split(num_chunks)[m])  # type: ignore[misc]
                for m in range(num_chunks)]

    def double(self) -> Batch:
        """Return the batch with floating-point tensors in float64."""
        return self.map(_double)


class Boundary(NamedTuple):
    """A boundary of a stage in one micro-batch. kind: "F" for its outputs, "B" for the gradients of its inputs."""

    kind: str
    stage: int
    microbatch: int


class UnpipelinedStep(NamedTuple):
    """The results of a step. losses: (replicas, micro-batches); gradients: by the unpipelined model's names."""

    losses: Tensor
    gradients: dict[str, Tensor]


def make_batches(model: ComparedModel, replicas: int, dtype: torch.dtype, device: torch.device) -> list[Batch]:
    """Return the batch of each pipeline, with floating-point tensors in the dtype of the model.

    Raises ValueError for fewer rows than micro-batches, and for values that are no tensors.
    """
    batches = []
    for replica in range(replicas):
        inputs, labels, side = model.make_batch(replica)
        batch = Batch(_tensors("inputs", inputs), _tensors("labels", labels), validate_side_inputs(side))
        batch = batch.map(lambda t: t.detach().to(device, dtype if t.is_floating_point() else None))
        for tensor in (*batch.inputs, *batch.labels, *batch.side.values()):
            rows = tensor.shape[0] if tensor.dim() else 0
            if rows < model.num_chunks:
                raise ValueError(f"the batch has a tensor of shape {list(tensor.shape)}, whose first dimension must be "
                                 f"at least the {model.num_chunks} micro-batches")
        batches.append(batch)
    return batches


def stop_random_numbers(model: ComparedModel, whole: nn.Module, batch: Batch) -> str:
    """Put the unpipelined model into eval mode if it draws random numbers, as dropout does.

    A pipeline draws others: the order of its micro-batches is another one, on ranks with random states of their own.

    Returns a line that says so, or "" for a model that draws none. Raises ValueError if it draws them in eval mode too.
    """
    drawing = _first_drawing(model, whole, batch)
    if not drawing:
        return ""
    whole.eval()
    still_drawing = _first_drawing(model, whole, batch)
    if still_drawing:
        raise ValueError(f"{still_drawing} draws random numbers also in eval mode, and the pipeline draws others; give "
                         "parity a model that draws none in eval mode, such as F.dropout(x, p, self.training)")
    return f"{drawing} draws random numbers in training: both models are compared in eval mode, which draws none"


def _first_drawing(model: ComparedModel, whole: nn.Module, batch: Batch) -> str:
    """Return the first of the innermost modules that draw random numbers in a micro-batch; "" if none does."""
    whole = copy.deepcopy(whole)  # a forward may count, or update buffers
    names = {module: name for name, module in whole.named_modules()}
    states_before: list[bytes] = []  # of the calls that run, the outermost first
    drawing: list[str] = []

    def begin(module: nn.Module, inputs: object) -> None:
        states_before.append(_random_state())

    def end(module: nn.Module, inputs: object, outputs: object) -> None:
        if states_before.pop() != _random_state():
            drawing.append(f"{names[module] or 'the model'} ({type(module).__name__})")

    for module in whole.modules():
        module.register_forward_pre_hook(begin)
        module.register_forward_hook(end)
    microbatch = batch.split(model.num_chunks)[0]
    with torch.no_grad():
        outputs = as_tuple(whole(*microbatch.inputs, **microbatch.side))
        state_before_loss = _random_state()
        model.compute_loss(*outputs, *microbatch.labels)
    if state_before_loss != _random_state():
        drawing.append("the loss")
    return drawing[0] if drawing else ""


def _random_state() -> bytes:
    """Return the state of torch's random number generators."""
    return b"".join(bytes(state.numpy()) for state in RandomState.capture() if state is not None)


def _double(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


def _tensors(name: str, value: object) -> tuple[Tensor, ...]:
    """Return the tensors of a batch's inputs or labels. Raises ValueError unless they are one or several tensors."""
    tensors = (value,) if isinstance(value, Tensor) else value
    if not isinstance(tensors, tuple | list) or not all(isinstance(tensor, Tensor) for tensor in tensors):
        kinds = [type(item).__name__ for item in tensors] if isinstance(tensors, tuple | list) else type(value).__name__
        raise ValueError(f"the {name} of the batch are {kinds}; give a tensor or a tuple of tensors")
    return tuple(tensors)


def microbatches(model: ComparedModel, batches: Sequence[Batch], only: int | None) -> Iterator[tuple[int, int, Batch]]:
    """Yield replica, number and data of the micro-batches of all pipelines. only: the number to yield; None for all."""
    for replica, batch in enumerate(batches):
        for number, microbatch in enumerate(batch.split(model.num_chunks)):
            if only is None or number == only:
                yield replica, number, microbatch


def train_whole(
    model: ComparedModel, whole: nn.Module, batches: Sequence[Batch], only: int | None = None,
    before_microbatch: Callable[[int, int], None] | None = None,
) -> UnpipelinedStep:
    """Run forward and backward of the unpipelined model, one micro-batch after the other.

    Gradients are the mean over pipelines, and accumulate in at least float32.

    Args:
        only: number of the micro-batch to run in each pipeline; None for all.
        before_microbatch: called with the numbers of the pipeline and of the micro-batch.
    """
    begin = before_microbatch or _do_nothing
    whole.zero_grad()
    accumulate_wide([whole])
    losses = torch.zeros(len(batches), model.num_chunks, dtype=torch.float64, device="cpu")
    for replica, number, microbatch in microbatches(model, batches, only):
        begin(replica, number)
        outputs = as_tuple(whole(*microbatch.inputs, **microbatch.side))
        loss = _check_loss(model.compute_loss(*outputs, *microbatch.labels))
        _run_backward([loss], [torch.full_like(loss, 1 / len(batches))])
        losses[replica, number] = loss.detach().double()
    return UnpipelinedStep(losses, _gradients(whole))


def _check_loss(loss: object) -> Tensor:
    """Return the loss of a micro-batch. Raises ValueError unless it is a scalar tensor that requires a gradient."""
    if not isinstance(loss, Tensor) or loss.dim() or not loss.requires_grad:
        kind = type(loss).__name__
        if isinstance(loss, Tensor):
            requires = "requires" if loss.requires_grad else "requires no"
            kind = f"tensor of shape {list(loss.shape)} that {requires} gradient"
        raise ValueError(f"the loss of a micro-batch is a {kind}; loss(*outputs, *labels) must return a scalar tensor "
                         "that requires a gradient")
    return loss


def _run_backward(roots: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
    """Run autograd as a pipeline does.

    Not with torch.autograd.backward, which disables function modes: they must see the recomputations of checkpoints.
    """
    run_backward([get_gradient_edge(root) for root in roots], gradients)


def accumulate_wide(modules: Iterable[nn.Module]) -> None:
    """Make gradients accumulate in at least float32."""
    for parameter in chain.from_iterable(module.parameters() for module in modules):
        if parameter.requires_grad:
            parameter.grad_dtype = torch.promote_types(parameter.dtype, torch.float32)  # type: ignore[attr-defined]


def _gradients(whole: nn.Module) -> dict[str, Tensor]:
    """Return gradients under all names of the parameters, zeros for a parameter without one."""
    grads = {}
    for name, parameter in whole.named_parameters(remove_duplicate=False):
        if parameter.requires_grad:
            grads[name] = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
    return grads


class StagesInSequence:
    """All stages in one process, one after the other, with a backward of its own for every stage, as in a pipeline.

    The stages are neither sharded nor overlapped. Their differences from the unpipelined model come from the split into
    stages; differences of a pipeline from them do not.
    """

    def __init__(self, model: ComparedModel, stages: Sequence[NamedStage]) -> None:
        self._model = model
        self._stages = stages
        self.boundaries: dict[Boundary, list[Tensor]] = {}  # of the pipeline `replica` of the last `train`

    @property
    def stages(self) -> Sequence[NamedStage]:
        """All stages, in order."""
        return self._stages

    def train(
        self, batches: Sequence[Batch], replica: int, after_forward: Callable[[int, int], None] | None = None,
        before_microbatch: Callable[[int, int], None] | None = None,
    ) -> UnpipelinedStep:
        """Run a step of all pipelines, and store the tensors at the boundaries in one of them.

        Args:
            replica: number of that pipeline.
            after_forward: called with the numbers of stage and micro-batch after every forward of that pipeline.
            before_microbatch: see `train_whole`.
        """
        begin = before_microbatch or _do_nothing
        self.boundaries = {}
        losses = torch.zeros(len(batches), self._model.num_chunks, dtype=torch.float64, device="cpu")
        for stage in self._stages:
            stage.module.zero_grad()
        for pipeline, microbatch, batch in microbatches(self._model, batches, None):
            begin(pipeline, microbatch)
            is_stored = pipeline == replica
            call = after_forward if is_stored and after_forward is not None else _do_nothing
            loss, boundaries = self._train_microbatch(microbatch, batch, 1 / len(batches), call)
            losses[pipeline, microbatch] = loss
            if is_stored:
                self.boundaries |= boundaries
        return UnpipelinedStep(losses, self._sum_gradients())

    def _train_microbatch(
        self, microbatch: int, batch: Batch, scale: float, after_forward: Callable[[int, int], None]
    ) -> tuple[Tensor, dict[Boundary, list[Tensor]]]:
        """Run one micro-batch; return its loss and the tensors at the boundaries.

        Gradients of parameters are multiplied by `scale`, those at boundaries are not.
        """
        boundaries: dict[Boundary, list[Tensor]] = {}
        stage_inputs: list[tuple[Tensor, ...]] = []
        stage_outputs: list[tuple[Tensor, ...]] = []
        tensors = batch.inputs
        for stage in self._stages:
            tensors = tuple(_leaf(tensor, needs_grad=stage.number > 0) for tensor in tensors)
            stage_inputs.append(tensors)
            spec = SideSpec.of(stage.module)
            side = {name: tensor for name, tensor in batch.side.items() if spec.takes(name)}
            tensors = as_tuple(stage.module(*tensors, **side))
            after_forward(stage.number, microbatch)
            stage_outputs.append(tensors)
            boundaries[Boundary("F", stage.number, microbatch)] = [tensor.detach() for tensor in tensors]
        loss = self._model.compute_loss(*tensors, *batch.labels)
        roots: list[Tensor] = [loss]
        gradients: list[Tensor] = [torch.full_like(loss, scale)]
        for stage in reversed(self._stages):
            _run_backward(roots, gradients)
            leaves = [tensor for tensor in stage_inputs[stage.number] if tensor.requires_grad]
            input_grads = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves]
            boundaries[Boundary("B", stage.number, microbatch)] = [grad / scale for grad in input_grads]
            if stage.number > 0:
                outputs = [tensor for tensor in stage_outputs[stage.number - 1] if tensor.is_floating_point()]
                pairs = [(output, grad) for output, grad in zip(outputs, input_grads) if output.requires_grad]
                roots = [output for output, _ in pairs]
                gradients = [grad for _, grad in pairs]
        return loss.detach(), boundaries

    def _sum_gradients(self) -> dict[str, Tensor]:
        """Return gradients by the unpipelined model's names, summed over the stages' copies of a parameter."""
        sums: dict[str, Tensor] = {}
        counted: set[nn.Parameter] = set()
        for stage in self._stages:
            for stage_name, parameter in stage.module.named_parameters(remove_duplicate=False):
                if parameter.grad is None or parameter in counted:
                    continue
                counted.add(parameter)
                name = stage.names[stage_name]
                sums[name] = sums[name] + parameter.grad if name in sums else parameter.grad.clone()
        return sums


def _do_nothing(stage_or_replica: int, microbatch: int) -> None:
    """Do nothing, in place of a callback."""


def _leaf(tensor: Tensor, *, needs_grad: bool) -> Tensor:
    """Return a tensor as a stage receives it: without the graph of the stage before."""
    leaf = tensor.detach()
    return leaf.requires_grad_() if needs_grad and leaf.is_floating_point() else leaf


def tied_names(whole: nn.Module) -> dict[str, list[str]]:
    """Return, for the name of every parameter, all names of that parameter."""
    groups: dict[nn.Parameter, list[str]] = {}
    for name, parameter in whole.named_parameters(remove_duplicate=False):
        groups.setdefault(parameter, []).append(name)
    return {name: names for names in groups.values() for name in names}


def sum_by_first_name(gradients: Mapping[str, Tensor], tied: Mapping[str, list[str]]) -> dict[str, Tensor]:
    """Return gradients by the first name of their parameters; a tied parameter may have another name in every stage."""
    sums: dict[str, Tensor] = {}
    for name, gradient in gradients.items():
        first = tied[name][0]
        sums[first] = sums[first] + gradient if first in sums else gradient
    return sums


def compare_by_first_name(
    gradients: Mapping[str, Tensor], expected: Mapping[str, Tensor], tied: Mapping[str, list[str]], floor: float
) -> list[Difference]:
    """Measure the gradients of `sum_by_first_name` against those of the unpipelined model.

    A missing gradient counts as zero. floor: see `difference`.
    """
    return [difference(name, gradients.get(name, torch.zeros_like(gradient)), gradient, floor)
            for name, gradient in expected.items() if tied[name][0] == name]


def names_of(stages: Iterable[NamedStage]) -> set[str]:
    """Return the names in the unpipelined model of all parameters of `stages`."""
    return {name for stage in stages for name in stage.names.values()}
