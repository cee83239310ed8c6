"""Running the package as a module."""

import subprocess
import sys
from pathlib import Path

from dualpipe import cli

ROOT = Path(cli.__file__).parents[1]


def python(code, folder):
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_python_m_from_the_root_does_not_shadow_kernels():
    code = """
import importlib.util, runpy, sys
sys.argv = ["dualpipe", "--version"]
assert importlib.util.find_spec("kernels").origin.startswith(sys.path[0] or __import__("os").getcwd())
try:
    runpy.run_module("dualpipe", run_name="__main__", alter_sys=True)
except SystemExit:
    pass
spec = importlib.util.find_spec("kernels")
print(spec is None or "site-packages" in spec.origin)
"""
    assert python(code, ROOT).splitlines()[-1] == "True"
