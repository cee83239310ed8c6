"""Compiled kernels stay within their budgets, and what is read from machine code is what is there."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from scripts import fork_script

FOLDER = Path(__file__).parents[2] / "benchmarks"

pytestmark = [
    pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed"),
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="a process that interprets cannot compile"),
]

SASS = """
        /*0000*/                   MOV R1, c[0x0][0x28] ;                /* 0x1 */
        /*0010*/                   HGMMA.64x256x16.F32.BF16 R24, gdesc[UR8] ;  /* 0x1 */
        /*0020*/                   LDGSTS.E.BYPASS.128 [R15], desc[UR28][R26.64] ;  /* 0x1 */
        /*0030*/                   DEPBAR.LE SB0, 0x2 ;                  /* 0x1 */
        /*0040*/                   HGMMA.64x256x16.F32.BF16 R24, gdesc[UR8], gsb0 ;  /* 0x1 */
        /*0050*/                   WARPGROUP.DEPBAR.LE gsb0, 0x1 ;       /* 0x1 */
        /*0060*/               @P0 BRA 0x90 ;                            /* 0x1 */
        /*0070*/              @!P0 BRA 0x20 ;                            /* 0x1 */
        /*0080*/                   DEPBAR.LE SB0, 0x0 ;                  /* 0x1 */
        /*0090*/              @!P1 BRA 0x0 ;                             /* 0x1 */
        /*00a0*/                   BRA 0xa0 ;                            /* 0x1 */
"""
TTGIR = """
    %a = ttg.local_alloc : () -> !ttg.memdesc<3x64x128xbf16, #shared, #smem, mutable>
    %b = ttg.local_alloc : () -> !ttg.memdesc<2x1x1x64x256xf8E4M3FN, #shared, #smem, mutable>
    %i = ttg.local_alloc : () -> !ttg.memdesc<1x64xi32, #shared2, #smem, mutable>
    %t = ttg.local_alloc %x : (tensor<1x128x128xf32, #l>) -> !ttg.memdesc<1x128x128xf32, #shared1, #smem>
"""


def run(code, *arguments):
    """Run Python code beside the benchmarks, without the interpreter; what it prints, as JSON."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment |= {"PYTHONSAFEPATH": "1", "PYTHONPATH": str(FOLDER)}
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], env=environment, capture_output=True, text=True, timeout=1000)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


READ = """
import json, sys
from dataclasses import asdict
from compile_kernels import buffers, main_loop
print(json.dumps([asdict(main_loop(sys.argv[1])), main_loop("no loop"), buffers(sys.argv[2]), buffers("")]))
"""


def test_the_main_loop_and_its_buffers_are_read():
    """The shorter of two loops; of two operands the one with fewer tiles; neither indices nor what is not loaded."""
    loop, none, buffers, no_buffers = run(READ, SASS, TTGIR)
    assert loop == {"instructions": 6, "matrix_instructions": 1, "load_waits": [2], "matrix_waits": [1]}
    assert none is None
    assert (buffers, no_buffers) == (2, 0)


JUDGE = """
import json
from dataclasses import replace
from kernel_budget import KernelBudget, estimated_share, resident_programs
budget = KernelBudget(registers=200, shared=1000, buffers=3, load_wait=2, matrix_instructions=8)
changes = [{}, {"registers": 208}, {"registers": 209}, {"shared": 1001}, {"buffers": 2}, {"load_wait": 0},
           {"matrix_instructions": 4}, {"buffers": 4, "shared": 900, "load_wait": 4}]
worse = [budget.excesses(replace(budget, **change)) for change in changes]
by_engine = replace(budget, load_wait=None)
worse.append(by_engine.excesses(budget))
worse.append(budget.excesses(by_engine))
programs = [resident_programs(replace(budget, registers=r, shared=s), 8)
            for r, s in ((200, 147992), (110, 98840), (128, 65536), (32, 1))]
print(json.dumps([worse, [estimated_share(128, 256, 64, n) for n in (2, 3, 4)], programs]))
"""


def test_what_is_over_the_budget_is_named_and_what_is_better_is_not():
    worse, shares, programs = run(JUDGE)
    assert worse == [
        [], [], ["209 registers instead of 200"], ["1001 bytes of shared memory instead of 1000"],
        ["2 tiles in shared memory instead of 3"],
        ["the loop waits until 0 copies are on their way instead of 2"],
        ["4 matrix instructions instead of 8"], [],
        ["the loop waits for copies by threads, which TMA made before"], [],
    ]
    cycles = 32 * 1024
    assert shares == pytest.approx([cycles / (32 * 1568 + 1568 + 1024), *[cycles / (cycles + 1568 + 1024)] * 2])
    assert programs == [1, 2, 2, 8]


COMPARE = """
import json, sys
from dataclasses import replace
from compile_kernels import compile_spec
from kernel_budget import ARCH, budgeted_specs, excesses, read_budget
budget = read_budget()
specs = [spec for match in sys.argv[1].split() for spec in budgeted_specs(match)]
shallow = [replace(spec, num_stages=3) for spec in specs if "wide_gathered" in spec.name]
lines = [excesses(budget, [compile_spec(spec, ARCH) for spec in each]) for each in (specs, shallow)]
print(json.dumps([len(budget), len(specs), *lines]))
"""


@pytest.mark.slow
def test_kernels_of_an_expert_layer_are_within_their_budgets_and_a_lost_stage_is_found():
    """The gathered weight gradient with as many stages as the plain one, which has two tiles instead of three."""
    names = "rows.wide.bf16.16.gather_bias wide_gathered.bf16.16.fp32_add.gather.dy.out"
    budgets, count, over, shallow = run(COMPARE, names)
    if not budgets:
        pytest.skip("the budget is of another version of Triton")
    assert count == 2 and not over
    (line,) = shallow
    assert "2 tiles in shared memory instead of 3, the loop waits until 0 copies are on their way instead of 2" in line


@pytest.mark.slow
def test_the_script_compares_a_kernel_with_its_budget():
    done = fork_script(FOLDER / "kernel_budget.py", "--match", "weight.narrow.bf16.16.bf16_write", timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 kernels are within their budgets" in done.stdout or "nothing is compared" in done.stderr


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_all_kernels_are_within_their_budgets():
    budgets, count, over, _ = run(COMPARE, "grouped_gemm")
    if not budgets:
        pytest.skip("the budget is of another version of Triton")
    assert count == budgets and not over, "\n".join(over)
