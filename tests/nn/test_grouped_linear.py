"""GroupedLinear against one nn.Linear for each expert, GroupedSwiGLU against GroupedLinear and the activation."""

import copy
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dualpipe.kernels import clamped_swiglu, dispatch_tokens, sort_tokens, swiglu
from dualpipe.nn import GroupedLinear, GroupedSwiGLU
from dualpipe.nn.deferral import WeightGradStore
from dualpipe.nn.grouped_linear import grouped_linear

COUNTS = {"balanced": [3, 3, 3], "first empty": [0, 5, 2], "last empty": [4, 1, 0], "all empty": [0, 0, 0]}


def pair(dtype, bias):
    torch.manual_seed(0)
    ours = GroupedLinear(3, 8, 16, bias=bias, dtype=dtype)
    experts = nn.ModuleList(nn.Linear(8, 16, bias=bias, dtype=dtype) for _ in range(3))
    with torch.no_grad():
        for e, expert in enumerate(experts):
            expert.weight.copy_(ours.weight[e])
            if bias:
                expert.bias.copy_(ours.bias[e])
    return ours, experts


def apply(experts, x, counts):
    return torch.cat([expert(rows) for expert, rows in zip(experts, x.split(counts))])


def ends(counts):
    return torch.tensor(counts).cumsum(0).to(torch.int32)


def run(module, x, offs, dy, deferred):
    if not deferred:
        y = module(x, offs)
        y.backward(dy)
        return y
    store = WeightGradStore()
    with store.activate(), store.defer("I"):
        y = module(x, offs)
        y.backward(dy)
    assert store.pending() == {"I": 1}
    store.run("I")
    return y


@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
def test_equals_one_linear_per_expert(counts, dtype, bias, deferred):
    ours, experts = pair(dtype, bias)
    tolerance = {"rtol": 2e-2, "atol": 2e-2} if dtype is torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-6}
    for _ in range(2):
        x = torch.randn(sum(counts), 8, dtype=dtype, requires_grad=True)
        x_ours = x.detach().clone().requires_grad_()
        dy = torch.randn(sum(counts), 16, dtype=dtype)
        expected = apply(experts, x, counts)
        expected.backward(dy)
        actual = run(ours, x_ours, ends(counts), dy, deferred)
        torch.testing.assert_close(actual, expected, **tolerance)
        torch.testing.assert_close(x_ours.grad, x.grad, **tolerance)
    torch.testing.assert_close(ours.weight.grad, torch.stack([e.weight.grad for e in experts]), **tolerance)
    if bias:
        torch.testing.assert_close(ours.bias.grad, torch.stack([e.bias.grad for e in experts]), **tolerance)
    empty = [e for e, count in enumerate(counts) if count == 0]
    assert (ours.weight.grad[empty] == 0).all()


@pytest.mark.parametrize(
    ("dtype", "grad_dtype"),
    [(torch.float64, None), (torch.bfloat16, None), (torch.bfloat16, torch.float32)],
    ids=str,
)
def test_deferred_gradients_have_the_bits_of_plain_ones(dtype, grad_dtype):
    modules = [pair(dtype, bias=True)[0] for _ in range(2)]
    for module in modules:
        if grad_dtype:
            module.weight.grad_dtype = module.bias.grad_dtype = grad_dtype
    for counts in ([2, 0, 5], [1, 1, 1]):
        x, dy = torch.randn(sum(counts), 8, dtype=dtype), torch.randn(sum(counts), 16, dtype=dtype)
        for deferred, module in enumerate(modules):
            run(module, x, ends(counts), dy, bool(deferred))
    plain, deferred = modules
    for a, b in zip(plain.parameters(), deferred.parameters()):
        assert a.grad.dtype is b.grad.dtype is (grad_dtype or dtype)
        assert torch.equal(a.grad, b.grad)


