"""The models that parity compares, with their split into stages: `CutModel`, `HubModel` and `ConfigModel`.

Each is a `ComparedModel`: it builds the unpipelined model, this rank's stages in their pipeline, and all stages in one
process without a pipeline, all with the same weights; and it has a batch and a loss for all of them.
"""

from __future__ import annotations

import copy
import importlib
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from dualpipe.kernels.formats import Format
from dualpipe.models import HubConfig
from dualpipe.nn import defer_weight_grads
from dualpipe.nn.attention import packed_positions
from dualpipe.nn.routing.router_set import RouterSet
from dualpipe.parallel import DTypePlan, DTypePolicy, Rule, resolve_dtypes, shard_stages
from dualpipe.pipeline import Pipeline
from dualpipe.pipeline.batch import validate_side_inputs
from dualpipe.runtime.errors import nearest
from dualpipe.schedule import Schedule, build
from dualpipe.train.config.fit import Resolved
from dualpipe.train.data.token_stream import shift_targets
from dualpipe.train.launch.join import Job
from dualpipe.train.loss import MicroBatchLoss, tokens_ahead
from dualpipe.train.step import StepRunner, build_routers, build_whole, resolve_model_dtypes

if TYPE_CHECKING:
    from transformers import PretrainedConfig

BF16 = torch.bfloat16
Tensors = Tensor | Sequence[Tensor]


class NamedStage(NamedTuple):
    """A stage of the pipeline. names: names in the unpipelined model, by the names of the stage's parameters."""

    number: int
    module: nn.Module
    names: dict[str, str]


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


NO_ROUTERS = RouterSet([], num_microbatches=1)


class RankPipeline(NamedTuple):
    """This rank's stages in their pipeline.

    criterion: the loss of a micro-batch on this rank.
    routers: the routers whose losses are part of the step.
    columns: numbers of this context-parallel rank's tokens in each sequence; None for whole sequences.
    plan: of the dtypes; None if gradients are added in at least float32.
    """

    schedule: Schedule
    stages: list[NamedStage]
    pipeline: Pipeline
    criterion: Callable[..., Tensor]
    routers: RouterSet = NO_ROUTERS
    columns: Tensor | None = None
    plan: DTypePlan | None = None


class ComparedModel(ABC):
    """A model that parity compares.

    Attributes:
        num_chunks: number of micro-batches in a step.
        num_steps: number of steps to run, of which the last is compared.
        has_dtype_rules: dtypes and formats of some tensors are others than those asked for.
        loss: `loss(*outputs, *labels)` of a micro-batch of whole sequences.
    """

    num_chunks: int
    num_steps = 1
    has_dtype_rules = False
    loss: Callable[..., Tensor]

    @abstractmethod
    def build_whole(self, dtype: torch.dtype, device: torch.device) -> nn.Module:
        """Return the unpipelined model."""

    @abstractmethod
    def build_pipeline(self, job: Job, dtype: torch.dtype) -> RankPipeline:
        """Return this rank's stages in their pipeline, prepared as for training. Collective.

        dtype: compute dtype; gradients accumulate in at least float32.
        """

    @abstractmethod
    def make_batch(self, replica: int) -> Batch:
        """Return the batch of a step of one pipeline."""

    def build_routers(self, whole: nn.Module, device: torch.device) -> RouterSet:
        """Return the routers of the unpipelined model whose losses are part of the step; by default none."""
        return NO_ROUTERS


# -- a custom model


