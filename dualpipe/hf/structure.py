"""Checks that a causal LM of transformers can be cut into stages, before any weight is read.

The checks run on a skeleton: the model with stand-ins for its layers, embedding and norm. The rest of the model's
forward, which makes masks and rotary tables, runs unchanged. A run of the whole skeleton records the arguments of every
layer. A stage of the skeleton, which gets hidden states alone, must call its layers with the same arguments, and pass
nothing but hidden states from layer to layer.
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
from dualpipe.hf.stand_ins import CallRecorder, LayerForm, OutputRecorder, StandIn, swap_modules
from dualpipe.parallel.experts.dispatcher import stacked_parameters
from dualpipe.runtime.errors import first_line

ADVICE = "cut the model yourself, as docs/your-model.md#your-own-modules shows"
_TOKENS = torch.tensor([[0, 1, 1, 0], [1, 0, 0, 1]], device="cpu")
_FORMS = [LayerForm(num_results) for num_results in range(4)]


class LayerCall(NamedTuple):
    """Call of a layer: the hidden states, and the arguments after them."""

    hidden_states: Tensor
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class SkeletonLayer(StandIn):
    """Stand-in for a layer that records its call, and returns new random hidden states in the form of its results.

    rest: returned as every element after the hidden states.
    """

    def __init__(self, layer: nn.Module, form: LayerForm, rest: Any) -> None:
        super().__init__(layer)
        self._form = form
        self._rest = rest
        self.calls: list[LayerCall] = []
        self.output: Tensor | None = None

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Record the call, and return random hidden states, which `output` keeps."""
        self.calls.append(LayerCall(hidden_states, args, kwargs))
        self.output = torch.randn_like(hidden_states)
        return self._form.pack(self.output, self._rest)


class Skeleton(NamedTuple):
    """Causal LM without its layers, and the removed layers."""

    causal_lm: Any
    layers: list[nn.Module]
    embedding_size: int


def check_structure(causal_lm: Any, cuts: Sequence[range]) -> LayerForm:
    """Check that stages can run the model, and return the form of its layers' results. All ranks get the same form.

    causal_lm: the whole model on the meta device; unusable afterwards.
    cuts: numbers of every stage's layers.

    Raises ValueError if stages cannot run the model.
    """
    check_parameter_owners(causal_lm)
    model_name = type(causal_lm).__name__
    layer_name = type(base_of(causal_lm).layers[0]).__name__
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        skeleton = _make_skeleton(causal_lm)
        form, calls = _record_calls(skeleton, model_name)
        _check_shared_state(skeleton, calls, model_name)
        hidden_states = torch.randn_like(calls[0].hidden_states)
        for number, layers in enumerate(cuts):
            try:
                _check_stage(skeleton, form, calls, layers, hidden_states, number == 0, number == len(cuts) - 1)
            except Exception as error:  # a forward without its other layers may raise anything
                raise ValueError(
                    f"stage {number} of a {model_name} cannot run without the other stages: {first_line(error)}; "
                    f"a stage gets hidden states alone, and must call every {layer_name} with the same arguments as "
                    f"the whole model: {ADVICE}") from error
    return form


def check_parameter_owners(causal_lm: Any) -> None:
    """Raise ValueError unless every parameter belongs to one of: embedding, layers, norm, head.

    Every stage would train its own copy of a parameter that is elsewhere, or that layers share. Only a tied head may
    share the embedding's weight.
    """
    owners, shared = _parameter_owners(causal_lm)
    model_name = type(causal_lm).__name__
    if shared:
        raise ValueError(f"a {model_name} shares parameters between parts that stages would train separately: "
                         f"{_abbreviate(shared)}; only a head may share the embedding's weight: {ADVICE}")
    others = [name for name, parameter in causal_lm.named_parameters() if parameter not in owners]
    if others:
        raise ValueError(f"a {model_name} has parameters outside of embedding, layers, norm and head, which every "
                         f"stage would train separately: {_abbreviate(others)}; expected none: {ADVICE}")


def _parameter_owners(causal_lm: Any) -> tuple[dict[nn.Parameter, str], list[str]]:
    """Return the part of the model that owns each parameter, and descriptions of parameters with several owners."""
    base = base_of(causal_lm)
    parts = {"embed_tokens": base.embed_tokens, "norm": getattr(base, norm_name(base))}
    if getattr(causal_lm, "lm_head", None) is not None:
        parts["lm_head"] = causal_lm.lm_head
    parts |= {f"layers.{number}": layer for number, layer in enumerate(base.layers)}
    owners: dict[nn.Parameter, str] = {}
    shared: list[str] = []
    for part, module in parts.items():
        for name, parameter in module.named_parameters():
            owner = owners.setdefault(parameter, part)
            if owner != part and {owner, part} != {"embed_tokens", "lm_head"}:
                shared.append(f"{part}.{name} (also in {owner})")
    return owners, shared


