"""Who this process is under torchrun and SLURM, what the launcher says when a rank fails, and what it refuses."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from dualpipe import cli
from dualpipe.train import launch
from dualpipe.train.job import choose_device
from dualpipe.train.launch import RankInfo, check_machine, rank_from_environment, slurm_rendezvous
from dualpipe.train.tables import ParallelConfig


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
        ({"RANK": "2", "WORLD_SIZE": "2"}, "rank 2 of 2, on its machine 2 of 2, cannot be: ranks count from 0"),
        ({"RANK": "2", "WORLD_SIZE": "4", "LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "2"}, "2 of 2, cannot be"),
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


@pytest.mark.parametrize(
    "environment",
    [
        {},
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
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ValueError, match=r"first node of SLURM_STEP_NODELIST = 'n\[1-2\]'; set MASTER_ADDR"):
        slurm_rendezvous({"SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NODELIST": "n[1-2]"})


def write_error(path, time, text, status):
    path.write_text(json.dumps({"time": time, "text": text, "status": status}))


@pytest.mark.parametrize("order", [(1.0, 2.0), (2.0, 1.0)])
def test_the_earliest_error_is_the_cause(tmp_path, capsys, order):
    errors = [tmp_path / "0", tmp_path / "1", tmp_path / "2"]
    write_error(errors[0], order[0], "error: from 0", 3)
    write_error(errors[1], order[1], "error: from 1", 4)
    first = order.index(1.0)
    assert launch._report([3, 4, None], errors) == 3 + first
    assert capsys.readouterr().err == f"error: from {first}\n"


def test_a_killed_rank_is_the_cause_of_errors_elsewhere(tmp_path, capsys):
    write_error(tmp_path / "0", 1.0, "error: connection closed by peer", 1)
    assert launch._report([1, -9], [tmp_path / "0", tmp_path / "1"]) == 137
    assert capsys.readouterr().err == "error: rank 1 was ended by SIGKILL (out of memory?)\n"


def test_a_rank_that_ended_without_a_word(tmp_path, capsys):
    assert launch._report([None, 7], [tmp_path / "0", tmp_path / "1"]) == 7
    assert "rank 1 ended with exit status 7" in capsys.readouterr().err


def ranks(count):
    return ParallelConfig(pp=count, device="cpu")


def fake_ranks(monkeypatch, tmp_path, program):
    """Have the launcher start `program` in place of the `dualpipe` command."""
    (tmp_path / "dualpipe.py").write_text(program)
    monkeypatch.setattr(sys, "executable", _python_from(tmp_path))


def _python_from(folder):
    script = folder / "python"
    script.write_text(f'#!/bin/sh\nexec {sys.executable} {folder}/dualpipe.py "$@"\n')
    script.chmod(0o755)
    return str(script)


def test_one_failing_rank_stops_the_others(monkeypatch, tmp_path, capsys):
    program = f"""
import os, sys, time
open("{tmp_path}/pid" + os.environ["RANK"], "w").write(str(os.getpid()))
if os.environ["RANK"] == "1":
    while not all(os.path.exists(f"{tmp_path}/pid{{rank}}") for rank in range(3)):
        time.sleep(0.01)
    sys.exit(9)
time.sleep(100)
"""
    fake_ranks(monkeypatch, tmp_path, program)
    assert launch.start_ranks(["train"], ranks(3)) == 9
    assert "rank 1 ended with exit status 9" in capsys.readouterr().err
    for rank in range(3):
        with pytest.raises(ProcessLookupError):
            os.kill(int((tmp_path / f"pid{rank}").read_text()), 0)


@pytest.mark.parametrize(
    ("error", "status", "last_line"),
    [(None, 0, ""), (ValueError("bad"), 2, "error: bad"), (KeyError("fault"), 1, "error: rank 1: KeyError: 'fault'")],
)
def test_a_rank_of_several_leaves_at_once_with_what_it_has_to_say(monkeypatch, capsys, error, status, last_line):
    def leave(status):
        raise SystemExit(status)

    monkeypatch.setattr(launch.os, "_exit", leave)
    monkeypatch.delenv(launch.ERROR_FILE, raising=False)
    with pytest.raises(SystemExit) as left, launch.as_rank(RankInfo(1, 2, 1, 2)):
        if error is not None:
            raise error
    said = capsys.readouterr().err
    assert (left.value.code, said.splitlines()[-1:]) == (status, [last_line] if last_line else [])
    assert ("Traceback" in said) == isinstance(error, KeyError)


def test_the_cursor_is_shown_again_when_ranks_were_stopped(monkeypatch, tmp_path, capsys):
    fake_ranks(monkeypatch, tmp_path, "import os, sys\nsys.exit(int(os.environ['RANK']))\n")
    launch.start_ranks(["train"], ranks(2))
    assert "\x1b" not in capsys.readouterr().out, "not a terminal"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    launch.start_ranks(["train"], ranks(2))
    assert capsys.readouterr().out == "\x1b[?25h"


def test_ranks_get_their_place_and_arguments(monkeypatch, tmp_path):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    program = f"""
import json, os, sys
keys = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS", "MASTER_ADDR")
with open("{tmp_path}/rank" + os.environ["RANK"], "w") as file:
    json.dump([sys.argv[1:], [os.environ[k] for k in keys]], file)
