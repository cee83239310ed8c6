"""Behaviour of FSDP2 by itself where the pipeline, the plan or the optimizer replaces it: the reasons for doing so.

Each test shows the failure on its own. Where a torch release no longer has it, the test shows what that one does.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from dualpipe.parallel.clipping import clip_grad_norm_
from ranks import run_ranks
from toys import param_groups

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
NEWER = hasattr(FSDPModule, "finalize_backward")  # torch 2.15


def error_of(attempt) -> str:
    try:
        attempt()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def gathered_without_a_root(rank: int) -> str:
    """Call `unshard` and `post_backward` by hand, as a schedule does, before any forward of the module."""
    stage = fully_shard(nn.Linear(4, 4), mesh=init_device_mesh("cpu", (2,)))
    stage.unshard()
    nn.Linear.forward(stage, torch.ones(2, 4)).sum().backward()
    return error_of(lambda: [group.post_backward() for group in param_groups(stage)])


def test_given_unshard_alone_then_the_root_state_is_missing():
    """`StageParameters.gather` initialises it first."""
    for message in run_ranks(gathered_without_a_root, 2):
        assert "has no attribute" in message


def accumulated_twice(rank: int) -> list[float]:
    stage = fully_shard(nn.Linear(4, 4, bias=False), mesh=init_device_mesh("cpu", (2,)), mp_policy=BF16)
    stage.set_requires_gradient_sync(False)
    stage.set_reshard_after_backward(False)
    stage(torch.ones(1, 4)).sum().backward()
    (param,) = (p for group in param_groups(stage) for p in group.fsdp_params)
    if NEWER:
        before = param.unsharded_param.grad.sum().item()
        stage(torch.ones(1, 4)).sum().backward()
        return [before, param.unsharded_param.grad.sum().item()]
    before = param.unsharded_accumulated_grad.sum().item()
    param.unsharded_param.grad = torch.ones(4, 4, dtype=torch.bfloat16)
    param.to_accumulated_grad_if_needed()
    return [before, param.unsharded_accumulated_grad.sum().item()]


def test_given_a_second_gradient_then_fsdp2s_accumulator_is_replaced():
    """FSDP2 adds only by another call, which must come first. Everything adds to our `.grad`, as to torch 2.15's."""
    for found in run_ranks(accumulated_twice, 2):
        assert found == ([16.0, 32.0] if NEWER else [16.0, 16.0])


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(4, 4), nn.Linear(4, 4).bfloat16()

    def forward(self, x):
        return self.narrow(self.wide(x).bfloat16())


def mixed_storage(rank: int) -> str:
    stage = fully_shard(Mixed(), mesh=init_device_mesh("cpu", (2,)))
    return error_of(lambda: stage(torch.ones(2, 4)).sum().backward())


def test_given_parameters_of_two_dtypes_then_the_first_forward_fails():
    """`resolve_dtypes` groups the parameters by dtype, or refuses, before anything is sharded."""
    for message in run_ranks(mixed_storage, 2):
        assert "expects uniform original parameter dtype" in message


def other_meshes(rank: int) -> tuple[str, str, float]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    params = []
    for part, layout in ((mesh["dp"], [Shard(0)]), (mesh, [Replicate(), Shard(0)])):
        params.append(nn.Parameter(distribute_tensor(torch.ones(4, 4), part, layout)))
        params[-1].grad = distribute_tensor(torch.ones(4, 4), part, layout)
    plain = nn.Parameter(torch.ones(4))
    plain.grad = torch.ones(4)
    clip = error_of(lambda: nn.utils.clip_grad_norm_(params, 1.0))
    foreach = error_of(lambda: torch.optim.AdamW([params[0], plain], foreach=True).step())
    return clip, foreach, clip_grad_norm_(params, 1.0, device=torch.device("cpu")).item()


def test_given_gradients_on_several_meshes_then_torch_cannot_clip_or_step_them_together():
    for clip, foreach, ours in run_ranks(other_meshes, 4):
        assert clip and "DTensor" in foreach + clip
        assert ours == pytest.approx(32**0.5)


def ignored(rank: int) -> list[float]:
    """Train a parameter that FSDP2 is told to ignore: it keeps each rank's own gradient."""
    stage = nn.Linear(4, 4)
    fully_shard(stage, mesh=init_device_mesh("cpu", (2,)), ignored_params={stage.bias})
    stage(torch.full((1, 4), 1.0 + rank)).square().sum().backward()
    assert not isinstance(stage.bias, DTensor)
    return stage.bias.grad.tolist()


def test_given_ignored_params_then_gradients_are_not_reduced():
    a, b = run_ranks(ignored, 2)
    assert a != b


def meta(rank: int) -> list[bool]:
    """Return whether buffers keep their values after a whole-module `to_empty`."""
    stage = nn.Linear(4, 4, device="meta")
    stage.register_buffer("table", torch.full((1000,), 3.0))
    stage.to_empty(device="cpu")
    return [bool((stage.table == 3.0).all())]


def test_given_to_empty_then_buffers_lose_their_values():
    assert run_ranks(meta, 1) == [[False]]


def cast_late(rank: int) -> tuple[str, str]:
    mesh = init_device_mesh("cpu", (2,))
    early, late = (fully_shard(nn.Linear(4, 4), mesh=mesh) for _ in range(2))
    early.to(torch.bfloat16)(torch.ones(2, 4, dtype=torch.bfloat16)).sum().backward()
    late(torch.ones(2, 4)).sum().backward()
    late.zero_grad()
    late.to(torch.bfloat16)
    attempt = error_of(lambda: late(torch.ones(2, 4, dtype=torch.bfloat16)).sum().backward())
    return str(early.weight.grad.dtype), attempt or str(late.weight.grad.dtype)


def test_given_a_cast_after_the_first_forward_then_fsdp2_does_not_follow():
    for early, late in run_ranks(cast_late, 2):
        assert early == "torch.bfloat16"
        assert late.startswith("RuntimeError: Expected out tensor to have dtype")