@dataclass(frozen=True)
class CutModel(ComparedModel):
    """The unpipelined model, and the functions that split it into stages, prepare them and train them.

    Attributes:
        whole: the unpipelined model. Parity works on copies of it.
        cut: `cut(model, num_stages)` returns the stages, made of the modules of `model`, a copy of `whole`.
        batch: `batch(seed)` returns inputs and labels of a step of one pipeline, each a tensor or several with the
            batch as the first dimension. Every pipeline gets another seed. A third value is a dict of side inputs, such
            as position ids, by name: `whole` and the stages get them as in `Pipeline.step`.
        loss: `loss(*outputs, *labels)` of a micro-batch, as in training: gradients are summed over micro-batches.
        place: `place(stages, mesh, dtype)` prepares a rank's stages in place as for training: it shards them, sets the
            dispatchers of their experts, and defers weight gradients. dtype: compute dtype. By default weight gradients
            are deferred, and parameters are sharded by FSDP2; expert parallelism (--ep) needs a `place`.
        names: `names(stage, name)` returns the name in the unpipelined model of a stage's parameter. By default
            parameters of the copy given to `cut` are recognized, and new ones must have the same names.
        num_chunks: number of micro-batches in a step.
        schedule: name of the schedule, see `dualpipe.schedule.build`.
    """

    whole: nn.Module
    cut: Callable[[nn.Module, int], Sequence[nn.Module]]
    batch: Callable[[int], tuple[Tensors, Tensors] | tuple[Tensors, Tensors, Mapping[str, Tensor]]]
    loss: Callable[..., Tensor]
    place: Callable[[list[nn.Module], DeviceMesh, torch.dtype], object] | None = None
    names: Callable[[int, str], str] | None = None
    num_chunks: int = 4
    schedule: str = "dualpipev"

    def build_whole(self, dtype: torch.dtype, device: torch.device) -> nn.Module:
        """Return a copy of the unpipelined model."""
        return copy.deepcopy(self.whole).to(device, dtype)

    def build_pipeline(self, job: Job, dtype: torch.dtype) -> RankPipeline:
        """Split a copy of the unpipelined model, and prepare this rank's stages."""
        schedule = build(self.schedule, job.place.size("pp"), self.num_chunks)
        all_stages = self._cut(schedule.num_stages, dtype, storage_dtype(dtype, job), job.device)
        stages = [all_stages[number] for number in schedule.rank_stages(job.place.rank("pp"))]
        self._place([stage.module for stage in stages], dtype, job)
        return _into_pipeline(schedule, stages, self.loss, job)

    def make_batch(self, replica: int) -> Batch:
        """Return `batch(replica)`, whose tensors are checked."""
        parts = self.batch(replica)
        if not isinstance(parts, tuple | list) or len(parts) not in (2, 3):
            raise ValueError(f"batch({replica}) returned a {type(parts).__name__}; it must return (inputs, labels), or "
                             "(inputs, labels, side) with a dict of side inputs by name")
        inputs, labels, *side = parts
        return Batch(_as_tensors("inputs", inputs), _as_tensors("labels", labels),
                     validate_side_inputs(side[0] if side else {}))

    def _cut(
        self, num_stages: int, dtype: torch.dtype, storage: torch.dtype, device: torch.device
    ) -> list[NamedStage]:
        """Split a copy of the unpipelined model. storage: dtype of the parameters, whose values are rounded to `dtype`.

        Checks all stages, so that an invalid one raises on every rank.
        """
        whole = self.build_whole(dtype, device)
        parameters = dict(whole.named_parameters(remove_duplicate=False))  # now, as cut() may change the model
        modules = list(self.cut(whole, num_stages))
        if len(modules) != num_stages or not all(isinstance(module, nn.Module) for module in modules):
            kinds = [type(module).__name__ for module in modules]
            raise ValueError(f"cut(whole, {num_stages}) returned {kinds}; it must return {num_stages} nn.Modules")
        for parameter in parameters.values():
            if parameter.is_floating_point():
                parameter.data = parameter.data.to(storage)
        return [NamedStage(number, module, self._names_of(number, module, parameters))
                for number, module in enumerate(modules)]

    def _names_of(self, number: int, stage: nn.Module, parameters: Mapping[str, nn.Parameter]) -> dict[str, str]:
        """Return the names in the unpipelined model of a stage's parameters, which are not yet sharded.

        parameters: of the unpipelined model, by name.

        Raises ValueError for a parameter that is not in the unpipelined model, or has another shape there.
        """
        names_by_parameter = {parameter: name for name, parameter in parameters.items()}
        names: dict[str, str] = {}
        for stage_name, parameter in stage.named_parameters(remove_duplicate=False):
            if self.names is not None:
                name = self.names(number, stage_name)
            else:
                # By identity, as a stage may rename parameters; a parameter that cut() created must keep its name.
                name = names_by_parameter.get(parameter, stage_name)
            if name not in parameters:
                raise ValueError(f"stage {number} has a parameter {stage_name!r}, which the unpipelined model lacks; "
                                 "make stages of the modules that cut() receives, or give CutModel(names=...)")
            if parameter.shape != parameters[name].shape:
                raise ValueError(f"{stage_name!r} of stage {number} has shape {list(parameter.shape)}, and {name!r} of "
                                 f"the unpipelined model {list(parameters[name].shape)}; shard parameters in "
                                 "CutModel(place=...), not in cut()")
            names[stage_name] = name
        return names

    def _place(self, modules: list[nn.Module], dtype: torch.dtype, job: Job) -> None:
        """Prepare the stages as for training. Those of a single rank are not prepared."""
        if job.mesh is None:
            accumulate_wide(modules)
            return
        if self.place is not None:
            self.place(modules, job.mesh, dtype)
            return
        place = job.place
        if place.size("ep") > 1:
            raise ValueError(f"--ep {place.size('ep')} needs CutModel(place=...), which distributes experts over "
                             "ranks; give it, or leave out --ep")
        for module in modules:
            defer_weight_grads(module)
        plan = resolve_dtypes(modules, policy_of(dtype), group=place.group("pp"))
        shard_stages(modules, place.dense if place.replicas > 1 else None, plan)


