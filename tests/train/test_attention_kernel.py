"""`model.attention` in a run."""


def test_a_run_refuses_a_kernel_that_does_not_run(run_folder, dualpipe):
    done = dualpipe(run_folder, "train", "run.toml", "--model.attention", "fa3", "--train.steps", "1")
    assert done.returncode == 2 and "attention kernel 'fa3' needs a CUDA device, got cpu" in done.stderr


def test_a_run_on_cpu_uses_torchs_order_and_does_not_mention_it(run_folder, dualpipe):
    done = dualpipe(run_folder, "train", "run.toml", "--train.steps", "1", "--output.dir", "plain")
    assert done.returncode == 0 and "attention by" not in done.stdout, done.stderr
