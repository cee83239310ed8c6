"""Models whose micro-batches are counted on meta: those of this library, and those of transformers.

`dualpipe.plan.activations` asks a model for the kinds of its layers, and for stages of some kinds that it runs.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import nn

from dualpipe.models.hub import HubConfig
from dualpipe.models.stages import Recompute, Stage
from dualpipe.nn.deferral import WeightGradStore
from dualpipe.nn.segments import Segment
from dualpipe.parallel.experts.dispatcher import is_interface_experts, stacked_parameters
from dualpipe.pipeline.overlap import walk
from dualpipe.plan.on_meta.meta_attention import DeviceAttention
from dualpipe.plan.on_meta.meta_run import EvenDispatcher, LayerKind, MetaRun, kinds_of, meta_hidden, stage_of_kinds

if TYPE_CHECKING:
    from dualpipe.hf.model import TransformersModel
    from dualpipe.plan.on_meta.meta_stage import MetaStage
    from dualpipe.train.config.model_config import TrainedModel

_TRIAL_SHAPE = 2, 16  # rows and tokens of a trial of a layer
_SHORT = 8, 16  # lengths of the sequences of two runs, so short that attention's scores do not decide where the peak is
_FEW_TOKENS = 128
_LONG = 1024, 2048  # lengths instead of longer ones, whose masks would take long to compute
_MOST_PAIRS = 2**28  # pairs of positions in the sequences of a micro-batch whose masks are computed
_WINDOW = 512  # positions that attention sees in sequences of the lengths _LONG, where it does not see the whole of one


class Workload(NamedTuple):
    """Micro-batches of a rank that are counted.

    tokens: of a micro-batch. lengths: of its sequences; two of them where what a longer one takes follows from both.
    cpu: run there, not on GPUs. has_documents: a row holds several, which attention does not cross.
    """

    tokens: int
    lengths: tuple[int, ...]
    dtype: torch.dtype
    ep: int = 1
    cpu: bool = False
    has_documents: bool = False


class CountedStage(Protocol):
    """A stage without memory, and how it is run.

    fused: bytes for each token that fused kernels of GPUs keep instead of attention's scores, which the stage computes;
    None where what it computes is what the device computes. has_masks: its masks, of bool, take memory.
    """

    @property
    def module(self) -> nn.Module: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def is_last(self) -> bool: ...
    @property
    def fused(self) -> float | None: ...
    @property
    def has_masks(self) -> bool: ...

    def segments(self) -> list[Segment]:
        """Return the segments of the stage."""

    def side_inputs(self, batch: int, length: int) -> dict[str, Any]:
        """Return what the carry holds besides hidden states and labels."""

    def attention(self) -> AbstractContextManager[Any]:
        """Return what attention runs in."""


class CountedModel(Hashable, Protocol):
    """A model that is counted."""

    def probe(self, work: Workload) -> Workload:
        """Return what is run instead of `work`, in sequences of each of its lengths."""

    def kinds(self, layers: Iterable[int], recompute: Iterable[str]) -> list[LayerKind]:
        """Return the kinds of some layers, in their order. recompute: the rules of `Recompute`."""

    def stage(self, kinds: Sequence[LayerKind], probe: Workload, is_last: bool) -> CountedStage:
        """Return a stage of layers of these kinds."""


def counted_model(model: TrainedModel) -> CountedModel:
    """Return what counts a model's micro-batches."""
    return OwnModel(model) if isinstance(model, HubConfig) else ModelOfTransformers(model)


class OwnStage:
    """A stage of this library's layers. Their attention is written down as whole scores, as the CPU computes it."""

    has_masks = False

    def __init__(self, module: Stage, fused: float | None) -> None:
        self.module = module
        self.hidden_size = module.config.hidden_size
        self.is_last = module.last
        self.fused = fused

    def segments(self) -> list[Segment]:
        """Return the segments of the stage."""
        return self.module.segments()

    def side_inputs(self, batch: int, length: int) -> dict[str, Any]:
        """Return the tokens ahead, where layers for multi-token prediction embed them."""
        depth = len(self.module.segments()[-1].writes) - 1 if self.module.last else 0
        ahead = torch.empty((batch, length, depth), dtype=torch.int64, device="meta") if depth else None
        return {"positions": None, "ahead": ahead}

    def attention(self) -> AbstractContextManager[Any]:
        """Return a context that changes nothing."""
        return nullcontext()


