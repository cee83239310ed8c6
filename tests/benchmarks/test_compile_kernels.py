"""Every kernel and configuration of the table compiles for each chip, without spills, with matrix instructions.

In processes without TRITON_INTERPRET, because a process that interprets cannot compile.
"""

import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from few_cases import PARTS
from scripts import fork_script

ROOT = Path(__file__).parents[2]
TOOL = ROOT / "benchmarks" / "compile_kernels.py"
ARCHITECTURES = (80, 90, 100)
# Of all files, what a training step on sm_90 launches most; the rest is `slow`.
FAST = ("rows.wide.bf16.16", "grouped_gemm_fp8.fp8_block.a.w")

pytestmark = [
    pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed"),
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="a process that interprets cannot compile"),
]


def without_interpreter(*arguments):
    env = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    env |= {"PYTHONSAFEPATH": "1", "PYTHONPATH": str(TOOL.parent)}
    return subprocess.run([sys.executable, *arguments], env=env, capture_output=True, text=True)


def compile_table(*arguments):
    result = fork_script(TOOL, "--json", *arguments, timeout=1100)
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    problems = [f"{row['name']} sm_{row['arch']}: {', '.join(row['problems'])}" for row in rows if row["problems"]]
    assert rows and not problems and result.returncode == 0, "\n".join(problems) + result.stderr[-3000:]
    return rows


@pytest.mark.slow
@pytest.mark.parametrize("part", FAST)
def test_main_configurations_compile(part):
    for row in compile_table("--arch", "90", "--match", part):
        assert row["matrix_instructions"] > 0


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_everything_compiles(arch, request):
    """With --matrix-part, only that part of it."""
    part = request.config.getoption("--matrix-part")
    number, parts = (0, 1) if part is None else (part % PARTS, PARTS)
    rows = compile_table("--arch", str(arch), "--part", f"{number}/{parts}")
    assert len({row["name"] for row in rows}) >= 50 // parts


LISTED = """
import json
from compile_kernels import ARCHITECTURES
from kernel_specs import all_specs
kernels = {spec.kernel for arch in ARCHITECTURES for spec in all_specs(arch)}
print(json.dumps([(kernel.__module__.split(".")[-1], kernel.__name__) for kernel in kernels]))
"""


@pytest.mark.slow
def test_every_kernel_has_configurations():
    listed = without_interpreter("-c", LISTED)
    assert listed.returncode == 0, listed.stderr[-3000:]
    kernels = re.compile(r"^@triton\.jit(?:\(.*\))?(?:  #.*)?\ndef (\w+_kernel)\(", re.M)
    files = (ROOT / "kernels").glob("*.py")
    written = {(path.stem, name) for path in files for name in kernels.findall(path.read_text())}
    assert len(written) >= 10
    assert {tuple(pair) for pair in json.loads(listed.stdout)} == written


ADDRESSES = """
import json, re, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from kernel_specs import all_specs
for spec in all_specs(80):
    if spec.name.startswith("grouped_gemm.") and (".odd." in spec.name or "wide.bf16.8" in spec.name):
        order = spec.kernel.arg_names
        signature = {name: spec.signature.get(name, "constexpr") for name in order}
        source = ASTSource(spec.kernel, signature, {(order.index(n),): v for n, v in spec.constexprs.items()})
        ttir = triton.compile(source, target=GPUTarget("cuda", 80, 32)).asm["ttir"]
        added = re.findall(r"tt.addptr .*: tensor<.*!tt.ptr<(?:bf16|f32|f64)>>, tensor<[0-9x]+x(i[0-9]+)>", ttir)
        products = re.findall(r"arith.muli .*: tensor<[0-9x]+x(i[0-9]+)>", ttir)
        print(json.dumps([spec.name, added, products]))
"""


@pytest.mark.slow
def test_addresses_are_computed_in_64_bits():
    """No product of a row and a stride in 32 bits, and no 32-bit offset into a matrix."""
    result = without_interpreter("-c", ADDRESSES)
    assert result.returncode == 0, result.stderr[-3000:]
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    assert len(lines) >= 8
    for name, added, products in lines:
        assert len(added) >= 4 and set(added) == {"i64"}, name
        assert len(products) >= 2 and set(products) == {"i64"}, name
