"""Runs actions in turn, so that one's communication is hidden behind another's computing.

Each action (a forward, a backward, weight gradients) is a generator that computes until its next communication, yields
it to be started, and waits for it when it is resumed. `walk` resumes those of a step in turn:

    F   attend 0   [dispatch 0]   experts 0   [combine 0]   finish 0, attend 1   ...
    B              finish 3       [combine 3] experts 3     [dispatch 3]         ...

While [dispatch 0] is in flight the backward computes `finish 3`, while [combine 3] is in flight the forward computes
`experts 0`, and so on, for any number of segments on either side and any kinds of actions. A full backward defers its
weight gradients and computes them when its own next communication has started: alone, it hides that behind them.

A communication may start in two parts: [dispatch 0] sends the numbers of rows, and the rows when the host knows them.
Communications run one behind the other, so the rows must be on their way before the backward starts [dispatch 3], which
waits for `experts 3`: before one action starts a communication, those of the others are advanced. On a device:

    computing       finish 3    attend 0    experts 3           experts 0    attend 3    finish 0
    communicating               combine 3   counts 0, rows 0    dispatch 3   combine 0

All ranks walk the same actions in the same order, whatever has arrived, so their communications match.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any

from torch import Tensor

from dualpipe.nn.segments import Pending


class InFlight:
    """One communication of an action, from what is sent to what has arrived.

    start: called with `values`. then: called when it has started, to compute what hides it.
    """

    def __init__(
        self, start: Callable[[tuple[Any, ...]], Pending], values: Sequence[Any], then: Callable[[], None]
    ) -> None:
        self._start: Callable[[tuple[Any, ...]], Pending] | None = start
        self._values = tuple(v.detach() if isinstance(v, Tensor) else v for v in values)
        self._then = then
        self._pending: Pending | None = None
        self._is_advanced = False

    def start(self) -> None:
        """Start it, and compute what it hides behind."""
        assert self._start is not None, "a communication starts once"
        start = self._start
        self._start = None
        self._pending = start(self._values)  # the values stay until the end, as other streams read them
        self._then()

    def advance(self) -> None:
        """Do what could not be done at the start, once."""
        if self._pending is not None and not self._is_advanced:
            self._is_advanced = True
            self._pending.advance()

    def finish(self) -> tuple[tuple[Any, ...], Any]:
        """Wait; return what was received, and the context for the backward."""
        self.advance()
        assert self._pending is not None, "only what has started is waited for"
        received = self._pending.wait()
        self._pending = None
        self._values = ()
        return received


Task = Generator[InFlight | None, None, None]  # None: it has computed something to hide the others' behind


def walk(tasks: Iterable[Task], turn: Callable[[int], None] | None = None) -> None:
    """Run tasks in turn, each until its next communication, and start that once those of the others are advanced.

    turn: told the number of the task before anything of it is run, for the error that this may raise.
    """
    running: deque[tuple[int, Task, InFlight | None]] = deque()
    for number, task in enumerate(tasks):
        running.append((number, task, None))
    turn = turn or _no_turn
    while running:
        number, task, _ = running.popleft()
        turn(number)
        try:
            in_flight = next(task)
        except StopIteration:
            continue
        for other_number, _, other in running:
            if other is not None:
                turn(other_number)
                other.advance()
        if in_flight is not None:
            turn(number)
            in_flight.start()
        running.append((number, task, in_flight))


def _no_turn(number: int) -> None:
    """Tell nobody."""