@dataclass(frozen=True)
class OwnModel:
    """A model of this library."""

    config: HubConfig

    def probe(self, work: Workload) -> Workload:
        """Return a few tokens: all that is made grows with them, because all weight gradients are deferred."""
        return work._replace(tokens=_FEW_TOKENS, lengths=_SHORT, has_documents=False)

    def kinds(self, layers: Iterable[int], recompute: Iterable[str]) -> list[LayerKind]:
        """Return the kinds of some layers, in their order."""
        return kinds_of(self.config, layers, recompute)

    def stage(self, kinds: Sequence[LayerKind], probe: Workload, is_last: bool) -> OwnStage:
        """Return a stage of layers of these kinds."""
        stage = stage_of_kinds(self.config, kinds, probe.ep, probe.dtype, is_last)
        if probe.cpu:
            return OwnStage(stage, None)
        fused = 0
        for index, layer in stage.numbered():
            if "attention" not in kinds[index].again:
                # What fused kernels keep beyond the CPU's without its scores: a float32 for each head's row of them,
                # and less, since keys and values need not be repeated for the heads that share them.
                attention = layer.self_attn
                num_repeated = attention.num_heads - attention.num_kv_heads
                repeated = num_repeated * (attention.qk_dim + attention.v_dim)
                fused += 4 * attention.num_heads - repeated * probe.dtype.itemsize
        return OwnStage(stage, fused)


