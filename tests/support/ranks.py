"""Run a function on N real processes joined by gloo.

Ranks are forked from a server that has already imported what tests need. The function is found in the child by its file
and name, because test modules are not importable by name.
"""

from __future__ import annotations

import faulthandler
import importlib.util
import multiprocessing as mp
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

PRELOAD = [
    "torch", "torch.distributed", "torch._dynamo", "dualpipe.train.loop", "dualpipe.train.parity", "dualpipe.cli",
    "dualpipe.schedule.command", "torch.utils.tensorboard", "torch.profiler._cupti_monitor", "transformers",
    "matplotlib.backends.backend_agg", "PIL.JpegImagePlugin", "rich._emoji_codes", "typeguard",
    "tyro._backends._tyro_backend",
    *(f"tyro.constructors._struct_spec_{kind}" for kind in ("attrs", "dataclass", "flax", "msgspec", "pydantic")),
    *(f"transformers.models.{name}.modeling_{name}" for name in ("qwen3_moe", "deepseek_v2", "deepseek_v3", "gpt_oss")),
]  # fmt: skip


def server() -> mp.context.ForkServerContext:
    """Forks processes that have imported what tests need: a world of four starts in about 0.2 s."""
    ctx = mp.get_context("forkserver")
    ctx.set_forkserver_preload(PRELOAD)
    return ctx


def run_ranks(fn: Callable[..., Any], world_size: int, *args: Any, timeout: float = 60, group_timeout: float = 30,
              check: bool = True) -> list[Any]:  # fmt: skip
    """Call `fn(rank, *args)` on `world_size` processes with a default gloo group; return their results by rank.

    With `check`, a rank that raised fails the caller with all tracebacks. Without, its entry is the exception (with the
    traceback text as its only argument where it does not pickle), and a rank that died is a `ChildProcessError`.
    Ranks that are not done within `timeout` seconds print their stacks and are killed, and `TimeoutError` is raised.
    `group_timeout` (s) is the timeout of the process group.
    """
    ctx = server()
    with tempfile.TemporaryDirectory() as folder:
        store = os.path.join(folder, "store")
        target = (fn.__code__.co_filename, fn.__qualname__)
        pipes, processes = [], []
        for rank in range(world_size):
            receiver, sender = ctx.Pipe(duplex=False)
            process = ctx.Process(
                target=_rank_main, args=(rank, world_size, store, target, args, group_timeout, timeout, sender)
            )
            process.start()
            sender.close()
            pipes.append(receiver)
            processes.append(process)
        try:
            results = _collect(pipes, processes, time.monotonic() + timeout)
        finally:
            for process in processes:
                if process.is_alive():
                    process.kill()
                process.join()
    failures = [f"rank {r}: {value[1]}" for r, (ok, value) in enumerate(results) if not ok]
    if check and failures:
        raise AssertionError("\n".join(failures))
    return [value if ok else value[0] for ok, value in results]


def _collect(pipes: list, processes: list, deadline: float) -> list[tuple[bool, Any]]:
    results = []
    for rank, (pipe, process) in enumerate(zip(pipes, processes)):
        if not pipe.poll(max(0.0, deadline - time.monotonic())):
            raise TimeoutError(f"rank {rank} did not finish in time; its stack is on stderr")
        try:
            results.append(pipe.recv())
        except EOFError:
            process.join()
            error = ChildProcessError(f"rank {rank} died with exit code {process.exitcode}")
            results.append((False, (error, str(error))))
    return results


def _rank_main(rank, world_size, store, target, args, group_timeout, timeout, sender) -> None:
    import torch
    import torch.distributed as dist

    faulthandler.dump_traceback_later(max(1.0, timeout - 2), exit=False)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    try:
        dist.init_process_group(
            "gloo", init_method=f"file://{store}", rank=rank, world_size=world_size,
            timeout=timedelta(seconds=group_timeout),
        )  # fmt: skip
        result = (True, _load(*target)(rank, *args))
    except BaseException as error:
        text = traceback.format_exc()
        result = (False, (error, text))
        try:
            import pickle

            pickle.loads(pickle.dumps(error))
        except Exception:
            result = (False, (RuntimeError(text), text))
    sender.send(result)
    sender.close()
    faulthandler.cancel_dump_traceback_later()
    # Leave without the destructors of a group that a test may have broken on purpose; rank 0 keeps no store to serve.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _load(path: str, qualname: str) -> Callable[..., Any]:
    name = "_ranks_" + Path(path).stem
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        sys.path.insert(0, str(Path(__file__).parent))
        spec.loader.exec_module(module)
    fn = sys.modules[name]
    for part in qualname.split("."):
        fn = getattr(fn, part)
    return fn
