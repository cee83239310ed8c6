"""The `dualpipe` command from outside: exit statuses, messages, and runs on real processes."""

import json
import math
import os
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from command import COMMAND
from dualpipe import Pipeline, cli

TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "dualpipe")


def losses(folder, out):
    return column(folder, out, "loss")


def column(folder, out, name):
    return [json.loads(line)[name] for line in (folder / out / "metrics.jsonl").read_text().splitlines()]


# -- training


@pytest.fixture(scope="module")
def trained(run_folder, dualpipe):
    return dualpipe(run_folder, "train", "run.toml")


def test_train_starts_its_ranks_and_reports(trained, run_folder):
    assert trained.returncode == 0, trained.stderr
    lines = trained.stdout.splitlines()
    assert "4 stages on 2 cpu ranks, schedule dualpipev" in trained.stdout and "unigram model" in trained.stdout
    assert [line.split()[1] for line in lines if line.startswith("step ")] == [f"{step}/5" for step in range(1, 6)]
    for name in ("metrics.jsonl", "loss.png", "schedule.svg"):
        assert any(f"out/{name}" in line for line in lines[-3:])
        assert (run_folder / "out" / name).stat().st_size > 0


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_train_in_interpreters_of_its_own(trained, run_folder, dualpipe, ranks):
    out = f"interpreters{ranks}"
    done = dualpipe(run_folder, "train", "run.toml", "--parallel.pp", str(ranks), "--output.dir", out, command=COMMAND)
    assert done.returncode == 0, done.stderr
    assert losses(run_folder, out) == pytest.approx(losses(run_folder, "out"), rel=1e-6)
    assert (run_folder / out / "loss.png").read_bytes().startswith(b"\x89PNG\r\n")


