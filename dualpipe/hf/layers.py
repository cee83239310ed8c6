"""A decoder layer of any model, cut at its experts: what comes before them, the experts, and what comes after.

A layer is one function, of which nothing is known but the modules that it calls. It is cut by running it twice. The
first run ends where the experts are reached, and what its modules have returned until then is noted. The second run
goes on from there: modules that have been called return what was noted, the experts return what came back from the
ranks, and nothing is computed twice but additions and changes of shape.

    layer      norm -> attention -> add -> norm -> router -> experts -> shared experts -> add
    first      norm    attention    add    norm    router  | reached
    between                                                  dispatch, experts, combine
    second     noted   noted        add    noted   noted     result     shared experts    add

Gradients are those of the layer: what was noted crosses from the first run to the second as any tensor does between
segments, and a result that the second run does not use gets none. A layer that is not such a function, as one with
random numbers in it, is found out by `check_split`, which compares both ways, and runs as a whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from dualpipe.hf.experts import dispatcher_of, exchange_segments
from dualpipe.hf.stand_ins import Known, Noted, PartReached, Reached, standing_in
from dualpipe.nn.segments import Compute, Segment, run_segments
from dualpipe.parallel.fsdp.forward_hooks import with_forward_hooks

ROUTED = ("rows", "weights", "plan")
TOLERANCE = 1e-4  # of a check in float32 or wider, relative to the largest number


class LayerArguments(NamedTuple):
    """What a layer is called with behind the hidden states."""

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
        self._reached = Reached()
        self._noted = {path: Noted(layer.get_submodule(path)) for path in _paths_beside(layer, self._experts_path)}
        self._known = {path: Known(layer.get_submodule(path)) for path in self._noted}
        self._result = Known()
        self._called: list[str] = []  # the modules called before the experts, in order, as the first run found them
        self._specs: list[pytree.TreeSpec] = []
        self.num_noted = 0

    def like(self, layer: nn.Module) -> SplitLayer:
        """Return another layer of the same form cut in the same way, without a check of its own."""
        other = SplitLayer(layer)
        other._called = self._called
        other._specs = self._specs
        other.num_noted = self.num_noted
        return other

    def first(self, x: Tensor, arguments: LayerArguments) -> tuple[Any, ...]:
        """Run the layer up to its experts; return rows, weights and plan to dispatch, and what was noted."""
        stand_ins: dict[str, nn.Module] = {**self._noted, self._experts_path: self._reached}
        for noted in self._noted.values():
            noted.results = []  # of a step that failed
        inputs: tuple[Any, ...] | None = None
        try:
            with standing_in(self.layer, stand_ins):
                self.layer.forward(x, *arguments.args, **arguments.kwargs)
        except PartReached as reached:
            inputs = reached.inputs
        if inputs is None or len(inputs) != 3:
            raise CannotSplit("does not call its experts with hidden states, indices and weights")
        hidden_states, top_k_index, top_k_weights = inputs
        results = self._take_noted()
        plan = dispatcher_of(self.experts).plan(hidden_states.flatten(0, -2), top_k_weights, top_k_index)
        return (*plan, *results)

    def second(self, x: Tensor, arguments: LayerArguments, rows: Tensor, plan: Any, *noted: Any) -> Tensor:
        """Run the layer from its experts on; return its hidden states."""
        y_TH = dispatcher_of(self.experts).finish(rows, plan)
        self._give_noted(noted)
        self._result.results = [y_TH]
        stand_ins: dict[str, nn.Module] = {**self._known, self._experts_path: self._result}
        try:
            with standing_in(self.layer, stand_ins):
                result = self.layer.forward(x, *arguments.args, **arguments.kwargs)
        finally:
            self._result.results = []
            for known in self._known.values():
                known.results = []
        return hidden_states_of(result)

    def segments(self, arguments: str) -> list[Segment]:
        """Return the segments from "x" and what is called `arguments` to "x"."""
        noted = tuple(f"noted{number}" for number in range(self.num_noted))
        return [
            Compute(self.first, ("x", arguments), (*ROUTED, *noted)),
            *exchange_segments(self.experts),
            Compute(self.second, ("x", arguments, "rows", "plan", *noted), "x"),
        ]

    def hooked_segments(self, arguments: str) -> list[Segment]:
        """Return `segments` between the layer's forward hooks."""
        return with_forward_hooks(self.layer, self.segments(arguments), ("x", arguments), ("x",))

    def _take_noted(self) -> list[Any]:
        """Return the leaves of what the modules before the experts have returned."""
        leaves: list[Any] = []
        called: list[str] = []
        specs: list[pytree.TreeSpec] = []
        for path, noted in self._noted.items():
            for result in noted.results:
                parts, spec = pytree.tree_flatten(result)
                leaves += parts
                called.append(path)
                specs.append(spec)
            noted.results = []
        if not self._called:
            self._called = called
            self._specs = specs
            self.num_noted = len(leaves)
        if (called, specs) != (self._called, self._specs):
            raise RuntimeError(f"a {type(self.layer).__name__} called {called} before its experts, and {self._called} "
                               "when it was cut; it cannot run in two parts: load_stages(..., overlap=False)")
        return leaves

    def _give_noted(self, leaves: Sequence[Any]) -> None:
        """Have the modules that were called before the experts return the same again."""
        start = 0
        for path, spec in zip(self._called, self._specs):
            end = start + spec.num_leaves
            self._known[path].results.append(pytree.tree_unflatten(list(leaves[start:end]), spec))
            start = end


