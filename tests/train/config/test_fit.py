"""Resume with another number of ranks: the same batches, and so the same losses up to the order of summation."""

import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from default_signals import set_default_signals
from dualpipe.parallel import Rule
from dualpipe.train import saver
from dualpipe.train.config import fit
from dualpipe.train.config.load import load_config
from dualpipe.train.config.schema import CheckpointConfig, Config, ParallelConfig, TrainConfig
from dualpipe.train.metrics import read_metrics

OPTIONS = ["train", "run.toml", "--parallel.pp", "1", "--train.eval_batches", "0", "--checkpoint.interval", "1",
           "--optimizer.schedule", "constant"]


def losses(folder, output):
    return {row["step"]: row["loss"] for row in read_metrics(folder / output / "metrics.jsonl")}


@pytest.fixture
def train_on(run_folder, start_dualpipe, free_port):
    """Train up to a step on `world` ranks that are started one by one; returns the output of rank 0."""

    def run(world, output, steps, *options):
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{free_port}", "WORLD_SIZE": f"{world}"}
        arguments = [*OPTIONS, "--output.dir", output, "--train.steps", f"{steps}", *options]
        started = [start_dualpipe(run_folder, *arguments, environment={**place, "RANK": f"{rank}"})
                   for rank in range(world)]
        outputs = [process.communicate(280) for process in started]
        assert [process.returncode for process in started] == [0] * world, outputs
        return outputs[0][0]

    return run


@pytest.mark.slow
def test_the_global_batch_is_kept_on_fewer_and_on_more_ranks(run_folder, train_on):
    train_on(2, "whole", 3)
    assert "num_chunks" not in train_on(2, "changing", 1)
    output = train_on(1, "changing", 2)
    assert "train.num_chunks = 8 keeps the 16 sequences" in output
    train_on(2, "changing", 3)
    assert losses(run_folder, "changing") == pytest.approx(losses(run_folder, "whole"), rel=1e-5)
    assert len(set(losses(run_folder, "whole").values())) == 3


@pytest.fixture
def resume_on(tmp_path):
    """Return the configuration of a run that resumes on a number of ranks, and the line about it.

    The checkpoint was saved by 2 pipelines in steps of 16 sequences.
    """
    run = {"train": {"micro_batch_size": 2, "num_chunks": 4}, "parallel": {"dp": 2, "ep": 1}}
    saved = saver._saved_batch(tmp_path, SimpleNamespace(config={"run": run}))

    def resume_on(config, world_size):
        known = fit.Resolved.of(fit.fit_world(config, world_size), None)
        kept, note = fit.keep_batch(known, saved)
        return kept.config, note

    return resume_on


def test_a_batch_that_cannot_be_kept_is_refused(resume_on):
    config = Config(train=TrainConfig(micro_batch_size=2, num_chunks=4))
    assert resume_on(config, 2) == (replace(config, parallel=ParallelConfig(dp=2)), "")
    resumed, note = resume_on(config, 4)
    assert resumed.train.num_chunks == 2 and "keeps the 16 sequences" in note
    with pytest.raises(ValueError, match=r'3 pipelines, .* 16 sequences .*; start 1 or 2 ranks, .* \["loader"\]'):
        resume_on(config, 3)


def test_an_allowed_change_of_the_batch_gives_a_warning(resume_on):
    config = Config(train=TrainConfig(micro_batch_size=2, num_chunks=4), checkpoint=CheckpointConfig(allow=("loader",)))
    other, note = resume_on(config, 3)
    assert other.train.num_chunks == 4 and "WARNING: a step now has 24 sequences instead of 16" in note


@pytest.mark.slow
def test_batch_size_holds_on_any_number_of_ranks(run_folder, train_on):
    train_on(1, "batch-size", 2, "--train.batch_size", "16")
    assert "num_chunks = 8" not in train_on(2, "batch-size", 4, "--train.batch_size", "16", "--train.num_chunks", "3")
    train_on(2, "straight", 4)
    assert losses(run_folder, "batch-size") == pytest.approx(losses(run_folder, "straight"), rel=1e-5)


# -- torchrun, in its own interpreters


@pytest.fixture
def agents(run_folder, free_port):
    """Start agents of torchrun, each a node with one rank. All processes are killed after the test."""
    started = []

    def start(name, *options):
        environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "MASTER_PORT")}
        environment["PYTHONFAULTHANDLER"] = "1"
        with open(run_folder / f"{name}.log", "w") as log:
            started.append(subprocess.Popen(
                [sys.executable, "-P", "-m", "torch.distributed.run", "--nnodes", "1:2", "--nproc-per-node", "1",
                 "--max-restarts", "10", "--monitor-interval", "0.2", "--rdzv-backend", "c10d", "--rdzv-endpoint",
                 f"localhost:{free_port}", "--rdzv-conf", "last_call_timeout=15,keep_alive_interval=1,"
                 "keep_alive_max_attempt=20,read_timeout=600", "-m", "dualpipe", *OPTIONS, *options],
                cwd=run_folder, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
                preexec_fn=set_default_signals,
            ))
        return started[-1]

    yield start
    for agent in started:
        for pid in descendants(agent.pid):
            os.kill(pid, signal.SIGKILL)
        agent.kill()
        agent.wait()


