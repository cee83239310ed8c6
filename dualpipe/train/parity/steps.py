"""A step of a compared model: unpipelined, and in its pipeline.

Parameters go by their names in the unpipelined model; a tied one has the first of its names everywhere.
"""

from __future__ import annotations

import copy
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from itertools import chain
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable
from torch.autograd.graph import get_gradient_edge
from torch.distributed.tensor import DTensor

from dualpipe.nn.accumulators import local
from dualpipe.nn.routing.router_set import RouterSet
from dualpipe.pipeline.compiled_stage import as_tuple
from dualpipe.pipeline.lower import Instruction
from dualpipe.pipeline.microbatch_state import SegmentRun
from dualpipe.runtime.device import RandomState
from dualpipe.runtime.recorder import WHAT, Entry, Observer, Recorder
from dualpipe.schedule import Action
from dualpipe.train.launch.join import Job
from dualpipe.train.parity.models import Batch, ComparedModel, accumulate_wide
from dualpipe.train.parity.routes import Microbatch, Position, Replay, Routes, choosing, in_backward

# -- names


class Names:
    """Names of the parameters and modules of the unpipelined model.

    Modules of a stage are recognized by the parameters inside them. Modules with the same parameters inside, such as a
    module and its wrapper, all get the name of the outermost one. Modules without parameters have no name.

    Attributes:
        first: for the name of every parameter, the first name of that parameter.
    """

    def __init__(self, whole: nn.Module) -> None:
        first_by_parameter: dict[nn.Parameter, str] = {}
        self.first = {name: first_by_parameter.setdefault(parameter, name)
                      for name, parameter in whole.named_parameters(remove_duplicate=False)}
        self._modules: dict[frozenset[str], str] = {}
        for path, inside in self._parameters_inside(whole, self.first):
            self._modules.setdefault(inside, path)  # outer modules come first

    def of_modules(self, module: nn.Module, parameters: Mapping[str, str]) -> dict[nn.Module, str]:
        """Return the names of the modules inside `module` that the unpipelined model has too.

        parameters: names in the unpipelined model, by the names of the parameters in `module`.
        """
        return {module.get_submodule(path): self._modules[inside]
                for path, inside in self._parameters_inside(module, parameters) if inside in self._modules}

    def _parameters_inside(
        self, module: nn.Module, parameters: Mapping[str, str]
    ) -> Iterator[tuple[str, frozenset[str]]]:
        """Yield the name of each module inside `module`, and those of its parameters in the unpipelined model."""
        for path, child in module.named_modules():
            names = [name for name, _ in child.named_parameters(path, remove_duplicate=False)]
            if names:
                yield path, frozenset(self.first[parameters[name]] for name in names)


# -- batches, and models that draw random numbers


def make_batches(model: ComparedModel, num_pipelines: int, dtype: torch.dtype, device: torch.device) -> list[Batch]:
    """Return the batch of each pipeline, with floating-point tensors in the dtype of the model.

    Raises ValueError for fewer rows than micro-batches.
    """
    batches = []
    for replica in range(num_pipelines):
        batch = model.make_batch(replica)
        batch = batch.map(lambda t: t.detach().to(device, dtype if t.is_floating_point() else None))
        for tensor in chain(batch.inputs, batch.labels, batch.side.values()):
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

    for module in names:
        module.register_forward_pre_hook(begin)
        module.register_forward_hook(end)
    microbatch = batch.split(model.num_chunks)[0]
    with torch.no_grad():
        outputs = as_tuple(whole(*microbatch.inputs, **microbatch.side))
        state_before_loss = _random_state()
        model.loss(*outputs, *microbatch.labels)
    if state_before_loss != _random_state():
        drawing.append("the loss")
    return drawing[0] if drawing else ""


def _random_state() -> bytes:
    """Return the state of torch's random number generators."""
    return b"".join(bytes(state.numpy()) for state in RandomState.capture() if state is not None)


# -- without a pipeline


LOSS = "loss of the micro-batches"


