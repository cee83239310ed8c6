"""Compile kernels without a GPU and report the resources that each one needs.

    python benchmarks/compile_kernels.py [--arch 80 90 100] [--match SUBSTRING] [--part N/PARTS] [--json]

For each configuration in kernel_specs.py, print registers, stack bytes (which show spills), shared memory, the number
of matrix instructions, the tiles of an operand in shared memory, and the copies that each wait of the main loop leaves
in flight. Exit with status 1 if a kernel spills, needs more shared memory than the chip has, or lacks the matrix
instructions that its chip offers. TRITON_INTERPRET must not be set: a process that interprets cannot compile.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from kernel_specs import CompileSpec, all_specs

ARCHITECTURES = (80, 90, 100)
SHARED_LIMIT = {80: 166_912, 90: 232_448, 100: 232_448}  # bytes per block
MATRIX_INSTRUCTION = {80: "mma.sync", 90: "wgmma.mma_async", 100: "tcgen05.mma"}  # as named in PTX
_MATRIX_OPCODES = ("HMMA", "HGMMA", "QGMMA", "IMMA", "DMMA", "UTCHMMA", "UTCQMMA", "UTCOMMA")
_INSTRUCTION = re.compile(r"^\s+/\*(?P<address>[0-9a-f]{4,})\*/\s+(?P<text>[^;]*);", re.M)
_BRANCH = re.compile(r"\bBRA(?:\.\S+)?\s+(?:!?U?P\d,\s*)?0x(?P<target>[0-9a-f]+)")
_LOAD_WAIT = re.compile(r"^(?:@\S+\s+)?DEPBAR\.LE SB0, 0x([0-9a-f]+)")
_MATRIX_WAIT = re.compile(r"^(?:@\S+\s+)?WARPGROUP\.DEPBAR\.LE gsb0, 0x([0-9a-f]+)")
_BUFFERED = re.compile(r"ttg\.local_alloc : \(\) -> !ttg\.memdesc<(\d+)(?:x\d+){2,5}x(?:bf16|f16|f32|f64|f8\w+|i8)\b")


@dataclass(frozen=True)
class Resources:
    """Resources of one compiled kernel."""

    name: str
    arch: int
    registers: int
    stack: int  # bytes per thread
    shared: int  # bytes per block
    matrix_instructions: int
    buffers: int  # tiles of an operand in shared memory, see `buffers`
    load_waits: tuple[int, ...]  # main loop: groups of copies that each wait leaves in flight
    problems: tuple[str, ...]


def compile_spec(spec: CompileSpec, arch: int) -> Resources:
    """Compile a kernel for sm_`arch` and return its resources."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    order = spec.kernel.arg_names
    attrs = {(order.index(name),): [["tt.divisibility", 16]] for name in spec.divisible_by_16}
    signature = {name: spec.signature.get(name, "constexpr") for name in order}
    source = ASTSource(spec.kernel, signature, {(order.index(n),): v for n, v in spec.constexprs.items()}, attrs)
    options = {"num_warps": spec.num_warps, "num_stages": spec.num_stages, **spec.options}
    compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    registers, stack = _resource_usage(compiled.asm["cubin"])
    loop = main_loop(_cuobjdump(compiled.asm["cubin"], "--dump-sass")) if spec.needs_mma else None
    count = len(re.findall(re.escape(MATRIX_INSTRUCTION[arch]) + spec.mma_kind, compiled.asm["ptx"]))
    problems = []
    if stack:
        problems.append(f"spills: {stack} bytes of stack")
    if compiled.metadata.shared > SHARED_LIMIT[arch]:
        problems.append(f"needs {compiled.metadata.shared} bytes of shared memory, sm_{arch} has {SHARED_LIMIT[arch]}")
    if spec.needs_mma and not count:
        problems.append(f"no {MATRIX_INSTRUCTION[arch]}{spec.mma_kind}")
    return Resources(
        name=spec.name, arch=arch, registers=registers, stack=stack, shared=compiled.metadata.shared,
        matrix_instructions=count, buffers=buffers(compiled.asm["ttgir"]),
        load_waits=() if loop is None else loop.load_waits, problems=tuple(problems))


def _cuobjdump(cubin: bytes, option: str) -> str:
    """Return the output of cuobjdump, which Triton's wheel carries, for a compiled kernel."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([tool, option, file.name], capture_output=True, text=True, check=True).stdout


def _resource_usage(cubin: bytes) -> tuple[int, int]:
    """Return the registers and the stack bytes per thread."""
    text = _cuobjdump(cubin, "--dump-resource-usage")
    match = re.search(r"REG:(\d+) STACK:(\d+)", text)
    assert match is not None, f"cuobjdump printed no resource usage: {text[:200]}"
    return int(match[1]), int(match[2])


# -------------------------------------------------------------------------------------------------------- machine code
#
# Triton's `num_stages` is a request. If loads depend on each other, or a tile passes through registers, the compiler
# keeps fewer tiles in shared memory than requested. Only the machine code shows this: a loop that begins with a wait
# for *all* loads overlaps none of them with its matrix instructions.
#
# Example, sm_90: a loop with `DEPBAR.LE SB0, 0x2` leaves two groups of loads in flight, one with `DEPBAR.LE SB0, 0x0`
# none.


@dataclass(frozen=True)
class Instruction:
    """One instruction: its address in the kernel, and its text with predicate and operands."""

    address: int
    text: str

    @property
    def is_matrix(self) -> bool:
        """Return True for a matrix instruction."""
        opcode = re.sub(r"^@\S+\s+", "", self.text)
        return opcode.startswith(_MATRIX_OPCODES)


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


# -------------------------------------------------------------------------------------------------------- main program


def _part(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+)/(\d+)", text)
    if match is None or int(match[1]) >= int(match[2]):
        raise argparse.ArgumentTypeError(f"got {text!r}; give N/PARTS with N below PARTS, such as 3/14")
    return int(match[1]), int(match[2])


def main() -> int:
    """Print the table; see the module's docstring."""
    parser = argparse.ArgumentParser(description="compile every kernel without a GPU and show what it needs")
    parser.add_argument("--arch", type=int, nargs="+", default=list(ARCHITECTURES), choices=ARCHITECTURES)
    parser.add_argument("--match", default="", help="only configurations whose name contains this")
    parser.add_argument("--part", type=_part, default=(0, 1), metavar="N/PARTS",
                        help="only every PARTS-th configuration, from the N-th on, counting from 0")
    parser.add_argument("--json", action="store_true", help="one JSON object a line instead of a table")
    args = parser.parse_args()
    failed = False
    if not args.json:
        print(f"{'kernel':<56} {'arch':>4} {'regs':>5} {'stack':>5} {'shared':>7} {'mma':>4} {'tiles':>5} {'waits':>6}"
              "  problems")
    for arch in args.arch:
        matching = [spec for spec in all_specs(arch) if args.match in spec.name]
        number, parts = args.part
        for spec in matching[number::parts]:
            r = compile_spec(spec, arch)
            failed |= bool(r.problems)
            waits = ",".join(map(str, r.load_waits))
            row = (f"{r.name:<56} {r.arch:>4} {r.registers:>5} {r.stack:>5} {r.shared:>7} {r.matrix_instructions:>4} "
                   f"{r.buffers:>5} {waits:>6}")
            print(json.dumps(asdict(r)) if args.json else f"{row}  {'; '.join(r.problems)}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
