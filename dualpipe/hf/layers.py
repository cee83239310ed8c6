"""A decoder layer of any model, cut at its experts: what comes before them, the experts, and what comes after.

A layer is one function, of which nothing is known but the modules that it calls. It is cut by running it twice. The
first run stops at the experts, and records the outputs of the modules before them. The second run replays these
outputs: the modules return what they returned in the first run, the experts return what came back from the ranks, and
nothing is computed twice but additions and changes of shape.

    layer      norm   -> attention -> add -> norm   -> router -> experts -> shared experts -> add
    first      norm      attention    add    norm      router  | stop
    between                                                      dispatch, experts, combine
    second     replay    replay       add    replay    replay    result     shared experts    add

Gradients are those of the layer: the recorded outputs cross from the first run to the second as any tensor does between
segments, and an output that the second run does not use gets none. A layer that is not such a function, as one with
random numbers in it, is detected by `check_split`, which compares both ways, and runs as a whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from dualpipe.hf.experts import dispatcher_of, exchange_segments
from dualpipe.hf.stand_ins import ForwardStop, ForwardStopped, OutputRecorder, OutputReplay, standing_in
from dualpipe.nn.segments import Compute, Segment, run_segments
from dualpipe.parallel.experts.dispatcher import is_interface_experts
from dualpipe.parallel.fsdp.forward_hooks import with_forward_hooks

ROUTED = ("rows", "weights", "plan")
TOLERANCE = 1e-4  # of a check in float32 or wider, relative to the largest number


class LayerArguments(NamedTuple):
    """Arguments of a layer behind the hidden states."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class CannotSplit(ValueError):
    """A layer cannot be cut at its experts; the text says why."""


class SplitLayer:
    """A decoder layer that runs in two parts around its experts.

    Raises CannotSplit where the layer has no experts that can be left out, or hooks that would run twice.
    """

    def __init__(self, layer: nn.Module) -> None:
        self.layer = layer
        self._experts_path = _path_of_experts(layer)
        self.experts = layer.get_submodule(self._experts_path)
        self._stop = ForwardStop()
        modules = {path: layer.get_submodule(path) for path in _paths_beside(layer, self._experts_path)}
        self._recorders = {path: OutputRecorder(module) for path, module in modules.items()}
        self._replays = {path: OutputReplay(module) for path, module in modules.items()}
        self._experts_result = OutputReplay()
        self._called: list[str] = []  # the modules called before the experts, in order, in the first run of all
        self._specs: list[pytree.TreeSpec] = []
        self.num_recorded = 0

    def like(self, layer: nn.Module) -> SplitLayer:
        """Return another layer of the same form cut in the same way, without a check of its own."""
        other = SplitLayer(layer)
        other._called = self._called
        other._specs = self._specs
        other.num_recorded = self.num_recorded
        return other

    def first(self, x: Tensor, arguments: LayerArguments) -> tuple[Any, ...]:
        """Run the layer up to its experts; return rows, weights and plan to dispatch, and the recorded outputs."""
        stand_ins: dict[str, nn.Module] = {**self._recorders, self._experts_path: self._stop}
        for recorder in self._recorders.values():
            recorder.results = []  # of a step that failed
        inputs: tuple[Any, ...] | None = None
        try:
            with standing_in(self.layer, stand_ins):
                self.layer.forward(x, *arguments.args, **arguments.kwargs)
        except ForwardStopped as stopped:
            inputs = stopped.inputs
        if inputs is None or len(inputs) != 3:
            raise CannotSplit("does not call its experts with hidden states, indices and weights")
        hidden_states, top_k_index, top_k_weights = inputs
        outputs = self._take_recorded()
        plan = dispatcher_of(self.experts).plan(hidden_states.flatten(0, -2), top_k_weights, top_k_index)
        return (*plan, *outputs)

    def second(self, x: Tensor, arguments: LayerArguments, rows: Tensor, plan: Any, *recorded: Any) -> Tensor:
        """Run the layer from its experts on; return its hidden states."""
        y_TH = dispatcher_of(self.experts).finish(rows, plan)
        self._replay(recorded)
        self._experts_result.results = [y_TH]
        stand_ins: dict[str, nn.Module] = {**self._replays, self._experts_path: self._experts_result}
        try:
            with standing_in(self.layer, stand_ins):
                result = self.layer.forward(x, *arguments.args, **arguments.kwargs)
        finally:
            self._experts_result.results = []
            for replay in self._replays.values():
                replay.results = []
        return hidden_states_of(result)

    def segments(self, arguments: str) -> list[Segment]:
        """Return the segments from "x" and the value named `arguments` to "x"."""
        recorded = tuple(f"recorded{number}" for number in range(self.num_recorded))
        return [
            Compute(self.first, ("x", arguments), (*ROUTED, *recorded)),
            *exchange_segments(self.experts),
            Compute(self.second, ("x", arguments, "rows", "plan", *recorded), "x"),
        ]

    def hooked_segments(self, arguments: str) -> list[Segment]:
        """Return `segments` between the layer's forward hooks."""
        return with_forward_hooks(self.layer, self.segments(arguments), ("x", arguments), ("x",))

    def _take_recorded(self) -> list[Any]:
        """Return the leaves of the recorded outputs of the modules before the experts."""
        leaves: list[Any] = []
        called: list[str] = []
        specs: list[pytree.TreeSpec] = []
        for path, recorder in self._recorders.items():
            for result in recorder.results:
                parts, spec = pytree.tree_flatten(result)
                leaves += parts
                called.append(path)
                specs.append(spec)
            recorder.results = []
        if not self._called:
            self._called = called
            self._specs = specs
            self.num_recorded = len(leaves)
        if (called, specs) != (self._called, self._specs):
            raise RuntimeError(f"a {type(self.layer).__name__} called {called} before its experts, and {self._called} "
                               "when it was cut; it cannot run in two parts: load_stages(..., overlap=False)")
        return leaves

    def _replay(self, leaves: Sequence[Any]) -> None:
        """Have the modules before the experts return the recorded outputs."""
        start = 0
        for path, spec in zip(self._called, self._specs):
            end = start + spec.num_leaves
            self._replays[path].results.append(pytree.tree_unflatten(list(leaves[start:end]), spec))
            start = end


