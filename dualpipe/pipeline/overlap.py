"""Overlap of actions: the communication of one is hidden behind the computation of another.

Every action (a forward, a backward, weight gradients) is a generator. It computes until its next communication and
yields that to be started. When it is resumed, it computes on, and waits for the communication before the first segment
that needs the results. `walk` resumes the actions of a step in turn. The executor puts a backward, here from layer 3
on, before the forward:

    B   finish 3   [combine 3]   experts 3      [dispatch 3]   attend 3      ...
    F              attend 0      [dispatch 0]   experts 0      [combine 0]   finish 0, attend 1   ...

While [combine 3] is in flight, the forward computes `attend 0`; while [dispatch 0] is in flight, the backward computes
`experts 3`; and so on, for any number of segments and any kinds of actions. A full backward defers its weight gradients
and computes them when its next communication has started: without another action, they hide that communication.

A communication may start in two parts: [dispatch 0] first sends the numbers of rows, and then, once the host knows
these, the rows. Communications run one after the other in the order of their starts, and [dispatch 3] cannot run before
`experts 3` has ended. If the rows were started after [dispatch 3], `experts 3` could not hide them. So before an action
starts a communication, `walk` advances those of the other actions: it starts their second parts. On a device:

    computing       finish 3    attend 0    experts 3           experts 0    attend 3    finish 0
    communicating               combine 3   counts 0, rows 0    dispatch 3   combine 0

All ranks run the same actions in the same order, whatever has arrived, so their communications match.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any

from torch import Tensor

from dualpipe.nn.segments import Pending


class InFlight:
    """One communication of an action. The action yields it to have it started, and waits for it later.

    Args:
        start: starts the communication of `values`: a method of the stage's `Communication`.
        values: values to send, tensors or not.
        then: called after the start, to compute work that hides the communication.
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
        """Start the communication, and compute work that hides it."""
        assert self._start is not None, "a communication starts once"
        start = self._start
        self._start = None
        self._pending = start(self._values)  # `self` keeps the values until the end, as other streams read them
        self._then()

    def advance(self) -> None:
        """Start the second part of the communication, once."""
        if self._pending is not None and not self._is_advanced:
            self._is_advanced = True
            self._pending.advance()

    def finish(self) -> tuple[tuple[Any, ...], Any]:
        """Wait for the communication; return the received values, and the context for the backward."""
        self.advance()
        assert self._pending is not None, "a communication is waited for after its start"
        received = self._pending.wait()
        self._pending = None
        self._values = ()
        return received


Task = Generator[InFlight | None, None, None]  # yields None after work that hides the others' communications


def walk(tasks: Iterable[Task], turn: Callable[[int], None] | None = None) -> None:
    """Run tasks in turn, each until its next communication; advance those of the others, then start it.

    turn: called with the index of a task before any of its work runs, so that an error can be attributed to it.
    """
    running: deque[tuple[int, Task, InFlight | None]] = deque()
    for index, task in enumerate(tasks):
        running.append((index, task, None))
    turn = turn or _ignore_turn
    while running:
        index, task, _ = running.popleft()
        turn(index)
        try:
            in_flight = next(task)
        except StopIteration:
            continue
        for other_index, _, other in running:
            if other is not None:
                turn(other_index)
                other.advance()
        if in_flight is not None:
            turn(index)
            in_flight.start()
        running.append((index, task, in_flight))


def _ignore_turn(index: int) -> None:
    """Do nothing."""
