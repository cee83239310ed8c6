"""Order of starts in a pair, and computation during every all-to-all of experts, on a pretend device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from dualpipe.nn import GroupedLinear, defer_weight_grads
from dualpipe.nn.deferral import WeightGradStore
from dualpipe.nn.segments import Communicate, Compute
from dualpipe.parallel.experts.dispatcher import ExpertParallel, run_experts
from dualpipe.pipeline.compiled_stage import compile_segments
from dualpipe.pipeline.microbatch_state import MicrobatchState
from dualpipe.pipeline.overlap import walk
from dualpipe.pipeline.stage_runner import StageRunner
from pretend_cuda import pretend_cuda
from threads import Rank, ThreadAllToAll, run_threads

RANKS, TOKENS, WIDTH, EXPERTS = 2, 6, 8, 4


class Entry(NamedTuple):
    what: str
    time: int  # of the computing stream: when it is given to it, or up to when a communication waits for it


class Noted(ThreadAllToAll):
    """An all-to-all that logs computation, starts and waits of its rank."""

    def __init__(self, rank: Rank) -> None:
        super().__init__(rank, "ep", range(RANKS))
        self.log: list[Entry] = []
        self.who, self._computing = "", torch.cuda.current_stream()

    def note(self, what: str) -> None:
        self.log.append(Entry(what, torch.cuda.current_stream().clock[self._computing.number]))

    def start(self, received: Tensor, sent: Tensor, *rows: Any) -> Any:
        self.note(f"{self.who}: {'counts' if sent.dtype is torch.int64 else 'rows'}")
        return super().start(received, sent, *rows)


class Named:
    """A communication, or its pending part, that logs starts and waits under a name."""

    group = None

    def __init__(self, name: str, noted: Noted, inner: Any) -> None:
        self._name, self._noted, self._inner = name, noted, inner

    def _call(self, method: str, *args: Any) -> Any:
        with mock.patch.object(self._noted, "who", self._name):
            return getattr(self._inner, method)(*args)

    def forward(self, inputs: Any) -> Named:
        return Named(self._name, self._noted, self._call("forward", inputs))

    def backward(self, context: Any, gradients: Any) -> Named:
        return Named(self._name, self._noted, self._call("backward", context, gradients))

    def advance(self) -> None:
        self._call("advance")

    def wait(self) -> Any:
        self._noted.note(f"{self._name}: wait")
        return self._call("wait")


class Layer(nn.Module):
    """A linear in place of attention, and one expert per rank; all tokens go to both ranks."""

    def __init__(self, name: str, noted: Noted) -> None:
        super().__init__()
        self.attention, self.up = nn.Linear(WIDTH, WIDTH), GroupedLinear(EXPERTS // RANKS, WIDTH, WIDTH)
        self._name, self._noted = name, noted

    def _computed(self, segment: str, fn: Callable[..., Tensor], *args: Any) -> Tensor:
        """Return the result of `fn`; log its beginning and that of its backward."""

        self._noted.note(f"{self._name} {segment}")
        result = fn(*args)
        if result.requires_grad:
            result.register_hook(lambda _: self._noted.note(f"{self._name} {segment}"))
        return result

    def segments(self, dispatcher: Any) -> list:
        def attend(x):
            h = self._computed("attend", self.attention, x)
            first = torch.arange(len(x), device=x.device) % EXPERTS
            choices = torch.stack((first, (first + EXPERTS // 2) % EXPERTS), 1)
            return x, *dispatcher.plan(h, h[:, :2].sigmoid(), choices)

        def up(x, tokens, weights):
            return self.up(x, tokens.offs) * weights[:, None]

        def experts(*inputs):
            return self._computed("experts", run_experts, up, *inputs)

        def finish(residual, rows, plan):
            return self._computed("finish", lambda: residual + dispatcher.finish(rows, plan))

        dispatch, combine = (Named(f"{self._name} {way}", self._noted, getattr(dispatcher, way))
                             for way in ("dispatch", "combine"))
        return [
            Compute(attend, "x", ("residual", "rows", "weights", "plan")),
            Communicate(dispatch, ("rows", "weights", "plan"), ("rows", "weights", "received")),
            Compute(experts, ("rows", "weights", "received"), "rows"),
            Communicate(combine, ("rows", "received"), "rows"),
            Compute(finish, ("residual", "rows", "plan"), "x"),
        ]


class Store(WeightGradStore):
    def __init__(self, noted: Noted) -> None:
        super().__init__()
        self._noted = noted

    def add(self, fn: Any) -> None:
        super().add(lambda: (self._noted.note("weights"), fn()))


def walked(rank: Rank, kinds: str) -> list[Entry]:
    """Return the log of a walk of two actions in the executor's order: backwards first.

    They are called by their kind, a second one of a kind by "G".
    """
    noted = Noted(rank)
    store, expert_parallel = Store(noted), ExpertParallel(EXPERTS, noted)
    tasks = []
    with store.activate(), torch.autograd.set_multithreading_enabled(False):
        for i, kind in enumerate(kinds):
            layer = defer_weight_grads(Layer("G" if kind in kinds[:i] else kind, noted))
            segments = layer.to(rank.device).segments(expert_parallel.dispatcher())
            stage, state = StageRunner(compile_segments(segments, ("x",)), store), MicrobatchState()
            state.begin({"x": torch.ones(TOKENS, WIDTH, device=rank.device, requires_grad=True)})
            task = stage.forward(state)
            if kind != "F":
                walk([task])
                state.gradients = {"x": torch.ones_like(state.carry.pop("x"))}
                task = stage.backward(state, "B" if kind == "B" else "I", i)
            if kind == "W":
                walk([task])
                task = stage.compute_deferred(i, turns=2)
            tasks.append(task)
        noted.log.clear()
        walk(tasks)
    return noted.log


def beside(log: list[Entry]) -> list[tuple[str, str]]:
    """Return the starts in order, each with the computation between its start and its wait."""
    found = []
    for i, start in enumerate(log):
        name, _, part = start.what.partition(": ")
        if part in ("counts", "rows"):
            end = next(n for n, entry in enumerate(log) if n > i and entry.what == f"{name}: wait")
            computed = [entry.what for entry in log[:end] if ":" not in entry.what and entry.time >= start.time]
            found.append((start.what, ", ".join(dict.fromkeys(computed))))
    return found


# In a dispatch the rows go out as two all-to-alls: the hidden states, and their weights.
ORDER = {
    "BF": [
        ("B combine: rows", "F attend"),
        ("F dispatch: counts", "B experts, weights"),
        ("F dispatch: rows", "B experts, weights"), ("F dispatch: rows", "B experts, weights"),
        ("B dispatch: rows", "weights, F experts"), ("B dispatch: rows", "weights, F experts"),
        ("F combine: rows", "B attend, weights"),
    ],
    "IF": [
        ("I combine: rows", "F attend"),
        ("F dispatch: counts", "I experts"), ("F dispatch: rows", "I experts"), ("F dispatch: rows", "I experts"),
        ("I dispatch: rows", "F experts"), ("I dispatch: rows", "F experts"),
        ("F combine: rows", "I attend"),
    ],
    "FW": [
        ("F dispatch: counts", "weights"), ("F dispatch: rows", "weights"), ("F dispatch: rows", "weights"),
        ("F combine: rows", "weights"),
    ],
    "FF": [
        ("F dispatch: counts", "G attend"), ("F dispatch: rows", "G attend"), ("F dispatch: rows", "G attend"),
        ("G dispatch: counts", "F experts"), ("G dispatch: rows", "F experts"), ("G dispatch: rows", "F experts"),
        ("F combine: rows", "G experts"),
        ("G combine: rows", "F finish"),
    ],
}


@pytest.mark.parametrize("kinds", ORDER)
def test_order_of_starts_and_what_each_is_beside(kinds):
    with pretend_cuda() as device:
        logs = run_threads(walked, RANKS, kinds, device="cuda")
    assert [beside(log) for log in logs] == [ORDER[kinds]] * RANKS
    assert device.report({}) == []
