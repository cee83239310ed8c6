"""Benchmarks are scripts: their folder is on `sys.path` only while a test imports them."""

from importlib import import_module
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def script(monkeypatch):
    """script(name) -> the module of benchmarks/<name>.py."""
    monkeypatch.syspath_prepend(str(FOLDER))
    return import_module