def test_frozen_weight_and_autograd_grad():
    ours, _ = pair(torch.float64, bias=True)
    x = torch.randn(4, 8, dtype=torch.float64, requires_grad=True)
    offs, store = ends([1, 3, 0]), WeightGradStore()
    expected = torch.autograd.grad(ours(x, offs).square().sum(), [x, ours.weight, ours.bias])

    def call(x, weight, bias):
        return torch.func.functional_call(ours, {"weight": weight, "bias": bias}, (x, offs))

    assert torch.autograd.gradcheck(call, (x, ours.weight, ours.bias))
    ours.weight.requires_grad_(False)
    with store.activate(), store.defer("I"):
        ours(x, offs).square().sum().backward()
    store.run("I")
    assert torch.equal(x.grad, expected[0])
    assert ours.weight.grad is None
    assert torch.equal(ours.bias.grad, expected[2])


def test_bias_gradient_of_many_rows_is_summed_in_float32():
    ours, _ = pair(torch.bfloat16, bias=True)
    run(ours, torch.randn(2000, 8).bfloat16(), ends([2000, 0, 0]), torch.ones(2000, 16).bfloat16(), deferred=True)
    assert (ours.bias.grad[0] == 2000).all()  # in bfloat16 1 is lost next to 256


@pytest.mark.parametrize("make", [GroupedLinear, GroupedSwiGLU])
def test_autocast_and_second_derivative(make):
    module, x = make(3, 8, 4, bias=True), torch.randn(4, 8, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = module(x, ends([1, 3, 0]))
    assert y.dtype is torch.bfloat16
    y.sum().backward()
    assert x.grad.dtype is module.weight.grad.dtype is module.bias.grad.dtype is torch.float32
    (dx,) = torch.autograd.grad(module(x, ends([1, 3, 0])).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dx.sum().backward()


CHOICES = {"balanced": [[0, 1], [2, 0], [1, 2]], "one empty": [[0, 2], [2, 0], [2, 2]], "no tokens": [], "top 1": [[1]]}
FORMS = {"halves": False, "pairs": True}


def sort(choices):
    return sort_tokens(torch.tensor(choices, dtype=torch.long).view(len(choices), -1 if choices else 2), 3)


def step(function, operands, deferred, seed=1):
    """Return the result and the operands' gradients, for a random gradient of the result."""
    store, operands = WeightGradStore(), [t.detach().clone().requires_grad_() for t in operands]

    def forward_and_backward():
        y = function(*operands)
        dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        y.backward(dy.to(y.dtype))
        return y.detach()

    if not deferred:
        return forward_and_backward(), *(operand.grad for operand in operands)
    with store.activate(), store.defer("I"):
        y = forward_and_backward()
    store.run("I")
    return y, *(operand.grad for operand in operands)


def assert_same_bits(actual, expected):
    for a, b in zip(actual, expected, strict=True):
        assert a.dtype is b.dtype
        assert torch.equal(a, b)


@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("choices", CHOICES.values(), ids=CHOICES)
def test_tokens_are_read_as_if_they_had_been_sorted(choices, dtype, deferred):
    tokens = sort(choices)
    (ours, _), (theirs, _) = pair(dtype, bias=True), pair(dtype, bias=True)
    copies = len(choices[0]) if choices else 2
    for _ in range(2):
        x = torch.randn(len(choices), 8, dtype=dtype)
        actual = step(lambda x: ours(x, tokens), [x], deferred)
        assert_same_bits(actual, step(lambda x: theirs(dispatch_tokens(x, tokens, copies), tokens.offs), [x], False))
    assert_same_bits([p.grad for p in ours.parameters()], [p.grad for p in theirs.parameters()])


@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("sorted_before", [False, True])
@pytest.mark.parametrize("clamped", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_swiglu_equals_linear_and_activation(dtype, clamped, sorted_before, scaled, deferred):
    tokens = sort(CHOICES["one empty"])
    rows = tokens.offs if sorted_before else tokens
    theirs, _ = pair(dtype, bias=True)
    ours = GroupedSwiGLU(3, 8, 8, bias=True, dtype=dtype, clamped=clamped)
    ours.load_state_dict(theirs.state_dict())
    activation = clamped_swiglu if clamped else swiglu
    for _ in range(2):
        operands = [torch.randn(6 if sorted_before else 3, 8, dtype=dtype)] + [torch.randn(6)] * scaled
        actual = step(lambda x, *scale: ours(x, rows, *scale), operands, deferred)
        assert_same_bits(actual, step(lambda x, *scale: activation(theirs(x, rows), *scale), operands, False))
    assert_same_bits([p.grad for p in ours.parameters()], [p.grad for p in theirs.parameters()])


def test_swiglu_in_float32_accumulator_and_frozen():
    tokens, module = sort(CHOICES["balanced"]), GroupedSwiGLU(3, 8, 4, dtype=torch.bfloat16)
    module.weight.grad_dtype = torch.float32
    x, scale = torch.randn(3, 8).bfloat16(), torch.randn(6)
    plain = step(lambda x, scale: module(x, tokens, scale), [x, scale], deferred=False)
    plain_grad, module.weight.grad = module.weight.grad, None
    deferred = step(lambda x, scale: module(x, tokens, scale), [x, scale], deferred=True)
    assert_same_bits([*plain, plain_grad], [*deferred, module.weight.grad])
    assert plain_grad.dtype is torch.float32
    module.weight.grad = None
    module.weight.requires_grad_(False)
    frozen = step(lambda x, scale: module(x, tokens, scale), [x, scale], deferred=True)
    assert_same_bits(frozen, plain)
    assert module.weight.grad is None


@pytest.mark.parametrize("module", [GroupedLinear(3, 8, 6), GroupedSwiGLU(3, 8, 3)], ids=lambda m: type(m).__name__)
def test_no_sorted_copy_of_the_tokens_is_kept(module):
    """Among the saved tensors, only the tokens and the GEMM's output are as wide as the tokens or the result."""
    tokens, x, kept = sort(CHOICES["balanced"]), torch.randn(3, 8, requires_grad=True), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        module(x, tokens)
    shapes = [tuple(t.shape) for t in kept if t is not module.weight]
    assert shapes == [(3, 8)] + [(6, 6)] * isinstance(module, GroupedSwiGLU)


@pytest.fixture
def poisoned_memory():
    """Fill every uninitialised tensor with NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("module", [GroupedLinear(3, 8, 8, bias=True), GroupedSwiGLU(3, 8, 8, bias=True)],
                         ids=lambda m: type(m).__name__)
def test_rows_of_nobody_change_nothing(module, dtype, deferred):
    """Rows without an expert change nothing, neither by their values nor by being there."""
    choices = torch.tensor([[0, -1, 2], [-1, 2, -1], [-1, -1, -1]])
    uncut, module = sort_tokens(choices, 3), copy.deepcopy(module).to(dtype)
    tokens, x = uncut.cut(3), torch.randn(3, 8, dtype=dtype)

    def run(tokens):
        module.zero_grad()
        y, dx = step(lambda x: module(x, tokens)[:3], [x], deferred)
        return y, dx, *(param.grad for param in module.parameters())

    cut, garbage = run(tokens), run(uncut)
    for a, b in zip(cut, garbage, strict=True):
        torch.testing.assert_close(a, b)  # on CPU the last bit of an exponential depends on its position in the tensor
    assert all(t.isfinite().all() for t in cut)
    assert (cut[1][2] == 0).all() and (cut[1][:2] != 0).any(1).all()
    by_expert = x[tokens.gather.long()]  # unsorted tokens, sorted in advance
    y, d_rows = step(lambda x: module(x, tokens.offs), [by_expert], False)
    torch.testing.assert_close(y, cut[0])
    wanted = torch.zeros(3, 8, dtype=torch.float64).index_add(0, tokens.gather.long(), d_rows.double())
    torch.testing.assert_close(cut[1].double(), wanted, rtol=1e-2, atol=1e-2)


def test_misfits_are_refused():
    tokens, module = sort(CHOICES["balanced"]), GroupedSwiGLU(3, 8, 4)
    with pytest.raises(ValueError, match="each of 3 experts"):
        GroupedLinear(3, 8, 4)(torch.randn(4, 8), torch.tensor([2, 4], dtype=torch.int32))
    with pytest.raises(ValueError, match=r"x has .* rows"):
        module(torch.randn(4, 8), tokens)
    with pytest.raises(ValueError, match=r"\(6,\)"):
        module(torch.randn(3, 8), tokens, torch.randn(3))
    with pytest.raises(ValueError, match=r"limit is 0\.0, expected a positive number"):
        GroupedSwiGLU(3, 8, 4, clamped=True, limit=0.0)


def test_torch_func_is_refused_with_the_remedy():
    layer, ends = GroupedLinear(2, 3, 4), torch.tensor([1, 3], dtype=torch.int32)
    for module in (layer, GroupedSwiGLU(2, 3, 4)):
        with pytest.raises(ValueError, match=r"torch.func .*GroupedLinear.*torch.autograd.grad"):
            torch.func.vmap(lambda x, module=module: module(x, ends))(torch.randn(2, 3, 3))


class LowRank(nn.Module):
    """Parametrization of an adapter: the frozen weight plus a product of two small matrices."""

    def __init__(self, weight):
        super().__init__()
        groups, rows, columns = weight.shape
        self.a = nn.Parameter(torch.randn(groups, rows, 2, dtype=weight.dtype))
        self.b = nn.Parameter(torch.randn(groups, 2, columns, dtype=weight.dtype))

    def forward(self, weight):
        return weight + self.a @ self.b


@pytest.mark.parametrize("how", ["adapted", "functional_call"])
@pytest.mark.parametrize("grad_dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("mode", ["I", "B", "no store"])
def test_weights_that_are_computed_from_others_pass_their_gradients_on(mode, grad_dtype, how):
    ours, experts = pair(torch.float64, bias=True)
    counts, store = [3, 0, 4], WeightGradStore()
    adapter = LowRank(ours.weight)
    ours.weight.requires_grad_(False)
    weight = ours.weight + adapter.a @ adapter.b
    leaves = [adapter.a, adapter.b]
    x = torch.randn(7, 8, dtype=torch.float64)
    expected_y = torch.cat([rows @ w.T + expert.bias for rows, w, expert in zip(x.split(counts), weight, experts)])
    expected = torch.autograd.grad(expected_y.square().sum(), [*leaves, *(e.bias for e in experts)])
    for param in (*leaves, ours.bias):
        param.grad_dtype = grad_dtype
    if how == "adapted":
        nn.utils.parametrize.register_parametrization(ours, "weight", adapter)
        y = ours(x, ends(counts))
    else:
        weight = ours.weight + adapter.a @ adapter.b
        y = torch.func.functional_call(ours, {"weight": weight, "bias": ours.bias * 1}, (x, ends(counts)))
    modes = {"I": store.defer("I"), "B": store.accumulate(), "no store": nullcontext()}
    with store.activate(), modes[mode]:
        y.square().sum().backward()
    store.run("I")
    tolerance = 1e-10 if grad_dtype is torch.float64 else 1e-5
    for param, wanted in zip((*leaves, ours.bias), (*expected[:2], torch.stack(expected[2:]))):
        torch.testing.assert_close(param.grad.double(), wanted, rtol=tolerance, atol=tolerance)


def test_forward_mode_is_refused_with_the_remedy_where_there_is_a_derivative():
    layer, rows = GroupedLinear(2, 3, 4), torch.tensor([1, 3], dtype=torch.int32)
    x = torch.randn(3, 3)
    expected = layer(x, rows)
    with torch.autograd.forward_ad.dual_level():
        assert torch.equal(layer(x, rows), expected)
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
        with pytest.raises(ValueError, match=r"forward_ad .*GroupedLinear.*torch.autograd.grad"):
            layer(dual, rows)
        with pytest.raises(ValueError, match=r"forward_ad .*grouped_linear"):
            grouped_linear(dual, layer.weight, None, rows)
        scale = torch.autograd.forward_ad.make_dual(torch.ones(3), torch.ones(3))
        with pytest.raises(ValueError, match=r"forward_ad .*GroupedLinear"):
            GroupedSwiGLU(2, 3, 4)(x, rows, scale)


# ---------------------------------------------------------------------------------------------------- by torch's GEMMs


def by_library(library, *, bias=True, experts=4, hidden=32, out=48):
    torch.manual_seed(0)
    layer = GroupedLinear(experts, hidden, out, bias=bias, dtype=torch.bfloat16)
    layer.gemm_library = library
    return layer


@pytest.mark.parametrize("library", ["dualpipe", "grouped_mm"])
@pytest.mark.parametrize("counts", [[10, 10, 10, 10], [0, 0, 39, 1], [1, 0, 0, 0], [0, 7, 0, 0]], ids=str)
def test_a_library_equals_float64(library, counts):
    layer = by_library(library)
    x = torch.randn(44, 32, dtype=torch.bfloat16, requires_grad=True)
    total = sum(counts)
    y = layer(x, ends(counts))[:total]  # four rows belong to no expert
    expert = torch.repeat_interleave(torch.arange(4), torch.tensor(counts))
    weight = layer.weight.detach().double()[expert]
    expected = torch.einsum("mh,mnh->mn", x.detach().double()[:total], weight) + layer.bias.detach().double()[expert]
    # The GEMM and, for torch's, the sum with the bias round to bfloat16, whose eps is 2**-7.
    torch.testing.assert_close(y.double(), expected, rtol=2**-7, atol=2**-7)
    dy = torch.randn_like(y)
    (dx,) = torch.autograd.grad(y, x, dy)
    expected = torch.einsum("mn,mnh->mh", dy.double(), weight)
    torch.testing.assert_close(dx.double()[:total], expected, rtol=2**-7, atol=2**-6)


def test_torchs_gemms_read_no_size_back(monkeypatch):
    """The host would wait for the device: on it, `item` and `tolist` of a tensor are such waits."""
    layer = by_library("grouped_mm")
    x = torch.randn(40, 32, dtype=torch.bfloat16)
    tokens = sort_tokens(torch.randint(-1, 4, (40, 2)), 4)
    monkeypatch.setattr(F, "grouped_mm", lambda a, b, offs: a.new_empty(a.shape[0], b.shape[2]))
    for name in ("item", "tolist", "__int__", "__bool__", "__index__"):
        monkeypatch.setattr(torch.Tensor, name, lambda *_: pytest.fail("a size was read back"))
    assert layer(x, tokens).shape == (80, 48)


@pytest.mark.parametrize("library", ["dualpipe", "grouped_mm"])
def test_a_library_takes_no_tokens(library):
    layer = by_library(library, bias=False)
    tokens = sort_tokens(torch.empty(0, 2, dtype=torch.int64), 4)
    assert layer(torch.empty(0, 32, dtype=torch.bfloat16), tokens).shape == (0, 48)


@pytest.mark.parametrize("clamped", [False, True])
def test_layers_have_the_same_gradients_by_torchs_gemms(clamped, monkeypatch):
    calls = []
    grouped_mm = F.grouped_mm
    monkeypatch.setattr(F, "grouped_mm", lambda *args, **kwargs: (calls.append(1), grouped_mm(*args, **kwargs))[1])
    torch.manual_seed(1)
    first = GroupedSwiGLU(4, 32, 24, bias=clamped, dtype=torch.bfloat16, clamped=clamped)
    second = GroupedLinear(4, 24, 32, bias=True, dtype=torch.bfloat16)
    index = torch.randint(0, 4, (40, 2))
    scale = torch.rand(80)
    x = torch.randn(40, 32, dtype=torch.bfloat16)
    results = []
    for library in ("dualpipe", "grouped_mm"):
        first.gemm_library = second.gemm_library = library
        calls.clear()
        leaf = x.clone().requires_grad_()
        rows = sort_tokens(index, 4)
        y = second(first(leaf, rows, scale), rows.offs)
        parameters = [leaf, *first.parameters(), *second.parameters()]
        results.append([y, *torch.autograd.grad(y.float().square().sum(), parameters)])
    assert len(calls) >= 4
    for ours, others in zip(*results):
        # Sums of bfloat16 in another order or with one more rounding; eps is 2**-7.
        error = (ours.double() - others.double()).norm() / ours.double().norm()
        assert error < 2**-6, error


@pytest.mark.parametrize("deferred", [False, True])
def test_the_ends_of_rows_may_come_from_inference_mode(deferred):
    module = GroupedLinear(3, 8, 4, dtype=torch.float64)
    expected = copy.deepcopy(module)
    x, dy = torch.randn(7, 8, dtype=torch.float64), torch.randn(7, 4, dtype=torch.float64)
    with torch.inference_mode():
        offs = ends([2, 0, 5])
    run(module, x, offs, dy, deferred)
    run(expected, x, offs.clone(), dy, False)
    assert torch.equal(module.weight.grad, expected.weight.grad)
