"""Benchmarks are scripts: their folder is on `sys.path` only while a test imports them."""

from importlib import import_module

import pytest

from scripts import BENCHMARKS


@pytest.fixture
def script(monkeypatch):
    """script(name) -> the module of benchmarks/<name>.py."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return import_module
