"""The rank of a process under torchrun and SLURM."""

import os
import re
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch.distributed import HashStore

from dualpipe import cli
from dualpipe.runtime.rank_process import RankInfo
from dualpipe.train.launch.environment import rank_from_environment, slurm_rendezvous
from dualpipe.train.launch.join import choose_device


def test_torchrun_environment():
    e = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
    assert rank_from_environment(e) == RankInfo(5, 8, 1, 4)


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"RANK": "x", "WORLD_SIZE": "2"}, "RANK = 'x' must be a number from 0; start the job by torchrun"),
        ({"RANK": "-1", "WORLD_SIZE": "2"}, "RANK = '-1' must be a number from 0"),
        ({"RANK": "0"}, "WORLD_SIZE = '' must be a number from 0"),
        ({"WORLD_SIZE": "2"}, "RANK = '' must be a number from 0"),
        ({"RANK": "0", "WORLD_SIZE": "two"}, "WORLD_SIZE = 'two' must be a number"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "got rank 2 of 2, but ranks count from 0"),
        ({"RANK": "2", "WORLD_SIZE": "4", "LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "2"},
         "got rank 2 of 4 as rank 2 of 2 on its machine; expected as many on every machine"),
        ({"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}, "as rank 1 of 4 on its machine.* as torchrun does"),
        ({"RANK": "1", "WORLD_SIZE": "3", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}, "as many on every machine"),
        ({"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "4", "SLURM_LOCALID": "0", "SLURM_STEP_NUM_NODES": "2"},
         "rank 1 of 4 as rank 0 of 2 on .* one after the other.*: give srun --distribution=block"),  # cyclic
        ({"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "?"}, r"SLURM_STEP_NUM_TASKS = '\?' must be a number"),
    ],
)
def test_an_environment_that_names_no_rank(environment, message):
    with pytest.raises(ValueError, match=message):
        rank_from_environment(environment)


def test_slurm_environment():
    e = {"SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "8", "SLURM_LOCALID": "1", "SLURM_STEP_NUM_NODES": "2"}
    assert rank_from_environment(e) == RankInfo(5, 8, 1, 4)
    assert rank_from_environment({**e, "RANK": "0", "WORLD_SIZE": "2"}) == RankInfo(0, 2, 0, 2), "torchrun inside a job"


@pytest.mark.parametrize("tasks", ["3,1", "2,1(x2)"])
def test_every_task_of_an_uneven_slurm_step_is_refused(tasks):
    """Otherwise only the fullest node would notice, and the others would wait for it."""
    nodes = "2" if tasks == "3,1" else "3"
    step = {"SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_NUM_NODES": nodes, "SLURM_STEP_TASKS_PER_NODE": tasks}
    for rank, local_rank in enumerate("0120"):
        with pytest.raises(ValueError, match=f"4 tasks on {nodes} nodes, {re.escape(tasks)}; give srun --ntasks-per-n"):
            rank_from_environment(step | {"SLURM_PROCID": f"{rank}", "SLURM_LOCALID": local_rank})
    even = step | {"SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_TASKS_PER_NODE": "2(x2)"}
    assert rank_from_environment(even | {"SLURM_PROCID": "3", "SLURM_LOCALID": "1"}) == RankInfo(3, 4, 1, 2)


SEVERAL = [
    {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "0"},
    {"PMI_RANK": "1", "PMI_SIZE": "2"},
    {"PMIX_RANK": "0", "PMIX_NAMESPACE": "prterun-1"},  # says no size
    {"MV2_COMM_WORLD_RANK": "0", "MV2_COMM_WORLD_SIZE": "4"},
    {"JSM_NAMESPACE_RANK": "3", "JSM_NAMESPACE_SIZE": "4"},
    {"PALS_RANKID": "0", "PMI_RANK": "0", "PMI_SIZE": "4"},
    {"FLUX_TASK_RANK": "0", "FLUX_JOB_SIZE": "2"},
    # mpirun in a SLURM job: the tasks of the step are its daemons, one on each node
    {"OMPI_COMM_WORLD_RANK": "9", "OMPI_COMM_WORLD_SIZE": "16", "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2",
     "SLURM_STEP_NUM_NODES": "2"},
    # and in its batch script
    {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2", "SLURM_PROCID": "0", "SLURM_NTASKS": "2"},
]


@pytest.mark.parametrize("environment", SEVERAL, ids=" ".join)
def test_copies_by_another_launcher_are_refused(environment):
    with pytest.raises(ValueError, match=r"`torchrun .* or `srun .* or set RANK, WORLD_SIZE"):
        rank_from_environment(environment)
    ranks = {"RANK": "1", "WORLD_SIZE": "2"}
    assert rank_from_environment(environment | ranks) == RankInfo(1, 2, 1, 2), "a wrapper that says the rank"


def test_variables_of_mpi_that_srun_sets_are_no_other_launcher():
    task = {"SLURM_PROCID": "1", "SLURM_LOCALID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NUM_NODES": "1"}
    for mpi in ({"PMI_RANK": "1", "PMI_SIZE": "2"}, {"PMIX_RANK": "1"}):
        assert rank_from_environment(task | mpi) == RankInfo(1, 2, 1, 2)


def test_the_command_refuses_copies_before_it_writes(run_folder, monkeypatch, capsys):
    monkeypatch.setenv("PMI_RANK", "0")
    monkeypatch.setenv("PMI_SIZE", "2")
    out = run_folder / "out"
    assert cli.main(["train", str(run_folder / "run.toml"), "--output.dir", str(out)]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: PMI_RANK = '0' of 2") and err.count("\n") == 1
    assert not out.exists()


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1", "PMIX_RANK": "0"},  # mpirun -np 1
        {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1", "PMIX_RANK": "0"},  # srun --pty, with MPI
        {"OMPI_COMM_WORLD_SIZE": "2"},  # no process of an MPI program
        {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"},
        {"SLURM_JOB_ID": "7"},
        {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "2"},  # a batch script that does not use srun
    ],
)
def test_nobody_started_us(environment):
    assert rank_from_environment(environment) is None


def test_slurm_rendezvous(monkeypatch):
    one = {"SLURM_STEP_NUM_NODES": "1", "SLURM_JOB_ID": "123456"}
    assert slurm_rendezvous(one) == {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "23456"}
    assert slurm_rendezvous({"MASTER_ADDR": "a", "MASTER_PORT": "1"}) == {}
    ports = [int(slurm_rendezvous(one | {"SLURM_STEP_ID": f"{step}"})["MASTER_PORT"]) for step in range(100)]
    assert ports[0] == 23456 and len(set(ports)) == 100, "steps of a job that run on one node do not meet"
    assert all(20000 <= port < 40000 for port in ports)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ValueError, match=r"first node of SLURM_STEP_NODELIST = 'n\[1-2\]'; set MASTER_ADDR"):
        slurm_rendezvous({"SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NODELIST": "n[1-2]"})


def test_a_device_for_every_rank(monkeypatch):
    """Every rank gets a GPU of its own; too few GPUs are refused; without any, "auto" selects the CPU."""
    info = RankInfo(rank=1, world_size=2, local_rank=1, local_world_size=2)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    cases = [(2, "auto", "cuda:1"), (2, "cuda", "cuda:1"), (0, "auto", "cpu"), (2, "cpu", "cpu"), (1, "cpu", "cpu")]
    for count, wanted, expected in cases:
        monkeypatch.setattr("torch.cuda.device_count", lambda count=count: count)
        assert str(choose_device(info, wanted, HashStore())) == expected
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda device: SimpleNamespace(uuid="GPU-1"))
    taken = HashStore()
    taken.add("device GPU-1", 1)
    for wanted in ("cuda", "auto"):
        with pytest.raises(ValueError, match=f"'{wanted}', but torch finds 1 CUDA devices here for 2 ranks; start few"):
            choose_device(info, wanted, taken)
        assert str(choose_device(info, wanted, HashStore())) == "cuda:0"  # all that this rank sees


# -- examples/slurm.sbatch

SBATCH = Path(__file__).parents[3] / "examples" / "slurm.sbatch"


def start_batch_script(folder, *arguments, srun="true", **environment):
    """Start the script as SLURM would on the nodes n7 and n8; its `srun` leaves what it was given, then runs `srun`."""
    tools = {
        "scontrol": 'echo "$@" >> calls; [ "$1" != show ] || printf "n7\\nn8\\n"',
        "srun": f'printf "%s\\n" "$@" > arguments; env > part; mv part environment; {srun}',
    }
    for name, script in tools.items():
        (folder / name).write_text(f"#!/bin/sh\n{script}\n")
        (folder / name).chmod(0o755)
    job = {"PATH": f"{folder}:{os.environ['PATH']}", "SLURM_JOB_ID": "123456", "SLURM_JOB_NODELIST": "n[7-8]",
           "SLURM_CPUS_PER_TASK": "6", "SLURM_PROCID": "0", "SLURM_NTASKS": "16"}
    return subprocess.Popen(["bash", SBATCH, *arguments], cwd=folder, env=job | environment)


def test_the_batch_script_sets_what_the_ranks_read(tmp_path):
    assert start_batch_script(tmp_path, "run.toml", "--train.steps", "a b").wait(200) == 0
    srun = (tmp_path / "arguments").read_text().splitlines()
    command = ["--kill-on-bad-exit=0", "--wait=60", "--cpus-per-task=6", "dualpipe", "train", "run.toml",
               "--train.steps", "a b"]
    assert srun == command
    found = dict(line.split("=", 1) for line in (tmp_path / "environment").read_text().splitlines())
    task = {"SLURM_PROCID": "9", "SLURM_STEP_NUM_TASKS": "16", "SLURM_LOCALID": "1", "SLURM_STEP_NUM_NODES": "2"}
    assert rank_from_environment(found | task) == RankInfo(9, 16, 1, 8), "what srun sets in a task"
    assert found["MASTER_ADDR"] == "n7"
    assert "MASTER_PORT" not in found, "one for each step, not for the job"
    steps = [slurm_rendezvous(found | task | {"SLURM_STEP_ID": step}) for step in ("0", "1")]
    assert [list(step) for step in steps] == [["MASTER_PORT"]] * 2 and steps[0] != steps[1]
    asked = dict(line.removeprefix("#SBATCH --").split("=", 1) if "=" in line else (line, "")
                 for line in SBATCH.read_text().splitlines() if line.startswith("#SBATCH"))
    assert asked["ntasks-per-node"] == asked["gpus-per-node"], "a task for each GPU"
    assert "#SBATCH --requeue" in asked
    assert asked["signal"].startswith("USR1@"), "to the ranks, not to the script"


def test_the_batch_script_puts_a_container_before_the_command(tmp_path):
    assert start_batch_script(tmp_path, "run.toml", CONTAINER="apptainer exec --nv a.sif").wait(200) == 0
    assert (tmp_path / "arguments").read_text().splitlines()[3:] == [
        "apptainer", "exec", "--nv", "a.sif", "dualpipe", "train", "run.toml"]


@pytest.mark.parametrize("status", [0, 1, 7, 75, 138, 143])
def test_the_batch_script_ends_as_srun_or_goes_back_into_the_queue(tmp_path, status):
    """After a time limit or USR1 the job is queued again; a cancelled job (143) is not."""
    ended = start_batch_script(tmp_path, "run.toml", srun=f"exit {status}").wait(200)
    requeued = "requeue 123456" in (tmp_path / "calls").read_text()
    assert (ended, requeued) == ((0, True) if status in (75, 138) else (status, False))