def test_metrics_have_a_line_per_step(trained, run_folder):
    rows = [json.loads(line) for line in (run_folder / "out/metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]
    assert [row["step"] for row in rows if "eval_loss" in row] == [2, 4, 5]
    for row in rows:
        assert row["grad_norm"] > 0 and row["tokens_per_second"] > 0 and row["memory_bytes"] > 2**20 and row["lr"] > 0
    assert 5.3 < rows[0]["loss"] < 5.8, "near ln(257) = 5.55 before the first update"
    assert rows[-1]["loss"] < rows[0]["loss"]
    assert rows[-1]["eval_loss"] < rows[0]["loss"]


@pytest.mark.slow
def test_torchrun_another_schedule_and_no_evaluation_give_the_same_losses(trained, run_folder, dualpipe):
    options = ("--parallel.schedule", "1f1b", "--train.eval_batches", "0", "--output.dir", "torchrun")
    done = dualpipe(run_folder, "train", "run.toml", *options, command=TORCHRUN)
    assert done.returncode == 0, done.stderr
    assert losses(run_folder, "torchrun") == pytest.approx(losses(run_folder, "out"), rel=1e-5)


@pytest.mark.slow
def test_a_schedule_found_by_search_gives_the_same_losses(trained, run_folder, dualpipe, monkeypatch):
    """Also where a micro-batch is computed twice, alone, by the guard."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(run_folder / "cache"))
    options = ("--parallel.schedule", "auto", "--parallel.schedule_costs", "F=1,B=1.6,W=0.8,FB=2,FI=1.5",
               "--parallel.schedule_memory", "4", "--guard.recheck_interval", "2", "--output.dir", "auto")
    done = dualpipe(run_folder, "train", "run.toml", *options)
    assert done.returncode == 0, done.stderr
    assert "schedule auto" in done.stdout
    assert losses(run_folder, "auto") == pytest.approx(losses(run_folder, "out"), rel=1e-5)


def test_bf16(trained, run_folder, dualpipe):
    options = ("--parallel.pp", "1", "--train.dtype", "bf16", "--output.dir", "bf16")
    done = dualpipe(run_folder, "train", "run.toml", *options)
    assert done.returncode == 0, done.stderr
    assert losses(run_folder, "bf16") == pytest.approx(losses(run_folder, "out"), rel=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("pp", [1, 2])
def test_data_parallelism_gives_the_losses_of_twice_the_micro_batches(trained, run_folder, dualpipe, pp):
    out = f"dp{pp}"
    options = ("--parallel.dp", "2", "--parallel.pp", str(pp), "--train.num_chunks", "2", "--output.dir", out)
    done = dualpipe(run_folder, "train", "run.toml", *options)
    assert done.returncode == 0, done.stderr
    assert f"4 stages on 2 x {pp} cpu rank" in done.stdout or pp == 1
    assert losses(run_folder, out) == pytest.approx(losses(run_folder, "out"), rel=1e-6)
    assert [line for line in done.stdout.splitlines() if line.startswith("step 5/5")], "one rank reports"


# -- the routers


def test_loads_are_reported_without_any_option(trained, run_folder):
    assert set(column(run_folder, "out", "dropped")) == {0}
    assert all(1 < value < 4 for value in column(run_folder, "out", "load_max_over_mean"))
    assert "balance_loss" not in (run_folder / "out/metrics.jsonl").read_text()


@pytest.mark.slow  # tests/train/parity/test_config_model.py has the gradients of the same
@pytest.mark.parametrize("level", ["sequence", "global"])
def test_router_losses_do_not_depend_on_the_layout(trained, run_folder, dualpipe, level):
    terms = ("--router.balance", "0.5", "--router.balance_level", level, "--router.z_loss", "0.1")
    layouts = {
        "one": ("--parallel.pp", "1"),
        "dp": ("--parallel.pp", "1", "--parallel.dp", "2", "--train.num_chunks", "2", "--train.eval_batches", "0"),
        "ep": ("--parallel.pp", "2", "--parallel.ep", "2", "--train.num_chunks", "2", "--memory.recompute", "layer"),
    }
    for name, layout in layouts.items():
        done = dualpipe(run_folder, "train", "run.toml", *terms, *layout, "--output.dir", f"{level}-{name}")
        assert done.returncode == 0, done.stderr
    for name in ("loss", "load_max_over_mean", "balance_loss", "z_loss", "dropped"):
        one, dp, ep = (column(run_folder, f"{level}-{layout}", name) for layout in layouts)
        assert dp == pytest.approx(one, rel=1e-6), name
        assert ep == pytest.approx(one, rel=1e-6), name
    difference = [abs(a - b) for a, b in zip(losses(run_folder, f"{level}-one"), losses(run_folder, "out"))]
    assert difference[0] < 1e-5 < 1e-3 < max(difference), "the terms act from the first update on"
    balance = column(run_folder, f"{level}-one", "balance_loss")
    assert balance[0] == (0 if level == "global" else pytest.approx(1, abs=0.2)), "no step before the first has loads"
    assert balance[1:] == pytest.approx([1] * 4, abs=0.2)
    z = column(run_folder, f"{level}-one", "z_loss")
    assert z[0] == pytest.approx(math.log(4) ** 2, rel=0.05) and z[-1] < z[0]


def test_a_bias_update_without_a_bias(run_folder, dualpipe):
    done = dualpipe(run_folder, "train", "run.toml", "--router.bias_update_rate", "0.001")
    assert done.returncode == 2
    assert "bias_update_rate is 0.001" in done.stderr and done.stderr.count("\n") == 1


# -- parity


@pytest.mark.slow
def test_tied_embeddings_train_alike_on_any_ranks_and_from_one_layout_to_another(run_folder, dualpipe):
    """On 8 ranks, in a V, where FSDP2 has the weight in one of two stages; on 2 with a copy at each end; on one."""
    tied = run_folder / "tied.json"
    tied.write_text(json.dumps({**json.loads((run_folder / "config.json").read_text()), "tie_word_embeddings": True}))

    def train(out, pp=1, dp=1, ep=1, schedule="dualpipev", steps=4):
        done = dualpipe(run_folder, "train", "run.toml", "--model.config", "tied.json", "--parallel.pp", str(pp),
                        "--parallel.dp", str(dp), "--parallel.ep", str(ep), "--parallel.schedule", schedule,
                        "--train.num_chunks", str(8 // (dp * ep)), "--train.steps", str(steps), "--output.dir", out,
                        "--checkpoint.interval", "2", "--export.to_hf", f"{out}/hf-{steps}",
                        "--optimizer.schedule", "constant")
        assert done.returncode == 0, done.stderr
        return losses(run_folder, out)

    alone = train("tied-alone")
    assert alone[-1] < alone[0]
    for out, layout in {"tied-8": {"pp": 2, "dp": 2, "ep": 2}, "tied-ends": {"pp": 2, "schedule": "1f1b"}}.items():
        assert train(out, **layout, steps=2) == pytest.approx(alone[:2], rel=1e-4)
        assert train(out, schedule="1f1b" if out == "tied-8" else "dualpipev", pp=2) == pytest.approx(alone, rel=1e-4)
    found = [AutoModelForCausalLM.from_pretrained(run_folder / out / "hf-4").state_dict()
             for out in ("tied-alone", "tied-8", "tied-ends")]
    for name, tensor in found[0].items():
        assert all(torch.allclose(tensor, each[name], atol=2e-4) for each in found[1:]), name


def test_parity_on_two_ranks(run_folder, dualpipe):
    good = dualpipe(run_folder, "parity", "run.toml", "--pp", "2", "--worst", "2", "--train.num_chunks", "3")
    assert good.returncode == 0, good.stderr
    assert "parity passed" in good.stdout


# -- failures


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--data.tokenizer", "none"], "tokenizer none"),
        (["--train.sequence_length", "100000"], "one sequence each"),
    ],
)
def test_what_a_rank_refuses_is_said_once(run_folder, dualpipe, options, message):
    done = dualpipe(run_folder, "train", "run.toml", *options)
    assert done.returncode == 2
    assert message in done.stderr and done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (None, "model.config"),
        ("{", "broken.json"),
        ({"vocab_size": 256}, "vocab_size is 256"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
    ],
)
def test_a_bad_model(run_toml, capsys, model, message):
    broken = run_toml.with_name("broken.json")
    if isinstance(model, dict):
        model = json.dumps({**json.loads(run_toml.with_name("config.json").read_text()), **model})
    if model is not None:
        broken.write_text(model)
    out = str(run_toml.with_name("out"))
    options = ["--model.config", str(broken), "--parallel.pp", "1", "--output.dir", out]
    assert cli.main(["train", str(run_toml), *options]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ") and message in err


def test_an_output_folder_that_cannot_be_made(run_toml, capsys):
    run_toml.with_name("file").write_text("")
    out = str(run_toml.with_name("file") / "out")
    assert cli.main(["train", str(run_toml), "--parallel.pp", "1", "--output.dir", out]) == 2
    assert f"output.dir = '{out}'" in capsys.readouterr().err


# -- results that diagnostics do not cost


@pytest.fixture
def train_alone(run_toml, monkeypatch):
    """Run `dualpipe train` in this process, on one rank, with these options besides."""
    monkeypatch.chdir(run_toml.parent)
    return lambda *options: cli.main(["train", "run.toml", "--parallel.pp", "1", "--train.steps", "2", *options])


@pytest.mark.parametrize("wanted", ["True", "False"])
def test_a_deterministic_run(train_alone, monkeypatch, wanted):
    for name in ("CUBLAS_WORKSPACE_CONFIG", "NCCL_ALGO"):
        monkeypatch.setenv(name, "as it was")
    modes, step = [], Pipeline.step

    def noted(*args, **kwargs):
        modes.append(torch.get_deterministic_debug_mode())
        return step(*args, **kwargs)

    monkeypatch.setattr(Pipeline, "step", noted)
    assert train_alone("--train.deterministic", wanted) == 0
    assert set(modes) == {2 if wanted == "True" else 0} and torch.get_deterministic_debug_mode() == 0


def test_the_model_is_exported_whatever_becomes_of_the_metrics(train_alone, capsys):
    Path("out/metrics.jsonl").mkdir(parents=True)
    Path("out/schedule.svg").mkdir()
    assert train_alone("--export.to_hf", "hf") == 0
    assert list(Path("hf").glob("*.safetensors"))
    out, err = capsys.readouterr()
    assert err.count("\n") == 3 and "step 2/2" in out
    assert all(name in err for name in ("metrics.jsonl", "loss.png", "schedule.svg"))


def test_an_error_of_the_disk_names_file_rank_and_step(train_alone, capsys, monkeypatch):
    def full(*arguments, **options):
        raise OSError(28, "No space left on device", "hf/model.safetensors")

    monkeypatch.setattr("dualpipe.train.export.save_hf", full)
    assert train_alone("--export.to_hf", "hf") == 1
    err = capsys.readouterr().err
    assert "rank 0, after step 2" in err and "'hf/model.safetensors'" in err
    assert not Path("out/loss.png").exists(), "the export comes first"


def test_an_output_directory_is_for_one_job(train_alone, capsys, monkeypatch):
    import dualpipe.train.trainer as loop
    from dualpipe.runtime.files import lock

    monkeypatch.setattr(loop, "lock", lambda file, patience: lock(file, 0))
    Path("out").mkdir()
    other = lock(Path("out/.metrics.lock"), 0)
    assert train_alone() == 2
    assert "another job saves to out" in capsys.readouterr().err
    other.release()
    assert train_alone() == 0, "the lock is free again"
    assert train_alone() == 0, "and after a job has ended"


def test_training_goes_on_when_nobody_reads_it(train_alone, capsys, monkeypatch):
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as stdout:
        monkeypatch.setattr("sys.stdout", stdout)
        assert train_alone() == 0
    assert len(losses(Path(), "out")) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.slow
def test_a_wrong_number_of_ranks_under_torchrun(run_folder, dualpipe):
    one = (*TORCHRUN[:5], "1", *TORCHRUN[6:])
    done = dualpipe(run_folder, "train", "run.toml", command=one)
    assert done.returncode != 0
    assert "parallel.pp * dp * ep" in done.stderr


@pytest.mark.slow
def test_of_two_signals_to_a_rank_the_first_is_reported(run_folder, start_dualpipe):
    """As where ranks are also told what their launcher passes on."""
    launcher = start_dualpipe(run_folder, "train", "run.toml", "--train.steps", "100000", "--output.dir", "signals")
    for line in launcher.stdout:
        if line.startswith("step 2/"):
            break
    children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
    os.kill(int(children[1]), signal.SIGUSR1)
    time.sleep(0.02)
    os.kill(int(children[1]), signal.SIGTERM)
    out, _ = launcher.communicate(timeout=250)
    assert launcher.returncode == 138 and "stopped by SIGUSR1" in out


# -- the rest of the command


def test_train_from_packed_data_on_one_rank(run_toml, capsys):
    folder = run_toml.parent
    (folder / "text/tiny.txt").write_bytes(bytes(range(1, 256)))
    cli.main(["data", "pack", str(folder / "text"), "--out", str(folder / "packed")])
    options = ["--data.path", str(folder / "packed"), "--parallel.pp", "1", "--output.dir", str(folder / "out"),
               "--train.steps", "2", "--data.validation_fraction", "0"]
    assert cli.main(["train", str(run_toml), *options]) == 0
    assert "unigram" not in capsys.readouterr().out, "nothing is held out to evaluate it on"
    assert len(losses(folder, "out")) == 2
    assert not list((folder / "out").glob("data-*")), "packed data is used where it is"
    (folder / "packed/tokens-00000.bin").write_bytes(b"")
    assert cli.main(["train", str(run_toml), *options]) == 2
    assert "tokens-00000.bin has 0 bytes" in capsys.readouterr().err
