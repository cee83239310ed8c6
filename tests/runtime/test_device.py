"""dualpipe/runtime/device.py apart from streams, which tests/test_pretend_cuda.py checks."""

import os
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from dualpipe.runtime import device
from dualpipe.runtime.device import deterministic, peak_tflops


def modes():
    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()


@pytest.fixture
def environment(monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    monkeypatch.setenv("NCCL_ALGO", "Ring")  # the user's
    yield
    torch.use_deterministic_algorithms(False)


def write_twice():
    torch.zeros(3).put_(torch.tensor([0, 0]), torch.ones(2))  # which one is last, torch does not say


@pytest.mark.parametrize("warns", [True, False])
def test_nondeterministic_operators_raise_and_the_modes_are_restored(environment, warns):
    torch.use_deterministic_algorithms(warns, warn_only=warns)
    before = modes()
    with deterministic(False):
        assert modes() == before
    with pytest.raises(RuntimeError, match="does not have a deterministic implementation"), deterministic():
        assert modes() == (True, False), "flash attention's backward is as it was where torch only warns"
        assert (os.environ["CUBLAS_WORKSPACE_CONFIG"], os.environ["NCCL_ALGO"]) == (":4096:8", "Ring")
        write_twice()
    assert modes() == before


READ_AT_START = ("CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_MODULE_LOADING", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
OURS = {"CUDA_DEVICE_MAX_CONNECTIONS": "32", "CUDA_MODULE_LOADING": "EAGER",
        "PYTORCH_ALLOC_CONF": "expandable_segments:True"}


@pytest.mark.parametrize("users", [
    {}, {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "CUDA_MODULE_LOADING": "LAZY", "PYTORCH_ALLOC_CONF": "backend:native"},
    {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:512"},
])
def test_variables_read_at_the_start_are_set_unless_the_user_has_set_them(monkeypatch, users):
    monkeypatch.setattr(os, "environ", dict(users))
    device.set_environment()
    expected = OURS | users
    if "PYTORCH_CUDA_ALLOC_CONF" in users:
        del expected["PYTORCH_ALLOC_CONF"]  # torch would read one of the two, by version
    assert {name: os.environ[name] for name in READ_AT_START if name in os.environ} == expected
    assert (device.single_queue_problem() is None) == (expected["CUDA_DEVICE_MAX_CONNECTIONS"] == "32")


def test_a_side_stream_has_high_priority():
    with mock.patch.object(torch.cuda, "Stream", lambda *args, **options: SimpleNamespace(**options)):
        assert device.new_stream(torch.device("cuda", 0)).priority == -1
    assert device.new_stream(torch.device("cpu")) is None


def test_the_least_time_is_of_later_calls(monkeypatch):
    """The clock is read before and after each call: 9, 3, 1 and 2 seconds."""
    readings = iter([0, 9, 10, 13, 20, 21, 30, 32])
    calls = []
    monkeypatch.setattr(device.time, "perf_counter", lambda: next(readings))
    assert device.min_seconds(lambda: calls.append(1), torch.device("cpu"), num_calls=3) == 1
    assert len(calls) == 4


def test_the_time_of_a_device_includes_its_work(monkeypatch):
    events = []
    monkeypatch.setattr(device, "synchronize", lambda _: events.append("synchronized"))
    device.min_seconds(lambda: events.append("called"), torch.device("cuda", 0), num_calls=1)
    assert events == ["called", "synchronized"] * 2


@pytest.mark.parametrize(("name", "peak"), [
    ("NVIDIA H200", 989), ("NVIDIA H200 MIG 1g.18gb", None), ("NVIDIA GH200 480GB", 989), ("NVIDIA H20", 148),
    ("NVIDIA H100 80GB HBM3", 989), ("NVIDIA H100 PCIe", 756), ("NVIDIA A100-SXM4-80GB", 312), ("NVIDIA GB200", 2500),
    ("NVIDIA B200", 2250), ("NVIDIA A10", 125), ("NVIDIA GeForce RTX 3060", None), ("", None),
])
def test_peaks_of_devices(name, peak):
    assert peak_tflops(name) == peak
