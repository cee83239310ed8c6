"""The number of ranks that a machine runs, and the commands for more."""

import os

import pytest

from dualpipe import cli
from dualpipe.train.launch import environment as launch
from dualpipe.train.launch import start
from dualpipe.train.launch.start import check_machine


@pytest.fixture
def gpus(monkeypatch):
    """Return a function that gives this machine two cores and a number of GPUs: by device files, and by torch."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})

    def set_gpus(files, torch_finds=None):
        monkeypatch.setattr(start, "_count_device_files", lambda environment: files)
        count = files if torch_finds is None else torch_finds
        monkeypatch.setattr("torch.cuda.is_available", lambda: count > 0)
        monkeypatch.setattr("torch.cuda.device_count", lambda: count)

    return set_gpus


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
def test_more_ranks_than_a_machine_can_run_are_refused(gpus, world_size, device, files, torch_finds, refused):
    gpus(files, torch_finds)
    if refused is None:
        check_machine(["train"], world_size, device)
        return
    with pytest.raises(ValueError, match=refused) as error:
        check_machine(["train"], world_size, device)
    assert [line.split()[0] for line in error.value.__notes__] == ["torchrun", "srun"]


def test_the_commands_start_all_ranks(gpus):
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
    files = start._count_device_files({})
    assert start._count_device_files({"CUDA_VISIBLE_DEVICES": ""}) == 0
    assert start._count_device_files({"CUDA_VISIBLE_DEVICES": "0"}) == min(files, 1)


@pytest.mark.parametrize("command", [["train"], ["parity", "--pp", "16"]])
def test_no_process_is_started_for_a_thousand_ranks(run_toml, gpus, monkeypatch, capsys, command):
    monkeypatch.setattr(start, "subprocess", None)
    monkeypatch.setattr(launch, "rank_from_environment", lambda environment: None)
    gpus(0)
    name, *options = command
    options = [*options, "--parallel.pp", "16", "--parallel.ep", "64", "--parallel.device", "auto"]
    assert cli.main([name, str(run_toml), *options]) == 2
    error, torchrun, srun = capsys.readouterr().err.splitlines()
    assert error.startswith("error: 1024 ranks are more than 4 for each")
    assert "--nnodes 128 --nproc-per-node 8" in torchrun and "--parallel.ep 64" in torchrun
    assert "--nodes 128 --ntasks-per-node 8 --gpus-per-node 8" in srun