def _make_skeleton(causal_lm: Any) -> Skeleton:
    """Replace the layers and all large tensors of a model, and move it to the CPU."""
    base = base_of(causal_lm)
    layers = list(base.layers)
    norm = norm_name(base)
    embedding_size = base.embed_tokens.weight.shape[-1]
    base.layers = nn.ModuleList()
    base.embed_tokens = nn.Embedding(2, embedding_size)
    setattr(base, norm, _PassThrough(getattr(base, norm)))
    if getattr(causal_lm, "lm_head", None) is not None:
        causal_lm.lm_head = _PassThrough(causal_lm.lm_head)
    causal_lm.all_tied_weights_keys = {}
    fill_on_cpu(causal_lm, [module for module in causal_lm.modules() if not isinstance(module, nn.Embedding)])
    return Skeleton(causal_lm, layers, embedding_size)


def fill_on_cpu(causal_lm: Any, modules: Sequence[nn.Module]) -> None:
    """Move modules of a model from the meta device to the CPU, and compute their buffers, such as rotary frequencies.

    The model's `_init_weights` computes the buffers. Parameters of modules without buffers stay uninitialized.
    """
    for module in modules:
        module.to_empty(device="cpu", recurse=False)
    for module in modules:
        if any(True for _ in module.buffers(recurse=False)):
            causal_lm._init_weights(module)


