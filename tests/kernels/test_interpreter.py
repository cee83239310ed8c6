"""Every kernel test once more with the Triton code itself, interpreted, in place of the reference.

Triton reads TRITON_INTERPRET when it is imported, and a process that interprets cannot compile: hence subprocesses.
"""

import os
import subprocess
import sys
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from pkgutil import iter_modules

import pytest

import dualpipe.kernels

HERE = Path(__file__).parent
FILES = sorted(path.name for path in HERE.glob("test_*.py"))
FILES.remove("test_interpreter.py")
# Not one for each file, as every interpreter takes seconds to start.
PARTS = tuple(FILES[first::4] for first in range(4))
NO_TESTS_COLLECTED = 5


def release(package):
    return tuple(map(int, version(package).split(".")[:2]))


INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
pytestmark = [
    pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed"),
    pytest.mark.skipif(
        find_spec("triton") is not None and release("triton") < (3, 7) and release("numpy") >= (2, 4),
        reason="the interpreter of Triton before 3.7 needs numpy before 2.4",
    ),
]

INTERPRETS = pytest.mark.skipif(INTERPRETED, reason="is interpreted already")


def check_interpreted(files, marks, timeout=300, allowed=(0,)):
    """Run the tests of these marks with interpreted kernels; they must end with one of the `allowed` statuses."""
    paths = [str(HERE / file) for file in files]
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-m", marks, f"--timeout={timeout}", *paths]
    env = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONSAFEPATH": "1"}
    result = subprocess.run(command, cwd=HERE.parents[1], env=env, capture_output=True, text=True)
    assert result.returncode in allowed, result.stdout[-5000:] + result.stderr[-1000:]


@pytest.mark.skipif(not INTERPRETED, reason="kernels are not interpreted")
def test_every_kernel_was_launched(launched):
    """By the tests before this one, which is the last of `test_interpreted`."""
    modules = [import_module(f"dualpipe.kernels.{each.name}") for each in iter_modules(dualpipe.kernels.__path__)]
    kernels = {f"{module.__name__}.{name}" for module in modules for name, kernel in vars(module).items()
               if name.endswith("_kernel") and getattr(kernel, "fn", kernel).__module__ == module.__name__
               and hasattr(kernel, "fn")}
    assert len(kernels) > 20 and kernels <= launched, sorted(kernels - launched)


@pytest.mark.slow
@INTERPRETS
def test_interpreted():
    """A case or two of each kernel; the rest, apart from bfloat16, comes below."""
    check_interpreted([*FILES, "test_interpreter.py"], "not gpu and not slow")


@INTERPRETS
@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("files", PARTS, ids=" ".join)
def test_interpreted_pairs(files):
    """Every test, every value of every parameter, and every two of them together, once."""
    check_interpreted(files, "slow and not matrix and not gpu")


@INTERPRETS
@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(36000)
@pytest.mark.parametrize("files", PARTS, ids=" ".join)
def test_interpreted_matrix(files):
    """All the rest, in hours."""
    check_interpreted(files, "matrix and not gpu", timeout=1200, allowed=(0, NO_TESTS_COLLECTED))
