"""What a GPU and its links can do, from machines.toml, with what was measured in place of what is assumed.

The seconds that bytes take over the links are in `dualpipe.plan.communication`.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields, replace
from math import isfinite
from pathlib import Path
from typing import Any

from dualpipe.runtime.errors import nearest
from dualpipe.runtime.files import read_toml
from dualpipe.runtime.nccl import EXPERTS
from dualpipe.runtime.peak_tflops import peak_tflops

TABLE = Path(__file__).with_name("machines.toml")
# Fields that something is divided by; others may be 0, which leaves out what they stand for.
POSITIVE = frozenset({"tflops", "hbm", "memory", "multiprocessors", "nvlink", "network", "gemm", "grouped",
                      "attention", "attention_backward", "bandwidth", "links", "networks"})


@dataclass(frozen=True)
class Machine:
    """A GPU among others: see machines.toml for what the fields are. node: GPUs of a node."""

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
    node: int = 8


def read_machine(name: str, *, node: int = 8, measured: tuple[str, ...] = ()) -> Machine:
    """The GPU called so in machines.toml, or that of a file of the same fields. measured: JSON files with fields of
    `Machine`, or written by bench_grouped_gemm.py and its like. Raises ValueError for what is neither."""
    tables = read_toml(TABLE)
    path = Path(name)
    if path.suffix == ".toml":
        given = tables["default"] | read_toml(path)
    elif name in tables and name != "default":
        peak = peak_tflops(name.upper())
        given = tables["default"] | ({"tflops": peak} if peak else {}) | tables[name]
    else:
        known = [each for each in tables if each != "default"]
        raise ValueError(f"no GPU is called {name!r}; known are {', '.join(known)}, or a FILE.toml as {TABLE.name} has")
    if missing := [field.name for field in fields(Machine) if field.default is MISSING and field.name not in given]:
        raise ValueError(f"{name} does not say {', '.join(missing)}; see {TABLE}")
    machine = Machine(**_checked(name, given), node=node)
    for file in measured:
        machine = replace(machine, **_checked(file, _measured(Path(file), machine)))
    return machine


def _checked(where: str, given: Mapping[str, Any]) -> dict[str, Any]:
    known = [field.name for field in fields(Machine) if field.name != "node"]
    for name, value in given.items():
        if name not in known:
            raise ValueError(f"{where}: unknown field {name!r}; the nearest is {nearest(name, known, cutoff=0)[0]!r}")
        if name == "host_waits":
            if not isinstance(value, bool):
                raise ValueError(f"{where}: {name} is {value!r}; give true or false")
            continue
        is_number = isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)
        if not is_number or value < 0 or (value == 0 and name in POSITIVE):
            needed = "a positive number" if name in POSITIVE else "a number of at least 0"
            raise ValueError(f"{where}: {name} is {value!r}; give {needed}")
    return dict(given)


def _measured(path: Path, machine: Machine) -> dict[str, Any]:
    """The fields that a JSON file says: by their names, or from the rates and rows of a benchmark."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} has {found!r:.60}; it must hold an object, such as {{\"gemm\": 0.7}}")
    if "rows" not in found:
        return found
    fields_ = {"gemm": found["dense_tflops"] / machine.tflops} if "dense_tflops" in found else {}
    if "copy_gb_per_s" in found:
        fields_["bandwidth"] = found["copy_gb_per_s"] / machine.hbm
    if rates := [row["of dense"] for row in found["rows"] if "product" in row and "of dense" in row]:
        fields_["grouped"] = statistics.median(rates) * fields_.get("gemm", machine.gemm)
    if speeds := [row[name] for row in found["rows"] if (name := f"beside {EXPERTS.ctas}") in row]:
        fields_["beside"] = statistics.median(speeds)
    if not fields_:
        raise ValueError(f"{path} has no rates of kernels: give what bench_grouped_gemm.py or bench_overlap.py --save "
                         "writes, or an object such as {\"gemm\": 0.7}")
    return fields_
