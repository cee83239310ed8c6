"""What dualpipe/device.py asks of torch beside streams, which are for test_pretend_cuda.py."""

import os

import pytest
import torch

from dualpipe.device import deterministic


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
def test_what_cannot_be_deterministic_raises_and_all_is_reset(environment, warns):
    torch.use_deterministic_algorithms(warns, warn_only=warns)
    before = modes()
    with deterministic(False):
        assert modes() == before
    with pytest.raises(RuntimeError, match="does not have a deterministic implementation"), deterministic():
        assert modes() == (True, False), "flash attention's backward is as it was where torch only warns"
        assert (os.environ["CUBLAS_WORKSPACE_CONFIG"], os.environ["NCCL_ALGO"]) == (":4096:8", "Ring")
        write_twice()
    assert modes() == before