def storage_dtype(dtype: torch.dtype, job: Job) -> torch.dtype:
    """Return the dtype in which the parameters of stages that compute in `dtype` are stored.

    Sharded parameters are stored in at least float32: FSDP2 casts them when it gathers them, and returns gradients in
    the storage dtype. Parameters that are not sharded are never cast.
    """
    return torch.promote_types(dtype, torch.float32) if job.place.replicas > 1 else dtype


def policy_of(dtype: torch.dtype) -> DTypePolicy:
    """Return a policy that computes in `dtype` and accumulates gradients in at least float32."""
    wide = torch.promote_types(dtype, torch.float32)
    return DTypePolicy(param_dtype=dtype, reduce_dtype=wide, output_dtype=dtype)


def accumulate_wide(modules: Iterable[nn.Module]) -> None:
    """Make gradients accumulate in at least float32."""
    for module in modules:
        for parameter in module.parameters():
            if parameter.requires_grad:
                wide = torch.promote_types(parameter.dtype, torch.float32)
                parameter.grad_dtype = wide  # type: ignore[attr-defined]


def copy_parameters(target: nn.Module, source: nn.Module) -> None:
    """Copy the values of the parameters of `source`, which has the same names. Quantized ones are dequantized."""
    values = dict(source.named_parameters())
    with torch.no_grad():
        for name, parameter in target.named_parameters():
            parameter.copy_(values[name])


def named_alike(number: int, module: nn.Module) -> NamedStage:
    """Return a stage whose parameters have the names of the unpipelined model."""
    return NamedStage(number, module, {name: name for name, _ in module.named_parameters(remove_duplicate=False)})


def _into_pipeline(
    schedule: Schedule, stages: list[NamedStage], criterion: Callable[..., Tensor], job: Job
) -> RankPipeline:
    """Put the stages of this rank into their pipeline."""
    modules = [stage.module for stage in stages]
    pipeline = Pipeline(modules, process_group=job.place.group("pp"), schedule=schedule)
    return RankPipeline(schedule, stages, pipeline, criterion)


def _as_tensors(name: str, value: object) -> tuple[Tensor, ...]:
    """Return the tensors of a batch's inputs or labels. Raises ValueError unless they are one or several tensors."""
    tensors = (value,) if isinstance(value, Tensor) else value
    if not isinstance(tensors, tuple | list) or not all(isinstance(tensor, Tensor) for tensor in tensors):
        kinds = [type(item).__name__ for item in tensors] if isinstance(tensors, tuple | list) else type(value).__name__
        raise ValueError(f"the {name} of the batch are {kinds}; give a tensor or a tuple of tensors")
    return tuple(tensors)


# -- a directory of transformers

HUB_LENGTH = 32  # tokens of a sequence
EAGER = "eager"  # transformers' plain implementation of experts, a loop over them


