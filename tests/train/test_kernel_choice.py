"""The kernels of a run: the library of the experts' GEMMs, and that a replay uses those of its run."""

from pathlib import Path

import pytest
import torch

from dualpipe import cli
from dualpipe.nn import GroupedLinear, pick_fastest
from dualpipe.runtime.ranks.rank_sync import RankSync
from dualpipe.train import kernel_choice, loss, replay
from dualpipe.train.kernel_choice import LIBRARIES, ExpertWork, choose_expert_gemm
from dualpipe.train.replay import rerun_step
from ranks import run_ranks

RUN = ["train", "run.toml", "--parallel.pp", "1", "--train.steps", "1", "--train.eval_batches", "0"]
WORK = ExpertWork(rows=64, expert_ranks=1, dtype=torch.bfloat16, device=torch.device("cpu"))
ALONE = RankSync(None)


def stage():
    return torch.nn.Sequential(GroupedLinear(4, 16, 32, dtype=torch.bfloat16), torch.nn.Linear(4, 4))


def time_as(monkeypatch, seconds):
    """Have libraries take these times; return the list of what is run."""
    trials = []

    def run(library, layer, x, tokens):
        trials.append((library, tuple(layer.weight.shape), len(x)))
        return seconds[library]

    monkeypatch.setattr(kernel_choice, "_run", run)
    monkeypatch.setattr(pick_fastest, "min_seconds", lambda run, device, num_calls: (run(), seconds[trials[-1][0]])[1])
    return trials


def test_it_is_set_on_all_expert_layers():
    model = stage()
    assert choose_expert_gemm([model], "dualpipe", WORK, ALONE).text == "" and model[0].gemm_library == "dualpipe"
    assert "'grouped_mm', as configured" in choose_expert_gemm([model], "grouped_mm", WORK, ALONE).text
    assert model[0].gemm_library == "grouped_mm"


def test_what_does_not_run_is_refused():
    with pytest.raises(ValueError, match=r"'grouped_mm' does not run here .* torch\.float64 on cpu; use 'dualpipe'"):
        choose_expert_gemm([stage()], "grouped_mm", WORK._replace(dtype=torch.float64), ALONE)
    with pytest.raises(ValueError, match="'mkl'; expected one of dualpipe, grouped_mm"):
        choose_expert_gemm([stage()], "mkl", WORK, ALONE)


@pytest.mark.parametrize("seconds, fastest", [
    ({"dualpipe": 0.003, "grouped_mm": 0.001}, "grouped_mm"), ({"dualpipe": 0.001, "grouped_mm": 0.003}, "dualpipe")])
def test_the_fastest_is_taken(monkeypatch, seconds, fastest):
    trials = time_as(monkeypatch, seconds)
    model = stage()
    library, text = choose_expert_gemm([model], "auto", WORK._replace(expert_ranks=2), ALONE)
    assert model[0].gemm_library == library == fastest and trials[0] == ("dualpipe", (2, 32, 16), 64)
    assert f"by {fastest!r}: " in text and "64 rows by 2 x 32 x 16" in text
    assert all(f"{1e3 * value:.3g} ms by {name!r}" in text for name, value in seconds.items())


def test_it_is_timed():
    model = stage()
    text = choose_expert_gemm([model], "auto", WORK, ALONE).text
    assert model[0].gemm_library in LIBRARIES and "ms by 'dualpipe'" in text and "ms by 'grouped_mm'" in text
    assert choose_expert_gemm([torch.nn.Linear(2, 2)], "auto", WORK, ALONE).text == ""


def one_has_no_experts(rank):
    ranks = RankSync(torch.distributed.group.WORLD)
    model = stage() if rank == 1 else torch.nn.Linear(2, 2)
    text = choose_expert_gemm([model], "auto", WORK, ranks).text
    try:
        choose_expert_gemm([model], "grouped_mm", WORK._replace(dtype=torch.float64), ranks)
    except ValueError as error:
        return text, str(error)


def test_ranks_agree():
    (text, error), (same_text, same_error) = run_ranks(one_has_no_experts, 2)
    assert text == same_text and text.startswith("GEMMs of the experts by")
    assert "rank 1: a GEMM of experts by 'grouped_mm' does not run here" in error
    assert "a GEMM of experts by 'grouped_mm'" in same_error


@pytest.mark.slow
@pytest.mark.parametrize(("in_run", "in_replay"), [("grouped_mm", "dualpipe"), ("dualpipe", "grouped_mm")])
def test_a_replay_uses_the_library_that_the_run_has_measured_to_be_fastest(run_toml, monkeypatch, in_run, in_replay):
    """Timed again, another library could be the fastest, and its sums have other bits."""

    def time_as_fastest(fastest):
        time_as(monkeypatch, {library: float(library != fastest) for library in LIBRARIES})

    def note(runner, *arguments):
        layers = [layer for stage in runner.model.stages for layer in stage.modules()
                  if isinstance(layer, GroupedLinear)]
        libraries.update(layer.gemm_library for layer in layers)
        return rerun_step(runner, *arguments)

    libraries = set()
    plain = loss.cross_entropy_loss
    monkeypatch.setattr(loss, "cross_entropy_loss", lambda *given, **how: plain(*given, **how) * torch.nan)
    monkeypatch.setattr(replay, "rerun_step", note)
    monkeypatch.chdir(run_toml.parent)
    time_as_fastest(in_run)
    assert cli.main([*RUN, "--model.expert_gemm", "auto"]) == 1
    (bundle,) = Path("out/bundles").glob("step-*")
    config = replay.read_bundle(bundle)
    assert config.model.expert_gemm == in_run and config.model.attention == "default"
    time_as_fastest(in_replay)
    assert cli.main(["replay", str(bundle)]) == 0
    assert libraries == {in_run}
