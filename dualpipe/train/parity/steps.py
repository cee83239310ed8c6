"""A step of a compared model: unpipelined, and in its pipeline.

Parameters go by their names in the unpipelined model; a tied one has the first of its names everywhere.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.distributed.tensor import DTensor

from dualpipe.nn.deferral import local
from dualpipe.nn.routing.router_set import RouterSet
from dualpipe.pipeline.compiled_stage import as_tuple
from dualpipe.pipeline.stage_runner import run_backward
from dualpipe.runtime.device import RandomState
from dualpipe.runtime.recorder import Observer, Recorder
from dualpipe.schedule import Action
from dualpipe.train.launch.join import Job
from dualpipe.train.parity.models import Batch, ComparedModel, NamedStage, accumulate_wide
from dualpipe.train.parity.routes import (
    Chooser,
    Microbatch,
    ModuleNames,
    PipelinePosition,
    UnpipelinedPosition,
    choosing,
    in_backward,
)


class Step(NamedTuple):
    """The results of a step of the unpipelined model.

    losses: of the micro-batches (pipelines, micro-batches). router_losses: by name. gradients: by parameter, the mean
    over pipelines.
    """

    losses: Tensor
    router_losses: dict[str, Tensor]
    gradients: dict[str, Tensor]


class StageTensor(NamedTuple):
    """The unsharded value or gradient of a stage's parameter."""

    stage: int
    name: str
    tensor: Tensor


# -- batches, and models that draw random numbers


def make_batches(model: ComparedModel, num_pipelines: int, dtype: torch.dtype, device: torch.device) -> list[Batch]:
    """Return the batch of each pipeline, with floating-point tensors in the dtype of the model.

    Raises ValueError for fewer rows than micro-batches.
    """
    batches = []
    for replica in range(num_pipelines):
        batch = model.make_batch(replica)
        batch = batch.map(lambda t: t.detach().to(device, dtype if t.is_floating_point() else None))
        for tensor in batch.tensors:
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


# -- names


def first_names(whole: nn.Module) -> dict[str, str]:
    """Return, for the name of every parameter, the first name of that parameter."""
    first_by_parameter: dict[nn.Parameter, str] = {}
    return {name: first_by_parameter.setdefault(parameter, name)
            for name, parameter in whole.named_parameters(remove_duplicate=False)}


def with_first_names(stages: Sequence[NamedStage], first: Mapping[str, str]) -> list[NamedStage]:
    """Return the stages with the first names of their parameters."""
    return [stage._replace(names={stage_name: first[name] for stage_name, name in stage.names.items()})
            for stage in stages]


def modules_of(stages: Sequence[NamedStage], names: ModuleNames) -> dict[nn.Module, str]:
    """Return the names in the unpipelined model of the modules in stages."""
    modules: dict[nn.Module, str] = {}
    for stage in stages:
        modules |= names.of(stage.module, stage.names)
    return modules


# -- without a pipeline


class UnpipelinedModel:
    """The unpipelined model, which runs the micro-batches of all pipelines one after the other.

    Gradients accumulate in at least float32.

    Attributes:
        modules: names of the modules.
        position: the current micro-batch.
    """

    def __init__(
        self, model: ComparedModel, whole: nn.Module, batches: Sequence[Batch], device: torch.device,
        modules: dict[nn.Module, str],
    ) -> None:
        self._model = model
        self._whole = whole
        self._batches = batches
        self.modules = modules
        accumulate_wide([whole])
        self._routers = model.build_routers(whole, device)
        self.position = UnpipelinedPosition()

    def train(self, counted: Collection[int] | None = None, chooser: Chooser | None = None) -> Step:
        """Run a step.

        Args:
            counted: numbers of the micro-batches whose losses count; None for all. The others are multiplied by zero.
            chooser: chooses experts; None for the model's own choices.
        """
        losses = torch.zeros(len(self._batches), self._model.num_chunks, dtype=torch.float64, device="cpu")
        for _ in range(self._model.num_steps):
            if chooser is not None:
                chooser.begin_step()
            self._whole.zero_grad()
            with self._routers.step(), choosing(self.modules, self.position, chooser):
                for microbatch, batch in self._microbatches():
                    outputs = as_tuple(self._whole(*batch.inputs, **batch.side))
                    loss = _check_loss(self._model.compute_loss(*outputs, *batch.labels))
                    if counted is not None and microbatch.number not in counted:
                        loss = loss * 0
                    # Not with torch.autograd.backward, which disables function modes: they must see recomputed choices.
                    run_backward([get_gradient_edge(loss)], [torch.full_like(loss, 1 / len(self._batches))])
                    losses[microbatch] = loss.detach().double()
        return Step(losses, router_losses(self._routers), self._gradients())

    def _microbatches(self) -> Iterator[tuple[Microbatch, Batch]]:
        """Yield the micro-batches of all pipelines; each is the current position until the next one."""
        for replica, batch in enumerate(self._batches):
            for number, part in enumerate(batch.split(self._model.num_chunks)):
                self.position.microbatch = Microbatch(replica, number)
                yield self.position.microbatch, part
        self.position.microbatch = None

    def _gradients(self) -> dict[str, Tensor]:
        """Return the gradients, zeros for a missing one."""
        return {name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
                for name, parameter in self._whole.named_parameters() if parameter.requires_grad}


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


