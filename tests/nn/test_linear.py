"""Linear layers with deferred weight gradients against plain ones: same bits, whatever is frozen, shared or empty."""

import copy
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dualpipe.nn import Embedding, Linear, defer_weight_grads, linear
from dualpipe.nn.deferral import WeightGradStore
from linears import KINDS, Conv1D, assert_same_grads, backward, pair
from pretend_cuda import pretend_cuda

SHAPES = [(5, 6), (6,), (2, 3, 6), (2, 1, 3, 6), (0, 6), (2, 0, 6)]
WITH_BIAS = pytest.mark.parametrize("kind", ["Linear", "Conv1D"])


@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_results_and_gradients_have_the_same_bits(shape, dtype, kind, deferred):
    plain, ours = pair(dtype, kind)
    store = WeightGradStore() if deferred else None
    for _ in range(3):  # accumulating
        x = torch.randn(shape, dtype=dtype, requires_grad=True)
        x_ours = x.detach().clone().requires_grad_()
        dy = torch.randn(*shape[:-1], 4, dtype=dtype)
        assert torch.equal(ours(x_ours), plain(x))
        backward(plain, x, dy)
        backward(ours, x_ours, dy, store)
        assert torch.equal(x_ours.grad, x.grad)
        if deferred:
            assert store.pending() == {"I": 1}
            store.run("I")
    assert_same_grads(ours, plain)
    assert ours.weight.grad.shape == ours.weight.shape


def test_long_sums_accumulate_in_the_order_of_autograd():
    plain, ours = pair()
    store = WeightGradStore()
    for _ in range(3):
        x, dy = torch.randn(4000, 6), torch.randn(4000, 4)
        backward(plain, x, dy)
        backward(ours, x, dy, store)
        store.run("I")
    assert_same_grads(ours, plain)


@WITH_BIAS
@pytest.mark.parametrize("frozen", [("weight",), ("bias",), ("weight", "bias")], ids="+".join)
@pytest.mark.parametrize("deferred", [False, True])
def test_frozen_parameters_get_nothing(frozen, deferred, kind):
    plain, ours = pair(kind=kind)
    for module in (plain, ours):
        for name in frozen:
            getattr(module, name).requires_grad_(False)
    store = WeightGradStore() if deferred else None
    x = torch.randn(5, 6, requires_grad=True)
    backward(plain, x, torch.ones(5, 4))
    x.grad, expected = None, x.grad
    backward(ours, x, torch.ones(5, 4), store)
    if deferred:
        assert store.pending() == {"I": 0 if len(frozen) == 2 else 1}
        store.run("I")
    assert torch.equal(x.grad, expected)
    assert_same_grads(ours, plain)


def test_only_what_the_backward_needs_is_saved():
    _, ours = pair()
    x = torch.randn(5, 6, requires_grad=True)

    def saved(x):
        y = ours(x)  # held: what is saved goes with it
        return [tensor is not None for tensor in y.grad_fn.saved_tensors]

    assert saved(x) == [True, True]
    assert saved(x.detach()) == [True, False]
    ours.weight.requires_grad_(False)
    assert saved(x) == [False, True]


def test_no_grad_and_eval():
    plain, ours = pair()
    x = torch.randn(5, 6)
    with torch.no_grad():
        assert torch.equal(ours(x), plain(x))
        assert not ours(x).requires_grad
    with torch.inference_mode():
        assert torch.equal(ours(x), plain(x))


@WITH_BIAS
@pytest.mark.parametrize("deferred", [False, True])
def test_autocast_casts_as_for_plain_layers(deferred, kind):
    plain, ours = pair(kind=kind)
    store = WeightGradStore() if deferred else None
    x = torch.randn(5, 6, requires_grad=True)
    x_ours = x.detach().clone().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y, y_ours = plain(x), ours(x_ours)
        assert ours.double()(x.double()).dtype is torch.float64
        ours.float()
    assert y_ours.dtype is torch.bfloat16
    assert torch.equal(y, y_ours)
    y.backward(torch.ones_like(y))
    backward(lambda y: y, y_ours, torch.ones_like(y), store)
    if deferred:
        store.run("I")
    assert x_ours.grad.dtype is torch.float32
    assert torch.equal(x_ours.grad, x.grad)
    assert_same_grads(ours, plain)


