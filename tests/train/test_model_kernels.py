"""`model.attention` and `model.expert_gemm` in a run."""

import pytest

from dualpipe.train.metrics import read_metrics


def test_a_run_refuses_a_kernel_that_does_not_run(run_folder, dualpipe):
    done = dualpipe(run_folder, "train", "run.toml", "--model.attention", "fa3", "--train.steps", "1")
    assert done.returncode == 2 and "attention kernel 'fa3' needs a CUDA device, got cpu" in done.stderr


@pytest.mark.slow
def test_experts_by_another_library(run_folder, dualpipe):
    options = ("--train.steps", "2", "--train.dtype", "bf16")
    plain = dualpipe(run_folder, "train", "run.toml", *options, "--output.dir", "ours")
    other = dualpipe(
        run_folder, "train", "run.toml", *options, "--output.dir", "others", "--model.expert_gemm", "grouped_mm")
    assert other.returncode == 0 and "GEMMs of the experts by 'grouped_mm', as configured" in other.stdout, other.stderr
    ours, others = (read_metrics(run_folder / name / "metrics.jsonl")[-1]["loss"] for name in ("ours", "others"))
    assert plain.returncode == 0 and others == pytest.approx(ours, rel=1e-2)
