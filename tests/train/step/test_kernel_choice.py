"""A replay uses the kernels of its run."""

from pathlib import Path

import pytest
import torch

from dualpipe import cli
from dualpipe.nn import GroupedLinear
from dualpipe.train import replay
from dualpipe.train.anomaly.localize import rerun_step
from dualpipe.train.step import expert_gemm_choice, loss

RUN = ["train", "run.toml", "--parallel.pp", "1", "--train.steps", "1", "--train.eval_batches", "0"]


@pytest.mark.slow
@pytest.mark.parametrize(("in_run", "in_replay"), [("grouped_mm", "dualpipe"), ("dualpipe", "grouped_mm")])
def test_a_replay_uses_the_library_that_the_run_has_measured_to_be_fastest(run_toml, monkeypatch, in_run, in_replay):
    """Timed again, another library could be the fastest, and its sums have other bits."""

    def time_as_fastest(fastest):
        monkeypatch.setattr(expert_gemm_choice, "_seconds", lambda library, shape, work: float(library != fastest))

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
    config, _ = replay.read_bundle(bundle)
    assert config.model.expert_gemm == in_run
    time_as_fastest(in_replay)
    assert cli.main(["replay", str(bundle)]) == 0
    assert libraries == {in_run}