class HubModel(ComparedModel):
    """A causal language model of transformers on random tokens, with the mean cross-entropy as its loss.

    Raises ValueError for a directory without config.json or safetensors, or with a quantized checkpoint, and if
    transformers cannot be imported.
    """

    num_chunks = 4

    def __init__(self, folder: Path) -> None:
        try:
            from transformers import AutoConfig
            from transformers.utils.logging import disable_progress_bar
        except ImportError as error:
            raise ValueError(f"--model {str(folder)!r}: a directory needs transformers, which cannot be imported "
                             f"({error}); install it, or give module:function") from error
        if not (folder / "config.json").is_file():
            raise ValueError(f"--model {str(folder)!r} has no config.json; give a directory that transformers loads a "
                             "causal language model from, or module:function")
        if not list(folder.glob("*.safetensors")):
            raise ValueError(f"--model {str(folder)!r} has no *.safetensors; give a directory with weights")
        disable_progress_bar()  # every stage on every rank would show one
        self._folder = folder
        config: PretrainedConfig = AutoConfig.from_pretrained(folder)
        self._vocab_size = config.get_text_config().vocab_size
        if getattr(config, "quantization_config", None) is not None:
            raise ValueError(f"--model {str(folder)!r} is quantized, but transformers' own model has gradients for "
                             "unquantized weights only; save it dequantized")

    def build_whole(self, dtype: torch.dtype, device: torch.device) -> nn.Module:
        """Return transformers' own model, which returns the logits alone."""
        from transformers import AutoModelForCausalLM

        whole: nn.Module = AutoModelForCausalLM.from_pretrained(
            self._folder, dtype=dtype, experts_implementation=EAGER, use_cache=False)
        whole.register_forward_hook(lambda module, inputs, output: output.logits)
        return whole.to(device).train()

    def build_pipeline(self, job: Job, dtype: torch.dtype) -> RankPipeline:
        """Load this rank's stages as training does."""
        from dualpipe.hf import load_stages

        schedule = build("dualpipev", job.place.size("pp"), self.num_chunks)
        numbers = schedule.rank_stages(job.place.rank("pp"))
        modules = load_stages(
            self._folder, schedule.num_stages, numbers, mesh=job.mesh, dtype=storage_dtype(dtype, job),
            policy=policy_of(dtype))
        stages = [named_alike(number, module.to(job.device)) for number, module in zip(numbers, modules)]
        return _into_pipeline(schedule, stages, self.loss, job)

    def make_batch(self, replica: int) -> Batch:
        """Return random tokens and the next token of each, both (B, S)."""
        generator = torch.Generator().manual_seed(replica)
        rows = torch.randint(self._vocab_size, (self.num_chunks, HUB_LENGTH + 1), generator=generator, device="cpu")
        return Batch((rows[:, :-1].contiguous(),), (rows[:, 1:].contiguous(),), {})

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the contribution of a micro-batch to the mean cross-entropy over the batch."""
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten()) / self.num_chunks


# -- a configuration of `dualpipe train`


class ConfigModel(ComparedModel):
    """The model of a run's configuration on random tokens, built as for training, with the losses of its routers.

    It runs without torch.compile, FP8 GEMMs and QK-clip, which the unpipelined model does not have. Quantized weights
    are replaced by their dequantized values in the unpipelined model.
    """

    def __init__(self, resolved: Resolved) -> None:
        config = resolved.config
        # Context parallelism and MTP depend on positions, so they are tested with several documents per sequence.
        self._has_documents = config.parallel.cp > 1 or resolved.model.mtp_depth > 0
        self._resolved = resolved.with_config(replace(
            config,
            train=replace(config.train, compile=False),
            optimizer=replace(config.optimizer, qk_clip=0.0),
            dtypes=replace(config.dtypes, gemm_precision="auto", fp8_weight_grad=False, fp8_dispatch=False),
            data=replace(config.data, separate_documents=self._has_documents),
        ))
        self._config = self._resolved.config
        self.num_chunks = config.train.num_chunks
        # Balance of level "global" uses the loads of the step before, and the first step has none.
        self.num_steps = 2 if config.router.balance and config.router.balance_level == "global" else 1
        self.has_dtype_rules = bool(config.dtypes.rules)

    def build_whole(self, dtype: torch.dtype, device: torch.device) -> nn.Module:
        """Return the unpipelined model: in bfloat16 with the formats of the run, else with dequantized weights."""
        seed = self._config.train.seed
        plan = self._plan(dtype, is_whole=True)
        model = cast(HubConfig, self._resolved.model)
        whole = build_whole(model, dtypes=plan, device=device, seed=seed)
        if dtype is BF16 or not any(rule.format for rule in self._resolved.dtypes.rules):
            return whole
        dequantized = build_whole(model, dtypes=dtype, device=device, seed=seed)
        copy_parameters(dequantized, whole)
        return dequantized

    def build_pipeline(self, job: Job, dtype: torch.dtype) -> RankPipeline:
        """Build this rank's part of the model as the trainer does."""
        runner = StepRunner(self._resolved, job, dtypes=self._plan(dtype))
        numbers = runner.schedule.rank_stages(job.place.rank("pp"))
        stages = [named_alike(number, stage) for number, stage in zip(numbers, runner.model.stages)]
        columns = None
        if runner.split.size > 1:
            columns = runner.split.token_indices(self._config.train.sequence_length).to(job.device)
        return RankPipeline(
            runner.schedule, stages, runner.pipeline, runner.criterion(1), runner.routers, columns, runner.model.plan)

    def build_routers(self, whole: nn.Module, device: torch.device) -> RouterSet:
        """Return the routers as [router] configures them."""
        return build_routers(self._config, [whole], group=None, device=device, whole=True)

    def make_batch(self, replica: int) -> Batch:
        """Return random tokens (B, T), their targets (B, T) or (B, T, 1 + D), and positions (B, T) with documents."""
        train = self._config.train
        depth = self._resolved.model.mtp_depth
        num_rows = train.micro_batch_size * train.num_chunks
        row_length = train.sequence_length + 1
        num_tokens = num_rows * row_length
        generator = torch.Generator().manual_seed(train.seed + replica)
        rows = torch.randint(self._resolved.model.vocab_size, (num_rows, row_length), generator=generator, device="cpu")
        side: dict[str, Tensor] = {}
        positions = None
        if self._has_documents:
            starts = torch.randint(num_tokens, (num_rows,), generator=generator, device="cpu").sort().values
            bounds = torch.cat((torch.zeros_like(starts[:1]), starts, torch.full_like(starts[:1], num_tokens)))
            all_positions = packed_positions(bounds, num_rows, row_length)
            positions = all_positions.numpy()
            side["positions"] = all_positions[:, :-1].contiguous()
        targets = torch.from_numpy(shift_targets(rows.numpy(), depth, positions)).contiguous()
        ahead = tokens_ahead(targets)
        if ahead is not None:
            side["ahead"] = ahead
        return Batch((rows[:, :-1].contiguous(),), (targets,), side)

    def loss(self, *outputs_and_labels: Tensor) -> Tensor:
        """Return the loss of a micro-batch in the first step."""
        mtp_weight = self._config.mtp.weight_of(1, self._config.train.steps)
        return MicroBatchLoss(self.num_chunks, mtp_weight)(*outputs_and_labels)

    def _plan(self, dtype: torch.dtype, *, is_whole: bool = False) -> DTypePlan:
        """Return the dtypes of the pipeline's tensors: those of the run in bfloat16, else `dtype` and the formats.

        The unpipelined model is on one rank, which stores parameters in their compute dtype or in a format.
        """
        rules = []
        for rule in self._resolved.dtypes.rules:
            dtypes = rule.dtypes
            if dtype is not BF16:
                dtypes = {name: value for name, value in dtypes.items() if isinstance(value, Format)}
            elif is_whole and not isinstance(rule.storage, Format):
                dtypes.pop("storage", None)
            if dtypes:
                rules.append(Rule(rule.pattern, **dtypes))
        replicas = 1 if is_whole else self._config.parallel.replicas
        return resolve_model_dtypes(self._resolved.model, dtype, replicas=replicas, rules=rules)


