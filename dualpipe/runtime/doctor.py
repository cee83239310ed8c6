"""`dualpipe doctor`: what is installed here, and what of it this library will use or miss.

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

from dualpipe import __version__

REQUIRED = ("einops", "numpy", "rich", "safetensors", "tokenizers", "xxhash")
OPTIONAL = {
    "triton": "the kernels are their PyTorch references",
    "tensorboard": "training writes no TensorBoard events",
    "matplotlib": "training draws no picture of the loss",
    "pyarrow": ".parquet is not read",
    "zstandard": ".jsonl.zst is not read",
    "wandb": "--metrics.wandb is refused",
    "transformers": "nothing in training; the tests compare with its models",
}

Finding = tuple[str, str]  # "ok", "missing" or "error" (`dualpipe train` cannot run); what there is, or what it costs


def run() -> int:
    """Print a line for each finding; the exit status is 1 where one is an error."""
    failed = 0
    for state, text in examine():
        print(f"{state:<8} {text}", flush=True)
        failed |= state == "error"
    return failed


def examine() -> Iterator[Finding]:
    """Everything there is to say, the most basic first."""
    yield "ok", f"python {platform.python_version()}, dualpipe {__version__} in {Path(__file__).parent}"
    packages = []
    for name in (*REQUIRED, *OPTIONAL):
        try:
            packages.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            cost = OPTIONAL.get(name)
            yield "missing" if cost else "error", f"{name}: {cost or 'no training'}; pip install {name}"
    yield "ok", ", ".join(packages)
    try:
        import torch

        old = tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 11)
    except Exception as error:  # a broken build raises anything; what it says is what is to be known
        yield "error", f"torch cannot be imported ({type(error).__name__}: {error}): no training"
        return
    yield "error" if old else "ok", f"torch {torch.__version__}{', but 2.11 is needed' if old else ''}"
    from dualpipe.runtime import device as cuda

    count = cuda.count()
    for index in range(count):
        found = cuda.properties(index)
        text = f"cuda:{index} {found.name}, sm_{found.major}{found.minor}, {found.total_memory / 2**30:.0f} GiB"
        yield ("ok", text) if found.major >= 8 else ("missing", f"{text}: too old for bf16 and Triton's kernels")
    if not count:
        cause = "torch is built without CUDA" if torch.version.cuda is None else "torch sees none"
        cause += ", though nvidia-smi is here" if shutil.which("nvidia-smi") else ""
        yield "missing", f"CUDA devices: {cause}; training runs on {os.cpu_count()} CPU cores, with gloo"
    compiler = shutil.which(os.environ.get("CC", "cc"))
    used = "Triton's kernels and --train.compile" if count else "--train.compile"
    yield ("ok", f"C compiler {compiler}") if compiler else ("missing", f"C compiler: no {used}; set CC")
    yield _gloo()
    if wrong := cuda.one_queue():
        yield "missing", wrong
    if count > 1:
        yield from _links(count)


def _gloo() -> Finding:
    """The address that gloo gives to other ranks: of GLOO_SOCKET_IFNAME, otherwise what the host's name means."""
    import torch

    if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
        return "error", "gloo: this build of torch has none; only one rank can train"
    names = [name for _, name in socket.if_nameindex()]
    if wanted := os.environ.get("GLOO_SOCKET_IFNAME"):
        if set(wanted.split(",")) <= set(names):
            return "ok", f"gloo on {wanted} (GLOO_SOCKET_IFNAME)"
        return "error", f"gloo: GLOO_SOCKET_IFNAME={wanted} is none of {', '.join(names)}"
    host, address = socket.gethostname(), "127.0.0.1"
    with suppress(OSError):
        address = socket.gethostbyname(host)
    if address.startswith("127."):
        return "missing", (f"gloo between machines: {host} means {address} here; set GLOO_SOCKET_IFNAME, one of "
                           f"{', '.join(names)}")
    return "ok", f"gloo on {address} ({host}); GLOO_SOCKET_IFNAME chooses another interface"


def _links(count: int) -> Iterator[Finding]:
    """Check what several devices need to train together: NCCL, links between them, a fabric between nodes."""
    import torch

    from dualpipe.runtime import device as cuda
    from dualpipe.runtime.nccl import waiting_blocks

    if torch.distributed.is_nccl_available():
        yield "ok", f"NCCL {'.'.join(map(str, cuda.nccl_version()))}"
        blocks, room = waiting_blocks(), cuda.properties(0).multi_processor_count
        text = f"NCCL's kernels, where all wait at once: up to {blocks} blocks on {room} multiprocessors"
        yield ("ok", text) if blocks < room else ("missing", f"{text}; they can wait for each other: set "
                                                  "NCCL_MAX_NCHANNELS=8 for all ranks")
    else:
        yield "error", "NCCL: this build of torch has none; GPUs cannot train together"
    apart = [f"cuda:{a} to {b}" for a, b in permutations(range(count), 2) if not cuda.reaches(a, b)]
    if apart:
        yield "missing", (f"peer access from {', '.join(apart[:4])}{', ...' * (len(apart) > 4)}: what they send goes "
                          "through host memory")
    else:
        yield "ok", f"peer access between all {count} devices"
    rows: list[list[str]] = []  # a device, and its links to all: X to itself, NV18, PIX, SYS, ...
    with suppress(OSError, subprocess.TimeoutExpired):
        done = subprocess.run(["nvidia-smi", "topo", "-m"], capture_output=True, text=True, timeout=2)
        rows = [line.split() for line in done.stdout.splitlines() if line.startswith("GPU")]
    kinds = sorted({kind for row in rows for kind in row[1 : len(rows) + 1]} - {"X"})
    if kinds and all(kind.startswith("NV") for kind in kinds):
        yield "ok", f"NVLink between all devices ({', '.join(kinds)})"
    else:
        seen = f" ({', '.join(kinds)} in nvidia-smi's words)" if kinds else ": nvidia-smi says nothing of it"
        yield "missing", f"NVLink between all devices{seen}; experts' all-to-all is slower by far over PCIe"
    fabric = Path("/sys/class/infiniband")
    cards = sorted(path.name for path in fabric.iterdir()) if fabric.is_dir() else []
    text = f"InfiniBand or RoCE: {', '.join(cards) or 'none; between nodes NCCL uses sockets'}"
    yield "ok" if cards else "missing", text
