"""One rank of a job of any size, alone: a process group that sends nothing and says that it has.

    with lone_rank(3, 8192) as calls:
        mesh = build_mesh(16, None, 8, torch.device("cpu"))
    assert calls.groups == 4
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch._C._distributed_c10d import FakeProcessGroup
from torch.testing._internal.distributed.fake_pg import FakeStore

LAYOUTS = ("/distributed/_mesh_layout.py", "/distributed/_pycute/int_tuple.py")  # torch 2.11 lists ranks there
COLLECTIVES = ("all_reduce", "all_gather_object", "broadcast_object_list", "all_to_all_single", "barrier")


class Calls:
    """groups: process groups that were made. collectives: over all ranks. work: functions that Python called,
    but for those of `LAYOUTS`."""

    groups = collectives = work = 0


@contextmanager
def lone_rank(rank: int, world_size: int) -> Iterator[Calls]:
    """Be a rank of the default process group, and count what is done with it."""
    calls = Calls()

    def make(common: Any, _: Any) -> FakeProcessGroup:
        options = FakeProcessGroup.Options()
        options._timeout = common.timeout
        return FakeProcessGroup._create_internal(common.group_rank, common.group_size, options)

    def counted(name: str, real: Callable[..., Any], *args: Any, **options: Any) -> Any:
        if name == "new_group":
            calls.groups += 1
        elif (group := options.get("group")) is None or group.size() == world_size:
            calls.collectives += 1
        return real(*args, **options)

    def called(frame: FrameType, event: str, argument: object) -> None:
        calls.work += event == "call" and not frame.f_code.co_filename.endswith(LAYOUTS)

    if "LONE" not in dist.Backend._plugins:
        dist.Backend.register_backend("lone", make, extended_api=True, devices=["cpu", "cuda"])
    dist.init_process_group("lone", rank=rank, world_size=world_size, store=FakeStore())
    before = sys.getprofile()
    with ExitStack() as stack:
        stack.callback(dist.destroy_process_group)
        stack.callback(gc.enable)
        stack.callback(sys.setprofile, before)
        for name in ("new_group", *COLLECTIVES):
            real = getattr(dist, name)
            stack.enter_context(mock.patch.object(
                dist, name, lambda *args, name=name, real=real, **options: counted(name, real, *args, **options)
            ))
        gc.disable()  # what other tests left behind may call functions when it is collected
        sys.setprofile(called)
        yield calls
