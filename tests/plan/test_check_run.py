"""`dualpipe memory` and `dualpipe plan` refuse what a run refuses, with its message."""

from pathlib import Path

import pytest

from dualpipe import cli

TOML = str(Path(cli.__file__).parents[1] / "examples" / "tiny-cpu.toml")
BF16 = ["--train.dtype", "bf16"]
ON_GPUS = ["--parallel.device", "cuda"]
FP8_BLOCK = ["--dtypes.rules", "*.experts,storage=fp8_block"]


@pytest.mark.parametrize("options, message", [
    (["--parallel.dispatch", "two_hop"], "'two_hop' between 2 expert-parallel ranks"),
    (["--dtypes.fp8_dispatch", "True"], "dtypes.fp8_dispatch"),
    ([*BF16, "--dtypes.rules", "*.o_proj,storage=fp8_block"], "cuts through the blocks of 128"),
    (["--parallel.ep", "3"], "cannot be divided evenly among 3"),
    (["--optimizer.groups", "nope,lr=1"], "'nope'"),
    (["--optimizer.groups", "norm,algorithm=muon"], "Muon"),
])
def test_the_memory_of_a_layout_that_a_run_refuses_is_not_estimated(options, message, capsys):
    assert cli.main(["memory", TOML, "--parallel.ep", "2", *options]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("options", [
    ["--parallel.dispatch", "two_hop", "--parallel.ranks_per_node", "1"],
    [*ON_GPUS, *BF16, *FP8_BLOCK, "--dtypes.fp8_dispatch", "True"],
    ["--optimizer.groups", "*.gate,lr=1"],
])
def test_a_layout_that_a_run_may_accept_is_estimated(options, capsys):
    assert cli.main(["memory", TOML, "--parallel.ep", "2", *options]) == 0
    assert "at most" in capsys.readouterr().out


def test_a_plan_leaves_out_what_a_run_refuses(capsys):
    """Experts on ranks of one node cannot be reached in two hops; without another mesh the run's error is shown."""
    run = ["plan", TOML, "--gpus", "2", "--parallel.dispatch", "two_hop"]
    assert cli.main(run) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    column = rows[0].index("ep")
    assert {row[column] for row in rows[1:] if row[0].isdecimal()} == {"1"}
    assert cli.main([*run, "--dtypes.fp8_dispatch", "True"]) == 2
    assert "dtypes.fp8_dispatch" in capsys.readouterr().err
