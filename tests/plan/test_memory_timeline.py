"""Memory of each rank during each step of its schedule."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest

from dualpipe.cli import main
from dualpipe.models import read_config
from dualpipe.plan.memory import estimate, step_memory
from dualpipe.plan.memory_timeline import COLOURS, timeline
from dualpipe.runtime.dtypes import dtype_of
from dualpipe.schedule import build
from dualpipe.train.config.load import load_config
from schedules import SCHEDULES

TINY = Path(__file__).parents[2] / "examples/tiny-cpu.toml"


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_worst_moment_is_what_is_estimated(schedule):
    config = load_config(TINY, ["--parallel.schedule", schedule, "--train.num_chunks", "7", "--parallel.ep", "2"])
    model = read_config(config.model.config)
    ranks, expected = timeline(config, model), estimate(config, model)
    assert [[moment.step for moment in moments] for moments in ranks] == [
        list(steps) for steps in build(schedule, 2, 7).ranks]
    for moments, memory in zip(ranks, expected):
        assert max(sum(moment.bytes) for moment in moments) == memory.total
        kinds = [dict(zip(COLOURS, moment.bytes)) for moment in moments]
        assert all(min(moment.values()) >= 0 for moment in kinds)
        assert kinds[0]["pending"] == 0 and kinds[0]["activations"] < memory.activations
        deferred = any(action.kind == "I" for moment in moments for action in moment.step)
        assert (max(moment["pending"] for moment in kinds) > 0) == deferred


def test_accumulators_come_and_gathered_parameters_go():
    """A rank has two stages, sharded over dp; at the end shards of the gradients and copies are added."""
    config = load_config(TINY, ["--parallel.pp", "1", "--parallel.dp", "2", "--train.num_chunks", "3"])
    model = read_config(config.model.config)
    _, (rank,) = step_memory(config, model)
    assert rank[0].gradients == 0 and rank[0].gathered > rank[-1].gathered > 0
    whole = max(each.gradients for each in rank if each.gathered == rank[0].gathered)
    assert whole == 4 * rank[0].gathered // dtype_of(config.train.dtype).itemsize < rank[-1].gradients < 2 * whole


def test_pairs_run_one_after_the_other_where_nothing_is_sent():
    moments = timeline(config := load_config(TINY, ["--parallel.ep", "1"]), read_config(config.model.config))
    assert {len(moment.step) for rank in moments for moment in rank} == {1}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_more_micro_batches_take_no_more(schedule):
    def peaks(chunks: int) -> list[int]:
        config = load_config(TINY, ["--parallel.schedule", schedule, "--train.num_chunks", str(chunks)])
        model = read_config(config.model.config)
        return [max(sum(moment.bytes) for moment in moments) for moments in timeline(config, model)]

    assert peaks(8) == peaks(9) == peaks(40)


def test_it_is_drawn_and_listed(capsys, tmp_path):
    picture = tmp_path / "memory.svg"
    assert main(["memory", str(TINY), "--timeline", str(picture), "--train.num_chunks", "5"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[4].split() == ["MiB", "of", "rank", "worst", "step", *COLOURS, "total"]
    assert lines[-1] == f"wrote {picture}"
    root = ElementTree.fromstring(picture.read_text())
    titles = [each.text for each in root.iter() if each.tag.endswith("title")]
    assert len(titles) == sum(len(step) for steps in build("dualpipev", 2, 5).ranks for step in steps)
    assert titles[0].startswith("F(stage 0, micro-batch 0)\nparameters ") and titles[0].endswith(" MiB")
    texts = [each.text for each in root.iter() if each.tag.endswith("text")]
    assert "rank 0, MiB" in texts and "rank 1, MiB" in texts and any("steps of the" in text for text in texts)
    heights = [float(text) for text in texts if text.isdigit()]
    assert {0, 10, 20}.issubset(heights), "numbers on both axes"
