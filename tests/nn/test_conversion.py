"""Modules that `defer_weight_grads` converts besides `nn.Linear`: same bits, same class, copies and pickles."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from dualpipe.nn import Linear, defer_weight_grads, undo_defer_weight_grads
from dualpipe.nn.conversion import deferring_class, is_conv1d
from dualpipe.nn.deferral import WeightGradStore
from dualpipe.nn.linear import TransposedLinear
from linears import Conv1D, assert_same_grads, backward


class Named(nn.Linear):
    """A subclass that leaves the GEMM unchanged."""

    tag = "mine"

    def __init__(self, size, scale=1.0):
        super().__init__(size, size)
        self.scale = scale

    def extra_repr(self):
        return f"scale={self.scale}"


class Scaled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


class NamesItsForward(nn.Linear):
    forward = nn.Linear.forward


def other_conv1d(**changes):
    """Return a module of the name Conv1D with another form."""

    class Conv1D(nn.Module):
        def __init__(self):
            super().__init__()
            self.nf, self.nx = 4, 6
            self.weight = nn.Parameter(torch.randn(changes.get("shape", (6, 4))))
            self.bias = nn.Parameter(torch.randn(4))

        def forward(self, x):
            return torch.addmm(self.bias, x, self.weight).relu()

    return Conv1D()


def converted(plain):
    torch.manual_seed(1)
    return defer_weight_grads(copy.deepcopy(plain))


def assert_defers_the_same_bits(plain, ours):
    x, store = torch.randn(5, 6), WeightGradStore()
    y = plain(x)
    assert torch.equal(ours(x), y)
    backward(plain, x, torch.ones_like(y))
    backward(ours, x, torch.ones_like(y), store)
    assert store.pending() == {"I": 1}
    store.run("I")
    assert_same_grads(ours, plain)


def test_a_subclass_with_the_forward_of_nn_linear_defers_and_stays_what_it_is():
    plain = Named(6, scale=3.0)
    ours = converted(plain)
    assert isinstance(ours, Named) and isinstance(ours, Linear) and type(ours) is not Named
    assert repr(ours) == repr(plain) and type(ours).__name__ == "Named" and ours.tag == "mine"
    assert type(converted(Named(3))) is type(ours), "one class for each that there was"
    assert type(defer_weight_grads(ours)) is type(ours)
    assert_defers_the_same_bits(plain, ours)


def test_conv1d_defers_and_stays_what_it_is():
    plain = Conv1D(4, 6)
    ours = converted(plain)
    assert isinstance(ours, Conv1D) and isinstance(ours, TransposedLinear) and repr(ours) == repr(plain)
    assert is_conv1d(ours) and type(defer_weight_grads(ours)) is type(ours)
    assert_defers_the_same_bits(plain, ours)


def test_a_compiled_conv1d_defers():
    plain = Conv1D(4, 6)
    ours, x = converted(plain), torch.randn(3, 5, 6)
    compiled, store = torch.compile(ours, backend="eager"), WeightGradStore()
    y = compiled(x)
    assert torch.equal(y, plain(x))
    with store.activate(), store.defer("I"):
        y.sum().backward()
    assert store.pending() == {"I": 1}


@pytest.mark.parametrize("make", [
    lambda: Scaled(6, 6),
    lambda: parametrizations.weight_norm(nn.Linear(6, 6)),
    lambda: parametrizations.weight_norm(nn.Linear(6, 6), "bias", dim=None),
    lambda: nn.LazyLinear(6),
    lambda: NamesItsForward(6, 6),
    lambda: nn.Conv1d(6, 6, 3, groups=6),
    lambda: other_conv1d(),
    lambda: other_conv1d(shape=(4, 6)),
    lambda: nn.Bilinear(6, 6, 6),
], ids=["own forward", "parametrized", "parametrized bias", "lazy", "named forward", "conv", "conv1d with more",
        "conv1d turned", "bilinear"])
def test_others_are_left_alone(make):
    module = make()
    kind = type(module)
    assert type(defer_weight_grads(module)) is kind and deferring_class(module) is None


@pytest.mark.parametrize("make", [lambda: Named(6), lambda: Conv1D(4, 6), lambda: nn.Linear(6, 4)])
def test_copies_and_pickles_are_the_same_layers(make):
    ours = converted(make())
    file = io.BytesIO()
    torch.save(ours, file)
    file.seek(0)
    others = [copy.deepcopy(ours), copy.copy(ours), pickle.loads(pickle.dumps(ours)),
              pickle.loads(pickle.dumps(ours, protocol=1)), torch.load(file, weights_only=False)]
    x = torch.randn(5, 6)
    for other in others:
        assert type(other) is type(ours) and torch.equal(other(x), ours(x))


def test_a_parametrization_after_conversion_can_be_removed():
    ours, x = converted(Named(6)), torch.randn(5, 6)
    kind, expected = type(ours), ours(x)
    parametrizations.orthogonal(ours)
    assert not torch.equal(ours(x), expected)
    nn.utils.parametrize.remove_parametrizations(ours, "weight")
    assert type(ours) is kind


@pytest.mark.parametrize("make", [lambda: Named(6), lambda: Conv1D(4, 6), lambda: nn.Linear(6, 4)])
def test_a_conversion_can_be_undone(make):
    module = nn.Sequential(make(), nn.ModuleList([make()]))
    kinds = [type(child) for child in module.modules()]
    params, state = list(module.parameters()), dict(module.named_parameters())
    defer_weight_grads(module)
    assert undo_defer_weight_grads(module) is module
    assert [type(child) for child in module.modules()] == kinds
    assert all(a is b for a, b in zip(module.parameters(), params)) and dict(module.named_parameters()) == state
    store = WeightGradStore()
    backward(module[0], torch.randn(5, 6), torch.ones(module[0](torch.zeros(5, 6)).shape), store)
    assert store.pending() == {"I": 0} and module[0].weight.grad is not None
    assert type(undo_defer_weight_grads(defer_weight_grads(module[0]))) is kinds[1]


def test_a_conversion_below_a_parametrization_is_not_undone_by_halves():
    module = defer_weight_grads(nn.Sequential(nn.Linear(6, 6), Named(6)))
    parametrizations.orthogonal(module[1])
    with pytest.raises(ValueError, match="'1' is a ParametrizedNamed"):
        undo_defer_weight_grads(module)
    assert type(module[0]) is Linear


def test_gpt2_of_transformers():
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=17, n_positions=8, n_embd=8, n_layer=2, n_head=2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    torch.manual_seed(0)
    plain = transformers.GPT2LMHeadModel(config).double()
    ours, store = defer_weight_grads(copy.deepcopy(plain)), WeightGradStore()
    tokens = torch.randint(17, (3, 8))
    for _ in range(2):
        plain(tokens, labels=tokens).loss.backward()
        with store.activate(), store.defer("I"):
            ours(tokens, labels=tokens).loss.backward()
        assert store.pending() == {"I": 4 * config.n_layer + 1}, "attention's two, the MLP's two, and the head"
        store.run("I")
    for actual, expected in zip(ours.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(actual.grad, expected.grad, rtol=1e-12, atol=1e-12)
