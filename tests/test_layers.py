"""Rooms: importing a lower one loads no upper one. What each may import is a contract in pyproject.toml."""

from __future__ import annotations

import subprocess
import sys


def loaded_by(*modules: str) -> list[set[str]]:
    """Return, for each of the modules, those of ours that a process has after importing it alone."""
    code = ("import importlib, os, sys, torch\n"
            "for module in sys.argv[1:]:\n"
            "    if (child := os.fork()) == 0:\n"
            "        importlib.import_module(module)\n"
            "        print(*(m for m in sys.modules if m.split('.')[0] == 'dualpipe'), flush=True)\n"
            "        os._exit(0)\n"
            "    assert os.waitpid(child, 0)[1] == 0\n")
    done = subprocess.run([sys.executable, "-P", "-c", code, *modules], capture_output=True, text=True, check=True)
    return [set(line.split()) for line in done.stdout.splitlines()]


def test_lower_layers_load_no_upper_ones() -> None:
    by_layers, by_meshes = loaded_by("dualpipe.nn", "dualpipe.parallel.mesh")
    assert not {name for name in by_layers if name.startswith(("dualpipe.p", "dualpipe.m"))}
    rooms = {name.split(".")[1] for name in by_meshes if "." in name}
    assert rooms == {"kernels", "parallel", "quantized", "runtime"}, "kernels for what formats are"
