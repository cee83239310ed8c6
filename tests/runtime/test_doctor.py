"""`dualpipe doctor` on machines with and without devices, links and a torch that can be imported."""

import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import dualpipe
from dualpipe import cli
from dualpipe.runtime import doctor

H200 = SimpleNamespace(name="NVIDIA H200", major=9, minor=0, total_memory=141 * 2**30, multi_processor_count=132)
NVLINK = """printf '\\033[4m\\tGPU0\\tGPU1\\tNIC0\\tCPU Affinity\\033[0m\\n'
printf 'GPU0\\t X \\tNV18\\tPIX\\t0-47\\nGPU1\\tNV18\\t X \\tSYS\\t48-95\\nNIC0\\tPIX\\tSYS\\t X \\n\\nLegend:\\n'"""


def says(capsys, status=0):
    """Return the lines that `dualpipe doctor` prints, by their state."""
    assert cli.main(["doctor"]) == status
    lines = capsys.readouterr().out.splitlines()
    return {state: [line[9:] for line in lines if line.split()[0] == state] for state in ("ok", "missing", "error")}


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
    assert found["error"] == []
    assert any(text.endswith(f" in {Path(dualpipe.__file__).parent}") for text in found["ok"])
    for text in ("cuda:0 NVIDIA H200, sm_90, 141 GiB", "cuda:1 NVIDIA H200, sm_90, 141 GiB", "NCCL 2.28.3",
                 "NCCL's kernels, if all wait at once: up to 61 blocks on 132 multiprocessors",
                 "peer access between all 2 devices", "NVLink between all devices (NV18)",
                 "gloo on lo (GLOO_SOCKET_IFNAME)", f"torch {torch.__version__}"):
        assert text in found["ok"], text
    assert not any("NVLink" in text or "CUDA" in text for text in found["missing"])


def test_blocks_that_do_not_fit_and_streams_that_share_a_queue(two_devices, monkeypatch, capsys):
    part = SimpleNamespace(**vars(H200) | {"name": "NVIDIA H200 MIG 2g", "multi_processor_count": 40})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: part)
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    text = "\n".join(says(capsys)["missing"])
    assert "up to 61 blocks on 40 multiprocessors; they can wait for each other: set NCCL_MAX_NCHANNELS=8" in text
    assert "CUDA_DEVICE_MAX_CONNECTIONS=1: all streams share one queue" in text
    monkeypatch.setenv("NCCL_MAX_NCHANNELS", "8")
    assert any("up to 37 blocks on 40" in text for text in says(capsys)["ok"])


def test_what_two_devices_can_miss(two_devices, monkeypatch, tmp_path, capsys):
    nvidia_smi(monkeypatch, tmp_path, NVLINK.replace("NV18", "SYS"))
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: a > b)
    v100 = SimpleNamespace(name="Tesla V100", major=7, minor=0, total_memory=32 * 2**30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: v100)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "ib9")
    found = says(capsys, status=1)
    assert found["error"][0].startswith("gloo: GLOO_SOCKET_IFNAME=ib9 is none of lo")
    assert found["error"][1] == "NCCL: this build of torch has none; GPUs cannot train together"
    text = "\n".join(found["missing"])
    assert "cuda:0 Tesla V100, sm_70, 32 GiB: too old" in text
    assert "peer access from cuda:0 to 1: messages go through host memory" in text
    assert "NVLink between all devices (SYS by nvidia-smi)" in text

    two_devices.write_text("#!/bin/sh\necho NVIDIA-SMI has failed; exit 9\n")
    assert any("nvidia-smi does not show" in text for text in says(capsys, status=1)["missing"])


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
    assert found["error"] == ["rich: no training; pip install rich"]
    assert "tensorboard: training writes no TensorBoard events; pip install tensorboard" in found["missing"]
    assert any(text.startswith("CUDA devices: torch ") and "training runs on" in text for text in found["missing"])
    assert "C compiler: no --train.compile; set CC" in found["missing"]
    assert any(text.startswith("gloo on 10.0.0.3 (") for text in found["ok"])
    monkeypatch.setattr(doctor.socket, "gethostbyname", lambda host: "127.0.1.1")
    monkeypatch.setattr(doctor.socket, "if_nameindex", lambda: [(1, "lo"), (2, "eth0"), (3, "ib0")])
    missing = says(capsys, 1)["missing"]
    assert any(text.endswith("resolves to 127.0.1.1; set GLOO_SOCKET_IFNAME to one of eth0, ib0") for text in missing)
    monkeypatch.setattr(doctor.socket, "if_nameindex", lambda: [(1, "lo")])
    missing = says(capsys, 1)["missing"]
    assert any(text.endswith("resolves to 127.0.1.1; it has no other interface") for text in missing)


def test_a_torch_that_cannot_be_imported(tmp_path):
    (tmp_path / "torch.py").write_text("raise OSError('libcudart.so.13: cannot open shared object file')")
    done = subprocess.run([sys.executable, "-P", "-m", "dualpipe", "doctor"], capture_output=True, text=True,
                          env={**os.environ, "PYTHONPATH": str(tmp_path)})
    assert done.returncode == 1 and done.stderr == ""
    assert done.stdout.splitlines()[-1] == (
        "error    torch cannot be imported (OSError: libcudart.so.13: cannot open shared object file): no training"
    )
