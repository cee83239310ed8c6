"""`model.expert_gemm`: which library runs the GEMMs of the experts."""

import pytest
import torch

from dualpipe.nn import GroupedLinear, expert_gemm
from dualpipe.runtime.ranks.rank_sync import RankSync
from dualpipe.train.step import expert_gemm_choice
from dualpipe.train.step.expert_gemm_choice import ExpertWork, choose_expert_gemm
from ranks import run_ranks

WORK = ExpertWork(rows=64, expert_ranks=1, dtype=torch.bfloat16, device=torch.device("cpu"))
ALONE = RankSync(None)


def stage():
    return torch.nn.Sequential(GroupedLinear(4, 16, 32, dtype=torch.bfloat16), torch.nn.Linear(4, 4))


def test_it_is_set_on_all_expert_layers():
    model = stage()
    assert choose_expert_gemm([model], "dualpipe", WORK, ALONE).text == "" and model[0].gemm_library == "dualpipe"
    text = choose_expert_gemm([model], "grouped_mm", WORK, ALONE).text
    assert text == "GEMMs of the experts by 'grouped_mm', as configured" and model[0].gemm_library == "grouped_mm"


def test_what_does_not_run_is_refused():
    message = (
        r"expert GEMMs by 'quack' do not run here \(ModuleNotFoundError: No module .*; expected a library that "
        r"is installed and takes torch.bfloat16 on cpu; use 'dualpipe'")
    with pytest.raises(ValueError, match=message):
        choose_expert_gemm([stage()], "quack", WORK, ALONE)
    with pytest.raises(ValueError, match="unknown library of expert GEMMs 'mkl'; expected one of dualpipe, grouped_mm"):
        choose_expert_gemm([stage()], "mkl", WORK, ALONE)


@pytest.mark.parametrize("seconds, fastest", [
    ({"dualpipe": 0.003, "grouped_mm": 0.001}, "grouped_mm"), ({"dualpipe": 0.001, "grouped_mm": 0.003}, "dualpipe")])
def test_the_fastest_is_taken(monkeypatch, seconds, fastest):
    asked = []

    def measured(library, shape, work):
        asked.append((library, shape, work.rows))
        return seconds.get(library, float("inf"))

    monkeypatch.setattr(expert_gemm_choice, "_seconds", measured)
    model = stage()
    library, text = choose_expert_gemm([model], "auto", WORK._replace(expert_ranks=2), ALONE)
    assert model[0].gemm_library == library == fastest and asked[0] == ("dualpipe", (2, 32, 16), 64)
    assert text == (f"GEMMs of the experts by {fastest!r}: a forward and an input gradient of 64 rows by 2 x 32 x 16 "
                    f"take {1e3 * seconds['dualpipe']:.3g} ms by 'dualpipe', {1e3 * seconds['grouped_mm']:.3g} ms by "
                    "'grouped_mm'")


def test_it_is_timed():
    model = stage()
    text = choose_expert_gemm([model], "auto", WORK, ALONE).text
    assert model[0].gemm_library in expert_gemm.EXPERT_GEMMS and "ms by 'grouped_mm'" in text and "quack" not in text
    assert choose_expert_gemm([torch.nn.Linear(2, 2)], "auto", WORK, ALONE).text == ""


def one_has_no_experts(rank):
    ranks = RankSync(torch.distributed.group.WORLD)
    model = stage() if rank == 1 else torch.nn.Linear(2, 2)
    text = choose_expert_gemm([model], "auto", WORK, ranks).text
    try:
        choose_expert_gemm([model], "quack", WORK, ranks)
    except ValueError as error:
        return text, str(error)


def test_ranks_agree():
    (text, error), (same_text, same_error) = run_ranks(one_has_no_experts, 2)
    assert text == same_text and text.startswith("GEMMs of the experts by")
    assert "rank 1: expert GEMMs by 'quack' do not run here" in error and "expert GEMMs by 'quack'" in same_error