"""
    fake_ranks(monkeypatch, tmp_path, program)
    assert launch.start_ranks(["train", "a b"], ranks(2)) == 0
    for rank in range(2):
        arguments, environment = json.loads((tmp_path / f"rank{rank}").read_text())
        assert arguments == ["-P", "-m", "dualpipe", "train", "a b"]
        assert environment == [str(rank), str(rank), "2", "2", "1", "127.0.0.1"]


def test_a_device_for_every_rank(monkeypatch):
    """Given a number of GPUs, then each rank has its own, or too few are refused; "auto" takes the CPU without any."""
    info = RankInfo(rank=1, world_size=2, local_rank=1, local_world_size=2)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    cases = [(2, "auto", "cuda:1"), (2, "cuda", "cuda:1"), (0, "auto", "cpu"), (2, "cpu", "cpu"), (1, "cpu", "cpu")]
    for count, wanted, expected in cases:
        monkeypatch.setattr("torch.cuda.device_count", lambda count=count: count)
        assert str(choose_device(info, wanted, bool)) == expected
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda device: SimpleNamespace(uuid="GPU-1"))
    for wanted in ("cuda", "auto"):
        with pytest.raises(ValueError, match=f"'{wanted}', but torch finds 1 CUDA devices here for 2 ranks; start few"):
            choose_device(info, wanted, lambda uuid: uuid != "GPU-1")
        assert str(choose_device(info, wanted, lambda uuid: uuid == "GPU-1")) == "cuda:0"  # all that this rank sees


# -- what one machine is not asked to serve


@pytest.fixture
def gpus(monkeypatch):
    """A machine with two cores and so many GPUs: device files that the launcher sees, and what torch finds."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})

    def set_(files, torch_finds=None):
        monkeypatch.setattr(launch, "_device_files", lambda environment: files)
        found = files if torch_finds is None else torch_finds
        monkeypatch.setattr("torch.cuda.is_available", lambda: found > 0)
        monkeypatch.setattr("torch.cuda.device_count", lambda: found)

    return set_


@pytest.mark.parametrize(
    ("world_size", "device", "files", "torch_finds", "refused"),
    [
        (8, "auto", 0, 0, None),
        (9, "auto", 0, 0, "9 ranks are more than 4 for each of this machine's 2 cores"),
        (8, "cpu", 1, 1, None),
        (9, "cpu", 16, 16, "9 ranks are more than 4 for each"),
        (8, "auto", 8, 8, None),
        (2, "auto", 1, 1, "2 ranks need as many GPUs, and this machine has 1; .*, or set parallel.device = 'cpu'"),
        (2, "auto", 1, 0, None),  # a torch without CUDA
        (2, "auto", 1, 2, None),  # device files are not all that there is
        (2, "cuda", 0, 0, "2 ranks need as many GPUs, and this machine has 0; .*, or set parallel.device = 'cpu'"),
    ],
)
def test_what_is_refused(gpus, world_size, device, files, torch_finds, refused):
    gpus(files, torch_finds)
    if refused is None:
        check_machine(["train"], world_size, device)
        return
    with pytest.raises(ValueError, match=refused) as error:
        check_machine(["train"], world_size, device)
    assert [line.split()[0] for line in error.value.__notes__] == ["torchrun", "srun"]