class _PassThrough(StandIn):
    """Stand-in for a norm or a head that returns its input."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return x


def _record_calls(skeleton: Skeleton, model_name: str) -> tuple[LayerForm, list[LayerCall]]:
    """Run the whole skeleton; return the form of its layers' results, and the call of every layer.

    Tries all forms. Raises ValueError if the model passes more than hidden states between layers, or does not call its
    norm exactly once after them.
    """
    base = base_of(skeleton.causal_lm)
    layer_name = type(skeleton.layers[0]).__name__
    faults = []
    for form in _FORMS:
        rest = torch.zeros((), device="cpu")
        layers = [SkeletonLayer(layer, form, rest) for layer in skeleton.layers]
        norm = OutputRecorder(getattr(base, norm_name(base)))
        try:
            with swap_modules(base, {"layers": nn.ModuleList(layers), norm_name(base): norm}):
                base(input_ids=_TOKENS, use_cache=False)
        except Exception as error:  # a forward may raise anything if layers return another form
            faults.append(first_line(error))
            continue
        forwarded = _arguments_containing(rest, layers)
        if forwarded:
            raise ValueError(f"a {model_name} passes {forwarded} to a {layer_name}, which the layer before it returns; "
                             f"stages pass on hidden states alone: {ADVICE}")
        if len(norm.results) != 1:
            raise ValueError(f"a {model_name} calls its norm {len(norm.results)} times; stages need one call, after "
                             f"the layers: {ADVICE}")
        fault = _chain_fault(layers, norm.results[0])
        if not fault:
            return form, [layer.calls[0] for layer in layers]
        faults.append(fault)
    raise ValueError(f"a {model_name} does not pass hidden states from {layer_name} to {layer_name}: {faults[0]}; "
                     f"stages pass on hidden states alone: {ADVICE}")


def _chain_fault(layers: Sequence[SkeletonLayer], norm_input: Tensor) -> str:
    """Describe where a layer or the norm gets other hidden states than the layer before it returns; "" if nowhere."""
    for number, layer in enumerate(layers):
        if len(layer.calls) != 1:
            return f"layer {number} is called {len(layer.calls)} times"
        if number and not _are_equal(layer.calls[0].hidden_states, layers[number - 1].output):
            return f"the input of layer {number} differs from the output of layer {number - 1}"
    if layers and not _are_equal(norm_input, layers[-1].output):
        return "the input of the norm differs from the output of the last layer"
    return ""


def _arguments_containing(value: Any, layers: Sequence[SkeletonLayer]) -> str:
    """Return the names of the layer arguments that contain an object, separated by commas."""
    names: dict[str, None] = {}
    for layer in layers:
        for call in layer.calls:
            for name, argument in _named_arguments(call):
                if any(leaf is value for leaf in pytree.tree_leaves(argument)):
                    names[repr(name)] = None
    return ", ".join(names)


def _named_arguments(call: LayerCall) -> list[tuple[str, Any]]:
    """Return the arguments of a call after the hidden states, with their names."""
    positional = [(f"argument {position}", value) for position, value in enumerate(call.args, 1)]
    return [*positional, *call.kwargs.items()]


def _check_shared_state(skeleton: Skeleton, calls: Sequence[LayerCall], model_name: str) -> None:
    """Raise ValueError if layers pass values to each other through an argument that holds state."""
    for layer, call in zip(skeleton.layers, calls):
        for argument, value in _named_arguments(call):
            if _may_hold_state(value) and uses_state(layer, call, value):
                raise ValueError(
                    f"a {type(layer).__name__} of a {model_name} shares values with other layers in {argument!r}, a "
                    f"{type(value).__name__}; stages pass on hidden states alone: {ADVICE}")


def _may_hold_state(value: Any) -> bool:
    """Return True for an argument that a layer could store values in: an empty container, or an unknown object."""
    if isinstance(value, dict | list):
        return not value
    plain = Tensor | bool | int | float | str | tuple | torch.dtype | torch.device | None
    return not isinstance(value, plain)


def uses_state(layer: nn.Module, call: LayerCall, state: Any) -> bool:
    """Return True if a layer, run on the meta device, writes to `state`, or fails without values of other layers."""
    experts = {path: CallRecorder() for path, module in layer.named_modules() if stacked_parameters(module)}
    # Without `is_leaf`, the map would copy an empty container, which is a node of the tree.
    is_state = partial(operator.is_, state)
    hidden_states, args, kwargs = pytree.tree_map_only(
        Tensor, lambda tensor: tensor.to("meta"), call, is_leaf=is_state)
    try:
        with swap_modules(layer, experts), torch.device("meta"):
            layer(hidden_states, *args, **kwargs)
    except Exception:  # a layer may raise anything if the state lacks values
        return True
    return len(state) > 0 if hasattr(state, "__len__") else True


def _check_stage(
    skeleton: Skeleton, form: LayerForm, calls: Sequence[LayerCall], layers: range, x: Tensor, is_first: bool,
    is_last: bool,
) -> None:
    """Raise ValueError if a stage calls its layers or its norm with other arguments than the whole model.

    calls: the layers' calls in the whole model.
    layers: numbers of the stage's layers.
    x: hidden states, the input of a later stage.
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
        fault = _chain_fault(stage_layers, y)
        if fault:
            raise ValueError(fault)
        first_input = stage_layers[0].calls[0].hidden_states
        x = first_input if is_first else x
        if not _are_equal(first_input, x):
            raise ValueError("the input of its first layer differs from the hidden states of the stage before")
    elif not is_first and not _are_equal(y, x):
        raise ValueError("it changes hidden states although it has no layers")
    for number, layer in zip(layers, stage_layers):
        _compare_arguments(number, layer.calls[0], calls[number])
    _, stage_arguments = stage.layer_arguments(_TOKENS if is_first else x)
    for number, arguments in zip(layers, stage_arguments):
        _compare_arguments(number, LayerCall(x, *arguments), calls[number])
    if is_last:
        stage.apply_head(x)
        if not _are_equal(norm.results[-1], x):
            raise ValueError("the input of the norm differs from the hidden states")


def _compare_arguments(number: int, actual: LayerCall, expected: LayerCall) -> None:
    """Raise ValueError if two calls of a layer differ in an argument after the hidden states.

    A missing argument counts as False: the forward with the head passes options that the base model's forward leaves
    out, such as `output_router_logits=False`.
    """
    actual_arguments = dict(_named_arguments(actual))
    expected_arguments = dict(_named_arguments(expected))
    for name in {**actual_arguments, **expected_arguments}:
        if not _are_equal(_none_if_false(actual_arguments.get(name)), _none_if_false(expected_arguments.get(name))):
            raise ValueError(f"layer {number} gets another {name!r} than in the whole model")


def _none_if_false(value: Any) -> Any:
    """Return None for False, and other values unchanged."""
    return None if value is False else value


def _are_equal(a: Any, b: Any) -> bool:
    """Return True if two nested values are equal; tensors are compared bit for bit, with NaN equal to NaN."""
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


def _abbreviate(names: Sequence[str]) -> str:
    """Join the first three names, and count the others."""
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"
