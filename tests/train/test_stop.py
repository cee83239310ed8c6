"""Runs stop after a step on request, save a checkpoint, and resume bit for bit."""

import os
import re
import signal
import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from dualpipe.checkpoint import latest
from dualpipe.checkpoint.manifest import Checkpoint
from dualpipe.runtime.rank_process import process_age
from dualpipe.train import stop
from dualpipe.train.metrics import read_metrics
from dualpipe.train.stop import RankReports, TimeLimit
from ranks import run_ranks

STEPS, AT = 6, 3  # of a run, and the step in which a signal is sent
RUN = ("train", "run.toml", "--train.steps", str(STEPS), "--train.eval_batches", "1", "--train.eval_interval", "0")
ALONE = ("--parallel.pp", "1")
DP2 = ("--parallel.dp", "2", "--train.num_chunks", "2")
STATUS = {"SIGTERM": 143, "SIGINT": 130, "SIGHUP": 129, "SIGUSR1": 138}
slow = pytest.mark.slow

# The ranks `by` do `what` when they begin the step `AT`, which takes long enough for a signal to be heard. Ranks are
# forked from a launcher that has run this too.
PLANT = f"""
import os, signal, time
from dualpipe.train import trainer
real = vars(trainer).setdefault("real_step", trainer.Trainer._step)
def step(self, number, batches):
    if self.job.rank in {{by}} and number == {AT}:
        {{what}}
        time.sleep(0.4)
    return real(self, number, batches)
trainer.Trainer._step = step
"""


def planted(what, by=(0,)):
    return PLANT.format(what=what, by=by)


def sent(name, to="os.getpid()", by=(0,)):
    return planted(f"os.kill({to}, signal.{name})", by)


def losses(folder, out):
    return [(row["step"], row["loss"], row["grad_norm"]) for row in read_metrics(folder / out / "metrics.jsonl")]


def stopped(process, by):
    """Return the step after which a process was stopped, and the path of its checkpoint, as it prints them."""
    assert not process.stderr, process.stderr
    found = re.findall(r"^stopped by (.+) after step (\d+); saved: (.+); the same command goes on from there$",
                       process.stdout, re.MULTILINE)
    assert len(found) == 1 and found[0][0] == by, process.stdout
    return int(found[0][1]), found[0][2]


@pytest.fixture(scope="module")
def whole(run_folder, dualpipe):
    """Return the losses of uninterrupted runs, by their options; each runs once."""
    known = {}

    def run(options):
        if options not in known:
            out = f"whole{len(known)}"
            assert dualpipe(run_folder, *RUN, *options, "--output.dir", out).returncode == 0
            known[options] = losses(run_folder, out)
        return known[options]

    return run


TO_ONE, TO_LAUNCHER = "os.getpid()", "os.getppid()"
CASES = [  # the fast one, and pairs of layout, signal, its receiver and mode
    ((), "SIGINT", TO_LAUNCHER, (0,), "async"),
    ((), "SIGUSR1", TO_ONE, (1,), "sync"),
    ((), "SIGHUP", TO_LAUNCHER, (0,), "sync"),
    ((), "SIGTERM", TO_LAUNCHER, (0,), "sync"),
    ((), "SIGTERM", TO_ONE, (1,), "async"),
    ((), "SIGUSR1", TO_ONE, (0,), "async"),
    (DP2, "SIGTERM", TO_ONE, (0, 1, 2, 3), "async"),  # as torchrun and SLURM do
    (DP2, "SIGHUP", TO_ONE, (0,), "async"),
    (DP2, "SIGHUP", TO_ONE, (3,), "sync"),
    (ALONE, "SIGINT", TO_ONE, (0,), "async"),  # nobody has started it as a rank
    (ALONE, "SIGTERM", TO_ONE, (0,), "sync"),
]


@pytest.mark.parametrize(
    ("options", "name", "to", "by", "mode"), [CASES[0], *(pytest.param(*case, marks=slow) for case in CASES[1:])])
def test_a_signal_ends_a_run_after_a_step_and_the_same_command_goes_on(
    run_folder, dualpipe, whole, request, options, name, to, by, mode
):
    out, folder = "-".join(re.findall(r"\w+", request.node.name)[-9:]), run_folder
    command = (*RUN, *options, "--output.dir", out, "--checkpoint.interval", "100", "--checkpoint.mode", mode,
               "--export.to_hf", f"{out}/exported")
    process = dualpipe(folder, *command, before=sent(name, to, by))
    step, path = stopped(process, name)
    assert process.returncode == STATUS[name]
    assert step in (AT, AT + 1), "the step in which it comes, or the one after"
    assert latest(folder / out / "checkpoints") == folder / path
    assert Checkpoint.read(folder / path).manifest.step == step
    assert [each for each, *_ in losses(folder, out)] == list(range(1, step + 1)), "the last one is written too"
    assert not (folder / out / "exported").exists() and not (folder / out / "loss.png").exists()
    assert not [each.name for each in (folder / out).rglob("*") if "tmp" in each.name]
    again = dualpipe(folder, *command)
    assert again.returncode == 0 and f"after step {step}, saved by" in again.stdout
    assert losses(folder, out) == whole(options)
    assert (folder / out / "exported").is_dir()