def test_the_commands_have_all_ranks(gpus):
    def commands(arguments, world_size, device="auto"):
        with pytest.raises(ValueError) as error:
            check_machine(arguments, world_size, device)
        return error.value.__notes__

    gpus(8)
    torchrun, srun = commands(["train", "a b.toml"], 1024)
    assert torchrun.endswith("-m dualpipe train 'a b.toml'") and srun.endswith(" dualpipe train 'a b.toml'")
    assert "--nnodes 128 --nproc-per-node 8 " in torchrun
    assert "--nodes 128 --ntasks-per-node 8 --gpus-per-node 8 " in srun
    assert "--nnodes 2 --nproc-per-node 6 " in commands(["train"], 12)[0], "as even as it goes"
    assert "--nnodes 8 --nproc-per-node 2 " in commands(["train"], 16, "cpu")[0]
    assert "gpus" not in commands(["train"], 16, "cpu")[1]


def test_hidden_devices_do_not_count():
    files = launch._device_files({})
    assert launch._device_files({"CUDA_VISIBLE_DEVICES": ""}) == 0
    assert launch._device_files({"CUDA_VISIBLE_DEVICES": "0"}) == min(files, 1)


@pytest.mark.parametrize("command", [["train"], ["parity", "--pp", "16"]])
def test_no_process_is_started_for_a_thousand_ranks(run_toml, gpus, monkeypatch, capsys, command):
    monkeypatch.setattr(launch, "subprocess", None)
    monkeypatch.setattr(launch, "rank_from_environment", lambda environment: None)
    gpus(0)
    name, *options = command
    options = [*options, "--parallel.pp", "16", "--parallel.ep", "64", "--parallel.device", "auto"]
    assert cli.main([name, str(run_toml), *options]) == 2
    error, torchrun, srun = capsys.readouterr().err.splitlines()
    assert error.startswith("error: 1024 ranks are more than 4 for each")
    assert "--nnodes 128 --nproc-per-node 8" in torchrun and "--parallel.ep 64" in torchrun
    assert "--nodes 128 --ntasks-per-node 8 --gpus-per-node 8" in srun


# -- examples/slurm.sbatch

SBATCH = Path(__file__).parents[2] / "examples" / "slurm.sbatch"


def start_batch_script(folder, *arguments, srun="true"):
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
    return subprocess.Popen(["bash", SBATCH, *arguments], cwd=folder, env=job)


def test_the_batch_script_sets_what_the_ranks_read(tmp_path):
    assert start_batch_script(tmp_path, "run.toml", "--train.steps", "a b").wait(20) == 0
    srun = (tmp_path / "arguments").read_text().splitlines()
    command = ["--kill-on-bad-exit=1", "--cpus-per-task=6", "dualpipe", "train", "run.toml", "--train.steps", "a b"]
    assert srun == command
    found = dict(line.split("=", 1) for line in (tmp_path / "environment").read_text().splitlines())
    task = {"SLURM_PROCID": "9", "SLURM_STEP_NUM_TASKS": "16", "SLURM_LOCALID": "1", "SLURM_STEP_NUM_NODES": "2"}
    assert rank_from_environment(found | task) == RankInfo(9, 16, 1, 8), "what srun sets in a task"
    assert found["MASTER_ADDR"] == "n7"
    assert {"MASTER_PORT": found.pop("MASTER_PORT")} == slurm_rendezvous(found), "as it would be without"
    asked = dict(line.removeprefix("#SBATCH --").split("=", 1) if "=" in line else (line, "")
                 for line in SBATCH.read_text().splitlines() if line.startswith("#SBATCH"))
    assert asked["ntasks-per-node"] == asked["gpus-per-node"], "a task for each GPU"
    assert "#SBATCH --requeue" in asked


def test_the_batch_script_ends_as_srun_and_goes_back_into_the_queue(tmp_path):
    assert start_batch_script(tmp_path, "run.toml", srun="exit 7").wait(20) == 7
    (tmp_path / "environment").unlink()
    job = start_batch_script(tmp_path, "run.toml", srun="while [ ! -e done ]; do sleep 0.02; done; exit 3")
    wait_for(tmp_path / "environment")
    job.send_signal(signal.SIGUSR1)
    wait_for(tmp_path / "calls", "requeue 123456")
    assert job.poll() is None, "until SLURM ends it"
    (tmp_path / "done").touch()
    assert job.wait(20) == 3


def wait_for(path, text=""):
    deadline = time.monotonic() + 20
    while not (path.exists() and text in path.read_text()):
        assert time.monotonic() < deadline, f"{path} with {text!r}"
        time.sleep(0.01)