@WITH_BIAS
@pytest.mark.parametrize("deferred", [False, True])
def test_products_for_a_wider_accumulator_are_not_rounded(deferred, kind):
    """Not the bits of nn.Linear, whose bf16 products are rounded before they are added: those of float32 throughout."""
    plain, ours = pair(torch.bfloat16, kind)
    for param in ours.parameters():
        param.grad_dtype = torch.float32
    exact = plain.float()
    store = WeightGradStore() if deferred else None
    for _ in range(3):
        x, dy = torch.randn(5, 6).bfloat16(), torch.randn(5, 4).bfloat16()
        backward(exact, x.float(), dy.float())
        backward(ours, x, dy, store)
        if deferred:
            store.run("I")
    assert ours.weight.grad.dtype is torch.float32
    assert_same_grads(ours, exact)


class Made(TorchDispatchMode):
    """The most elements of a tensor that an operator has made: not of one that it was given, or of a view."""

    def __init__(self):
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        given = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        made = (t for t in tree_leaves(out) if isinstance(t, torch.Tensor))
        self.largest = max([self.largest, *(t.numel() for t in made if t.untyped_storage().data_ptr() not in given)])
        return out


@pytest.mark.parametrize(("device", "how"), [("cpu", "deferred"), ("cpu", "in a full backward"), ("cuda", "deferred")])
@pytest.mark.parametrize("make", [Linear, Embedding])
def test_a_gradient_is_added_to_a_wider_accumulator_without_one_of_the_whole_weight(device, make, how, monkeypatch):
    monkeypatch.setattr(linear, "LARGEST_WEIGHT_GRAD", 7 * 64)
    with nullcontext() if device == "cpu" else pretend_cuda():
        layer, store, sums = make(64, 64, device=device, dtype=torch.bfloat16), WeightGradStore(), []
        layer.weight.grad_dtype = torch.float32
        given = torch.randint(64, (5,)) if make is Embedding else torch.randn(5, 64).bfloat16()
        given = given.to(device)
        for _ in range(2):
            with store.activate(), store.defer("I") if how == "deferred" else store.accumulate(), Made() as made:
                layer(given).sum().backward()
                store.run("I")
            sums.append(layer.weight.grad.clone())
            accumulator = layer.weight.grad
        assert made.largest < layer.weight.numel() / 2, "of the second micro-batch"
        assert layer.weight.grad is accumulator and torch.equal(sums[1], 2 * sums[0])


def test_a_gradient_in_chunks_is_that_of_the_whole(monkeypatch):
    store, layer, x, dy = WeightGradStore(), Linear(6, 50), torch.randn(9, 6), torch.randn(9, 50)
    for chunk in (linear.LARGEST_WEIGHT_GRAD, 6 * 7, 1):
        monkeypatch.setattr(linear, "LARGEST_WEIGHT_GRAD", chunk)
        layer.weight.grad = torch.ones_like(layer.weight)
        backward(layer, x, dy, store)
        store.run("I")
        torch.testing.assert_close(layer.weight.grad, 1 + dy.T @ x)


@pytest.mark.gpu
@pytest.mark.parametrize("make", [Linear, Embedding])
def test_on_a_gpu_nothing_of_the_size_of_the_weight_is_allocated_and_bits_repeat(make):
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    layer, store, results = make(512, 4096, device="cuda", dtype=torch.bfloat16), WeightGradStore(), []
    layer.weight.grad_dtype = torch.float32
    tokens, dy = torch.randint(512, (64,), device="cuda"), torch.randn(64, 4096, device="cuda").bfloat16()
    x = nn.functional.one_hot(tokens, 512).bfloat16()
    for _ in range(2):
        layer.weight.grad = None
        for _ in range(3):
            backward(layer, tokens if make is Embedding else x, dy, store)
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            store.run("I")
        assert torch.cuda.max_memory_allocated() - before < 2 * layer.weight.numel()  # bytes
        results.append(layer.weight.grad)
    expected = 3 * (x.float().T @ dy.float())
    assert torch.equal(*results)
    torch.testing.assert_close(results[0], expected if make is Embedding else expected.T, rtol=1e-4, atol=1e-3)


