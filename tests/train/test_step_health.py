"""The report on an unhealthy run: each cause happens, or its records are fed in; a healthy run reports nothing."""

import re
from itertools import count
from statistics import median

import pytest

from device_steps import as_training, write_run
from dualpipe.runtime.recorder import ENTRIES, Recorder
from dualpipe.schedule import Costs, build, simulate
from dualpipe.trace import symptoms
from dualpipe.train import step_health, stop
from dualpipe.train.config.schema import Config, ParallelConfig, RouterConfig
from dualpipe.train.step_health import (
    COLLAPSE_PATIENCE,
    LOAD_PATIENCE,
    PATIENCE,
    StepHealth,
    StepWaits,
    measure_waits,
    simulated_idle,
)

STEPS = 4
RUN = ("train", "run.toml", "--train.steps", str(STEPS), "--train.eval_batches", "0", "--train.print_interval", "1")
SOON = "from dualpipe.train import step_health\nstep_health.PATIENCE = 3\n"
# `what` happens at the start of a method. Ranks are forked from a launcher that has run this too.
PLANT = SOON + """
import time
import torch
import {module} as module
from dualpipe.runtime.recorder import Recorder
real = vars(module).setdefault("real_method", module.{cls}.{method})
def method(self, *arguments, **keywords):
    {what}
    return real(self, *arguments, **keywords)
module.{cls}.{method} = method
"""


def planted(module, cls, method, what):
    return PLANT.format(module=f"dualpipe.{module}", cls=cls, method=method, what=what)


class WithActions:
    """Stand-in for a recorded instruction."""

    def __init__(self, *actions):
        self.actions = actions


def health(max_load=4.0, *, overlap=True, **router):
    """Return the health of runs on two ranks, the first of which reports."""
    config = Config(parallel=ParallelConfig(overlap=overlap), router=RouterConfig(**router))
    return StepHealth(config, build("1f1b", 2, 4), 0, Recorder(0, {"pp": 2}), max_load)


def lines_of(run, steps, *, data=(0.0, 0.0), load=1.1, waits=None):
    """Return the lines that `steps` equal steps of a second report. data: waits for the batch, by rank."""
    starved = data.index(max(data))
    return [line for _ in range(steps)
            for line in run.lines(1.0, starved=starved, data_wait=data[starved], load=load, waits=waits)]


def recorded(*entries):
    """Return the entries of a recorded step (kind, what, ranks, begin, end), with times in seconds."""
    recorder = Recorder()
    for kind, what, ranks, began, ended in entries:
        entry = recorder.begin(kind, what, ranks)
        recorder.end()
        entry[:2] = round(began * 1e9), round(ended * 1e9)
    return recorder.entries()


# -- measuring


def test_the_waits_and_costs_in_the_entries_of_a_step():
    waits = measure_waits(recorded(
        ("data", "the next batch", (), 0, 1),
        ("gather", "the parameters of stage 0", (0, 1), 1, 2),
        ("F", WithActions(1), (), 2, 6),
        ("gather", "the parameters of stage 1", (0, 1), 3, 4),
        ("all_to_all", "rows to experts", (0, 1), 4, 5.5),
        ("send", "the activation", (1,), 6, 6.5),
        ("receive", "the gradient", (1,), 7, 10),
        ("receive", "the gradient", (1,), 8, 9),  # within the one before
        ("BF", WithActions(1, 2), (), 10, 13),
        ("reduce", "the gradients of stage 0", (0, 1), 13, 13.25),
        ("clip", "the norm of the gradients", (0, 1), 14, 20),
    ))
    assert waits.pipeline == 3.0
    assert waits.collectives == {"gathers": 2.0, "all-to-all": 1.5, "reductions": 0.25}
    assert waits.costs == {"F": [3.0], "FB": [3.0]}, "an all-to-all is a part of a cost, a gather is none"