def loss_title(shard: int, num_shards: int) -> str:
    """Return the name of the losses of a part of the batch."""
    return f"{LOSS} of pipeline {shard}" if num_shards > 1 else LOSS


class Step(NamedTuple):
    """The results of a step of the unpipelined model, by name.

    gradients: of the parameters, the mean over pipelines. losses: those of the micro-batches of each pipeline as one
    tensor (micro-batches,), see `loss_title`, and those of the routers.
    """

    gradients: dict[str, Tensor]
    losses: dict[str, Tensor]


class UnpipelinedModel:
    """The unpipelined model, which runs the micro-batches of all pipelines one after the other.

    Gradients accumulate in at least float32.

    Args:
        batches: of all pipelines.
        chooser: chooses experts; None for the model's own choices.

    Attributes:
        modules: names of the modules.
    """

    def __init__(
        self, model: ComparedModel, whole: nn.Module, batches: Sequence[Batch], names: Names, device: torch.device,
        chooser: Routes | Replay | None = None,
    ) -> None:
        self._model = model
        self._whole = whole
        self._batches = batches
        self.modules = names.of_modules(whole, names.first)
        self._chooser = chooser
        accumulate_wide([whole])
        self._routers = model.build_routers(whole, device)
        self._microbatch: Microbatch | None = None

    def position(self, module: nn.Module) -> Microbatch | None:
        """Return the current micro-batch."""
        return self._microbatch

    def train(self, counted: Collection[int] | None = None) -> Step:
        """Run a step from zero gradients.

        counted: numbers of the micro-batches whose losses count; None for all. The others are multiplied by zero.
        """
        losses = torch.zeros(len(self._batches), self._model.num_chunks, dtype=torch.float64, device="cpu")
        for _ in range(self._model.num_steps):
            if self._chooser is not None:
                self._chooser.begin_step()
            self._whole.zero_grad()
            with self._routers.step(), choosing(self.modules, self.position, self._chooser):
                for microbatch, batch in self._microbatches():
                    outputs = as_tuple(self._whole(*batch.inputs, **batch.side))
                    loss = _check_loss(self._model.loss(*outputs, *batch.labels))
                    if counted is not None and microbatch.number not in counted:
                        loss = loss * 0
                    run_backward_in_modes(loss, torch.full_like(loss, 1 / len(self._batches)))
                    losses[microbatch] = loss.detach().double()
        gradients = {name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
                     for name, parameter in self._whole.named_parameters() if parameter.requires_grad}
        by_pipeline = {loss_title(shard, len(self._batches)): row for shard, row in enumerate(losses)}
        return Step(gradients, by_pipeline | _router_losses(self._routers))

    def _microbatches(self) -> Iterator[tuple[Microbatch, Batch]]:
        """Yield the micro-batches of all pipelines; each is the current position until the next one."""
        for replica, batch in enumerate(self._batches):
            for number, part in enumerate(batch.split(self._model.num_chunks)):
                self._microbatch = Microbatch(replica, number)
                yield self._microbatch, part
        self._microbatch = None


def run_backward_in_modes(value: Tensor, gradient: Tensor) -> None:
    """Run autograd like torch.autograd.backward, which disables function modes: they must see recomputed choices."""
    Variable._execution_engine.run_backward(
        (get_gradient_edge(value),), (gradient,), False, False, (), allow_unreachable=True, accumulate_grad=True)


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


def _router_losses(routers: RouterSet) -> dict[str, Tensor]:
    """Return the losses of the routers in the last step, by name."""
    return {name: value for name, value in routers.metrics().items() if name.endswith("_loss")}


# -- in the pipeline


class StageTensor(NamedTuple):
    """The unsharded value or gradient of a stage's parameter; a loss has the stage -1."""

    stage: int
    name: str
    tensor: Tensor


