"""`dualpipe doctor` on machines with and without devices, links and a torch that can be imported."""

import os
import resource
import subprocess
import sys
from importlib import metadata
from types import SimpleNamespace

import pytest
import torch

from dualpipe import cli
from dualpipe.runtime import doctor

H200 = SimpleNamespace(name="NVIDIA H200", major=9, minor=0, total_memory=141 * 2**30, multi_processor_count=132)
NVLINK = """printf '\\033[4m\\tGPU0\\tGPU1\\tNIC0\\tCPU Affinity\\033[0m\\n'
printf 'GPU0\\t X \\tNV18\\tPIX\\t0-47\\nGPU1\\tNV18\\t X \\tSYS\\t48-95\\nNIC0\\tPIX\\tSYS\\t X \\n\\nLegend:\\n'"""


def says(capsys, status=0):
    """Return what `dualpipe doctor` prints, by the state of each line."""
    assert cli.main(["doctor"]) == status
    lines = capsys.readouterr().out.splitlines()
    return {state: "\n".join(line for line in lines if line.split()[0] == state) for state in
            ("ok", "missing", "error")}


@pytest.fixture
def two_devices(monkeypatch, tmp_path):
    """Pretend that torch sees two devices with peer access, and that `nvidia-smi` shows NVLink."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: H200)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: True)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 28, 3))
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    return nvidia_smi(monkeypatch, tmp_path, NVLINK)


def nvidia_smi(monkeypatch, folder, script):
    (folder / "nvidia-smi").write_text(f"#!/bin/sh\n{script}\n")
    (folder / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)
    return folder / "nvidia-smi"


def test_two_devices(two_devices, monkeypatch, capsys):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    found = says(capsys)
    assert found["error"] == ""
    for text in ("cuda:0 NVIDIA H200, sm_90, 141 GiB", "cuda:1 NVIDIA H200", "NCCL 2.28.3", "61 blocks on 132",
                 "peer access between all 2", "NV18", "gloo on lo", f"torch {torch.__version__}"):
        assert text in found["ok"], text
    assert "NVLink" not in found["missing"] and "CUDA" not in found["missing"]


def test_blocks_that_do_not_fit_and_streams_that_share_a_queue(two_devices, monkeypatch, capsys):
    part = SimpleNamespace(**vars(H200) | {"name": "NVIDIA H200 MIG 2g", "multi_processor_count": 40})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: part)
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    text = says(capsys)["missing"]
    assert "61 blocks on 40" in text and "NCCL_MAX_NCHANNELS=8" in text and "CUDA_DEVICE_MAX_CONNECTIONS=1" in text
    monkeypatch.setenv("NCCL_MAX_NCHANNELS", "8")
    assert "37 blocks on 40" in says(capsys)["ok"]


def test_what_two_devices_can_miss(two_devices, monkeypatch, tmp_path, capsys):
    nvidia_smi(monkeypatch, tmp_path, NVLINK.replace("NV18", "SYS"))
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: a > b)
    v100 = SimpleNamespace(name="Tesla V100", major=7, minor=0, total_memory=32 * 2**30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: v100)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "ib9")
    found = says(capsys, status=1)
    assert "GLOO_SOCKET_IFNAME=ib9" in found["error"] and "NCCL" in found["error"]
    for text in ("sm_70, 32 GiB: too old", "peer access from cuda:0 to 1", "SYS by nvidia-smi"):
        assert text in found["missing"]
    two_devices.write_text("#!/bin/sh\necho NVIDIA-SMI has failed; exit 9\n")
    assert "nvidia-smi does not show" in says(capsys, status=1)["missing"]


def test_no_device_no_compiler_and_a_package_missing(monkeypatch, capsys):
    def version(name):
        if name in ("tensorboard", "rich"):
            raise metadata.PackageNotFoundError(name)
        return "9.9"

    monkeypatch.setattr(doctor, "version", version)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(doctor.socket, "gethostbyname", lambda host: "10.0.0.3")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setenv("PATH", "")
    found = says(capsys, status=1)
    assert "pip install rich" in found["error"] and "tensorboard" not in found["error"]
    for text in ("pip install tensorboard", "CUDA devices", "C compiler"):
        assert text in found["missing"]
    assert "gloo on 10.0.0.3" in found["ok"]
    monkeypatch.setattr(doctor.socket, "gethostbyname", lambda host: "127.0.1.1")
    monkeypatch.setattr(doctor.socket, "if_nameindex", lambda: [(1, "lo"), (2, "eth0"), (3, "ib0")])
    assert "one of eth0, ib0" in says(capsys, 1)["missing"]
    monkeypatch.setattr(doctor.socket, "if_nameindex", lambda: [(1, "lo")])
    assert "no other interface" in says(capsys, 1)["missing"]


def test_a_torch_that_cannot_be_imported(tmp_path):
    (tmp_path / "torch.py").write_text("raise OSError('libcudart.so.13: cannot open shared object file')")
    done = subprocess.run([sys.executable, "-P", "-m", "dualpipe", "doctor"], capture_output=True, text=True,
                          env={**os.environ, "PYTHONPATH": str(tmp_path)})
    assert done.returncode == 1 and done.stderr == "" and "libcudart.so.13" in done.stdout.splitlines()[-1]


@pytest.mark.parametrize(("limit", "state", "text"), [
    (4096, "ok", "up to 4,096, enough for jobs of 768 ranks"),
    (1024, "missing", "up to 1,024, enough for jobs of 153 ranks; for larger ones raise the hard limit"),
])
def test_the_limit_of_open_files_is_given_in_ranks(monkeypatch, capsys, limit, state, text):
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (256, limit))
    monkeypatch.setattr(resource, "setrlimit", lambda kind, limits: None)
    assert text in says(capsys)[state]
