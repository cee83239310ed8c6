"""A script written for DeepSeek's DualPipe runs unchanged: its imports, class-level calls and checks."""

from __future__ import annotations

import sys
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from dualpipe import Communicate, Compute
from ranks import run_ranks
from toys import Handed, Hooked

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from dualpipe import DualPipeV, set_p2p_tensor_dtype, set_p2p_tensor_shapes
    from dualpipe.utils import WeightGradStore, run_backward

ROWS, WIDTH, CHUNKS = 3, 16, 10


class DeferredProduct(torch.autograd.Function):
    """x W^T as users of that library write it: the first backward creates the gradient, and a closure adds to it."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight)

    @staticmethod
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        if weight.grad is None:
            weight.grad = torch.zeros_like(weight)

        def add():
            weight.grad += dy.flatten(0, -2).T @ x.flatten(0, -2)

        SEEN.append(WeightGradStore.enabled)
        WeightGradStore.put(add) if WeightGradStore.enabled else add()
        return dy @ weight, None


SEEN: list[bool] = []


class OwnLinear(nn.Linear):
    def forward(self, x):
        return DeferredProduct.apply(x, self.weight)


class Part(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.first, self.second = OwnLinear(width, 2 * width, bias=False), OwnLinear(2 * width, width, bias=False)

    def forward(self, x):
        return self.second(F.gelu(self.first(x)))

    @classmethod
    def overlapped_forward_backward(cls, ahead, inputs, criterion, labels, behind, loss, outputs, gradients):
        results = ahead(*inputs)
        results = [results] if isinstance(results, torch.Tensor) else results
        found = None if criterion is None else criterion(*results, *labels)
        if loss is None:
            run_backward(outputs, gradients)
        else:
            loss.backward()
            loss.detach_()
        return results, found


def criterion(output, target):
    return F.mse_loss(output, target).clone()


def unpipelined(model, x, y):
    outputs, losses = [], []
    for xs, ys in zip(x.chunk(CHUNKS), y.chunk(CHUNKS)):
        outputs.append(model(xs))
        losses.append(criterion(outputs[-1], ys))
        losses[-1].backward()
    return torch.stack(losses), torch.cat(outputs)


def script(rank, ranks):
    """Run the part of such a script that needs neither NCCL nor CUDA, from start to end."""
    torch.set_default_device("cpu")
    torch.manual_seed(233)
    set_p2p_tensor_shapes([(ROWS, 5, WIDTH)])
    set_p2p_tensor_dtype(torch.float32)
    whole = nn.Sequential(*[Part(WIDTH) for _ in range(2 * ranks)])
    x, y = torch.randn(CHUNKS * ROWS, 5, WIDTH), torch.randn(CHUNKS * ROWS, 5, WIDTH)
    loss_ref, output_ref = unpipelined(whole, x, y)
    expected = nn.Sequential(whole[rank], whole[2 * ranks - 1 - rank])
    mine = nn.Sequential(Part(WIDTH), Part(WIDTH))
    for own, other in zip(mine, expected):
        own.load_state_dict(other.state_dict())
    pipe = DualPipeV(mine)
    if rank:
        x = y = None
    SEEN.clear()
    loss, outputs = pipe.step(x, num_chunks=CHUNKS, criterion=criterion, labels=(y,), return_outputs=False)
    assert outputs is None and (loss is None if rank else torch.equal(loss, loss_ref))
    for p, q in zip(mine.parameters(), expected.parameters(), strict=True):
        a, b = p.grad.double(), q.grad.double()
        assert 1 - 2 * (a * b).sum() / (a * a + b * b).sum() < 1e-13
    pipe.zero_grad()
    with torch.no_grad():
        loss, outputs = pipe.step(x, num_chunks=CHUNKS, criterion=criterion, labels=(y,), return_outputs=True)
    if rank:
        assert loss is None and outputs is None
    else:
        assert torch.equal(loss, loss_ref) and torch.equal(outputs, output_ref)
    return sorted(set(SEEN)), dist.get_world_size()


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_script_for_deepseeks_library_runs_unchanged(ranks):
    for deferred, world in run_ranks(script, ranks, ranks, fresh=True):
        assert (deferred, world) == ([False, True], ranks), "some weight gradients wait and some do not"


def test_the_names_are_deprecated_and_say_what_to_use(monkeypatch):
    with pytest.warns(DeprecationWarning, match="set_p2p_tensor_shapes"):
        set_p2p_tensor_shapes([(1,)])
    with pytest.warns(DeprecationWarning, match="set_p2p_tensor_dtype"):
        set_p2p_tensor_dtype(torch.float32)
    monkeypatch.delitem(sys.modules, "dualpipe.utils")
    with pytest.warns(DeprecationWarning, match="dualpipe.utils") as caught:
        exec(compile("from dualpipe.utils import WeightGradStore", "theirs.py", "exec"), {})
    assert [warning.filename for warning in caught] == ["theirs.py"]


def test_calls_of_the_class_go_to_the_running_store():
    from dualpipe import WeightGradStore as Store

    ran, stores = [], (Store(), Store())
    WeightGradStore.put(lambda: ran.append("at once"))
    assert not WeightGradStore.enabled and ran == ["at once"]
    for store in stores:
        with store.activate():
            for key in (1, 2, 3):
                with store.defer(key):
                    assert WeightGradStore.enabled
                    WeightGradStore.put(lambda key=key: ran.append(key))
            WeightGradStore.flush()
    with stores[0].activate():
        WeightGradStore.pop()
        assert ran == ["at once", 1] and stores[0].pending() == {2: 1, 3: 1} and len(stores[1].pending()) == 3
        WeightGradStore.clear()
        assert stores[0].pending() == {} and len(stores[1].pending()) == 3
        with pytest.raises(RuntimeError, match="there are no deferred weight gradients"):
            WeightGradStore.pop()


class Masked(Hooked, nn.Linear):
    def forward(self, x, mask=None):
        return super().forward(x)


def test_the_hook_gets_inputs_that_are_none():
    Hooked.pairs.clear()
    pipe = DualPipeV([Masked(4, 4), Masked(4, 4)])
    pipe.step(torch.ones(16, 4), None, num_chunks=8, criterion=torch.sum)
    assert 2 in Hooked.pairs


class InSegments(Masked):
    """Offers communicating segments besides the method."""

    def segments(self):
        rows = Compute(super().forward, "x", "y")
        return [rows, Communicate(Handed(), "y", "y"), Compute(lambda y: y * 1, "y", "x")]


def test_a_stage_with_segments_and_the_hook_is_refused():
    with pytest.raises(ValueError, match="InSegments has segments"):
        DualPipeV([InSegments(4, 4), InSegments(4, 4)])