def test_a_step_of_which_the_ring_has_lost_the_begin_is_not_judged():
    recorder = Recorder()
    for kind in ("data", *["receive"] * ENTRIES):
        recorder.begin(kind, "", (1,))
        recorder.end()
    assert measure_waits(recorder.entries()) is None
    assert measure_waits([]) is None


def test_the_simulation_has_the_median_costs():
    schedule = build("dualpipev", 2, 6)
    costs = {"F": [1.0, 1.2, 9.0], "B": [2.0], "I": [1.1], "W": [0.9, 0.9], "FB": [2.6]}
    timeline = simulate(schedule, Costs(F=median(costs["F"]), B=2.0, I=1.1, W=0.9, FB=2.6))
    for rank, spans in enumerate(timeline.spans):
        idle = spans[-1].end - sum(span.end - span.start for span in spans)
        assert simulated_idle(schedule, rank, costs) == pytest.approx(idle)


# -- what is said


def test_a_healthy_run_says_nothing():
    waits = StepWaits(0.2, {"all-to-all": 0.1, "gathers": 0.1}, {"F": [0.05], "B": [0.1]})
    assert lines_of(health(), 3 * LOAD_PATIENCE, data=(0.05, 0.0), load=2.4, waits=waits) == []
    assert lines_of(health(), 3 * LOAD_PATIENCE, load=None) == []


def test_a_cause_is_named_once_until_it_goes_away():
    run = health()
    assert lines_of(run, PATIENCE - 1, data=(0.0, 0.4)) == []
    assert lines_of(run, 1) == [], "one good step"
    assert lines_of(run, PATIENCE - 1, data=(0.0, 0.4)) == []
    (line,) = lines_of(run, 5 * PATIENCE, data=(0.0, 0.4))
    assert line.startswith(f"WARNING: for {PATIENCE} steps, input starvation: rank 1 (pp 1) waits 40% of a step")
    lines_of(run, PATIENCE - 1)
    assert lines_of(run, 5 * PATIENCE, data=(0.0, 0.4)) == [], "it had not gone away"
    lines_of(run, PATIENCE)
    assert lines_of(run, PATIENCE, data=(0.0, 0.4)) == [line]


@pytest.mark.parametrize("router, setting", [
    ({}, "balance (now 0)"), ({"balance": 0.01}, "balance (now 0.01)"),
    ({"bias_update_rate": 0.001}, "bias_update_rate (now 0.001)"),
])
def test_uneven_experts(router, setting):
    (line,) = lines_of(health(16.0, **router), LOAD_PATIENCE, load=3.25)
    assert "load imbalance: " in line and "3.2 times" in line and line.endswith(setting)
    assert lines_of(health(16.0, **router), LOAD_PATIENCE - 1, load=3.25) == []


def test_a_router_that_has_collapsed_is_no_uneven_one():
    (line,) = lines_of(health(4.0), LOAD_PATIENCE, load=3.7)
    assert f"for {COLLAPSE_PATIENCE} steps, router collapse: " in line and "3.70, at most 4" in line
    (line,) = lines_of(health(4.0), LOAD_PATIENCE, load=3.5)
    assert "load imbalance" in line
    assert lines_of(health(1.0), LOAD_PATIENCE, load=1.0) == [], "without experts"


@pytest.mark.parametrize("overlap, remedy", [(True, ""), (False, "[parallel] overlap = true, or ")])
def test_exposed_communication(overlap, remedy):
    waits = StepWaits(0.0, {"all-to-all": 0.2, "gathers": 0.1}, {})
    (line,) = lines_of(health(overlap=overlap), PATIENCE, waits=waits)
    assert "exposed communication: rank 0 (pp 0) waits 30% of a step in collectives, 20% in all-to-all" in line
    assert f"try {remedy}a smaller" in line


