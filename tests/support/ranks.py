"""Run a function on N real processes joined by gloo.

Ranks are forked from a server that has already imported what tests need. A child finds the function by its file and
name, because test modules are not importable by name.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib.util
import multiprocessing as mp
import os
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import forkserver, util
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

PRELOAD = [
    "pytest",  # test modules import it, also where a rank runs one of their functions
    "torch", "torch.distributed", "torch._dynamo", "dualpipe.train.trainer", "dualpipe.train.parity.command",
    "dualpipe.cli", "dualpipe.schedule.command", "torch.utils.tensorboard", "torch.profiler._cupti_monitor",
    "transformers",
    "matplotlib.figure", "matplotlib.backends.backend_agg", "PIL.JpegImagePlugin", "PIL.GifImagePlugin",
    "PIL.BmpImagePlugin", "PIL.PpmImagePlugin", "rich._emoji_codes", "einops._torch_specific",
    *(f"transformers.models.{name}.modeling_{name}" for name in ("qwen3_moe", "deepseek_v2", "deepseek_v3", "gpt_oss")),
    "preloaded",
]


def server() -> mp.context.ForkServerContext:
    """Fork processes that have imported what tests need: a world of four starts in about 0.2 s."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # as ranks have it; torch reads it when it is loaded
    ctx = mp.get_context("forkserver")
    ctx.set_forkserver_preload(PRELOAD)
    with mock.patch.dict(os.environ, PYTHONPATH=os.pathsep.join([str(Path(__file__).parent), *sys.path])):
        forkserver.ensure_running()  # Python 3.11 gives it no sys.path of ours
    return ctx


def run_ranks(fn: Callable[..., Any], world_size: int, *args: Any, timeout: float = 150, group_timeout: float = 30,
              check: bool = True, fresh: bool = False, default_group: bool = True) -> list[Any]:
    """Call `fn(rank, *args)` on `world_size` processes with a default gloo group; return their results by rank.

    With `check`, a rank that raised fails the caller with all tracebacks. Without, its entry is the exception (with the
    traceback text as its only argument if it cannot be pickled), and a rank that died is a `ChildProcessError`. Ranks
    not done within `timeout` seconds print their stacks and are killed, and `TimeoutError` is raised, with the errors
    of other ranks so far. `group_timeout` (s) is the timeout of the process group.

    fresh: start new processes and end them afterwards, for an `fn` that leaves its process or the default group in
    another state. Otherwise the world serves later calls too, until something fails in it: to start one takes longer
    than many tests. The group stays, because torch keeps meshes that are equal to later ones, with the names of their
    groups.

    default_group: False for a `fn` that makes it itself, in new processes.
    """
    fresh = fresh or not default_group
    kind = (world_size, group_timeout)
    world = None if fresh else _worlds.pop(kind, None)
    world = world or _World(world_size)
    try:
        target = (fn.__code__.co_filename, fn.__qualname__)
        results = world.run(target, args, group_timeout=group_timeout, timeout=timeout, is_last=fresh,
                            default_group=default_group)
        if not fresh and all(ok for ok, _ in results) and world.groups <= _GROUPS:
            _worlds[kind] = world
    finally:
        if _worlds.get(kind) is not world:
            world.end()
    failures = [f"rank {r}: {value[1]}" for r, (ok, value) in enumerate(results) if not ok]
    if check and failures:
        raise AssertionError("\n".join(failures))
    return [value if ok else value[0] for ok, value in results]


class Job(NamedTuple):
    """Work of one rank. See `run_ranks`."""

    rank: int
    world_size: int
    store: str
    target: tuple[str, str]  # file and name of the function
    args: tuple[Any, ...]
    group_timeout: float
    timeout: float
    folder: str  # working directory
    is_last: bool  # the process ends after it
    default_group: bool


class Result(NamedTuple):
    """Value returned by a rank, or its error and traceback; the number of its groups so far; whether it goes on."""

    ok: bool
    value: Any
    groups: int = 0
    late: bool = False


