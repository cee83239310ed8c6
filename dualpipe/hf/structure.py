"""Checks that a causal LM of transformers can be cut into stages, on its skeleton, before any weight is read.

The skeleton is the model with stand-ins for its layers, embedding and norm: what remains is the code between them,
which makes masks and rotary tables. Run whole, it tells what each layer is called with. Each stage of the skeleton must
call its layers with the same, given hidden states alone, and pass nothing but hidden states from layer to layer.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from dualpipe.hf.cut import base_of, cut_model, norm_name
from dualpipe.hf.stage import CausalLMStage
from dualpipe.hf.stand_ins import CallRecorder, LayerForm, OutputRecorder, StandIn, standing_in
from dualpipe.parallel.experts.dispatcher import stacked_parameters

ADVICE = "cut the model yourself, as docs/your-loop.md shows"
_TOKENS = torch.tensor([[0, 1, 1, 0], [1, 0, 0, 1]], device="cpu")
_FORMS = [LayerForm(num_results) for num_results in range(4)]


class LayerCall(NamedTuple):
    """Call of a layer: its hidden states, and the arguments behind them."""

    hidden_states: Tensor
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class SkeletonLayer(StandIn):
    """Stands for a layer: records its call, and returns new random hidden states in the form of a layer's results.

    rest: returned in the places behind the hidden states.
    """

    def __init__(self, layer: nn.Module, form: LayerForm, rest: Any) -> None:
        super().__init__(layer)
        self._form = form
        self._rest = rest
        self.calls: list[LayerCall] = []
        self.output: Tensor | None = None

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Record the call."""
        self.calls.append(LayerCall(hidden_states, args, kwargs))
        self.output = torch.randn_like(hidden_states)
        return self._form.pack(self.output, self._rest)


class Skeleton(NamedTuple):
    """Causal LM without its layers, and these."""

    causal_lm: Any
    layers: list[nn.Module]
    embedding_size: int


def check_structure(causal_lm: Any, cuts: Sequence[range]) -> LayerForm:
    """Return the form of the layers' results; ValueError for a model that stages cannot run.

    causal_lm: the whole model on meta; it is not usable afterwards. cuts: the numbers of each stage's layers.

    The result is the same on all ranks.
    """
    refuse_other_parameters(causal_lm)
    name = type(causal_lm).__name__
    layer = type(base_of(causal_lm).layers[0]).__name__
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        skeleton = _skeleton_of(causal_lm)
        form, calls = _calls_of_model(skeleton, name)
        _refuse_shared_state(skeleton, calls, name)
        hidden_states = torch.randn_like(calls[0].hidden_states)
        for number, layers in enumerate(cuts):
            try:
                _check_stage(skeleton, form, calls, layers, hidden_states, number == 0, number == len(cuts) - 1)
            except Exception as error:  # whatever the model's forward raises without its other layers
                raise ValueError(
                    f"stage {number} of a {name} cannot run without the other stages: {_one_line(error)}; stages get "
                    f"hidden states alone, and call each {layer} with what the whole model gives it: {ADVICE}"
                ) from error
    return form


def refuse_other_parameters(causal_lm: Any) -> None:
    """Raise ValueError for parameters outside of embedding, layers, norm and head, and for layers that share some.

    Each stage would keep and train a copy of its own.
    """
    base = base_of(causal_lm)
    parts = {"embed_tokens": base.embed_tokens, "norm": getattr(base, norm_name(base))}
    parts["lm_head"] = getattr(causal_lm, "lm_head", None)
    parts |= {f"layers.{number}": layer for number, layer in enumerate(base.layers)}
    owners: dict[nn.Parameter, str] = {}
    shared: list[str] = []
    tied = {"embed_tokens", "lm_head"}
    for part, module in parts.items():
        for name, parameter in module.named_parameters() if module is not None else ():
            owner = owners.setdefault(parameter, part)
            if owner != part and {owner, part} != tied:
                shared.append(f"{part}.{name} (also in {owner})")
    model = type(causal_lm).__name__
    if shared:
        raise ValueError(f"a {model} shares parameters between parts that stages would train separately: "
                         f"{_some(shared)}; only a head may share the embedding's weight: {ADVICE}")
    others = [name for name, parameter in causal_lm.named_parameters() if parameter not in owners]
    if others:
        raise ValueError(f"a {model} has parameters outside of embedding, layers, norm and head, which every stage "
                         f"would train separately: {_some(others)}; expected none: {ADVICE}")


