"""Schedules as the compute-only CSV of torch.distributed.pipelining, one row a rank, both ways.

A cell is `<stage><kind><micro-batch>`, such as 0F7, or a forward overlapped with a whole backward:
(0F7;7B3)OVERLAP_F_B. torch has no cell for other pairs; their actions are written one after the other.
"""

from __future__ import annotations

import csv
import io
import re

from dualpipe.schedule.types import Action, Schedule, ScheduleError, Step

_ACTION = re.compile(r"(\d+)([FBIW])(\d+)", re.ASCII)
_OVERLAP = re.compile(r"\(([^;()]*);([^;()]*)\)OVERLAP_F_B")


def to_torch_csv(schedule: Schedule) -> str:
    """One line a rank. In an overlapped pair the forward comes first, as torch has it."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    for steps in schedule.ranks:
        writer.writerow(cell for step in steps for cell in _cells(step))
    return text.getvalue()


def _cells(step: Step) -> list[str]:
    if len(step) == 2 and {action.kind for action in step} == {"F", "B"}:
        forward, backward = sorted(step, key=lambda action: action.kind != "F")
        return [f"({forward};{backward})OVERLAP_F_B"]
    return [str(action) for action in step]


def from_torch_csv(text: str, name: str = "csv") -> Schedule:
    """The schedule in `text`, with as many stages and micro-batches as its cells name; empty cells are idle time.

    Raises ScheduleError, naming row and cell, where a cell is malformed. Use `validate` to know whether it can be run.
    """
    rows = list(csv.reader(io.StringIO(text.rstrip("\r\n"), newline="")))
    ranks = [
        [_step(cell.strip(), row, column) for column, cell in enumerate(cells) if cell.strip()]
        for row, cells in enumerate(rows)
    ]
    actions = [action for steps in ranks for step in steps for action in step]
    if not actions:
        raise ScheduleError(f"schedule {name!r}: the CSV has no actions")
    num_stages = 1 + max(action.stage for action in actions)
    if num_stages > len(actions):  # before anything is made for each stage
        raise ScheduleError(f"schedule {name!r}: stage {num_stages - 1} among only {len(actions)} actions")
    num_microbatches = 1 + max(action.microbatch for action in actions)
    return Schedule(name, len(ranks), num_stages, num_microbatches, tuple(map(tuple, ranks)))


def _step(cell: str, row: int, column: int) -> Step:
    if overlap := _OVERLAP.fullmatch(cell):
        return tuple(_action(part.strip(), row, column) for part in overlap.groups())
    return (_action(cell, row, column),)


def _action(text: str, row: int, column: int) -> Action:
    match = _ACTION.fullmatch(text)
    if match is None or max(map(len, match.groups())) > 9:
        raise ScheduleError(
            f"row {row}, cell {column}: {text!r} is not an action like 0F7, nor a pair like (0F7;7B3)OVERLAP_F_B"
        )
    stage, kind, microbatch = match.groups()
    return Action(kind, int(stage), int(microbatch))