def test_autograd_grad_and_parameter_hooks_work_outside_of_defer():
    plain, ours = pair()
    x = torch.randn(5, 6)
    seen = []
    ours.weight.register_post_accumulate_grad_hook(lambda param: seen.append(param.grad.clone()))
    expected = torch.autograd.grad(plain(x).square().sum(), [plain.weight, plain.bias])
    actual = torch.autograd.grad(ours(x).square().sum(), [ours.weight, ours.bias])
    assert all(torch.equal(a, b) for a, b in zip(actual, expected))
    assert ours.weight.grad is None and not seen
    ours(x).sum().backward()
    assert torch.equal(seen[0], ours.weight.grad)


@pytest.mark.filterwarnings("ignore:Using backward")
def test_second_derivative():
    plain, ours = pair(torch.float64)
    x = torch.randn(5, 6, dtype=torch.float64, requires_grad=True)
    penalties = []
    for module in (plain, ours):
        grads = torch.autograd.grad(module(x).pow(3).sum(), [x, module.weight, module.bias], create_graph=True)
        penalties.append(torch.autograd.grad(sum(g.square().sum() for g in grads), module.weight)[0])
    assert torch.equal(*penalties)
    store = WeightGradStore()
    plain(x).pow(3).sum().backward(create_graph=True)
    with store.activate(), store.defer("I"):
        ours(x).pow(3).sum().backward(create_graph=True)
    assert store.pending() == {"I": 0}
    seconds = [torch.autograd.grad(module.weight.grad.square().sum(), module.weight)[0] for module in (plain, ours)]
    assert torch.equal(*seconds)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(9, 6)
        self.first, self.second, self.head = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 9, bias=False)
        self.second.weight, self.head.weight = self.first.weight, self.embed.weight

    def forward(self, tokens):
        return self.head(self.second(self.first(self.embed(tokens)).tanh()))


@pytest.mark.parametrize("sparse", [False, True])
def test_tied_weights_get_every_contribution(sparse):
    torch.manual_seed(0)
    plain = Tied().double()
    plain.embed.sparse = sparse
    ours = defer_weight_grads(copy.deepcopy(plain))
    store, tokens = WeightGradStore(), torch.tensor([1, 2, 2])
    for _ in range(2):
        plain(tokens).square().sum().backward()
        with store.activate(), store.defer("I"):
            ours(tokens).square().sum().backward()
        assert store.pending() == {"I": 3}
        store.run("I")
    for actual, expected in zip(ours.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(actual.grad, expected.grad, rtol=1e-12, atol=1e-12)


def test_one_layer_used_twice():
    plain = nn.Linear(6, 6).double()
    ours, store = defer_weight_grads(copy.deepcopy(plain)), WeightGradStore()
    x = torch.randn(5, 6, dtype=torch.float64)
    plain(plain(x)).sum().backward()
    with store.activate(), store.defer("I"):
        ours(ours(x)).sum().backward()
    store.run("I")
    torch.testing.assert_close(ours.weight.grad, plain.weight.grad, rtol=1e-12, atol=1e-12)


class OwnLinear(nn.Linear):
    def forward(self, x):
        return super().forward(x)


def test_defer_weight_grads_leaves_others_alone():
    module = nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6), OwnLinear(6, 6), nn.Sequential(nn.Linear(6, 4)))
    module.append(parametrizations.weight_norm(nn.Linear(4, 4)))
    module.append(prune.l1_unstructured(nn.Linear(4, 4), "weight", amount=2))
    types = [type(child) for child in module]
    keys, params = list(module.state_dict()), list(module.parameters())
    assert defer_weight_grads(module) is module
    assert defer_weight_grads(module) is module
    assert [type(child) for child in module] == [Linear, *types[1:]]
    assert type(module[3][0]) is Linear
    assert list(module.state_dict()) == keys
    assert all(a is b for a, b in zip(module.parameters(), params))
    assert isinstance(module[0], nn.Linear)