def router_losses(routers: RouterSet) -> dict[str, Tensor]:
    """Return the losses of the routers in the last step, by name."""
    return {name: value for name, value in routers.metrics().items() if name.endswith("_loss")}


# -- in the pipeline


class OutputDtypes(Observer):
    """Records the floating-point dtypes of the outputs of a rank's stages, by stage number."""

    def __init__(self) -> None:
        self.of_stage: dict[int, set[torch.dtype]] = {}

    def made(self, recorder: Recorder, what: object, results: tuple[object, ...]) -> None:
        """Record the dtypes of the results of a forward."""
        if isinstance(what, Action) and what.kind == "F":
            dtypes = {result.dtype for result in results if isinstance(result, Tensor) and result.is_floating_point()}
            self.of_stage[what.stage] = self.of_stage.get(what.stage, set()) | dtypes


class StagesInPipeline:
    """This rank's stages in their pipeline, in train or eval mode. Construction and methods are collective.

    batches: of all pipelines. names, first: names of modules and of parameters in the unpipelined model.
    """

    def __init__(
        self, model: ComparedModel, job: Job, dtype: torch.dtype, batches: Sequence[Batch], names: ModuleNames,
        first: Mapping[str, str], *, training: bool,
    ) -> None:
        built = model.build_pipeline(job, dtype)
        self.schedule = built.schedule
        self.stages = with_first_names(built.stages, first)
        self.columns = built.columns
        self.modules = modules_of(self.stages, names)
        self._model = model
        self._pipeline = built.pipeline
        self._criterion = built.criterion
        self._routers = built.routers
        self._context_group = job.place.group("cp")
        self._batch = _of_columns(batches[job.place.batch_shard], built.columns)
        self._row_weight = torch.ones((), dtype=dtype, device=job.device)
        self.stage_of = {module: stage.number for stage in self.stages for module in stage.module.modules()}
        self.position = PipelinePosition(job.place.batch_shard, self.stage_of)
        if not training:
            for stage in self.stages:
                stage.module.eval()

    def train(
        self, counted: Collection[int] | None = None, chooser: Chooser | None = None, *,
        with_router_losses: bool = True,
    ) -> Tensor | None:
        """Run a step from zero gradients; return the losses of the micro-batches on the rank of the last stage.

        Args:
            counted: numbers of the micro-batches whose losses count; None for all. The losses of the others are
                multiplied by zero. They run nevertheless, so that the contribution of a micro-batch to a gradient has
                the order and the accumulation of a whole step.
            chooser: chooses experts; None for the model's own choices.
            with_router_losses: the losses of the routers, which are not those of single micro-batches, are part of it.
        """
        num_chunks = self._model.num_chunks
        numbers = {stage.number for stage in self.stages}
        has_first = 0 in numbers
        has_last = self.schedule.num_stages - 1 in numbers
        labels = (*self._batch.labels, self._row_weights(counted)) if has_last else ()

        def criterion(*outputs_and_labels: Tensor) -> Tensor:
            *tensors, row_weights = outputs_and_labels
            return self._criterion(*tensors) * row_weights[0]

        losses: Tensor | None = None
        with Recorder.current().observed_by(self.position):
            for _ in range(self._model.num_steps):
                if chooser is not None:
                    chooser.begin_step()
                self._pipeline.zero_grad()
                routers = self._routers.step() if with_router_losses else nullcontext()
                with routers, choosing(self.modules, self.position, chooser):
                    losses, _ = self._pipeline.step(
                        *(self._batch.inputs if has_first else ()), num_chunks=num_chunks,
                        criterion=criterion if has_last else None, labels=labels,
                        side=self._batch.side if has_first else None)
        if losses is not None and self._context_group is not None:
            dist.all_reduce(losses, group=self._context_group)
            losses /= self._context_group.size()
        return losses

    def router_losses(self) -> dict[str, Tensor]:
        """Return the losses of the routers in the last step, the same on all ranks."""
        return router_losses(self._routers)

    def values(self) -> list[StageTensor]:
        """Return the values of the parameters, unsharded."""
        return [StageTensor(stage, name, _unshard(parameter.detach()))
                for stage, name, parameter in self.parameters()]

    def gradients(self) -> list[StageTensor]:
        """Return the gradients, unsharded, zeros for a missing one."""
        gradients = []
        for stage, name, parameter in self.parameters():
            grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            gradients.append(StageTensor(stage, name, _unshard(grad.detach())))
        return gradients

    def parameters(self) -> list[tuple[int, str, nn.Parameter]]:
        """Return stage number, name and parameter, for all parameters with a gradient."""
        return [(stage.number, stage.names[stage_name], parameter) for stage in self.stages
                for stage_name, parameter in stage.module.named_parameters() if parameter.requires_grad]

    def modules_with_own_tokens(self) -> dict[nn.Module, str]:
        """Return the names of the modules that see this rank's tokens: those outside of experts split over ranks."""
        inside: set[nn.Module] = set()
        for module in self.modules:
            parameters = list(module.parameters())
            if parameters and all(_is_split_expert(parameter) for parameter in parameters):
                inside.update(module.modules())
        return {module: name for module, name in self.modules.items() if module not in inside}

    def weight_action(self, stage: int, microbatch: int) -> str:
        """Return the title of the action that computes the weight gradients of a stage."""
        for steps in self.schedule.ranks:
            for step in steps:
                for action in step:
                    if action.stage == stage and action.microbatch == microbatch and action.kind in "BW":
                        return action.title
        raise AssertionError(f"the schedule {self.schedule.name!r} runs the weights of every stage and micro-batch")

    def _row_weights(self, counted: Collection[int] | None) -> Tensor:
        """Return the weight of every row's micro-batch (rows,): 1 if its loss counts, else 0."""
        weights = self._row_weight.expand(len(self._batch.inputs[0])).clone()
        for number, rows in enumerate(weights.tensor_split(self._model.num_chunks)):
            if counted is not None and number not in counted:
                rows.zero_()
        return weights


