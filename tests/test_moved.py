"""Modules that have moved: old paths give them, with a warning."""

from __future__ import annotations

from pathlib import Path

from scripts import fork_script


def test_old_paths_give_the_modules_at_their_new_ones(tmp_path: Path) -> None:
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
    (script := tmp_path / "old_paths.py").write_text(code)
    done = fork_script(script)
    assert done.returncode == 0, done.stderr
