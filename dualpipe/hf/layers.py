"""Decoder layers of any model, cut at their experts into two parts, so that computation can hide the all-to-all.

A layer is one opaque function; only the modules that it calls are known. It is cut by running its forward twice. The
first run stops at the experts, and records the outputs of the modules before them. The second run replays these
outputs: the modules return their recorded results, the experts return the combined result of all ranks, and only
additions and reshapes are computed twice.

    layer        norm   -> attention -> add -> norm   -> router -> experts -> shared experts -> add
    first run    norm      attention    add    norm      router  | stop
    between                                                        dispatch, experts, combine
    second run   replay    replay       add    replay    replay    result     shared experts    add

The gradients equal those of the layer: recorded outputs pass from the first run to the second like any tensor between
segments, and an output that the second run does not use gets no gradient. `check_split` compares both ways of running a
layer. It rejects layers for which the results differ, such as layers with random numbers; these run as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from torch.utils import _pytree as pytree

from dualpipe.hf.experts import dispatcher_of, exchange_segments
from dualpipe.hf.stand_ins import ForwardStop, ForwardStopped, OutputRecorder, OutputReplay, swap_modules
from dualpipe.nn.segments import Compute, Segment, run_segments
from dualpipe.parallel.experts.dispatcher import is_interface_experts
from dualpipe.parallel.forward_hooks import with_forward_hooks

ROUTED = ("rows", "weights", "plan")  # names of the values that the first part passes to the dispatch
TOLERANCE = 1e-4  # for checks in float32 or wider, relative to the largest absolute value


class LayerArguments(NamedTuple):
    """Arguments of a layer after the hidden states."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class CannotSplit(ValueError):
    """Raised for a layer that cannot be cut at its experts; the message is the reason, as a predicate of "it"."""


