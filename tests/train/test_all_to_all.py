"""`parallel.all_to_all`: a run whose rows are copied into the memory of other ranks is the same run."""

import os
import time
from unittest import mock

import pytest
import torch

from dualpipe.models import Qwen3MoeConfig
from dualpipe.parallel.mesh import build_mesh
from dualpipe.runtime.recorder import rank_name
from dualpipe.schedule import build
from dualpipe.train.metrics import read_metrics
from dualpipe.train.step.stages import StageOptions, build_model
from faults import planting
from ranks import run_ranks

pytestmark = pytest.mark.usefixtures("without_evaluation")
LAYOUT = ["--train.steps", "3", "--train.num_chunks", "2", "--train.eval_interval", "0", "--checkpoint.interval", "0"]
CONFIG = Qwen3MoeConfig(
    vocab_size=61, hidden_size=16, num_hidden_layers=4, num_attention_heads=2, num_key_value_heads=2, head_dim=8,
    num_experts=4, num_experts_per_tok=2, moe_intermediate_size=8,
)


@pytest.fixture
def train(run_folder, dualpipe):
    """Losses and gradient norms of a run."""

    def run(out, *options):
        done = dualpipe(run_folder, "train", "run.toml", "--output.dir", out, *LAYOUT, *options)
        assert done.returncode == 0, done.stderr
        return [(row["loss"], row["grad_norm"]) for row in read_metrics(run_folder / out / "metrics.jsonl")]

    return run


@pytest.mark.slow
@pytest.mark.parametrize("options", [
    ["--parallel.pp", "1", "--parallel.ep", "2"],
    pytest.param(["--parallel.pp", "2", "--parallel.ep", "2", "--memory.recompute", "dispatch"],
                 marks=pytest.mark.slow),
    pytest.param(["--parallel.pp", "1", "--parallel.ep", "2", "--model.backend", "transformers"],
                 marks=pytest.mark.slow),
    pytest.param(["--parallel.pp", "1", "--parallel.ep", "2", "--parallel.dispatch", "two_hop",
                  "--parallel.ranks_per_node", "1"], marks=pytest.mark.slow),
], ids=["ep 2", "pp 2 x ep 2, recomputed", "transformers", "two hops"])
def test_losses_and_gradient_norms_are_the_same(train, options):
    plain = train("nccl", *options)
    assert len(plain) == 3
    assert train("copies", *options, "--parallel.all_to_all", "copy_engine") == plain


@pytest.mark.parametrize("fault, status, text", [
    ("kill", 137, f"{rank_name(1, {'ep': 2})} was killed by SIGKILL"),
    ("raise", 1, f"{rank_name(1, {'ep': 2})}: "),
])
def test_the_rank_that_fails_is_named_long_before_the_timeout(run_folder, dualpipe, fault, status, text):
    began = time.monotonic()
    done = dualpipe(run_folder, "train", "run.toml", "--output.dir", fault, *LAYOUT, "--parallel.pp", "1",
                    "--parallel.ep", "2", "--parallel.all_to_all", "copy_engine", "--parallel.timeout", "1000",
                    before=planting(f"{fault} rank=1 step=2 action=segment"))
    assert time.monotonic() - began < 280
    assert (done.returncode, text in done.stderr) == (status, True), done.stderr


def test_another_name_is_refused(run_folder, dualpipe):
    done = dualpipe(run_folder, "train", "run.toml", "--parallel.all_to_all", "sm")
    assert done.returncode == 2 and "parallel.all_to_all" in done.stderr


def refused(rank):
    """The error of a rank where rank 3, of the second pipeline rank, has no room for its memory."""
    mesh = build_mesh(2, 1, 2, torch.device("cpu"))
    real = os.posix_fallocate

    def allocate(*args):
        if rank == 3:
            raise OSError("no space left")
        real(*args)

    try:
        with mock.patch.object(os, "posix_fallocate", allocate):
            build_model(CONFIG, build("dualpipev", 2, 4), mesh["pp"].get_local_rank(), dtypes=torch.float32,
                        device=torch.device("cpu"), mesh=mesh, options=StageOptions(all_to_all="copy_engine"))
    except ValueError as error:
        return str(error)


def test_no_room_on_a_rank_is_an_error_on_all_ranks_of_the_job():
    for error in run_ranks(refused, 4):
        assert error is not None and "no room for" in error
