"""The devices that tests run on, and the part of the exhaustive matrices that a run takes.

Devices are the CPU, a CUDA device, and the pretend one, on which a missing wait is a fault. On the pretend one the host
may wait, except where a test says torch.cuda.set_sync_debug_mode("error").
"""

import gc
from collections import Counter

import pytest
from _pytest.mark.expression import Expression

from dualpipe.runtime.recorder import Recorder
from few_cases import PARTS, few_cases, part_of
from pictures import write_stand_in
from run_files import write_files

REAL = pytest.param("cuda", marks=pytest.mark.gpu)
SLOW_CASES = 2  # of each slow test, where a part is run


def pytest_addoption(parser):
    parser.addoption(
        "--matrix-part", type=int, metavar="N",
        help=f"run only part N modulo {PARTS} of the tests marked `matrix`, and {SLOW_CASES} cases of each other slow "
             "test, chosen by N; without it, all of them",
    )
    parser.addoption(
        "--gpu-cases", type=int, metavar="N",
        help="of each test marked `gpu`, run N cases: compiling takes longer than running them",
    )


@pytest.hookimpl(tryfirst=True)  # before xdist starts its workers
def pytest_cmdline_main(config):
    """Run with one worker where a run is of tests marked `gpu` alone: they share one card."""
    if asks_for_gpu_alone(config.option.markexpr):
        config.option.numprocesses = 0
        config.option.dist = "no"
        config.option.tx = []


def asks_for_gpu_alone(markexpr):
    """Return True if an expression of marks takes tests that are marked `gpu`, and none that have no mark."""
    if not markexpr:
        return False
    chosen = Expression.compile(markexpr)
    return chosen.evaluate(lambda name, **_: name == "gpu") and not chosen.evaluate(lambda name, **_: False)


@pytest.hookimpl(trylast=True)  # after -m has left out what it leaves out
def pytest_collection_modifyitems(config, items):
    """Leave out tests of other parts of the matrices, and cases of slow and of GPU tests beyond those asked for."""
    part, most = config.getoption("--matrix-part"), config.getoption("--gpu-cases")
    left_out = set()
    if part is not None:
        matrices = {item for item in items if item.get_closest_marker("matrix")}
        left_out |= {item for item in matrices if part_of(item.nodeid) != part % PARTS}
        slow = [item for item in items if item.get_closest_marker("slow") and item not in matrices]
        left_out |= set(slow) - set(few_cases(slow, SLOW_CASES, turn=part))
    if most is not None:
        on_gpu = [item for item in items if item.get_closest_marker("gpu")]
        left_out |= set(on_gpu) - set(few_cases(on_gpu, most))
    if left_out:
        config.hook.pytest_deselected(items=[item for item in items if item in left_out])
        items[:] = [item for item in items if item not in left_out]


def pytest_terminal_summary(terminalreporter):
    """Print a line for each reason to skip tests, with their number."""
    reasons = Counter(report.longrepr[2].removeprefix("Skipped: ") for report in terminalreporter.getreports("skipped"))
    for reason, number in reasons.most_common():
        terminalreporter.write_line(f"skipped {number}: {reason}")


def pytest_collection_finish():
    """Leave out of garbage collections what is there by now: with it, each would take a third of a second."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def _heap_stays_frozen():
    """Runs of this process do not freeze what is there at their start, since they would thaw all of it at their end."""
    freeze, unfreeze = gc.freeze, gc.unfreeze
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gc, "freeze", lambda: None)
        patch.setattr(gc, "unfreeze", lambda: None)
        yield freeze, unfreeze


@pytest.fixture(autouse=True, scope="session")
def _stand_in_for_pictures():
    """Runs of this process do not have matplotlib draw their losses, and neither do forked ones (preloaded.py)."""
    from dualpipe.train import metrics

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(metrics, "_draw_loss", write_stand_in)
        yield


@pytest.fixture(autouse=True)
def _own_recorder():
    """A recorder of each test's own: one that has built a mesh would name the ranks of all after it."""
    with Recorder().activate():
        yield


@pytest.fixture
def run_toml(tmp_path):
    """The TOML of a training run that is small enough for a test."""
    return write_files(tmp_path)


@pytest.fixture(params=["cpu", REAL])
def real_device(request):
    """One that does what it is given when it comes to it, so that a missing wait shows in values."""
    yield from _device(request.param)


@pytest.fixture(params=["cpu", pytest.param("pretended", marks=[pytest.mark.slow, pytest.mark.matrix]), REAL])
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
