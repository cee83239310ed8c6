"""Read the main loop of a kernel from its machine code: its waits, and the number of tiles in flight.

Triton's `num_stages` is a request. If loads depend on each other, or a tile passes through registers, the compiler
keeps fewer tiles in shared memory than requested. Only the machine code shows this: a loop that begins with a wait for
*all* loads overlaps none of them with its matrix instructions.

Example, sm_90: a loop with `DEPBAR.LE SB0, 0x2` leaves two groups of loads in flight, one with `DEPBAR.LE SB0, 0x0`
none.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

MATRIX_INSTRUCTIONS = ("HMMA", "HGMMA", "QGMMA", "IMMA", "DMMA", "UTCHMMA", "UTCQMMA", "UTCOMMA")
_INSTRUCTION = re.compile(r"^\s+/\*(?P<address>[0-9a-f]{4,})\*/\s+(?P<text>[^;]*);", re.M)
_BRANCH = re.compile(r"\bBRA(?:\.\S+)?\s+(?:!?U?P\d,\s*)?0x(?P<target>[0-9a-f]+)")
_LOAD_WAIT = re.compile(r"^(?:@\S+\s+)?DEPBAR\.LE SB0, 0x([0-9a-f]+)")
_MATRIX_WAIT = re.compile(r"^(?:@\S+\s+)?WARPGROUP\.DEPBAR\.LE gsb0, 0x([0-9a-f]+)")
_BUFFERED = re.compile(r"ttg\.local_alloc : \(\) -> !ttg\.memdesc<(\d+)(?:x\d+){2,5}x(?:bf16|f16|f32|f64|f8\w+|i8)\b")


@dataclass(frozen=True)
class Instruction:
    """One instruction: its address in the kernel, and its text with predicate and operands."""

    address: int
    text: str

    @property
    def is_matrix(self) -> bool:
        """Return True for a matrix instruction."""
        opcode = re.sub(r"^@\S+\s+", "", self.text)
        return opcode.startswith(MATRIX_INSTRUCTIONS)


@dataclass(frozen=True)
class MainLoop:
    """The shortest loop with matrix instructions.

    load_waits: for each wait for asynchronous copies, the number of groups of copies that it leaves in flight.
    matrix_waits: for each wait for asynchronous matrix instructions (sm_90), the groups that it leaves unfinished.
    """

    instructions: int
    matrix_instructions: int
    load_waits: tuple[int, ...]
    matrix_waits: tuple[int, ...]


def instructions(sass: str) -> list[Instruction]:
    """Return the instructions of a kernel, as `cuobjdump --dump-sass` prints them."""
    return [Instruction(int(match["address"], 16), match["text"].strip()) for match in _INSTRUCTION.finditer(sass)]


def main_loop(sass: str) -> MainLoop | None:
    """Return the shortest loop with matrix instructions; None if there is no such loop."""
    listing = instructions(sass)
    loops = []
    for instruction in listing:
        branch = _BRANCH.search(instruction.text)
        if branch is None:
            continue
        start = int(branch["target"], 16)
        if start >= instruction.address:
            continue
        body = [each for each in listing if start <= each.address <= instruction.address]
        if any(each.is_matrix for each in body):
            loops.append(body)
    if not loops:
        return None
    body = min(loops, key=len)
    return MainLoop(
        instructions=len(body),
        matrix_instructions=sum(each.is_matrix for each in body),
        load_waits=_waits(body, _LOAD_WAIT),
        matrix_waits=_waits(body, _MATRIX_WAIT),
    )


def _waits(body: list[Instruction], pattern: re.Pattern[str]) -> tuple[int, ...]:
    """Return the number of groups that each matching wait leaves unfinished, in the order of the loop."""
    matches = [pattern.match(instruction.text) for instruction in body]
    return tuple(int(match[1], 16) for match in matches if match is not None)


def buffers(ttgir: str) -> int:
    """Return the number of tiles of an operand in shared memory at a time, the minimum over operands; 0 for none.

    It is read from the allocations in Triton's GPU IR, whose first dimension is the number of tiles.
    """
    return min(map(int, _BUFFERED.findall(ttgir)), default=0)
