"""Modules that have moved: old paths give them, with a warning."""

from __future__ import annotations

import subprocess
import sys


def test_old_paths_give_the_modules_at_their_new_ones() -> None:
    code = ("import importlib, warnings\n"
            "from dualpipe._moved import MOVED\n"
            "for old, new in MOVED.items():\n"
            "    with warnings.catch_warnings(record=True) as caught:\n"
            "        warnings.simplefilter('always')\n"
            "        module = importlib.import_module(old)\n"
            "    assert module is importlib.import_module(new), old\n"
            "    assert module.__spec__.name == new, module.__spec__\n"
            "    assert any(f'{old} has moved to {new}' in str(each.message) for each in caught), old\n"
            "from dualpipe.parallel import materialize, shard\n"
            "assert callable(materialize) and callable(shard)\n")
    subprocess.run([sys.executable, "-P", "-c", code], check=True)
