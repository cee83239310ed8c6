"""Python's garbage collector runs after the same steps on all ranks; after the run it works as before."""

import gc

import pytest

from dualpipe.train.trainer import GarbageCollection


@pytest.fixture(autouse=True)
def nothing_is_frozen(_heap_stays_frozen, monkeypatch):
    """Unfreeze the objects frozen by tests/conftest.py, so that the test runs as in a process of its own."""
    freeze, unfreeze = _heap_stays_frozen
    monkeypatch.setattr(gc, "freeze", freeze)
    monkeypatch.setattr(gc, "unfreeze", unfreeze)
    gc.unfreeze()
    yield
    gc.freeze()


@pytest.fixture
def collected(monkeypatch):
    """Return a list that gets a None for every collection."""
    found = []
    monkeypatch.setattr(gc, "collect", lambda *_: found.append(None))
    return found


def test_it_collects_after_every_so_many_steps(collected):
    assert gc.isenabled()
    at = []
    with GarbageCollection(3) as garbage:
        assert len(collected) == 1 and not gc.isenabled() and gc.get_freeze_count()
        for step in range(1, 8):
            garbage.after(step)
            at.append(len(collected) - 1)
    assert at == [0, 0, 1, 1, 1, 2, 2]
    assert gc.isenabled() and not gc.get_freeze_count()


def test_python_decides_itself(collected):
    with GarbageCollection(0) as garbage:
        assert gc.isenabled() and not gc.get_freeze_count()
        garbage.after(1)
    assert gc.isenabled() and not collected


@pytest.mark.slow
def test_it_is_as_before_after_an_error():
    gc.disable()
    try:
        with GarbageCollection(1):
            pass
        assert not gc.isenabled(), "somebody else has disabled it"
    finally:
        gc.enable()
    with pytest.raises(KeyError), GarbageCollection(1):
        raise KeyError
    assert gc.isenabled()