# -- the value of --model


def find_model(text: str) -> ComparedModel:
    """Return the model for the value of `--model`: "module:function" or a transformers directory.

    Modules in the working directory are found too. Raises ValueError for other text, if the function does not exist, or
    if it returns something other than a `CutModel`.
    """
    if Path(text).is_dir():
        return HubModel(Path(text))
    module_name, _, function_name = text.rpartition(":")
    if not module_name or not function_name:
        raise ValueError(f"--model {text!r} is no directory and no module:function; give a function that returns a "
                         "dualpipe.train.parity.CutModel, or a directory with config.json and safetensors")
    function = _find_function(text, module_name, function_name)
    torch.manual_seed(0)  # the same weights on every rank, unless the function wants others
    model = function()
    if not isinstance(model, CutModel):
        raise ValueError(f"--model {text!r} returned a {type(model).__name__}; it must return a "
                         "dualpipe.train.parity.CutModel")
    if not isinstance(model.whole, nn.Module):
        raise ValueError(f"--model {text!r}: CutModel.whole must be an nn.Module; got {type(model.whole).__name__}")
    for name in ("cut", "batch", "loss"):
        if not callable(getattr(model, name)):
            raise ValueError(f"--model {text!r}: CutModel.{name} must be a function; got "
                             f"{type(getattr(model, name)).__name__}")
    if model.num_chunks < 1:
        raise ValueError(f"--model {text!r}: CutModel.num_chunks must be at least 1; got {model.num_chunks}")
    return model


def _find_function(text: str, module_name: str, function_name: str) -> Callable[[], Any]:
    """Return a function by the names of its module and its own."""
    directory = os.getcwd()
    if directory not in sys.path:
        sys.path.append(directory)  # last: a folder here must not hide an installed package of the same name
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # another module, which the user's module imports
        raise ValueError(f"--model {text!r}: there is no module {error.name!r} in {directory} or among installed "
                         "packages; give its name as Python imports it") from error
    function: Callable[[], Any] | None = getattr(module, function_name, None)
    if not callable(function):
        near = nearest(function_name, [name for name, value in vars(module).items() if callable(value)])
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"--model {text!r}: module {module_name!r} has no function {function_name!r}{hint}")
    return function