class StageObserver(Observer):
    """Observes the stages of a rank in a step: the micro-batch that each module runs, and the dtypes of the outputs.

    Args:
        replica: number of the pipeline.
        stages: stage number of each module.

    Attributes:
        output_dtypes: floating-point dtypes of the outputs, by stage number.
    """

    def __init__(self, replica: int, stages: Mapping[nn.Module, int]) -> None:
        self._replica = replica
        self._stages = stages
        self._open: list[Entry] = []
        self.output_dtypes: dict[int, set[torch.dtype]] = {}

    def began(self, recorder: Recorder, entry: Entry) -> None:
        """Add an entry that has begun."""
        self._open.append(entry)

    def ended(self, recorder: Recorder, entry: Entry) -> None:
        """Remove an entry that has ended."""
        if self._open and self._open[-1] is entry:
            self._open.pop()

    def made(self, recorder: Recorder, what: object, results: tuple[object, ...]) -> None:
        """Record the dtypes of the results of a forward."""
        if isinstance(what, Action) and what.kind == "F":
            dtypes = {result.dtype for result in results if isinstance(result, Tensor) and result.is_floating_point()}
            self.output_dtypes.setdefault(what.stage, set()).update(dtypes)

    def position(self, module: nn.Module) -> Microbatch | None:
        """Return the micro-batch that the module's stage runs."""
        for entry in reversed(self._open):
            running = entry[WHAT]
            if isinstance(running, SegmentRun):
                return Microbatch(self._replica, running.microbatch)
            if isinstance(running, Instruction):
                actions = [action for action in running.actions if action.stage == self._stages[module]]
                if len(actions) > 1:  # a forward and a backward
                    actions = [action for action in actions if (action.kind != "F") == in_backward()]
                return Microbatch(self._replica, actions[0].microbatch) if actions else None
        return None