class StageOfTransformers:
    """A stage of transformers' layers. Their attention is what the device runs, by `DeviceAttention`."""

    fused = None
    has_masks = True

    def __init__(self, module: MetaStage, hidden_size: int, probe: Workload) -> None:
        self.module = module
        self.hidden_size = hidden_size
        self.is_last = module.is_last
        self._probe = probe

    def segments(self) -> list[Segment]:
        """Return the segments of the stage."""
        return self.module.segments()

    def side_inputs(self, batch: int, length: int) -> dict[str, Any]:
        """Return the positions of two documents in each row, where rows hold several."""
        positions = None
        if self._probe.has_documents:
            positions = torch.arange(length, device="cpu").remainder(length // 2).expand(batch, length)
        return {"position_ids": positions}

    def attention(self) -> AbstractContextManager[Any]:
        """Return a context in which attention keeps what the device's kernels keep."""
        return DeviceAttention(self._probe.cpu)


@dataclass(frozen=True)
class ModelOfTransformers:
    """A model of transformers."""

    model: TransformersModel

    def probe(self, work: Workload) -> Workload:
        """Return the micro-batch itself, or as many tokens in shorter sequences.

        Not a few tokens: gradients of routers are not deferred, and do not grow with them.
        """
        if work.tokens * max(work.lengths) <= _MOST_PAIRS:
            return work
        longest = max(_LONG)
        return work._replace(tokens=-(-work.tokens // longest) * longest, lengths=_LONG)

    def kinds(self, layers: Iterable[int], recompute: Iterable[str]) -> list[LayerKind]:
        """Return the kinds of some layers, in their order."""
        rules = Recompute(recompute, self.model.num_hidden_layers)
        numbers = _numbers_alike(self.model)
        return [LayerKind(numbers[i][0], ("layer",) if rules("layer", i) else ()) for i in layers]

    def stage(self, kinds: Sequence[LayerKind], probe: Workload, is_last: bool) -> StageOfTransformers:
        """Return a stage of layers of these kinds: those of the model that are the first of these forms."""
        from dualpipe.plan.on_meta.meta_stage import SkippedLayer, build_meta_stage, split_on_meta

        alike = {kind.first: iter(_numbers_alike(self.model)[kind.first]) for kind in kinds}
        by_number = {next(alike[kind.first]): kind for kind in kinds}
        module = build_meta_stage(self.model, list(by_number), is_last=is_last, dtype=probe.dtype)
        if len(probe.lengths) > 1:
            _shorten_windows(module.base.config)
        again = {number for number, kind in by_number.items() if kind.again}
        module.recompute = lambda part, number: number in again  # type: ignore[assignment]
        layers = module.layers
        for number, kind in by_number.items():
            if failure(self.model, kind.first):
                layers.add_module(str(number), SkippedLayer(layers.get_submodule(str(number))))
        hidden_size = self.model.hidden_size
        if probe.ep > 1:
            _share_experts(module, probe.ep)
            split_on_meta(module, meta_hidden(hidden_size, *_TRIAL_SHAPE, probe.dtype))
        for parameter in module.parameters():  # accumulators, which are counted apart
            parameter.grad = torch.empty_like(parameter)
        return StageOfTransformers(module, hidden_size, probe)


def uncounted_layers(model: TrainedModel) -> list[str]:
    """Return for each kind of layers whose activations are not counted a line that names it, and says why."""
    if isinstance(model, HubConfig):
        return []
    lines = []
    for numbers in {numbers[0]: numbers for numbers in _numbers_alike(model)}.values():
        reason = failure(model, numbers[0])
        if reason:
            layer = type(model.layer(numbers[0])).__name__
            lines.append(f"not counted: activations of {len(numbers)} of {model.num_hidden_layers} layers, such as "
                         f"layer {numbers[0]}, a {layer}, which does not run without memory: {reason}")
    return lines


@lru_cache(maxsize=1024)
def failure(model: TransformersModel, number: int) -> str:
    """Return why a layer cannot run on meta, as where its Python looks at values; "" where it can."""
    from dualpipe.plan.on_meta.meta_stage import build_meta_stage

    stage = build_meta_stage(model, [number], is_last=False, dtype=torch.bfloat16)
    run = MetaRun(stage.segments(), "x", WeightGradStore())
    try:
        with DeviceAttention(cpu=False), run.store.activate():
            x = meta_hidden(model.hidden_size, *_TRIAL_SHAPE, torch.bfloat16)
            run.begin({"x": x, "position_ids": None}, ("x",))
            walk([run.forward()])
            run.begin_backward()
            walk([run.backward("B")])
    except Exception as error:  # whatever a layer raises that looks at values
        return str(error).strip().partition("\n")[0] or type(error).__name__
    return ""


@lru_cache(maxsize=64)
def _numbers_alike(model: TransformersModel) -> list[list[int]]:
    """Return for each layer the numbers of all layers of its form."""
    from dualpipe.plan.on_meta.meta_stage import layer_forms

    forms = layer_forms(model)
    numbers: dict[Any, list[int]] = {}
    for number, form in enumerate(forms):
        numbers.setdefault(form, []).append(number)
    return [numbers[form] for form in forms]


def _share_experts(module: nn.Module, ep: int) -> None:
    """Leave of stacked experts those of a rank among `ep`, to which as many tokens come as to each other."""
    experts: list[Any] = [inner for inner in module.modules() if is_interface_experts(inner)]
    for inner in experts:
        inner.dispatcher = EvenDispatcher(inner.num_experts, ep)
        for name, parameter in stacked_parameters(inner).items():
            setattr(inner, name, nn.Parameter(parameter.detach()[: len(parameter) // ep].clone()))


def _shorten_windows(config: Any) -> None:
    """Make windows of attention shorter than the sequences of the lengths _LONG: whether there is a mask depends on it.

    A window that is longer than all of these counts as one that is shorter than the sequence that they stand for.
    """
    for name in ("sliding_window", "attention_chunk_size"):
        size = getattr(config, name, None)
        if size:
            setattr(config, name, min(size, _WINDOW))