def test_defer_weight_grads_on_the_root_and_hooks():
    linear, seen = nn.Linear(6, 4), []
    linear.register_forward_hook(lambda *_: seen.append("forward"))
    linear.register_full_backward_hook(lambda *_: seen.append("backward"))
    assert type(defer_weight_grads(linear)) is Linear
    linear(torch.randn(5, 6, requires_grad=True)).sum().backward()
    assert seen == ["forward", "backward"]
    assert repr(linear) == repr(nn.Linear(6, 4))


def test_pruning_or_weight_norm_after_conversion():
    torch.manual_seed(0)
    plain = nn.Linear(6, 4)
    ours = defer_weight_grads(copy.deepcopy(plain))
    for module in (plain, ours):
        prune.l1_unstructured(module, "weight", amount=5)
        parametrizations.weight_norm(module, "bias", dim=None)
    x, store = torch.randn(5, 6), WeightGradStore()
    backward(plain, x, torch.ones(5, 4))
    backward(ours, x, torch.ones(5, 4), store)
    assert store.pending() == {"I": 0}
    assert_same_grads(ours, plain)


def test_wrong_input_is_refused_as_by_nn_linear():
    plain, ours = pair()
    for module in (plain, ours):
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            module(torch.randn(5, 7))


@WITH_BIAS
def test_torch_func_goes_through(kind):
    plain, ours = pair(kind=kind)
    x, params = torch.randn(3, 5, 6), dict(plain.named_parameters())

    def loss(layer, params, x):
        return torch.func.functional_call(layer, params, (x,)).square().sum()

    assert torch.equal(torch.func.vmap(ours)(x), torch.func.vmap(plain)(x))
    per_sample = [torch.func.vmap(torch.func.grad(lambda p, x, layer=layer: loss(layer, p, x)), (None, 0))(params, x)
                  for layer in (plain, ours)]
    jacobians = [torch.func.jacrev(layer)(x[0]) for layer in (plain, ours)]
    torch.testing.assert_close(per_sample[1], per_sample[0], rtol=0, atol=0)
    torch.testing.assert_close(jacobians[1], jacobians[0], rtol=0, atol=0)


def test_forward_mode_goes_through():
    plain, ours = pair()
    x = torch.randn(5, 6)
    results = []
    for layer in (plain, ours):
        with torch.autograd.forward_ad.dual_level():
            dual = layer(torch.autograd.forward_ad.make_dual(x, torch.ones_like(x)))
            y, tangent = torch.autograd.forward_ad.unpack_dual(dual)
            (y.square().sum() + tangent.pow(3).sum()).backward()
        results.append((y, tangent))
    torch.testing.assert_close(*results, rtol=0, atol=0)
    assert_same_grads(ours, plain)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize("make", [nn.Linear, lambda h, n: Conv1D(n, h)])
@pytest.mark.filterwarnings("ignore:Complex modules are a new feature")
def test_complex_layers_have_the_gradients_of_plain_ones(make, deferred, autocast):
    torch.manual_seed(0)
    plain = make(6, 4).to(torch.complex128)
    with torch.no_grad():
        for param in plain.parameters():
            param.copy_(torch.randn_like(param))
    ours = defer_weight_grads(copy.deepcopy(plain))
    x = torch.randn(5, 6, dtype=torch.complex128)
    inputs = [x.clone().requires_grad_(), x.clone().requires_grad_()]
    store = WeightGradStore()
    for module, x, deferring in zip((plain, ours), inputs, (None, store if deferred else None)):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            y = module(x)
        assert y.dtype is torch.complex128
        torch.manual_seed(1)
        backward(lambda y: y, y, torch.randn_like(y), deferring)
    store.run("I")
    assert_same_grads(ours, plain)
    assert torch.equal(inputs[1].grad, inputs[0].grad)
