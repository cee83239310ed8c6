"""`dualpipe doctor`: report the installed software and hardware, and the consequences of everything missing.

Imports nothing at the top that may be missing or broken.
"""

from __future__ import annotations

import os
import platform
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from itertools import permutations
from pathlib import Path
from typing import Literal, NamedTuple

from dualpipe import __version__

REQUIRED = ("einops", "numpy", "rich", "safetensors", "tokenizers", "xxhash")
OPTIONAL = {  # name of a package: consequence where it is missing
    "triton": "PyTorch references run instead of the kernels",
    "tensorboard": "training writes no TensorBoard events",
    "matplotlib": "training draws no picture of the loss",
    "pyarrow": ".parquet is not read",
    "zstandard": ".jsonl.zst is not read",
    "wandb": "--metrics.wandb is refused",
    "transformers": "nothing in training; the tests compare with its models",
}
OLDEST_TORCH = (2, 11)
OLDEST_CUDA_MAJOR = 8  # compute capability
# Most open files of rank 0, which serves the store: of each rank the connection, its watchdog's, and one for causes
# of failures; gloo's in the two groups whose ranks are all connected, of experts and, with Muon, of a stage; and those
# of an idle process with its libraries.
FILES_PER_RANK = 5
OWN_FILES = 256
MANY_RANKS = 500  # a limit that ends a smaller job is reported as missing


class Finding(NamedTuple):
    """A line of the report. state: "error" if `dualpipe train` cannot run, "missing" if it does less or is slower."""

    state: Literal["ok", "missing", "error"]
    text: str


def run() -> int:
    """Print a line for every finding; return the exit status, 1 if one is an error."""
    status = 0
    for finding in examine():
        print(f"{finding.state:<8} {finding.text}", flush=True)
        if finding.state == "error":
            status = 1
    return status


def examine() -> Iterator[Finding]:
    """Yield all findings, the most basic first."""
    yield Finding("ok", f"python {platform.python_version()}, dualpipe {__version__} in {Path(__file__).parents[1]}")
    yield from _examine_packages()
    try:
        import torch

        torch_version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    except Exception as error:  # a broken build raises anything; the text of the error is the finding
        yield Finding("error", f"torch cannot be imported ({type(error).__name__}: {error}): no training")
        return
    if torch_version < OLDEST_TORCH:
        yield Finding("error", f"torch {torch.__version__}, but {'.'.join(map(str, OLDEST_TORCH))} is needed")
    else:
        yield Finding("ok", f"torch {torch.__version__}")
    from dualpipe.runtime import device as cuda

    num_devices = cuda.count()
    yield from _examine_devices(num_devices)
    yield _examine_compiler(num_devices)
    yield _examine_gloo()
    yield _examine_open_files()
    queue_problem = cuda.single_queue_problem()
    if queue_problem is not None:
        yield Finding("missing", queue_problem)
    if num_devices > 1:
        yield from _examine_nccl()
        yield _examine_peer_access(num_devices)
        yield _examine_nvlink()
        yield _examine_fabric()


def _examine_packages() -> Iterator[Finding]:
    """Yield a finding for every missing package, then the versions of the others, some in each line."""
    versions = []
    for name in (*REQUIRED, *OPTIONAL):
        try:
            versions.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            if name in OPTIONAL:
                yield Finding("missing", f"{name}: {OPTIONAL[name]}; pip install {name}")
            else:
                yield Finding("error", f"{name}: no training; pip install {name}")
    for start in range(0, len(versions), 6):
        yield Finding("ok", ", ".join(versions[start : start + 6]))


def _examine_devices(num_devices: int) -> Iterator[Finding]:
    """Yield a finding for every CUDA device, or the reason why there is none."""
    import torch

    from dualpipe.runtime import device as cuda

    for index in range(num_devices):
        device = cuda.properties(index)
        text = f"cuda:{index} {device.name}, sm_{device.major}{device.minor}, {device.total_memory / 2**30:.0f} GiB"
        if device.major >= OLDEST_CUDA_MAJOR:
            yield Finding("ok", text)
        else:
            yield Finding("missing", f"{text}: too old for bf16 and Triton's kernels")
    if not num_devices:
        reason = "torch is built without CUDA" if torch.version.cuda is None else "torch sees none"
        if shutil.which("nvidia-smi"):
            reason += ", though nvidia-smi is installed"
        yield Finding("missing", f"CUDA devices: {reason}; training runs on {os.cpu_count()} CPU cores, with gloo")


def _examine_compiler(num_devices: int) -> Finding:
    """Look for the C compiler of Triton and torch.compile."""
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if compiler:
        return Finding("ok", f"C compiler {compiler}")
    users = "Triton kernels, no --train.compile" if num_devices else "--train.compile"
    return Finding("missing", f"C compiler: no {users}; set CC")


