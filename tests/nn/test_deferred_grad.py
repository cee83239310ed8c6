"""Queues of deferred weight gradients that are merged: order, shares, bits, and what a GEMM is asked to do."""

import copy

import pytest
import torch
from torch.distributed.tensor import DTensor

from dualpipe.kernels import sort_tokens
from dualpipe.nn import GroupedLinear, GroupedSwiGLU, Linear
from dualpipe.nn.deferral import WeightGradStore
from dualpipe.nn.deferred_grad import DeferredGrad, Gemm, merge_queues
from dualpipe.parallel.experts.dispatcher import shard_experts
from dualpipe.parallel.mesh import build_mesh
from lone_rank import lone_rank
from weight_grads import Wgrads

WEIGHTS = {name: torch.zeros(1) for name in "XY"}
BIAS = torch.zeros(1)


def queue(log, microbatch, names, gemms):
    """Deferred gradients that log their name and micro-batch; X and Y can be merged, and X has a bias."""
    made = []
    for name in names:
        if name in WEIGHTS:
            made.append(DeferredGrad(WEIGHTS[name], BIAS if name == "X" else None, (microbatch,), gemms[name]))
        else:
            made.append(lambda text=f"{name}{microbatch}": log.append(text))
    return made


def logging_gemm(log, name):
    """A GEMM that logs its name and the micro-batches of its operands."""
    def weight_grad(weight, operands, out):
        log.append(name + "+".join(str(microbatch) for microbatch, in operands))
        return torch.zeros_like(weight)

    def bias_grad(bias, operands):
        log.append(f"bias{operands[0]}")
        return torch.zeros_like(bias)

    return Gemm(weight_grad, bias_grad=bias_grad, merges=True)


def shares(*names):
    log = []
    result = []
    gemms = {name: logging_gemm(log, name) for name in WEIGHTS}
    for share in merge_queues([queue(log, i, each, gemms) for i, each in enumerate(names)]):
        for deferred in share:
            deferred()
        result.append([*log])
        log.clear()
    return result


def test_order_and_shares():
    assert shares("aXb", "aXb") == [["a0", "X0+1", "bias0", "bias1"], ["b0", "a1", "b1"]]
    assert shares("XY", "XY", "XY") == [["X0+1+2", "bias0", "bias1", "bias2"], ["Y0+1+2"], []]
    assert shares("ab", "ab") == [["a0", "b0"], ["a1", "b1"]]
    assert shares("", "X", "a") == [["X1", "bias1"], ["a2"], []]
    assert shares("", "") == [[], []]
    assert shares("XX", "X") == [["X0+0+1", "bias0", "bias0", "bias1"], []]


def ends(counts):
    return torch.tensor(counts).cumsum(0).to(torch.int32)


def tokens_of(seed):
    choices = torch.randint(0, 3, (7, 2), generator=torch.Generator().manual_seed(seed))
    return sort_tokens(choices, 3)


def run(module, inputs, merged):
    """Backwards of several micro-batches, then all their weight gradients; returns the sizes of the GEMMs."""
    store = WeightGradStore()
    for key, (x, rows) in enumerate(inputs):
        with store.activate(), store.defer(key):
            y = module(x, rows) if rows is not None else module(x)
            y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(key)).to(y.dtype))
    keys = range(len(inputs))
    if merged:
        store.merge(keys)
    with Wgrads() as wgrads:
        for key in keys:
            store.run(key)
    assert store.pending() == {}
    return wgrads.sizes


@pytest.mark.parametrize("has_grads", [False, True])
@pytest.mark.parametrize(
    ("dtype", "grad_dtype"),
    [(torch.float64, None), (torch.bfloat16, None), (torch.bfloat16, torch.float32)], ids=str)
@pytest.mark.parametrize("layer", [
    lambda dtype: GroupedLinear(3, 16, 8, bias=True, dtype=dtype),
    lambda dtype: GroupedSwiGLU(3, 16, 8, bias=True, dtype=dtype, clamped=True),
], ids=["linear", "swiglu"])
@pytest.mark.parametrize("rows", [
    [ends([2, 0, 5]), ends([1, 1, 5]), ends([0, 0, 7])], [tokens_of(0), tokens_of(1), tokens_of(2)],
], ids=["rows", "tokens"])
def test_bits_are_those_of_unmerged_gradients(rows, layer, dtype, grad_dtype, has_grads):
    torch.manual_seed(0)
    merged = layer(dtype)
    for param in merged.parameters():
        if grad_dtype is not None:
            param.grad_dtype = grad_dtype
        if has_grads:
            param.grad = torch.randn_like(param, dtype=grad_dtype or dtype)
    plain = copy.deepcopy(merged)
    for a, b in zip(merged.parameters(), plain.parameters()):  # not copied
        b.grad_dtype = a.grad_dtype
        b.grad = None if a.grad is None else a.grad.clone()
    inputs = [(torch.randn(7, 16, dtype=dtype), each) for each in rows]
    assert run(merged, inputs, merged=True) == [3]
    assert run(plain, inputs, merged=False) == [1, 1, 1]
    for a, b in zip(merged.parameters(), plain.parameters()):
        assert a.grad.dtype is b.grad.dtype is (grad_dtype or dtype)
        assert torch.equal(a.grad, b.grad)


def test_other_layers_are_not_merged():
    merged, plain = (Linear(16, 8, dtype=torch.float64) for _ in range(2))
    inputs = [(torch.randn(5, 16, dtype=torch.float64), None) for _ in range(3)]
    run(merged, inputs, merged=True)
    run(plain, inputs, merged=False)
    assert torch.equal(merged.weight.grad, plain.weight.grad)
    assert torch.equal(merged.bias.grad, plain.bias.grad)


def test_a_frozen_weight_has_its_bias_alone():
    layer = GroupedLinear(3, 16, 8, bias=True)
    layer.weight.requires_grad_(False)
    assert run(layer, [(torch.randn(7, 16), ends([2, 0, 5]))] * 2, merged=True) == []
    assert layer.weight.grad is None and layer.bias.grad is not None


@pytest.mark.parametrize("has_grads", [False, True])
def test_experts_that_are_sharded_over_ranks_add_to_their_shards(has_grads):
    grads = []
    inputs = [(torch.randn(7, 16), ends(counts)) for counts in ([2, 0, 5], [1, 1, 5], [0, 0, 7])]
    with lone_rank(0, 2):
        mesh = build_mesh(1, 1, 2, torch.device("cpu"))
        for merged in (True, False):
            torch.manual_seed(0)
            layer = shard_experts(GroupedLinear(6, 16, 8, bias=True), mesh["ep"])
            if has_grads:
                run(layer, inputs[:1], merged=False)
            assert run(layer, inputs, merged=merged) == ([3] if merged else [1, 1, 1])
            assert all(isinstance(param.grad, DTensor) for param in layer.parameters())
            grads.append([param.grad.to_local() for param in layer.parameters()])
    assert all(map(torch.equal, *grads))
    assert grads[0][0].shape == (3, 8, 16)


def test_shares_free_what_they_have_computed():
    from weakref import ref

    layer, store = GroupedLinear(3, 16, 8), WeightGradStore()
    kept = []
    for key in range(2):
        x = torch.randn(7, 16)
        kept.append(ref(x.untyped_storage()))
        with store.activate(), store.defer(key):
            layer(x, ends([2, 0, 5])).sum().backward()
        del x
    store.merge([0, 1])
    assert all(each() is not None for each in kept)
    store.run(0)
    assert all(each() is None for each in kept)


