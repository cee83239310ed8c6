"""`parallel.all_to_all`: a run whose rows are copied into the memory of other ranks is the same run."""


import time

import pytest

from dualpipe.runtime.recorder import rank_name
from dualpipe.train.metrics import read_metrics
from faults import planting

pytestmark = pytest.mark.usefixtures("without_evaluation")
LAYOUT = ["--train.steps", "3", "--train.num_chunks", "2", "--train.eval_interval", "0", "--checkpoint.interval", "0"]


@pytest.fixture
def train(run_folder, dualpipe):
    """Losses and gradient norms of a run."""

    def run(out, *options):
        done = dualpipe(run_folder, "train", "run.toml", "--output.dir", out, *LAYOUT, *options)
        assert done.returncode == 0, done.stderr
        return [(row["loss"], row["grad_norm"]) for row in read_metrics(run_folder / out / "metrics.jsonl")]

    return run


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