def _skeleton_of(causal_lm: Any) -> Skeleton:
    """Return the model without layers and without large tensors, on the CPU."""
    base = base_of(causal_lm)
    layers = list(base.layers)
    norm = norm_name(base)
    embedding_size = base.embed_tokens.weight.shape[-1]
    base.layers = nn.ModuleList()
    base.embed_tokens = nn.Embedding(2, embedding_size)
    setattr(base, norm, _Passing(getattr(base, norm)))
    if getattr(causal_lm, "lm_head", None) is not None:
        causal_lm.lm_head = _Passing(causal_lm.lm_head)
    causal_lm.all_tied_weights_keys = {}
    fill_on_cpu(causal_lm, [module for module in causal_lm.modules() if not isinstance(module, nn.Embedding)])
    return Skeleton(causal_lm, layers, embedding_size)


def fill_on_cpu(causal_lm: Any, modules: Sequence[nn.Module]) -> None:
    """Move modules of a model from meta to the CPU, with the buffers that the model makes, such as frequencies."""
    for module in modules:
        module.to_empty(device="cpu", recurse=False)
    for module in modules:
        if any(True for _ in module.buffers(recurse=False)):
            causal_lm._init_weights(module)


class _Passing(StandIn):
    """Stands for a norm or a head: returns what it is given."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return x


def _calls_of_model(skeleton: Skeleton, name: str) -> tuple[LayerForm, list[LayerCall]]:
    """Return the form of the layers' results, and the call of each layer in the whole model."""
    base = base_of(skeleton.causal_lm)
    layer_class = type(skeleton.layers[0]).__name__
    reasons = []
    for form in _FORMS:
        rest = torch.zeros((), device="cpu")
        layers = [SkeletonLayer(layer, form, rest) for layer in skeleton.layers]
        norm = OutputRecorder(getattr(base, norm_name(base)))
        try:
            with standing_in(base, {"layers": nn.ModuleList(layers), norm_name(base): norm}):
                base(input_ids=_TOKENS, use_cache=False)
        except Exception as error:  # whatever the model's forward raises where layers return another form
            reasons.append(_one_line(error))
            continue
        handed_on = _arguments_with(rest, layers)
        if handed_on:
            raise ValueError(f"a {name} hands a {layer_class} {handed_on}, which the layer before it returns; stages "
                             f"pass on hidden states alone: {ADVICE}")
        if len(norm.results) != 1:
            raise ValueError(f"a {name} calls its norm {len(norm.results)} times; stages need it once, behind the "
                             f"layers: {ADVICE}")
        fault = _fault_in_chain(layers, norm.results[0])
        if not fault:
            return form, [layer.calls[0] for layer in layers]
        reasons.append(fault)
    raise ValueError(f"a {name} does not pass hidden states from {layer_class} to {layer_class}: {reasons[0]}; stages "
                     f"pass on hidden states alone: {ADVICE}")


def _fault_in_chain(layers: Sequence[SkeletonLayer], last: Tensor) -> str:
    """Return what is wrong where layers do not get what the ones before them return; "" where nothing is."""
    for number, layer in enumerate(layers):
        if len(layer.calls) != 1:
            return f"layer {number} is called {len(layer.calls)} times"
        if number and not _are_equal(layer.calls[0].hidden_states, layers[number - 1].output):
            return f"layer {number} gets something else than layer {number - 1} returns"
    if layers and not _are_equal(last, layers[-1].output):
        return "the norm gets something else than the last layer returns"
    return ""


def _arguments_with(value: Any, layers: Sequence[SkeletonLayer]) -> str:
    """Return the names of the arguments in which a layer gets an object."""
    names: dict[str, None] = {}
    for layer in layers:
        for call in layer.calls:
            for name, argument in _named_arguments(call):
                if any(leaf is value for leaf in pytree.tree_leaves(argument)):
                    names[repr(name)] = None
    return ", ".join(names)


def _named_arguments(call: LayerCall) -> list[tuple[str, Any]]:
    """Return the arguments of a call behind the hidden states, with names."""
    return [*((f"argument {place}", value) for place, value in enumerate(call.args, 1)), *call.kwargs.items()]


def _refuse_shared_state(skeleton: Skeleton, calls: Sequence[LayerCall], name: str) -> None:
    """Raise ValueError for an object that all layers get, and that some of them read or write."""
    for layer, call in zip(skeleton.layers, calls):
        for argument, value in _named_arguments(call):
            if _may_hold_state(value) and uses_state(layer, call, value):
                raise ValueError(
                    f"a {type(layer).__name__} of a {name} shares values with other layers in {argument!r}, a "
                    f"{type(value).__name__}; stages pass on hidden states alone: {ADVICE}")