class StagesInPipeline:
    """This rank's stages in their pipeline, in train or eval mode. Construction and methods are collective.

    Args:
        batches: of all pipelines.
        routes: choices of experts to replay; None for the model's own choices.

    Attributes:
        columns: see `RankPipeline`.
        replay: of `routes`.
        modules: names of the modules.
        stage_of: stage number of each module.
        observer: of the steps.
    """

    def __init__(
        self, model: ComparedModel, job: Job, dtype: torch.dtype, batches: Sequence[Batch], names: Names,
        routes: Routes | None, *, training: bool,
    ) -> None:
        self._built = model.build_pipeline(job, dtype)
        self.schedule = self._built.schedule
        self.columns = self._built.columns
        self.stages = [
            stage._replace(names={own: names.first[name] for own, name in stage.names.items()})
            for stage in self._built.stages]
        self.modules: dict[nn.Module, str] = {}
        for stage in self.stages:
            self.modules |= names.of_modules(stage.module, stage.names)
            if not training:
                stage.module.eval()
        self._model = model
        self._job = job
        whole_batch = batches[job.place.batch_shard]
        self._batch = _of_columns(whole_batch, self.columns)
        self.replay: Replay | None = None
        if routes is not None:
            self.replay = Replay(routes, self.columns, length=whole_batch.inputs[0].shape[-1])
        self.stage_of = {module: stage.number for stage in self.stages for module in stage.module.modules()}
        self.observer = StageObserver(job.place.batch_shard, self.stage_of)

    def train(
        self, counted: Collection[int] | None = None, *, with_router_losses: bool = True
    ) -> list[StageTensor]:
        """Run a step from zero gradients; return its losses, as far as this rank has them.

        The rank of the last stage has those of the micro-batches, and rank 0 those of the routers.

        Args:
            counted: numbers of the micro-batches whose losses count; None for all. The losses of the others are
                multiplied by zero. They run nevertheless, so that the contribution of a micro-batch to a gradient has
                the order and the accumulation of a whole step.
            with_router_losses: the losses of the routers, which are not those of single micro-batches, are part of it.
        """
        by_number = {stage.number: stage.module for stage in self.stages}
        last = by_number.get(self.schedule.num_stages - 1)

        def criterion(*outputs_and_labels: Tensor) -> Tensor:
            loss: Tensor = self._built.criterion(*outputs_and_labels)
            assert last is not None, "its rank has the loss"
            microbatch = self.observer.position(last)
            assert microbatch is not None, "the loss is that of a micro-batch"
            return loss if counted is None or microbatch.number in counted else loss * 0

        losses: Tensor | None = None
        with Recorder.current().observed_by(self.observer):
            for _ in range(self._model.num_steps):
                if self.replay is not None:
                    self.replay.begin_step()
                self._built.pipeline.zero_grad()
                routers = self._built.routers.step() if with_router_losses else nullcontext()
                with routers, choosing(self.modules, self.observer.position, self.replay):
                    losses, _ = self._built.pipeline.step(
                        *(self._batch.inputs if 0 in by_number else ()), num_chunks=self._model.num_chunks,
                        criterion=None if last is None else criterion,
                        labels=() if last is None else self._batch.labels,
                        side=self._batch.side if 0 in by_number else None)
        by_name = {} if self._job.rank else _router_losses(self._built.routers)
        if losses is not None:
            context_group = self._job.place.group("cp")
            if context_group is not None:
                dist.all_reduce(losses, group=context_group)
                losses /= context_group.size()
            if not self._job.place.rank("cp"):
                by_name[loss_title(self._job.place.batch_shard, self._job.place.batch_shards)] = losses.cpu()
        return [StageTensor(-1, name, loss) for name, loss in by_name.items()]

    def values(self) -> list[StageTensor]:
        """Return the values of the parameters, unsharded."""
        return [StageTensor(stage, name, _unshard(parameter)) for stage, name, parameter in self.parameters()]

    def gradients(self) -> list[StageTensor]:
        """Return the gradients, unsharded, zeros for a missing one."""
        gradients = []
        for stage, name, parameter in self.parameters():
            grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            gradients.append(StageTensor(stage, name, _unshard(grad)))
        return gradients

    def gradient_dtype(self, name: str) -> torch.dtype:
        """Return the narrowest dtype in which the gradients of a parameter are added.

        It is the dtype of accumulation or, if it is narrower, that in which FSDP2 returns gradients.
        """
        plan = self._built.plan
        if plan is None:
            return torch.float32
        dtypes = [plan.reduce_dtype(name)]
        if self._job.place.replicas > 1:
            dtypes.append(plan.of(name).storage)
        return max(dtypes, key=lambda dtype: torch.finfo(dtype).eps)

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
        actions = chain.from_iterable(chain.from_iterable(self.schedule.ranks))
        return next(action.title for action in actions
                    if (action.stage, action.microbatch) == (stage, microbatch) and action.kind in "BW")


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
    """Return the whole of a parameter or gradient. Collective."""
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else local(tensor)


# -- calls of modules


class CallKey(NamedTuple):
    """Identity of a call in a micro-batch. name: of the module. number: of the module's calls, from 0."""

    name: str
    number: int


class Call(NamedTuple):
    """A call of a module. outputs: the tensors that it returned."""

    module: nn.Module
    outputs: list[Tensor]


Calls = dict[CallKey, Call]
"""The calls of modules in a micro-batch, in order."""


@contextmanager
def recorded_calls(modules: Mapping[nn.Module, str], position: Position) -> Iterator[dict[Microbatch, Calls]]:
    """Yield the calls of modules during a `with` block, by micro-batch. modules: names in the unpipelined model."""
    calls: dict[Microbatch, Calls] = defaultdict(dict)
    num_calls: Counter[tuple[Microbatch, str]] = Counter()

    def record(module: nn.Module, inputs: object, outputs: object) -> None:
        microbatch = position(module)
        if microbatch is None or in_backward():
            return
        name = modules[module]
        tensors = outputs if isinstance(outputs, tuple | list) else (outputs,)
        copies = [tensor.detach().clone() for tensor in tensors if isinstance(tensor, Tensor)]
        calls[microbatch][CallKey(name, num_calls[microbatch, name])] = Call(module, copies)
        num_calls[microbatch, name] += 1

    handles = [module.register_forward_hook(record) for module, name in modules.items() if name]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()
