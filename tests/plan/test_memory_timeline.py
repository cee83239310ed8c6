"""Memory of each rank during each step of its schedule."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure

from dualpipe.cli import main
from dualpipe.models import read_config
from dualpipe.plan import memory_timeline
from dualpipe.plan.memory import estimate, step_memory
from dualpipe.plan.memory_timeline import COLOURS, draw, timeline
from dualpipe.runtime.dtypes import dtype_of
from dualpipe.schedule import Action, Schedule, build, by_name
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


@pytest.mark.parametrize("schedule", [name for name in SCHEDULES if name != "gpipe"])
def test_more_micro_batches_take_no_more(schedule):
    def peaks(chunks: int) -> list[int]:
        config = load_config(TINY, ["--parallel.schedule", schedule, "--train.num_chunks", str(chunks)])
        model = read_config(config.model.config)
        return [max(sum(moment.bytes) for moment in moments) for moments in timeline(config, model)]

    assert peaks(8) == peaks(9) == peaks(40)


def gpipe(num_ranks, num_microbatches):
    """All forwards before all backwards, so that all micro-batches are alive at once."""
    ranks = []
    for rank in range(num_ranks):
        order = [Action(kind, rank, number) for kind in "FB" for number in range(num_microbatches)]
        ranks.append(tuple((action,) for action in order))
    return Schedule("gpipe", num_ranks, num_ranks, num_microbatches, tuple(ranks), tuple(range(num_ranks)))


def test_every_micro_batch_counts_where_all_are_alive_at_once(monkeypatch):
    monkeypatch.setitem(by_name.BUILDERS, "gpipe", gpipe)
    config = load_config(TINY, ["--train.num_chunks", "40"])
    config = replace(config, parallel=replace(config.parallel, schedule="gpipe"))
    _, ranks = step_memory(config, read_config(config.model.config))
    for rank in ranks:
        activations = [memory.activations for memory in rank]
        of_one = activations[1] - activations[0]
        assert activations[39] == activations[0] + 39 * of_one


@pytest.mark.parametrize("name, start", [("memory.svg", b"<?xml"), ("memory.png", b"\x89PNG"), ("memory.pdf", b"%PDF")])
def test_it_is_drawn_and_listed(capsys, tmp_path, name, start):
    picture = tmp_path / name
    assert main(["memory", str(TINY), "--timeline", str(picture), "--train.num_chunks", "5"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[4].split() == ["MiB", "of", "rank", "worst", "step", *COLOURS, "total"]
    assert lines[-1] == f"wrote {picture}" and picture.read_bytes().startswith(start)


def test_every_rank_has_a_panel_with_a_bar_of_each_kind_for_each_step(tmp_path, monkeypatch):
    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path: figures.append(figure))
    config = load_config(TINY, ["--train.num_chunks", "5"])
    ranks = timeline(config, read_config(config.model.config))
    draw(ranks, tmp_path / "memory.png")
    (figure,) = figures
    assert [axes.get_ylabel() for axes in figure.axes] == ["rank 0, MiB", "rank 1, MiB"]
    for axes, moments in zip(figure.axes, ranks):
        bars = [[bar.get_height() for bar in kind] for kind in axes.containers]
        assert [kind.get_label() for kind in axes.containers] == list(COLOURS)
        expected = [[size / 2**20 for size in moment.bytes] for moment in moments]
        assert pytest.approx(np.array(expected)) == np.array(bars).T


@pytest.mark.parametrize("picture, error", [("memory.jpg", "'memory.jpg'"), ("memory.png", "dualpipe[viz]")])
def test_a_picture_that_cannot_be_drawn_is_refused_before_anything_is_counted(capsys, monkeypatch, picture, error):
    monkeypatch.setattr(memory_timeline, "find_spec", lambda name: None)
    assert main(["memory", str(TINY), "--timeline", picture]) == 2
    out, err = capsys.readouterr()
    assert out == "" and error in err and err.count("\n") == 1