class SplitLayer:
    """Decoder layer that runs in two parts, before and after its experts.

    Raises CannotSplit if the layer does not have exactly one module of experts, or has hooks that would run twice.
    """

    def __init__(self, layer: nn.Module) -> None:
        self.layer = layer
        self._experts_path = _find_experts(layer)
        self.experts = layer.get_submodule(self._experts_path)
        self._stop = ForwardStop()
        modules = {path: layer.get_submodule(path) for path in _sibling_paths(layer, self._experts_path)}
        self._recorders = {path: OutputRecorder(module) for path, module in modules.items()}
        self._replays = {path: OutputReplay(module) for path, module in modules.items()}
        self._experts_result = OutputReplay()
        # Set by the first call of `run_before_experts`; later calls must match.
        self._called_paths: list[str] = []  # modules called before the experts, in order
        self._output_specs: list[pytree.TreeSpec] = []  # structure of their outputs
        self.num_recorded = 0  # number of leaves of all their outputs

    def split_same(self, layer: nn.Module) -> SplitLayer:
        """Split another layer of the same structure in the same way, without checking it."""
        other = SplitLayer(layer)
        other._called_paths = self._called_paths
        other._output_specs = self._output_specs
        other.num_recorded = self.num_recorded
        return other

    def fits(self, layer: nn.Module) -> bool:
        """Return True if `layer` still has the experts that were cut; other modules in it may be replaced."""
        return self.layer is layer and layer.get_submodule(self._experts_path) is self.experts

    def run_before_experts(self, x: Tensor, arguments: LayerArguments) -> tuple[Any, ...]:
        """Run the layer up to its experts.

        Returns the rows, weights and plan for the dispatch, then the leaves of the recorded outputs. Raises CannotSplit
        if the experts are not called, and RuntimeError if the calls before them differ from those of the first run.
        """
        stand_ins: dict[str, nn.Module] = {**self._recorders, self._experts_path: self._stop}
        for path, recorder in self._recorders.items():
            recorder.stand_for(self.layer.get_submodule(path))  # the user may have put an adapter there
            recorder.results = []  # a failed step may have left some
        inputs: tuple[Any, ...] | None = None
        try:
            with swap_modules(self.layer, stand_ins):
                self.layer.forward(x, *arguments.args, **arguments.kwargs)
        except ForwardStopped as stopped:
            inputs = stopped.inputs
        if inputs is None or len(inputs) != 3:
            raise CannotSplit("does not call its experts with hidden states, indices and weights")
        hidden_states, top_k_index, top_k_weights = inputs
        outputs = self._take_recorded()
        plan = dispatcher_of(self.experts).plan(hidden_states.flatten(0, -2), top_k_weights, top_k_index)
        return (*plan, *outputs)

    def run_after_experts(
        self, x: Tensor, arguments: LayerArguments, rows: Tensor, plan: Any, *recorded: Any
    ) -> Tensor:
        """Run the layer from its experts to its end, and return its hidden states.

        rows, plan: results of the combine, and the dispatcher's plan.
        recorded: leaves of the recorded outputs, as `run_before_experts` returns them.
        """
        y_TH = dispatcher_of(self.experts).finish(rows, plan)
        self._replay(recorded)
        self._experts_result.results = [y_TH]
        for path, replay in self._replays.items():
            replay.stand_for(self.layer.get_submodule(path))
        stand_ins: dict[str, nn.Module] = {**self._replays, self._experts_path: self._experts_result}
        try:
            with swap_modules(self.layer, stand_ins):
                result = self.layer.forward(x, *arguments.args, **arguments.kwargs)
        finally:
            self._experts_result.results = []
            for replay in self._replays.values():
                replay.results = []
        return hidden_states_of(result)

    def segments(self, arguments: str) -> list[Segment]:
        """Return the segments of the layer, which read "x" and the value named `arguments`, and write "x"."""
        recorded = tuple(f"recorded{number}" for number in range(self.num_recorded))
        return [
            Compute(self.run_before_experts, ("x", arguments), (*ROUTED, *recorded)),
            *exchange_segments(self.experts),
            Compute(self.run_after_experts, ("x", arguments, "rows", "plan", *recorded), "x"),
        ]

    def hooked_segments(self, arguments: str) -> list[Segment]:
        """Return `segments`, with the layer's forward pre-hooks before them and its forward hooks after them."""
        return with_forward_hooks(self.layer, self.segments(arguments), ("x", arguments), ("x",))

    def _take_recorded(self) -> list[Any]:
        """Return the leaves of the outputs recorded before the experts, and clear the recorders."""
        leaves: list[Any] = []
        called_paths: list[str] = []
        output_specs: list[pytree.TreeSpec] = []
        for path, recorder in self._recorders.items():
            for result in recorder.results:
                result_leaves, spec = pytree.tree_flatten(result)
                leaves += result_leaves
                called_paths.append(path)
                output_specs.append(spec)
            recorder.results = []
        if not self._called_paths:
            self._called_paths = called_paths
            self._output_specs = output_specs
            self.num_recorded = len(leaves)
        if (called_paths, output_specs) != (self._called_paths, self._output_specs):
            raise RuntimeError(f"a {type(self.layer).__name__} called {called_paths} before its experts, but "
                               f"{self._called_paths} when it was cut; it cannot run in two parts: use "
                               "load_stages(..., overlap=False)")
        return leaves

    def _replay(self, leaves: Sequence[Any]) -> None:
        """Queue the recorded outputs, so that the modules before the experts return them."""
        start = 0
        for path, spec in zip(self._called_paths, self._output_specs):
            end = start + spec.num_leaves
            self._replays[path].results.append(pytree.tree_unflatten(list(leaves[start:end]), spec))
            start = end


def hidden_states_of(result: Any) -> Tensor:
    """Return the hidden states in a layer's result, which is a tensor or a tuple that starts with them."""
    return result[0] if isinstance(result, tuple) else result


def _find_experts(layer: nn.Module) -> str:
    """Return the path inside a layer of the only module that transformers calls through its experts interface.

    Raises CannotSplit if the layer has none or several.
    """
    paths = [path for path, module in layer.named_modules() if is_interface_experts(module)]
    if not paths:
        raise CannotSplit("has no experts that transformers calls through its experts interface")
    if len(paths) > 1:
        raise CannotSplit(f"has several modules of experts: {', '.join(paths)}")
    return paths[0]


def _sibling_paths(layer: nn.Module, experts_path: str) -> list[str]:
    """Return the paths of the siblings of the experts, and of the siblings of every module that contains the experts.

    Raises CannotSplit if a module that contains the experts has hooks: its forward runs twice.
    """
    paths: list[str] = []
    parent_path = ""
    for name in experts_path.split("."):
        parent = layer.get_submodule(parent_path)
        if parent_path and (parent._forward_hooks or parent._forward_pre_hooks or parent._backward_hooks):
            raise CannotSplit(f"has hooks on {parent_path}, which would run twice")
        siblings = [child for child, _ in parent.named_children() if child != name]
        paths += [f"{parent_path}.{sibling}".lstrip(".") for sibling in siblings]
        parent_path = f"{parent_path}.{name}".lstrip(".")
    return paths


