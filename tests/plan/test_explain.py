"""Terms of a prediction: each has its value, and those of a step add up to it."""

import dataclasses
import re

import pytest

from dualpipe.plan.explain import explain
from dualpipe.plan.predict import PARTS
from plans import prediction

OF_A_STEP = ("GEMMs", "memory traffic", "host", "recomputation", "all-to-all", "sends", "gather", "reduce",
             "optimizer", "bubble")


def terms(run):
    """The values of the table, by their terms."""
    lines = list(explain(run))
    rows = [re.split(r"\s{2,}", line.strip()) for line in lines[: lines.index("")]]
    assert rows[0] == ["term", "formula", "value"]
    return {row[0]: row[-1] for row in rows[1:]}, lines[lines.index("") + 1 :]


@pytest.mark.parametrize("options", [
    (), ("--parallel.ep", "2", "--parallel.dp", "2"), ("--memory.recompute", "layer"),
    ("--parallel.pp", "1", "--parallel.schedule", "1f1b"),
], ids=" ".join)
def test_the_terms_of_a_step_add_up(options):
    run = prediction(*options)
    values, _ = terms(run)
    milliseconds = {name: float(values[name].removesuffix(" ms")) for name in OF_A_STEP if name in values}
    assert milliseconds == pytest.approx({name: run.parts[name] * 1e3 for name in milliseconds}, abs=0.01)
    assert {*PARTS} - {*milliseconds} == ({"all-to-all"} if "all-to-all" not in values else set())
    assert sum(milliseconds.values()) == pytest.approx(run.step_seconds * 1e3, abs=0.1)
    assert values["step"] == f"{run.step_seconds:.4g} s" and values["MFU"] == f"{run.mfu:.1%}"
    assert values["tokens/s/GPU"] == f"{run.tokens_per_second:,.0f}"


def test_terms_are_there_where_there_is_something_to_say():
    alone, together = (terms(prediction(*options))[0] for options in (
        (), ("--parallel.dp", "4", "--parallel.dp_replicate", "2", "--parallel.ep", "2", "--optimizer.name", "muon")))
    assert "of reduce" in together and "of reduce" not in alone
    assert "all-to-all" in together and "all-to-all" not in alone


def test_the_link_to_the_host_is_explained_with_its_bytes_and_its_bandwidth():
    run = prediction("--optimizer.offload", "True")
    lines = [line.strip() for line in explain(run)]
    (optimizer,) = [line for line in lines if line.startswith("optimizer")]
    (link,) = [line for line in lines if line.startswith("of the link to the host")]
    assert "4 x moments in host memory" in optimizer and "or if longer the link to the host" in optimizer
    size, seconds = re.search(r"([\d.]+) MB of moments, .* / 20 GB/s +([\d.]+) ms$", link).groups()
    assert float(size) == pytest.approx(run.host_moments / 1e6, abs=0.05)
    assert float(seconds) == pytest.approx(float(size) / 20, rel=0.05)
    assert not any("host memory" in line for line in explain(prediction()))


@pytest.mark.parametrize("dispatch, per_node, shown", [("auto", 2, True), ("all_to_all", 2, False), ("auto", 4, False)])
def test_the_formula_of_two_hops_is_there_where_rows_take_them(dispatch, per_node, shown):
    run = prediction("--parallel.ep", "4", "--parallel.dp", "1", "--parallel.dispatch", dispatch)
    run = dataclasses.replace(run, machine=dataclasses.replace(run.machine, node=per_node))
    found = [line for line in explain(run) if "of two hops" in line]
    assert [" of the rows, 1 of 2 at " in line for line in found] == [True] * shown


def test_the_memory_of_each_rank_follows(capsys):
    run = prediction()
    _, memory = terms(run)
    assert len([line for line in memory if re.match(r"\s*\d", line)]) == run.config.parallel.pp
