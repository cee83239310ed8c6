"""Schedules that were found are kept: by all that they were searched for, whatever happens to the files."""

import resource
import signal
from types import MappingProxyType

import numpy as np
import pytest

from dualpipe.schedule import Costs, build, validate
from dualpipe.schedule.search import driver
from searches import QUICK, overlapped


def test_a_found_schedule_is_kept(own_cache, monkeypatch):
    first = build("auto", 3, 6, effort=QUICK // 10, costs=overlapped())
    (file,) = own_cache.iterdir()
    monkeypatch.setattr(driver, "_search_schedules", lambda *_: pytest.fail("searched again"))
    assert build("auto", 3, 6, effort=QUICK // 10, costs=overlapped()) == first
    with pytest.raises(pytest.fail.Exception):
        build("auto", 3, 6, effort=QUICK // 10, costs=overlapped(0.3))
    assert [*own_cache.iterdir()] == [file]


@pytest.mark.parametrize("damage", [b"", b"{", b"[]", b"\xff", b'{"ranks": [[["0F0"]]], "placement": [0]}',
                                    b'{"ranks": [[["0F0"]]], "placement": [0], "num_microbatches": 1}',
                                    b'{"ranks": [[["F"]]]}'])
def test_a_damaged_file_is_written_again(own_cache, damage):
    first = build("auto", 2, 2, effort=0)
    (file,) = own_cache.iterdir()
    whole = file.read_bytes()
    file.write_bytes(damage)
    assert build("auto", 2, 2, effort=0) == first
    assert [*own_cache.iterdir()] == [file] and file.read_bytes() == whole


def test_of_a_file_that_a_full_disk_cut_off_nothing_is_left(own_cache):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
        validate(build("auto", 2, 2, effort=0))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert [*own_cache.iterdir()] == []


def test_where_nothing_can_be_written(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    validate(build("auto", 2, 2, effort=0))
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "file"))
    validate(build("auto", 2, 2, effort=0))


def test_the_key_tells_all_inputs_apart():
    plain = Costs()
    keys = [driver.cache_key(each) for each in (
        plain, Costs(F=1.5), Costs(pairs={("F", "F"): 1.5}), Costs(per_stage={0: plain}), Costs(per_stage={1: plain}),
        Costs(F=np.float32(1.1)), Costs(F=np.nextafter(1.1, 2)), Costs(pairs=MappingProxyType({("F", "F"): 1.6})))]
    assert len(set(keys)) == len(keys)
    assert driver.cache_key(Costs(F=1.5)) == keys[1]