def check_split(layer: nn.Module, x: Tensor, arguments: LayerArguments) -> SplitLayer:
    """Cut a layer, and compare its results and gradients in two parts with those of the whole layer.

    x: hidden states (B, S, H) of a few tokens.

    Returns the cut layer. Raises CannotSplit, with the reason, for a layer that must run as a whole.
    """
    split = SplitLayer(layer)
    if getattr(layer, "gradient_checkpointing", False) and layer.training:
        raise CannotSplit("is checkpointed by transformers (gradient_checkpointing_enable)")

    def run_whole(hidden_states: Tensor) -> Tensor:
        return hidden_states_of(layer.forward(hidden_states, *arguments.args, **arguments.kwargs))

    def run_parts(hidden_states: Tensor) -> Tensor:
        return run_segments(split.segments("arguments"), {"x": hidden_states, "arguments": arguments})["x"]

    whole_results = _output_and_gradients(run_whole, layer, x)
    try:
        with torch.no_grad(), _fork_random_state(x):
            split.run_before_experts(x, arguments)  # finds the outputs to record
        results = _output_and_gradients(run_parts, layer, x)
    except CannotSplit:
        raise
    except Exception as error:  # a layer with state or side effects may raise anything
        reason = _random_reason(layer) or f"fails in two parts: {str(error).partition('. ')[0]}"
        raise CannotSplit(reason) from error
    for name, whole_result in whole_results.items():
        if not _are_close(whole_result, results[name]):
            raise CannotSplit(_random_reason(layer) or f"computes something else in two parts: {name} differs")
    return split


def _fork_random_state(x: Tensor) -> AbstractContextManager[None]:
    """Return a context that preserves the caller's random state on the CPU and on the device of a tensor."""
    return torch.random.fork_rng([x.device] if x.is_cuda else [])


def _random_reason(layer: nn.Module) -> str:
    """Name the settings of a layer, such as a dropout, that let it draw random numbers in training; "" if none do."""
    settings = []
    for path, module in layer.named_modules():
        for name, value in vars(module).items():
            is_random = any(word in name for word in ("dropout", "jitter", "noise")) or (
                isinstance(module, _DropoutNd) and name == "p")
            if is_random and isinstance(value, int | float) and value > 0:
                settings.append(f"{path}.{name} = {value}".lstrip("."))
    if not settings:
        return ""
    return f"draws random numbers twice in two parts: {', '.join(settings)}; only with 0 can it be cut at its experts"


def _output_and_gradients(
    forward: Callable[[Tensor], Tensor], layer: nn.Module, x: Tensor
) -> dict[str, Tensor | None]:
    """Run a forward and a backward of a layer; return the output and all gradients by their names in messages."""
    parameters = {name: parameter for name, parameter in layer.named_parameters() if parameter.requires_grad}
    leaf = x.detach().clone().requires_grad_()
    # The seed gives the same result on all ranks; the fork preserves the caller's random state.
    with _fork_random_state(x), torch.enable_grad():
        torch.manual_seed(0)
        y = forward(leaf)
        weights = torch.linspace(-1, 1, y.numel(), dtype=y.dtype, device=y.device).view_as(y)
        gradients = torch.autograd.grad((y * weights).sum(), [leaf, *parameters.values()], allow_unused=True)
    results: dict[str, Tensor | None] = {"the output": y.detach()}
    results["the gradient of the hidden states"] = gradients[0]
    for name, gradient in zip(parameters, gradients[1:]):
        results[f"the gradient of {name}"] = gradient
    return results


def _are_close(expected: Tensor | None, actual: Tensor | None) -> bool:
    """Return True if two tensors are equal up to rounding; None counts as zeros."""
    if expected is None or actual is None:
        other = expected if actual is None else actual
        return other is None or not bool(other.count_nonzero())
    tolerance = max(TOLERANCE, 8 * torch.finfo(expected.dtype).eps)
    largest = expected.abs().max().item() if expected.numel() else 0.0
    return torch.allclose(expected, actual, rtol=tolerance, atol=tolerance * largest)