def hidden_states_of(result: Any) -> Tensor:
    """Return the hidden states that a layer returns, alone or as the first of a tuple."""
    return result[0] if isinstance(result, tuple) else result


def _path_of_experts(layer: nn.Module) -> str:
    """Return the name inside of a layer of the module that transformers calls through its experts interface."""
    found = [path for path, module in layer.named_modules() if is_experts(module)]
    if not found:
        raise CannotSplit("has no experts that transformers calls through its experts interface")
    if len(found) > 1:
        raise CannotSplit(f"has several modules of experts: {', '.join(found)}")
    return found[0]


def is_experts(module: nn.Module) -> bool:
    """Return True for a module that transformers calls through its experts interface."""
    return all(hasattr(module, name) for name in ("has_gate", "is_transposed", "num_experts", "_apply_gate"))


def _paths_beside(layer: nn.Module, experts: str) -> list[str]:
    """Return the names of the modules that a layer calls besides its experts: those beside the experts, and those
    beside each module that has them inside. Raises CannotSplit for hooks of a module that would be called twice."""
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
        own = x.detach().clone().requires_grad_()
        # Seeded: the caller's random numbers stay as they are, and all ranks find the same.
        with torch.random.fork_rng([x.device] if x.is_cuda else []), torch.enable_grad():
            torch.manual_seed(0)
            y = hidden_states_of(forward(own))
            weights = torch.linspace(-1, 1, y.numel(), dtype=y.dtype, device=y.device).view_as(y)
            gradients = torch.autograd.grad((y * weights).sum(), [own, *parameters], allow_unused=True)
        return y.detach(), list(gradients)

    def in_parts(own: Tensor) -> Tensor:
        if not split.num_noted:
            with torch.no_grad():
                split.first(own, arguments)
        return run_segments(split.segments("arguments"), {"x": own, "arguments": arguments})["x"]

    expected, expected_gradients = run(lambda own: layer.forward(own, *arguments.args, **arguments.kwargs))
    try:
        found, found_gradients = run(in_parts)
    except CannotSplit:
        raise
    except Exception as error:  # whatever a layer that is no such function may raise
        raise CannotSplit(f"fails in two parts: {str(error).partition('. ')[0]}") from error
    names = ["the output", "the gradient of the hidden states",
             *(f"the gradient of {name}" for name, p in layer.named_parameters() if p.requires_grad)]
    pairs = zip(names, [expected, *expected_gradients], [found, *found_gradients])
    differing = [name for name, want, got in pairs if not _are_close(want, got)]
    if differing:
        raise CannotSplit(f"computes something else in two parts: {differing[0]} differs")
    return split


def _are_close(want: Tensor | None, got: Tensor | None) -> bool:
    if want is None or got is None:
        left = want if got is None else got
        return left is None or not bool(left.count_nonzero())
    tolerance = max(TOLERANCE, 8 * torch.finfo(want.dtype).eps)
    largest = want.abs().max().item() if want.numel() else 0.0
    return torch.allclose(want, got, rtol=tolerance, atol=tolerance * largest)