def _examine_gloo() -> Finding:
    """Find the address that gloo gives to other ranks: that of GLOO_SOCKET_IFNAME, or of the host's name without it."""
    import torch

    if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
        return Finding("error", "gloo: this build of torch has none; only one rank can train")
    interfaces = [name for _, name in socket.if_nameindex()]
    chosen = os.environ.get("GLOO_SOCKET_IFNAME")
    if chosen:
        if set(chosen.split(",")) <= set(interfaces):
            return Finding("ok", f"gloo on {chosen} (GLOO_SOCKET_IFNAME)")
        return Finding("error", f"gloo: GLOO_SOCKET_IFNAME={chosen} is none of {', '.join(interfaces)}")
    host = socket.gethostname()
    address = "127.0.0.1"
    with suppress(OSError):
        address = socket.gethostbyname(host)
    if address.startswith("127."):
        others = [name for name in interfaces if name not in ("lo", "lo0")]
        remedy = f"set GLOO_SOCKET_IFNAME to one of {', '.join(others)}" if others else "it has no other interface"
        return Finding("missing", f"gloo between machines: {host} resolves to {address}; {remedy}")
    return Finding("ok", f"gloo on {address} ({host}); GLOO_SOCKET_IFNAME chooses another interface")


def _examine_open_files() -> Finding:
    """Return the number of ranks that the limit of open files is enough for."""
    from dualpipe.runtime.rank_process import allow_open_files

    limit = allow_open_files()  # as each rank does
    num_ranks = max(0, limit - OWN_FILES) // FILES_PER_RANK
    text = f"open files: up to {limit:,}, enough for jobs of {num_ranks:,} ranks"
    if num_ranks >= MANY_RANKS:
        return Finding("ok", text)
    return Finding("missing", f"{text}; for larger ones raise the hard limit on rank 0's machine (ulimit -Hn 65536)")


def _examine_nccl() -> Iterator[Finding]:
    """Yield a finding for NCCL, then one that says if its kernels fit the device when all of them wait at once."""
    import torch

    from dualpipe.runtime import device as cuda
    from dualpipe.runtime.nccl import waiting_blocks

    if not torch.distributed.is_nccl_available():
        yield Finding("error", "NCCL: this build of torch has none; GPUs cannot train together")
        return
    yield Finding("ok", f"NCCL {'.'.join(map(str, cuda.nccl_version()))}")
    blocks = waiting_blocks()
    multiprocessors = cuda.properties(0).multi_processor_count
    text = f"NCCL's kernels, if all wait at once: up to {blocks} blocks on {multiprocessors} multiprocessors"
    if blocks < multiprocessors:
        yield Finding("ok", text)
    else:
        yield Finding("missing", f"{text}; they can wait for each other: set NCCL_MAX_NCHANNELS=8 for all ranks")


def _examine_peer_access(num_devices: int) -> Finding:
    """Check that every device can access the memory of all others."""
    from dualpipe.runtime import device as cuda

    pairs = permutations(range(num_devices), 2)
    refused = [f"cuda:{index} to {peer}" for index, peer in pairs if not cuda.can_access_peer(index, peer)]
    if not refused:
        return Finding("ok", f"peer access between all {num_devices} devices")
    more = ", ..." if len(refused) > 4 else ""
    return Finding("missing", f"peer access from {', '.join(refused[:4])}{more}: messages go through host memory")


def _examine_nvlink() -> Finding:
    """Check that all devices are linked by NVLink, by the table of `nvidia-smi topo -m`."""
    rows: list[list[str]] = []  # a device, and its links to all: X to itself, NV18, PIX, SYS, ...
    with suppress(OSError, subprocess.TimeoutExpired):
        process = subprocess.run(["nvidia-smi", "topo", "-m"], capture_output=True, text=True, timeout=2)
        rows = [line.split() for line in process.stdout.splitlines() if line.startswith("GPU")]
    kinds = sorted({kind for row in rows for kind in row[1 : len(rows) + 1]} - {"X"})
    if kinds and all(kind.startswith("NV") for kind in kinds):
        return Finding("ok", f"NVLink between all devices ({', '.join(kinds)})")
    seen = f" ({', '.join(kinds)} by nvidia-smi)" if kinds else " (nvidia-smi does not show the links)"
    return Finding("missing", f"NVLink between all devices{seen}; experts' all-to-all is far slower over PCIe")


def _examine_fabric() -> Finding:
    """Look for the cards of a fabric between nodes."""
    folder = Path("/sys/class/infiniband")
    cards = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    if cards:
        return Finding("ok", f"InfiniBand or RoCE: {', '.join(cards)}")
    return Finding("missing", "InfiniBand or RoCE: none; between nodes NCCL uses sockets")