def test_without_checkpoints_that_is_said(run_folder, dualpipe):
    process = dualpipe(run_folder, *RUN, "--output.dir", "unsaved", *ALONE, before=sent("SIGTERM"))
    assert process.returncode == 143 and not process.stderr
    assert re.search("^stopped by SIGTERM after step [34]; nothing is saved", process.stdout, re.MULTILINE)


@pytest.mark.parametrize(("options", "to"), [
    (ALONE, TO_ONE), pytest.param((), TO_LAUNCHER, marks=slow),
])
def test_a_second_signal_ends_it_at_once(run_folder, dualpipe, options, to):
    what = f"os.kill({to}, signal.SIGTERM); time.sleep(1.3); os.kill({to}, signal.SIGTERM); time.sleep(60)"
    start = time.monotonic()
    process = dualpipe(run_folder, *RUN, *options, "--output.dir", "twice", before=planted(what))
    assert process.returncode == 143 and "stopped" not in process.stdout and time.monotonic() - start < 30


@slow
def test_a_signal_while_it_evaluates_is_heard_after_that(run_folder, dualpipe):
    plant = """
import os, signal
from dualpipe.train import trainer
real = vars(trainer).setdefault("real_evaluate", trainer.evaluate)
def evaluate(runner, data, step):
    if step == 2 and runner.job.rank == 1:
        os.kill(os.getpid(), signal.SIGTERM)
    return real(runner, data, step)
trainer.evaluate = evaluate
"""
    process = dualpipe(run_folder, *RUN[:-1], "2", "--output.dir", "evaluated", "--checkpoint.interval", "100",
                       before=plant)
    assert process.returncode == 143 and stopped(process, "SIGTERM")[0] == 3
    rows = read_metrics(run_folder / "evaluated" / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3] and "eval_loss" in rows[1]


# -- a limit to the time


@slow
@pytest.mark.parametrize("options", [(), DP2])
def test_a_run_stops_before_its_time_is_over(run_folder, dualpipe, whole, options):
    out = f"limited{len(options)}"
    command = (*RUN, *options, "--output.dir", out, "--checkpoint.interval", "100")
    # Steps of half a second and more, the first two of which need not be known to last as long.
    slowly = "import time\n" + PLANT.format(what="pass", by=()).replace("    return", "    time.sleep(0.5)\n    return")
    start = time.monotonic()
    process = dualpipe(run_folder, *command, "--train.time_limit", "2.5", before=slowly)
    assert process.returncode == os.EX_TEMPFAIL == 75
    step, _ = stopped(process, "train.time_limit = 2.5")
    assert 1 <= step < STEPS and time.monotonic() - start > 1.0
    again = dualpipe(run_folder, *command, "--train.time_limit", "0")
    assert again.returncode == 0 and losses(run_folder, out) == whole(options)


def test_the_longest_of_the_last_steps_counts(monkeypatch):
    def reached(ages, limit=100.0, queued=1):
        monkeypatch.setattr(stop, "process_age", lambda pid: next(clock))
        clock, time_limit = iter(ages), TimeLimit(limit, queued)
        return [time_limit.reached() for _ in ages]

    assert reached([50, 60, 85, 95]) == [False, False, True, True], "85 + 25 > 100"
    assert reached([50, 60, 70, 80, 90, 91]) == [False] * 5 + [True]
    assert reached([99, 101]) == [False, True], "of one step nothing is known"
    assert reached([10, 20, 70], queued=3) == [False, False, True], "70 + 3 * 50 > 100"
    assert reached([0, 30, *range(31, 72)]) == [False] * 43, "30 s of the first step are forgotten"
    assert reached([1e9] * 3, limit=0) == [False] * 3


def test_time_is_counted_from_the_start_of_the_launcher(monkeypatch):
    monkeypatch.setenv("DUALPIPE_LAUNCHER", "1")
    assert process_age(1) >= process_age() > 0
    time_limit = TimeLimit(process_age(1) + 5, 1)
    assert not time_limit.reached() and time_limit._ages[0] == pytest.approx(process_age(1), abs=1)
    age = process_age()
    time.sleep(0.3)
    assert process_age() - age == pytest.approx(0.3, abs=0.2)
    assert process_age("none") >= 0, "where /proc says nothing"


def combined_report(rank):
    """Return the report of a step in which ranks wait for their batches and request stops, and its bytes."""
    watchdog = SimpleNamespace(stop=(0, signal.SIGUSR1, signal.SIGTERM, 0)[rank])
    job = SimpleNamespace(
        rank=rank, device=torch.device("cpu"), group=dist.group.WORLD, watchdog=watchdog)
    numbers = RankReports(job, 0.0).gather((0.2, 0.0, 0.7, 1e-4)[rank])
    return tuple(RankReports.decode(numbers.tolist())), numbers.nbytes


def test_the_report_of_a_step_names_the_last_rank_and_is_small():
    assert run_ranks(combined_report, 4) == [((143, 0.7, 2), 16)] * 4


@pytest.mark.parametrize("rank", [0, 99_999])
def test_a_wait_and_its_rank_are_exact_in_one_number(rank):
    job = SimpleNamespace(rank=rank, device=torch.device("cpu"), group=None, watchdog=None)
    for wait in (0.0, 0.001, 1.234567, 8000.000001):
        report = RankReports.decode(RankReports(job, 0.0).gather(wait).tolist())
        assert report == (0, wait, rank if wait else 0)