def descendants(pid):
    """Return the ids of all descendants of a process."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return []
    return [process for child in map(int, children) for process in (child, *descendants(child))]


def wait_for_step(folder, output, step, agents, timeout=500):
    """Wait until a step is in the metrics. Fail at once if one of the agents has ended.

    At a load of 40, torchrun and its ranks take minutes to start.
    """
    path = folder / output / "metrics.jsonl"
    deadline = time.monotonic() + timeout
    while not (path.exists() and f'"step": {step},' in path.read_text()):
        ended = [agent for agent in agents if agent.poll() is not None]
        if ended or time.monotonic() > deadline:
            for pid in [pid for agent in agents for pid in (agent.pid, *descendants(agent.pid))]:
                os.kill(pid, signal.SIGABRT)  # writes its stacks into the log
            for agent in agents:
                agent.wait()
            for log in folder.glob("*.log"):
                print(f"== {log.name}\n{log.read_text()[-3000:]}")
            pytest.fail(f"no step {step} in {output}; agents that ended: {len(ended)} of {len(agents)}")
        time.sleep(0.05)


def rank_of(agent):
    return descendants(agent.pid)[0]


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_torchrun_restarts_a_killed_worker(run_folder, agents):
    agent = agents("alone", "--output.dir", "alone", "--train.steps", "40")
    wait_for_step(run_folder, "alone", 3, [agent])
    os.kill(rank_of(agent), signal.SIGKILL)
    assert agent.wait(500) == 0
    assert "resuming from" in (run_folder / "alone.log").read_text()
    assert sorted(losses(run_folder, "alone")) == list(range(1, 41))


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_torchrun_stops_and_saves_the_run(run_folder, agents, number):
    """SIGTERM as from a scheduler; SIGINT as from Ctrl-C, which a terminal sends to the ranks too."""
    output = f"stopped-{number}"
    agent = agents(output, "--output.dir", output, "--train.steps", "100000", "--checkpoint.interval", "1000")
    wait_for_step(run_folder, output, 3, [agent])
    for pid in (agent.pid, *descendants(agent.pid)) if number == signal.SIGINT else (agent.pid,):
        os.kill(pid, number)
    agent.wait(500)
    log = (run_folder / f"{output}.log").read_text()
    step = re.search(rf"stopped by {signal.Signals(number).name} after step (\d+); saved: .*/step-(\d+);", log)
    assert step and int(step[1]) == int(step[2]), log


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(1200)  # interpreters start four times, and torchrun's own waits are long
def test_a_run_continues_without_a_killed_node(run_folder, agents, train_on, free_port):
    """The other of two nodes continues alone, with the same batches."""
    options = ["--output.dir", "nodes", "--train.steps", "60", "--parallel.timeout", "60"]
    first, deadline = agents("first", *options), time.monotonic() + 300
    store = ["bash", "-c", f"exec 3<>/dev/tcp/localhost/{free_port}"]
    while subprocess.run(store, stderr=subprocess.DEVNULL).returncode:
        assert time.monotonic() < deadline, "the agent that stays must be the one that has torchrun's store"
        time.sleep(0.1)
    second = agents("second", *options)
    wait_for_step(run_folder, "nodes", 3, [first, second])
    for pid in (second.pid, *descendants(second.pid)):
        os.kill(pid, signal.SIGKILL)
    assert first.wait(500) == 0
    log = (run_folder / "first.log").read_text()
    assert "train.num_chunks = 8 keeps the 16 sequences" in log, log
    train_on(2, "straight-60", 60)
    assert losses(run_folder, "nodes") == pytest.approx(losses(run_folder, "straight-60"), rel=1e-3)


# -- resolving


def test_resolve_reads_the_dtypes_and_the_model(run_folder):
    options = ["--parallel.pp", "1", "--train.dtype", "bf16", "--optimizer.moments", "bf16",
               "--dtypes.rules", "*.mlp.gate,compute=fp32"]
    resolved = fit.resolve(load_config(run_folder / "run.toml", options), 1)
    assert resolved.config.parallel.dp == 1
    assert resolved.dtypes == fit.RunDTypes(
        torch.bfloat16, torch.bfloat16, (Rule("*.mlp.gate", dtype=torch.float32),))
    other = resolved.with_config(replace(resolved.config, train=replace(resolved.config.train, dtype="fp32")))
    assert other.dtypes.compute is torch.float32 and other.model is resolved.model
