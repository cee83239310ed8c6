"""The devices that tests run on: the CPU, a CUDA device, and the pretend one, on which a missing wait is a fault.

On the pretend one the host may wait, but where a test says torch.cuda.set_sync_debug_mode("error").
"""

import pytest

from dualpipe.recorder import Recorder

REAL = pytest.param("cuda", marks=pytest.mark.gpu)


@pytest.fixture(autouse=True)
def _own_recorder():
    """A recorder of each test's own: one that has built a mesh would name the ranks of all after it."""
    with Recorder().activate():
        yield


@pytest.fixture(params=["cpu", REAL])
def real_device(request):
    """One that does what it is given when it comes to it, so that a missing wait shows in values."""
    yield from _device(request.param)


@pytest.fixture(params=["cpu", pytest.param("pretended", marks=pytest.mark.slow), REAL])
def device(request):
    yield from _device(request.param)


@pytest.fixture(params=["pretended", REAL])
def any_cuda(request):
    yield from _device(request.param)


def _device(name):
    import torch  # here, as some tests need none

    from pretend_cuda import pretend_cuda

    if name == "pretended":
        with pretend_cuda() as pretended:
            yield "cuda"
        assert pretended.report(waits={}) == []
    else:
        if name == "cuda" and not torch.cuda.is_available():
            pytest.skip("needs a CUDA device")
        yield name