def _may_hold_state(value: Any) -> bool:
    """Return True for an argument that a layer can leave something in: an empty container, or an unknown object."""
    if isinstance(value, dict | list):
        return not value
    plain = Tensor | bool | int | float | str | tuple | torch.dtype | torch.device | None
    return not isinstance(value, plain)


def uses_state(layer: nn.Module, call: LayerCall, state: Any) -> bool:
    """Return True if a layer, run on meta, writes to a container or fails without what other layers leave there."""
    experts = {path: CallRecorder() for path, module in layer.named_modules() if stacked_parameters(module)}
    # An empty container is a node of the tree, which a map would copy.
    is_state = partial(operator.is_, state)
    hidden_states, args, kwargs = pytree.tree_map_only(
        Tensor, lambda tensor: tensor.to("meta"), call, is_leaf=is_state)
    try:
        with standing_in(layer, experts), torch.device("meta"):
            layer(hidden_states, *args, **kwargs)
    except Exception:  # whatever it raises where the state is missing
        return True
    return len(state) > 0 if hasattr(state, "__len__") else True


def _check_stage(
    skeleton: Skeleton, form: LayerForm, calls: Sequence[LayerCall], layers: range, x: Tensor, is_first: bool,
    is_last: bool,
) -> None:
    """Raise ValueError where a stage calls a layer with something else than the whole model does.

    x: hidden states for a later stage.
    """
    causal_lm = copy.deepcopy(skeleton.causal_lm)
    base = base_of(causal_lm)
    norm = OutputRecorder(getattr(base, norm_name(base)))
    setattr(base, norm_name(base), norm)
    stand_ins = [SkeletonLayer(layer, form, None) for layer in skeleton.layers]
    base.layers = nn.ModuleList(stand_ins)
    cut_model(causal_lm, layers, is_first=is_first, is_last=is_last)
    stage = CausalLMStage(causal_lm, is_first=is_first, is_last=is_last, form=form)
    stage_layers = [stand_ins[number] for number in layers]
    y = stage(_TOKENS if is_first else x)
    if is_last:
        y = norm.results[-1]
    if stage_layers:
        fault = _fault_in_chain(stage_layers, y)
        if fault:
            raise ValueError(fault)
        first_input = stage_layers[0].calls[0].hidden_states
        x = first_input if is_first else x
        if not _are_equal(first_input, x):
            raise ValueError("its first layer gets something else than the hidden states of the stage before")
    elif not is_first and not _are_equal(y, x):
        raise ValueError("without layers, it changes hidden states")
    for number, layer in zip(layers, stage_layers):
        _compare(number, layer.calls[0][1:], calls[number][1:])
    _, arguments = stage.layer_arguments(_TOKENS if is_first else x)
    for number, argument in zip(layers, arguments):
        _compare(number, tuple(argument), calls[number][1:])
    if is_last:
        stage._end(x)
        if not _are_equal(norm.results[-1], x):
            raise ValueError("the norm gets something else than hidden states")


def _compare(number: int, got: tuple[Any, ...], expected: tuple[Any, ...]) -> None:
    """Raise ValueError that names the argument in which two calls of a layer differ.

    An option that is off, such as `output_router_logits`, need not be there: the head's forward alone sets some.
    """
    got_named = dict(_named_arguments(LayerCall(torch.empty(0, device="cpu"), *got)))
    expected_named = dict(_named_arguments(LayerCall(torch.empty(0, device="cpu"), *expected)))
    for name in {**got_named, **expected_named}:
        if not _are_equal(_unless_off(got_named.get(name)), _unless_off(expected_named.get(name))):
            raise ValueError(f"layer {number} gets another {name!r} than in the whole model")


def _unless_off(value: Any) -> Any:
    return None if value is False else value


def _are_equal(a: Any, b: Any) -> bool:
    """Return True for equal values, tensors among them bit for bit."""
    a_leaves, a_spec = pytree.tree_flatten(a)
    b_leaves, b_spec = pytree.tree_flatten(b)
    if a_spec != b_spec:
        return False
    for left, right in zip(a_leaves, b_leaves):
        if isinstance(left, Tensor) and isinstance(right, Tensor):
            if left.shape != right.shape or not torch.equal(left.nan_to_num(), right.nan_to_num()):
                return False
        elif type(left) is not type(right) or (not _may_hold_state(left) and left != right):
            return False
    return True


def _some(names: Sequence[str]) -> str:
    """Return the first names of a list, and the number of the others."""
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"


def _one_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__
