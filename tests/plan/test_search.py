"""Which runs there are on a number of GPUs, and which is the best."""

import pytest

from dualpipe.plan import search
from plans import plan


@pytest.mark.slow
def test_meshes_whose_heads_do_not_divide_are_left_out(capsys, monkeypatch):
    monkeypatch.setattr(search, "LONG", 8)
    lines = plan(capsys, "--parallel.cp_method", "all_to_all", "--rows", "100")
    ranks = {line.split()[3] for line in lines if line.split()[:1] != ["row"] and line.split()[0].isdigit()}
    assert ranks == {"1", "2"}, "of 2 heads of keys and values"


@pytest.mark.slow
def test_least_memory_first(capsys):
    lines = plan(capsys, "--objective", "memory", "--rows", "4")
    assert lines[5].startswith("predicted, not measured: ") and lines[5].endswith("; least memory first")
    sizes = [float(line.split()[-2 if line.split()[-1] != "traffic" else -3]) for line in lines[1:5]]
    assert sizes == sorted(sizes)
