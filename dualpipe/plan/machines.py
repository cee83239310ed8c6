"""GPUs and their links: peak rates and kernel efficiencies from machines.toml, or measurements in their place.

`dualpipe.plan.communication` computes transfer times from them.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields, replace
from math import isfinite
from pathlib import Path
from typing import Any

from dualpipe.runtime.device import peak_tflops
from dualpipe.runtime.errors import nearest
from dualpipe.runtime.files import read_toml
from dualpipe.runtime.nccl import EXPERTS

TABLE = Path(__file__).with_name("machines.toml")
GPUS_PER_NODE = 8  # unless a command or a configuration says otherwise
# Fields used as divisors. All others may be 0, which leaves out the cost that they stand for.
POSITIVE = frozenset({"tflops", "hbm", "memory", "multiprocessors", "nvlink", "network", "gemm", "grouped",
                      "attention", "attention_backward", "bandwidth", "links", "networks", "host_link"})


@dataclass(frozen=True)
class Machine:
    """A GPU of a cluster. machines.toml documents the fields; `node` is the number of GPUs per node."""

    tflops: float
    hbm: float
    memory: float
    multiprocessors: float
    nvlink: float
    network: float
    gemm: float
    grouped: float
    attention: float
    attention_backward: float
    bandwidth: float
    links: float
    networks: float
    latency: float
    network_latency: float
    launch: float
    imbalance: float
    reserve: float
    host_waits: bool = False
    fp8: float = 0.0
    beside: float = 0.0
    launch_grouped: float = 0.0
    launch_kernel: float = 0.0
    host_link: float = 20.0
    node: int = GPUS_PER_NODE


def read_machine(name: str, *, node: int = GPUS_PER_NODE, measured: tuple[str, ...] = ()) -> Machine:
    """Read a machine by its name in machines.toml, or from a TOML file with the same fields.

    Args:
        name: a table of machines.toml, such as "h100", or the path of a .toml file.
        node: number of GPUs per node.
        measured: JSON files whose values replace the assumed ones: fields of `Machine`, or the output of
            bench_grouped_gemm.py or bench_overlap.py with --save.

    Raises:
        ValueError: for an unknown name, a missing or unknown field, an invalid value, or an unreadable JSON file.
    """
    values = _machine_fields(name)
    missing = [field.name for field in fields(Machine) if field.default is MISSING and field.name not in values]
    if missing:
        raise ValueError(f"{name} lacks the fields {', '.join(missing)}; set them as in {TABLE}")
    machine = Machine(**_checked(name, values), node=node)
    for file in measured:
        measurements = _read_measurements(Path(file), machine)
        machine = replace(machine, **_checked(file, measurements))
    return machine


def _machine_fields(name: str) -> dict[str, Any]:
    """Return the unchecked fields of a machine, defaults included."""
    tables = read_toml(TABLE)
    path = Path(name)
    if path.suffix == ".toml":
        return tables["default"] | read_toml(path)
    if name in tables and name != "default":
        peak = peak_tflops(name.upper())
        peak_field = {"tflops": peak} if peak else {}
        return tables["default"] | peak_field | tables[name]
    names = [table for table in tables if table != "default"]
    raise ValueError(f"unknown GPU {name!r}; give one of {', '.join(names)}, or a FILE.toml with the fields of "
                     f"{TABLE.name}")


def _checked(source: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of `values`, or raise ValueError, naming `source`, for an unknown field or an invalid value."""
    names = [field.name for field in fields(Machine) if field.name != "node"]
    for name, value in values.items():
        if name not in names:
            raise ValueError(f"{source}: unknown field {name!r}; the nearest is {nearest(name, names, cutoff=0)[0]!r}")
        if name == "host_waits":
            if not isinstance(value, bool):
                raise ValueError(f"{source}: {name} is {value!r}; give true or false")
            continue
        is_number = isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)
        if not is_number or value < 0 or (value == 0 and name in POSITIVE):
            expected = "a positive number" if name in POSITIVE else "a number of at least 0"
            raise ValueError(f"{source}: {name} is {value!r}; give {expected}")
    return dict(values)


def _read_measurements(path: Path, machine: Machine) -> dict[str, Any]:
    """Read machine fields from a JSON file: by name, or derived from a benchmark's rates and rows."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} contains {content!r:.60}; it must hold an object, such as {{\"gemm\": 0.7}}")
    if "rows" not in content:
        return content
    measurements = _benchmark_fields(content, machine)
    if not measurements:
        raise ValueError(f"{path} has no rates of kernels: give the output of bench_grouped_gemm.py or "
                         "bench_overlap.py with --save, or an object such as {\"gemm\": 0.7}")
    return measurements


def _benchmark_fields(content: Mapping[str, Any], machine: Machine) -> dict[str, float]:
    """Derive machine fields from a benchmark's rates ("dense_tflops", "copy_gb_per_s") and the medians of its rows."""
    measurements: dict[str, float] = {}
    if "dense_tflops" in content:
        measurements["gemm"] = content["dense_tflops"] / machine.tflops
    if "copy_gb_per_s" in content:
        measurements["bandwidth"] = content["copy_gb_per_s"] / machine.hbm
    rows = content["rows"]
    grouped_rates = [row["of dense"] for row in rows if "product" in row and "of dense" in row]
    if grouped_rates:
        measurements["grouped"] = statistics.median(grouped_rates) * measurements.get("gemm", machine.gemm)
    overlap_column = f"beside {EXPERTS.ctas}"
    overlap_speeds = [row[overlap_column] for row in rows if overlap_column in row]
    if overlap_speeds:
        measurements["beside"] = statistics.median(overlap_speeds)
    return measurements
