"""Machine descriptions: measured rates of a GPU and its links, and unusable values."""

import json
from dataclasses import fields
from math import isfinite

import pytest

from dualpipe.plan.communication import all_to_all_seconds, ring_seconds, send_seconds
from dualpipe.plan.machines import Machine, read_machine


def test_what_was_measured_replaces_what_is_assumed(tmp_path):
    (tmp_path / "own.json").write_text('{"attention": 0.6}')
    rows = [{"product": "up forward", "of dense": share} for share in (0.8, 0.9, 0.95)]
    (tmp_path / "bench.json").write_text(json.dumps({"dense_tflops": 712.08, "copy_gb_per_s": 2847.5, "rows": rows}))
    machine = read_machine("h100", measured=(str(tmp_path / "own.json"), str(tmp_path / "bench.json")))
    assert machine.attention == 0.6 and machine.gemm == pytest.approx(0.72) and machine.bandwidth == pytest.approx(0.85)
    assert machine.grouped == pytest.approx(0.9 * 0.72)
    assert (machine.tflops, machine.node) == (989, 8)
    rows = [{"work": "F&B", "ms": 2.0, "beside 16": share} for share in (0.8, 0.9, 0.95)]
    (tmp_path / "overlap.json").write_text(json.dumps({"rows": rows}))
    assert read_machine("h100", measured=(str(tmp_path / "overlap.json"),)).beside == 0.9


@pytest.mark.parametrize("text, message", [
    ('{"gem": 0.5}', "'gemm'"), ('{"gemm": -1}', "gemm is -1"), ('{"latency": -1}', "latency is -1"),
    ('{"launch": true}', "launch is True"), ('{"host_waits": 2}', "host_waits is 2"), ("[1]", "object"),
    ("{", "not valid JSON"), ('{"rows": []}', "no rates"),
])
def test_costs_that_cannot_be_used(tmp_path, text, message):
    (tmp_path / "costs.json").write_text(text)
    with pytest.raises(ValueError, match=message):
        read_machine("h100", measured=(str(tmp_path / "costs.json"),))


def test_a_field_that_may_be_zero_has_an_effect_that_is_finite(tmp_path):
    """A divisor must be positive, wherever it is among the fields; other fields may be zero."""
    divisors = {"tflops", "hbm", "memory", "multiprocessors", "nvlink", "network", "gemm", "grouped", "attention",
                "attention_backward", "bandwidth", "links", "networks", "host_link"}
    path, mine = tmp_path / "costs.json", {}
    for field in fields(Machine):
        if field.name in ("node", "host_waits"):
            continue
        path.write_text(json.dumps({field.name: 0}))
        if field.name in divisors:
            with pytest.raises(ValueError, match=f"{field.name} is 0; give a positive number"):
                read_machine("h100", measured=(str(path),))
        else:
            mine[field.name] = 0
    path.write_text(json.dumps(mine))
    machine = read_machine("h100", measured=(str(path),))
    assert (machine.latency, machine.reserve, machine.fp8) == (0, 0, 0)
    assert isfinite(all_to_all_seconds(machine, 1e6, 16) + ring_seconds(machine, 1e6, 16)
                    + send_seconds(machine, 1e6, 16, 8))


def test_machines_of_ones_own(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text("tflops = 100\nhbm = 1000\nmemory = 24\nmultiprocessors = 80\nnvlink = 25\nnetwork = 12.5\n")
    assert read_machine(str(path)).tflops == 100 and read_machine(str(path)).gemm == read_machine("h100").gemm
    path.write_text("tflops = 100\nhbm = 1000\nmemory = 24\nnvlink = 25\n")
    with pytest.raises(ValueError, match="lacks the fields multiprocessors, network"):
        read_machine(str(path))
    with pytest.raises(ValueError, match="'h101'"):
        read_machine("h101")