def test_a_bubble_is_compared_with_the_simulated_one(monkeypatch):
    simulations = []

    def counted(*arguments):
        simulations.append(real(*arguments))
        return simulations[-1]

    real = step_health.simulated_idle
    monkeypatch.setattr(step_health, "simulated_idle", counted)
    costs = {"F": [0.1], "B": [0.2]}
    as_simulated = StepWaits(0.31, {}, costs)
    run = health()
    assert lines_of(run, 20 * PATIENCE, waits=as_simulated) == []
    assert simulations == [pytest.approx(0.3)], "once, although the bubble is above the limit in every step"
    (line,) = lines_of(run, 20 * PATIENCE, waits=as_simulated._replace(pipeline=0.5))
    assert "bubble: rank 0 (pp 0) waits 50% of a step" in line and "30% in the simulation" in line


# -- real runs


@pytest.fixture(scope="module")
def warnings_of(run_folder, dualpipe):
    """Run and return the lines with warnings, each with the step before it."""
    numbers = count()

    def run(before, *options):
        done = dualpipe(run_folder, *RUN, *options, "--output.dir", f"out{next(numbers)}", before=before)
        assert done.returncode == 0, done.stderr
        step = 0
        found = []
        for line in done.stdout.splitlines():
            match = re.match(r"step (\d+)/", line)
            step = int(match[1]) if match else step
            if line.startswith("WARNING"):
                found.append((step, line))
        return found

    return run


# Sleeps are long beside a step on a loaded machine: its shares are compared with limits.


@pytest.mark.slow
def test_a_slow_source_of_data(warnings_of):
    slow = planted("train.data.loader", "Loader", "batch", "time.sleep(2)")
    ((step, line),) = [pair for pair in warnings_of(slow, "--parallel.pp", "1") if "starvation" in pair[1]]
    assert step == 3 and re.search(r"rank 0 waits [2-9]\d% of a step", line)


@pytest.mark.slow
def test_a_slow_rank_of_the_pipeline(warnings_of):
    slow = planted("pipeline.executor", "Executor", "_run_actions", "time.sleep(0.25 * Recorder.current().rank)")
    ((step, line),) = [pair for pair in warnings_of(slow) if "bubble" in pair[1]]
    found = re.search(r"rank 0 \(pp 0\) waits (\d+)% of a step .* (\d+)% in the simulation", line)
    assert step >= 3 and found and int(found[1]) >= int(found[2]) + 15


@pytest.mark.slow
def test_slow_exchanges_of_rows(warnings_of):
    slow = planted("parallel.all_to_all", "CommStream", "start", "time.sleep(0.06 * Recorder.current().rank)")
    (line,) = [line for _, line in warnings_of(slow, "--parallel.pp", "1", "--parallel.ep", "2") if "exposed" in line]
    assert re.search(r"rank 0 \(ep 0\) waits \d+% of a step in collectives, \d+% in all-to-all", line)


def test_a_report_of_starvation_makes_no_host_wait_for_a_device(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(stop, "_MIN_DATA_WAIT", 0.0)  # every step reports its wait
    monkeypatch.setattr(symptoms, "STARVATION_LIMIT", 0.0)
    monkeypatch.setattr(step_health, "PATIENCE", 3)
    write_run(tmp_path)
    device = as_training(0, tmp_path, "--train.num_chunks", "1", "--train.steps", "5", "--train.eval_batches", "0",
                         "--checkpoint.interval", "0")
    assert device.waits.keys() == {"Event.synchronize in dualpipe/train/trainer.py: Trainer._read"}
    assert capsys.readouterr().out.count("input starvation") == 1


def test_an_uneven_router(warnings_of):
    equal_logits = planted("nn.routing.router", "Router", "forward", "self.weight.data.zero_()")  # first two of four
    equal_logits += "step_health.LOAD_PATIENCE = 3\nstep_health.COLLAPSE_FRACTION = 2\n"
    found = [pair for pair in warnings_of(equal_logits, "--parallel.pp", "1") if "load imbalance" in pair[1]]
    assert [(step, "2.0 times" in line) for step, line in found] == [(3, True)]


def test_a_healthy_run(warnings_of):
    assert [line for _, line in warnings_of("", "--parallel.pp", "1")] == []