def _of_columns(batch: Batch, columns: Tensor | None) -> Batch:
    """Return the part of a context-parallel rank: its columns, but the positions of whole sequences."""
    if columns is None:
        return batch
    part = batch.map(lambda tensor: tensor[:, columns])
    if "positions" in batch.side:
        part.side["positions"] = batch.side["positions"]
    return part


def _is_split_expert(parameter: nn.Parameter) -> bool:
    """Return True for a stacked weight of experts, of which this rank has some."""
    if not isinstance(parameter, DTensor):
        return False
    names = parameter.device_mesh.mesh_dim_names or ()
    return "ep" in names and parameter.device_mesh.size(names.index("ep")) > 1


def _unshard(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else local(tensor)


# -- calls of modules


class Call(NamedTuple):
    """A call of a module. outputs: the tensors that it returned."""

    module: nn.Module
    name: str
    outputs: list[Tensor]


@contextmanager
def recorded_calls(
    modules: Mapping[nn.Module, str], position: UnpipelinedPosition | PipelinePosition
) -> Iterator[dict[Microbatch, list[Call]]]:
    """Yield the calls of modules during a `with` block, by micro-batch. modules: names in the unpipelined model."""
    calls: dict[Microbatch, list[Call]] = {}

    def record(module: nn.Module, inputs: object, outputs: object) -> None:
        microbatch = position(module)
        if microbatch is not None and not in_backward():
            tensors = outputs if isinstance(outputs, tuple | list) else (outputs,)
            copies = [tensor.detach().clone() for tensor in tensors if isinstance(tensor, Tensor)]
            calls.setdefault(microbatch, []).append(Call(module, modules[module], copies))

    handles = [module.register_forward_hook(record) for module, name in modules.items() if name]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()
