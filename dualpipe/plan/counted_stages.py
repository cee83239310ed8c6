"""Stages whose activations are counted on the meta device: of native models, and of models of transformers.

`dualpipe.plan.activations` asks for the kinds of a model's layers, then runs stages of some of these kinds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from dualpipe.models.decoder import Layer
from dualpipe.models.hub import HubConfig
from dualpipe.models.stages import Recompute, Stage
from dualpipe.nn.attention.sequence_split import WHOLE, SequenceSplit
from dualpipe.nn.deferral import WeightGradStore
from dualpipe.nn.head import LinearHead
from dualpipe.parallel.context import ContextParallel
from dualpipe.parallel.experts.dispatcher import is_interface_experts, stacked_parameters
from dualpipe.pipeline.compiled_stage import plain_head
from dualpipe.pipeline.overlap import walk
from dualpipe.plan.meta_dispatch import MetaDispatcher, PretendedAllToAll
from dualpipe.plan.meta_run import LayerKind, MetaRun, kinds_of, meta_hidden, stage_of_kinds, start_layers
from dualpipe.runtime.errors import first_line
from dualpipe.train.config.schema import NO_ADAPTERS, LoRAConfig

if TYPE_CHECKING:
    from dualpipe.hf.model import TransformersModel
    from dualpipe.plan.meta_transformers import MetaStage
    from dualpipe.train.config.model_config import TrainedModel

_TRIAL_SHAPE = 2, 16  # sequences and tokens per sequence of a layer's trial run
# Sequence lengths of the two runs of a native stage, so short that attention's scores do not decide where the peak is.
_SHORT_LENGTHS = 8, 16
_SHORT_TOKENS = 128  # tokens per micro-batch of these runs
# Sequence lengths of the two runs that stand for longer sequences, whose masks would take long to compute.
_LONG_LENGTHS = 1024, 2048
_MAX_MASK_PAIRS = 2**28  # maximum number of position pairs per micro-batch for which masks are computed
_LONG_WINDOW = 512  # attention window in sequences of _LONG_LENGTHS, for layers that have a window


class Workload(NamedTuple):
    """Micro-batch of a rank whose memory is counted.

    tokens: tokens per micro-batch, those of all ranks that share its sequences. lengths: sequence length, or two of
    them, from which a longer one is extrapolated. dtype: compute dtype. ep: number of expert-parallel ranks. nodes:
    number of nodes that these are on, if rows are dispatched in two hops; 1: in one hop. cpu: True if the rank is a
    CPU, not a GPU. has_documents: True if a sequence holds several documents, which attention does not cross. cp:
    number of ranks that share a sequence. cp_rank: the rank among these. cp_method: value of parallel.cp_method.
    head_in_parts: True if the head and the loss run in parts, where the head can. lora: adapters of the model.
    """

    tokens: int
    lengths: tuple[int, ...]
    dtype: torch.dtype
    ep: int = 1
    nodes: int = 1
    cpu: bool = False
    has_documents: bool = False
    cp: int = 1
    cp_rank: int = 0
    cp_method: str = "auto"
    head_in_parts: bool = True
    lora: LoRAConfig = NO_ADAPTERS


@dataclass(frozen=True)
class CountedStage:
    """Stage on the meta device, with the inputs and the context to run it with.

    side_inputs: returns the entries of the carry other than hidden states and labels, for sequences (batch, length).
    attention: returns the context in which to run the stage. fused: bytes per token that fused attention kernels save
    in place of the scores, which the stage materializes; None if attention in the stage saves the same tensors as on
    the device. has_masks: True if its bool masks take memory on the device. split: tokens of this rank. is_start: True
    if the hidden states that it gets need no gradient.
    """

    module: Stage | MetaStage
    hidden_size: int
    is_last: bool
    side_inputs: Callable[[int, int], dict[str, Any]]
    attention: Callable[[], AbstractContextManager[Any]] = nullcontext
    fused: float | None = None
    has_masks: bool = False
    split: SequenceSplit = WHOLE
    is_start: bool = False

    def head(self) -> LinearHead | None:
        """Return the head of a last stage if it can run in parts with the loss, else None."""
        return plain_head(self.module) if self.is_last else None


def workload_to_run(model: TrainedModel, work: Workload) -> Workload:
    """Return a workload that is quick to run, once for each of its lengths, and from which the bytes of `work` follow.

    For a native model on the CPU it is the micro-batch itself: attention saves its scores there, and they decide where
    the peak is. On GPUs it has a few tokens: at a given sequence length, all counted tensors grow linearly with the
    tokens. Weight gradients do not, but all of them are deferred, and the store drops them. For a model of transformers
    it is the micro-batch itself, or about as many tokens in shorter sequences if its masks would be too large. A few
    tokens would not do: the weight gradients of routers are not deferred, and do not grow with the tokens.
    """
    if isinstance(model, HubConfig):
        if work.cpu:
            return work
        return work._replace(tokens=_SHORT_TOKENS, lengths=_SHORT_LENGTHS, has_documents=False)
    if work.tokens * max(work.lengths) <= _MAX_MASK_PAIRS:
        return work
    longest = max(_LONG_LENGTHS)
    return work._replace(tokens=-(-work.tokens // longest) * longest, lengths=_LONG_LENGTHS)


def layer_kinds(
    model: TrainedModel, layers: Iterable[int], recompute: Iterable[str], *, cp: int = 1,
    lora: LoRAConfig = NO_ADAPTERS,
) -> list[LayerKind]:
    """Return the kind of each of the layers.

    recompute: rules of `Recompute`. cp: ranks that share a sequence. lora: adapters of the model.
    """
    if isinstance(model, HubConfig):
        return kinds_of(model, layers, recompute, by_window=cp > 1, lora=lora, cp=cp)
    rules = Recompute(recompute, model.num_hidden_layers)
    equal_layers = _equal_layers(model, lora)
    start = start_layers(model, rules, lora, cp)
    return [LayerKind(equal_layers[i][0], ("layer",) if rules("layer", i) else (), i in start) for i in layers]


def counted_stage(model: TrainedModel, kinds: Sequence[LayerKind], probe: Workload, is_last: bool) -> CountedStage:
    """Return a stage with one layer per kind, to run `probe`."""
    if isinstance(model, HubConfig):
        return _native_stage(model, kinds, probe, is_last)
    return _transformers_stage(model, kinds, probe, is_last)


def _native_stage(config: HubConfig, kinds: Sequence[LayerKind], probe: Workload, is_last: bool) -> CountedStage:
    """Return a stage of native layers. Their attention materializes the scores, as it does on the CPU."""
    stage = stage_of_kinds(config, kinds, probe.ep, probe.dtype, is_last, probe.nodes, probe.lora)
    if probe.cp > 1:
        ranks = PretendedAllToAll(probe.cp, probe.cp_rank)
        stage.use_context_parallelism(ContextParallel(ranks, method=probe.cp_method))
    depth = len(stage.segments()[-1].writes) - 1 if is_last else 0  # layers for multi-token prediction

    def side_inputs(batch: int, length: int) -> dict[str, Any]:
        local_length = stage.split.counts(length)[probe.cp_rank]
        ahead = torch.empty((batch, local_length, depth), dtype=torch.int64, device="meta") if depth else None
        has_positions = probe.has_documents or probe.cp > 1
        positions = torch.empty((batch, length), dtype=torch.int64, device="meta") if has_positions else None
        return {"positions": positions, "ahead": ahead}

    fused = 0
    for index, layer in stage.numbered():
        if "attention" not in kinds[index].recomputed and _saves_attention(layer, kinds[index]):
            # Compared with the CPU's attention without its scores, fused kernels save one more float32 per head, and do
            # not save the copies of keys and values that several heads share.
            attention = layer.self_attn
            num_repeated = attention.num_heads - attention.num_kv_heads
            repeated = num_repeated * (attention.qk_dim + attention.v_dim)
            fused += 4 * attention.num_heads - repeated * probe.dtype.itemsize
    return CountedStage(
        stage, config.hidden_size, is_last, side_inputs, fused=None if probe.cpu else fused, has_masks=probe.cpu,
        split=stage.split, is_start=_is_start(kinds))


def _saves_attention(layer: Layer, kind: LayerKind) -> bool:
    """Return True if queries, keys or values need a gradient."""
    trained = (name for name, param in layer.self_attn.named_parameters() if param.requires_grad)
    return not kind.is_start or any(not name.startswith("o_proj.") for name in trained)


def _is_start(kinds: Sequence[LayerKind]) -> bool:
    """Return True if the hidden states that a stage of these layers gets need no gradient."""
    return bool(kinds) and kinds[0].is_start


def _transformers_stage(
    model: TransformersModel, kinds: Sequence[LayerKind], probe: Workload, is_last: bool
) -> CountedStage:
    """Return a stage of a model of transformers, with a different layer of the model for each entry of `kinds`.

    Its attention runs as on the device. If the workload has documents, a sequence has two.
    """
    from dualpipe.plan.meta_transformers import DeviceAttention, SkippedLayer, build_meta_stage, split_on_meta

    unused_layers = {kind.first: iter(_equal_layers(model, probe.lora)[kind.first]) for kind in kinds}
    by_number = {next(unused_layers[kind.first]): kind for kind in kinds}
    module = build_meta_stage(model, list(by_number), is_last=is_last, dtype=probe.dtype, lora=probe.lora)
    if len(probe.lengths) > 1:
        _shorten_windows(module.base.config)
    recomputed = {number for number, kind in by_number.items() if kind.recomputed}
    module.recompute = lambda part, number: number in recomputed  # type: ignore[assignment]
    layers = module.layers
    for number, kind in by_number.items():
        if failure(model, kind.first):
            layers.add_module(str(number), SkippedLayer(layers.get_submodule(str(number))))
    if probe.ep > 1:
        _keep_rank_experts(module, probe)
        split_on_meta(module, meta_hidden(model.hidden_size, *_TRIAL_SHAPE, probe.dtype))
    for parameter in module.parameters():  # accumulators, which are counted elsewhere
        parameter.grad = torch.empty_like(parameter) if parameter.requires_grad else None

    def side_inputs(batch: int, length: int) -> dict[str, Any]:
        positions = None
        if probe.has_documents:
            positions = torch.arange(length, device="cpu").remainder(length // 2).expand(batch, length)
        return {"position_ids": positions}

    attention = partial(DeviceAttention, probe.cpu)
    return CountedStage(
        module, model.hidden_size, is_last, side_inputs, attention, has_masks=True, is_start=_is_start(kinds))


def uncounted_layers(model: TrainedModel) -> list[str]:
    """Return a line for each kind of layers whose activations cannot be counted, with the reason."""
    if isinstance(model, HubConfig):
        return []
    lines = []
    for numbers in {numbers[0]: numbers for numbers in _equal_layers(model, NO_ADAPTERS)}.values():
        reason = failure(model, numbers[0])
        if reason:
            layer = type(model.layer(numbers[0])).__name__
            lines.append(f"not counted: activations of {len(numbers)} of {model.num_hidden_layers} layers, such as "
                         f"layer {numbers[0]}, a {layer}, which does not run on meta: {reason}")
    return lines


@lru_cache(maxsize=1024)
def failure(model: TransformersModel, number: int) -> str:
    """Return the reason a layer cannot run on meta, such as Python code that reads values; "" if it can."""
    from dualpipe.plan.meta_transformers import DeviceAttention, build_meta_stage

    stage = build_meta_stage(model, [number], is_last=False, dtype=torch.bfloat16)
    run = MetaRun(stage.segments(), "x", WeightGradStore())
    try:
        with DeviceAttention(cpu=False), run.store.activate():
            x = meta_hidden(model.hidden_size, *_TRIAL_SHAPE, torch.bfloat16)
            run.begin({"x": x, "position_ids": None}, ("x",))
            walk([run.forward()])
            run.begin_backward()
            walk([run.backward("B")])
    except Exception as error:  # layers that read values may raise any exception
        return first_line(error)
    return ""


@lru_cache(maxsize=64)
def _equal_layers(model: TransformersModel, lora: LoRAConfig) -> list[list[int]]:
    """Return for each layer the numbers of all layers with the same form, itself included."""
    from dualpipe.plan.meta_transformers import layer_forms

    forms = layer_forms(model, lora)
    numbers: dict[Any, list[int]] = {}
    for number, form in enumerate(forms):
        numbers.setdefault(form, []).append(number)
    return [numbers[form] for form in forms]


def _keep_rank_experts(module: MetaStage, probe: Workload) -> None:
    """Keep the stacked experts of one of `ep` ranks: 1/ep of them. Every rank gets the same number of tokens."""
    ep = probe.ep
    n_group = getattr(module.base.config, "n_group", None) or 1
    topk_group = min(getattr(module.base.config, "topk_group", None) or n_group, n_group)
    experts: list[Any] = [inner for inner in module.modules() if is_interface_experts(inner)]
    for inner in experts:
        inner.dispatcher = MetaDispatcher(
            inner.num_experts, ep, nodes=probe.nodes, n_group=n_group, topk_group=topk_group)
        for owner in inner.modules():  # the adapters of experts too
            for name, parameter in stacked_parameters(owner).items():
                local = parameter.detach()[: len(parameter) // ep].clone()
                setattr(owner, name, nn.Parameter(local, parameter.requires_grad))


def _shorten_windows(config: Any) -> None:
    """Limit attention windows to _LONG_WINDOW: a layer has a mask only if its window is shorter than the sequence.

    The sequences of _LONG_LENGTHS stand for longer ones, which are taken to be longer than all windows.
    """
    for name in ("sliding_window", "attention_chunk_size"):
        size = getattr(config, name, None)
        if size:
            setattr(config, name, min(size, _LONG_WINDOW))
