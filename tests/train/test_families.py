"""gpt-oss by the path of `dualpipe train`: from a checkpoint of two dtypes and back to one, on pp 2 x ep 2."""

import math
from pathlib import Path

import pytest
import torch

from dualpipe.checkpoint import save_hf
from dualpipe.parallel.mesh import build_mesh
from dualpipe.train.config.fit import resolve
from dualpipe.train.config.load import load_config
from dualpipe.train.launch.join import Job
from dualpipe.train.metrics import read_metrics
from dualpipe.train.saver import Saver
from dualpipe.train.trainer import Trainer
from hub import read_all, rewrite, save_family
from ranks import run_ranks

BF16, FP32 = torch.bfloat16, torch.float32


def from_hub_and_back(rank: int, toml: str, options: list[str]) -> None:
    """Write what was read, train, and write what came of it."""
    resolved, cpu = resolve(load_config(toml, options), 4), torch.device("cpu")
    mesh = build_mesh(2, 1, 2, cpu)
    job = Job(cpu, mesh)
    with Saver(resolved.config, job) as saver:
        run = Trainer(resolved, job, saver)
        model = run.runner.model
        save_hf(model.stages, "same", mesh, model.plan, source=resolved.config.init.from_hf)
        run.train()


@pytest.mark.slow
def test_gpt_oss_trains_on_four_ranks_and_keeps_the_dtypes_of_its_checkpoint(run_folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_family("hub", "gpt_oss", vocab_size=257)
    wide = ("router", "sinks", "norm.weight", "lm_head")
    source = {name: tensor if any(part in name for part in wide) else tensor.to(BF16)
              for name, tensor in read_all(Path("hub")).items()}
    rewrite(Path("hub"), source)
    options = ["--init.from_hf", "hub", "--model.config", "", "--export.to_hf", "trained", "--output.dir", "out",
               "--parallel.ep", "2", "--train.dtype", "bf16", "--train.eval_batches", "0"]
    run_ranks(from_hub_and_back, 4, str(run_folder / "run.toml"), options, timeout=120)
    same, trained = read_all("same"), read_all("trained")
    assert same.keys() == trained.keys() == source.keys()
    for name, tensor in source.items():
        assert trained[name].dtype is same[name].dtype is tensor.dtype, name
        assert torch.equal(same[name], tensor), name
        assert trained[name].isfinite().all() and not torch.equal(trained[name], tensor), name
    losses = [row["loss"] for row in read_metrics(Path("out/metrics.jsonl"))]
    assert len(losses) == 5 and abs(losses[0] - math.log(257)) < 0.1 and losses[-1] < losses[0]