def hidden_states_of(result: Any) -> Tensor:
    """Return the hidden states of a layer's result, which is these alone or a tuple that starts with them."""
    return result[0] if isinstance(result, tuple) else result


def _path_of_experts(layer: nn.Module) -> str:
    """Return the name inside of a layer of the module that transformers calls through its experts interface."""
    paths = [path for path, module in layer.named_modules() if is_interface_experts(module)]
    if not paths:
        raise CannotSplit("has no experts that transformers calls through its experts interface")
    if len(paths) > 1:
        raise CannotSplit(f"has several modules of experts: {', '.join(paths)}")
    return paths[0]


def _paths_beside(layer: nn.Module, experts: str) -> list[str]:
    """Return the names of the modules beside the experts, and beside each module that has the experts inside.

    Raises CannotSplit for hooks of a module that would be called twice.
    """
    paths: list[str] = []
    around = ""
    for name in experts.split("."):
        outer = layer.get_submodule(around)
        if around and (outer._forward_hooks or outer._forward_pre_hooks or outer._backward_hooks):
            raise CannotSplit(f"has hooks on {around}, which would run twice")
        children = [child for child, _ in outer.named_children() if child != name]
        paths += [f"{around}.{child}".lstrip(".") for child in children]
        around = f"{around}.{name}".lstrip(".")
    return paths


def check_split(layer: nn.Module, x: Tensor, arguments: LayerArguments) -> SplitLayer:
    """Cut a layer, and compare a forward and a backward in two parts with its own; return the cut layer.

    x: (B, S, H) hidden states, a few. Raises CannotSplit, with the reason, for a layer that must run as a whole.
    """
    split = SplitLayer(layer)
    if getattr(layer, "gradient_checkpointing", False) and layer.training:
        raise CannotSplit("is checkpointed by transformers (gradient_checkpointing_enable)")
    parameters = [p for p in layer.parameters() if p.requires_grad]

    def run(forward: Any) -> tuple[Tensor, list[Tensor | None]]:
        leaf = x.detach().clone().requires_grad_()
        # Seeded: the caller's random numbers stay as they are, and all ranks come to the same result.
        with torch.random.fork_rng([x.device] if x.is_cuda else []), torch.enable_grad():
            torch.manual_seed(0)
            y = hidden_states_of(forward(leaf))
            weights = torch.linspace(-1, 1, y.numel(), dtype=y.dtype, device=y.device).view_as(y)
            gradients = torch.autograd.grad((y * weights).sum(), [leaf, *parameters], allow_unused=True)
        return y.detach(), list(gradients)

    def in_parts(hidden_states: Tensor) -> Tensor:
        if not split.num_recorded:
            with torch.no_grad():
                split.first(hidden_states, arguments)
        return run_segments(split.segments("arguments"), {"x": hidden_states, "arguments": arguments})["x"]

    expected, expected_gradients = run(lambda leaf: layer.forward(leaf, *arguments.args, **arguments.kwargs))
    try:
        result, gradients = run(in_parts)
    except CannotSplit:
        raise
    except Exception as error:  # whatever a layer that is no such function may raise
        raise CannotSplit(f"fails in two parts: {str(error).partition('. ')[0]}") from error
    names = ["the output", "the gradient of the hidden states",
             *(f"the gradient of {name}" for name, p in layer.named_parameters() if p.requires_grad)]
    pairs = zip(names, [expected, *expected_gradients], [result, *gradients])
    differing = [name for name, whole, parts in pairs if not _are_close(whole, parts)]
    if differing:
        raise CannotSplit(f"computes something else in two parts: {differing[0]} differs")
    return split


def _are_close(expected: Tensor | None, tensor: Tensor | None) -> bool:
    """Return True for equal tensors but for rounding; None stands for zeros."""
    if expected is None or tensor is None:
        other = expected if tensor is None else tensor
        return other is None or not bool(other.count_nonzero())
    tolerance = max(TOLERANCE, 8 * torch.finfo(expected.dtype).eps)
    largest = expected.abs().max().item() if expected.numel() else 0.0
    return torch.allclose(expected, tensor, rtol=tolerance, atol=tolerance * largest)