class _Rank:
    """A process that runs jobs."""

    def __init__(self) -> None:
        self._pipe, other = server().Pipe()
        self._process = server().Process(target=_serve, args=(other,))
        self._process.start()
        other.close()

    def start(self, job: Job) -> None:
        self._pipe.send(job)

    def result(self, number: int, deadline: float) -> Result:
        if not self._pipe.poll(max(0.0, deadline - time.monotonic())):
            text = f"rank {number} did not finish in time; its stack is on stderr"
            return Result(False, (TimeoutError(text), text), late=True)
        try:
            return self._pipe.recv()
        except (EOFError, ConnectionResetError):
            self._process.join()
            error = ChildProcessError(f"rank {number} died with exit code {self._process.exitcode}")
            return Result(False, (error, str(error)))

    def end(self) -> None:
        if self._process.is_alive():
            self._process.kill()
        self._process.join()
        self._pipe.close()


class _World:
    """The ranks of a job, and their rendezvous."""

    def __init__(self, size: int) -> None:
        self._folder = tempfile.TemporaryDirectory()  # groups that later jobs make meet there too
        self._ranks = [_Rank() for _ in range(size)]
        self.groups = 0

    def run(self, target, args, *, group_timeout, timeout, is_last, default_group) -> list[tuple[bool, Any]]:
        for number, rank in enumerate(self._ranks):
            store = f"{self._folder.name}/store"
            rank.start(Job(number, len(self._ranks), store, target, args, group_timeout, timeout, os.getcwd(), is_last,
                           default_group))
        deadline = time.monotonic() + timeout
        results = [rank.result(number, deadline) for number, rank in enumerate(self._ranks)]
        if any(result.late for result in results):
            raise TimeoutError("\n".join(result.value[1] for result in results if not result.ok))
        self.groups = max(result.groups for result in results)
        return [(result.ok, result.value) for result in results]

    def end(self) -> None:
        for rank in self._ranks:
            rank.end()
        self._folder.cleanup()


# Groups that jobs have made stay in a world's processes, each with five files and three threads, of which one
# wakes a hundred times a second.
_GROUPS = 24
_worlds: dict[tuple[int, float], _World] = {}  # idle worlds, by size and timeout of the group


def _end_worlds() -> None:
    for world in _worlds.values():
        world.end()


util.Finalize(None, _end_worlds, exitpriority=0)  # at exit, before multiprocessing waits for all processes


def _serve(pipe) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    ended = _note_ended_groups()
    with contextlib.suppress(EOFError):
        while True:
            job = pipe.recv()
            ok, value = _do(job)
            num_groups = len(dist.distributed_c10d._world.pg_map)
            # A world in which a failed step has ended groups serves no other job: an equal mesh would use them again.
            pipe.send(Result(ok, value, _GROUPS + 1 if ended else num_groups))
            if job.is_last:
                break
    # Leave without the destructors of a group that a test may have broken on purpose; rank 0 keeps no store to serve.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _note_ended_groups() -> list[Any]:
    """Return a list that collects the process groups that failed steps end from now on."""
    from dualpipe.runtime.ranks import failure

    ended: list[Any] = []
    hang_up = failure.hang_up

    def noting(groups: list[Any]) -> None:
        ended.extend(groups)
        hang_up(groups)

    failure.hang_up = noting
    return ended


def _do(job: Job) -> tuple[bool, Any]:
    import torch
    import torch.distributed as dist

    from dualpipe.runtime.recorder import Recorder

    os.chdir(job.folder)
    faulthandler.dump_traceback_later(max(1.0, job.timeout - 2), exit=False)
    torch.manual_seed(0)
    try:
        if job.default_group and not dist.is_initialized():
            dist.init_process_group(
                "gloo", init_method=f"file://{job.store}", rank=job.rank, world_size=job.world_size,
                timeout=timedelta(seconds=job.group_timeout),
            )
            dist.barrier()  # a rank whose job ends the group at once would end it for one that is still joining
        with Recorder(job.rank).activate():  # the mesh of an earlier job is unknown to it
            return True, _load(*job.target)(job.rank, *job.args)
    except BaseException as error:
        text = traceback.format_exc()
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:
            error = RuntimeError(text)
        return False, (error, text)
    finally:
        faulthandler.cancel_dump_traceback_later()


def _load(path: str, qualname: str) -> Callable[..., Any]:
    name = "_ranks_" + "_".join(Path(path).with_suffix("").parts[-2:])  # files of two folders may have one name
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        sys.path.insert(0, str(Path(__file__).parent))
        spec.loader.exec_module(module)
    fn = sys.modules[name]
    for part in qualname.split("."):
        fn = getattr(fn, part)
    return fn
