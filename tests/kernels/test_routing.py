"""Sort, dispatch and combine of tokens against plain indexing in float64, with poisoned results."""

import importlib

import pytest
import torch

from dualpipe.kernels.common import INTERPRET
from dualpipe.kernels.routing import SortedTokens, combine_tokens, dispatch_tokens, find_destinations, sort_tokens
from row_kernels import assert_close, far_apart, no_synchronisation, poisoned_memory, run_with_debug_switch  # noqa: F401

MODULE = importlib.import_module("dualpipe.kernels.routing")
# Half precision rounds the result once; float32 sums K or H products, up to 3000 here.
TOLERANCE = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4}
# T, K, E, H: more than one block of 256 rows, K = 1, K = E, one expert, many, every shape class of H
CASES = [(5, 2, 7, 9), (300, 2, 5, 4), (3, 1, 1, 300), (9, 5, 5, 1030), (10, 3, 512, 1), (0, 2, 3, 8)]
pytestmark = pytest.mark.usefixtures("poisoned_memory")


def choose(tokens, top_k, experts, device):
    generator = torch.Generator().manual_seed(0)
    return torch.rand(tokens, experts, generator=generator).topk(top_k).indices.to(device)


def random(shape, dtype, device, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(device, dtype)


def unsorted(rows, device):
    """Return the order of rows that are sorted already, all for one expert."""
    return SortedTokens(*(torch.arange(rows, dtype=torch.int32, device=device),) * 2,
                        torch.tensor([rows], dtype=torch.int32, device=device),
                        torch.zeros(rows, dtype=torch.int32, device=device))


def check_sorted(expert_idx, num_experts):
    chosen, top_k = expert_idx.flatten(), expert_idx.shape[1]
    tokens = sort_tokens(expert_idx, num_experts)
    order = torch.argsort(chosen, stable=True)
    assert {tensor.dtype for tensor in tokens} == {torch.int32}
    assert torch.equal(tokens.order.long(), order)
    assert torch.equal(tokens.inverse.long(), torch.argsort(order))
    assert torch.equal(tokens.gather.long(), order // top_k)
    assert torch.equal(tokens.offs.long().cpu(), torch.bincount(chosen.cpu(), minlength=num_experts).cumsum(0))


def check_rows(expert_idx, num_experts, hidden, dtype, weight_dtype=None):
    """Run dispatch and combine, forward and backward."""
    (count, top_k), device = expert_idx.shape, expert_idx.device
    tokens = sort_tokens(expert_idx, num_experts)
    x, y = random((count, hidden), dtype, device), random((count * top_k, hidden), dtype, device, 1)
    weights = random((count, top_k), weight_dtype or dtype, device, 2)
    d_rows, d_out = random(y.shape, dtype, device, 3), random(x.shape, dtype, device, 4)
    wide_x, wide_y, wide_weights = (t.double().requires_grad_() for t in (x, y, weights))
    x, y, weights = x.requires_grad_(), y.requires_grad_(), weights.requires_grad_()
    rows, wide_rows = dispatch_tokens(x, tokens, top_k), wide_x[tokens.gather.long()]
    assert torch.equal(rows.double(), wide_rows)
    (dx,), (wide_dx,) = (
        torch.autograd.grad(*args) for args in ((rows, x, d_rows), (wide_rows, wide_x, d_rows.double()))
    )
    assert_close(dx, wide_dx, dtype, TOLERANCE[dtype])
    by_token = wide_y[tokens.inverse.long()].unflatten(0, expert_idx.shape)
    for operand, expected in (weights, (by_token * wide_weights[..., None]).sum(1)), (None, by_token.sum(1)):
        out = combine_tokens(y, operand, tokens, top_k=top_k)
        assert_close(out, expected, dtype, TOLERANCE[dtype])
        inputs, wide = ((y,), (wide_y,)) if operand is None else ((y, weights), (wide_y, wide_weights))
        grads = torch.autograd.grad(out, inputs, d_out)
        wanted = torch.autograd.grad(expected, wide, d_out.double(), retain_graph=True)
        for grad, want, of in zip(grads, wanted, inputs):
            assert_close(grad, want, of.dtype, TOLERANCE[of.dtype])


def test_worked_example(device):
    tokens = sort_tokens(torch.tensor([[2, 0], [0, 1]], device=device), 3)
    assert [tensor.tolist() for tensor in tokens] == [[1, 2, 3, 0], [3, 0, 1, 2], [2, 3, 4], [0, 1, 1, 0]]
    x = torch.tensor([[10.0], [20.0]], device=device)
    rows = dispatch_tokens(x, tokens, 2)
    assert rows.flatten().tolist() == [10, 20, 20, 10]
    weights = torch.tensor([[1.0, 2.0], [3.0, 4.0]], device=device)
    assert combine_tokens(rows, weights, tokens).flatten().tolist() == [30, 140]


@pytest.mark.parametrize("index_dtype", [torch.int64, torch.int32], ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_sort(case, index_dtype, device):
    tokens, top_k, experts, _ = case
    check_sorted(choose(tokens, top_k, experts, device).to(index_dtype), experts)


@pytest.mark.parametrize("experts", [1, 2, 63, 64, 65, 512])
def test_one_expert_gets_everything(experts, device):
    for expert in {0, experts // 2, experts - 1}:
        check_sorted(torch.full((260, 1), expert, device=device), experts)


@pytest.mark.slow
@pytest.mark.parametrize("experts", [1, 3, 31, 32, 64, 127, 128, 255, 256, 511, 512])
@pytest.mark.parametrize("rows", [1, 255, 256, 257, 512, 1100])
def test_sort_matrix(rows, experts, device):
    generator = torch.Generator().manual_seed(rows)
    check_sorted(torch.randint(experts, (rows, 1), generator=generator).to(device), experts)
    skewed = (experts * torch.rand(rows // 2, 2, generator=generator) ** 4).long().to(device)
    check_sorted(skewed, experts)


@pytest.mark.gpu
@pytest.mark.parametrize(("tokens", "top_k", "experts"), [(65536, 8, 128), (65536, 6, 64), (100_001, 4, 32)])
def test_sort_many(tokens, top_k, experts, device):
    check_sorted(choose(tokens, top_k, experts, device), experts)


def test_sort_of_views(device):
    chosen = choose(30, 3, 7, device)
    check_sorted(chosen.t().contiguous().t(), 7)
    check_sorted(chosen[:, :2], 7)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_rows_there_and_back(case, dtype, device):
    tokens, top_k, experts, hidden = case
    check_rows(choose(tokens, top_k, experts, device), experts, hidden, dtype)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("hidden", [2, 8, 9, 127, 128, 256, 257, 1024, 2048, 2880])
@pytest.mark.parametrize("top_k", [1, 4, 6, 8])
def test_rows_there_and_back_matrix(top_k, hidden, dtype, device):
    check_rows(choose(13, top_k, 8, device), 8, hidden, dtype)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_float32_weights_of_half_precision_rows(dtype, device):
    check_rows(choose(7, 3, 5, device), 5, 40, dtype, torch.float32)


def test_strides(device):
    tokens = sort_tokens(choose(6, 2, 4, device), 4)
    x, y, weights = (random(shape, torch.float32, device) for shape in ((6, 20), (12, 20), (6, 2)))
    rows, out = dispatch_tokens(x, tokens, 2), combine_tokens(y, weights, tokens)

    def spaced(t):
        return torch.cat((t, torch.full_like(t, float("nan"))), 1)[:, : t.shape[1]]

    def turned(t):
        return t.t().contiguous().t()

    for view in (spaced, turned):
        assert torch.equal(dispatch_tokens(view(x), tokens, 2), rows)
        assert torch.equal(combine_tokens(view(y), view(weights), tokens), out)
    leaves = (x.requires_grad_(), y.requires_grad_(), weights.requires_grad_())
    loss = dispatch_tokens(x, tokens, 2).sum() + combine_tokens(y, weights, tokens).sum()  # gradients of stride 0
    dx, dy, d_weights = torch.autograd.grad(loss, leaves)
    assert torch.equal(dx, torch.full_like(x, 2))
    assert torch.equal(dy, weights.detach().flatten()[tokens.order.long()][:, None].expand(-1, 20))
    assert_close(d_weights, y.detach().double().sum(1)[tokens.inverse.long()].view(6, 2), torch.float32, 1e-6)


def test_rows_beyond_two_to_the_31_elements():
    tokens = sort_tokens(torch.tensor([[0], [0], [0]]), 1)
    y, weights = random((3, 9), torch.float16, "cpu"), random((3, 1), torch.float16, "cpu")
    far = far_apart(y)
    assert torch.equal(combine_tokens(far, weights, tokens), combine_tokens(y, weights, tokens))
    assert torch.equal(dispatch_tokens(far, tokens, 1), y)
    grads = (MODULE._combine_tokens_backward(t, t, weights, tokens.inverse, tokens.offs) for t in (far, y))
    assert all(torch.equal(a, b) for a, b in zip(*grads))


def test_rows_are_added_in_ascending_order_of_k(device):
    """The float32 sum of 1, 2^-24 and -1 is 0 from the left and 2^-24 from the right."""
    tokens = unsorted(3, device)
    y = torch.tensor([[1.0], [2.0**-24], [-1.0]], device=device)
    ones = torch.ones(1, 3, device=device)
    assert combine_tokens(y, ones, tokens).item() == 0
    assert combine_tokens(y, None, tokens, top_k=3).item() == 0


def test_half_precision_is_added_in_float32(device):
    tokens = unsorted(64, device)
    y = torch.full((64, 4), 1.0, device=device, dtype=torch.float16)
    y[0] = 2048.0  # where 1 is lost in float16
    assert combine_tokens(y, None, tokens, top_k=64)[0, 0] == 2048 + 63 + 1  # ties to even


def test_second_derivative_of_linear_operators(device):
    tokens = sort_tokens(choose(5, 2, 4, device), 4)
    x = random((5, 3), torch.float64, device).requires_grad_()

    def unweighted(x):
        return combine_tokens(dispatch_tokens(x, tokens, 2).square(), None, tokens, top_k=2)

    assert torch.autograd.gradgradcheck(unweighted, x)


@pytest.mark.parametrize("expert", [3, 4, -2])
def test_expert_out_of_range(expert, device):
    """Raises ValueError on CPU; the kernel sorts the row as unassigned."""
    expert_idx = torch.tensor([[2, 0], [expert, 1]] * 150, device=device)  # more than one block
    if device.type == "cuda" or INTERPRET:
        tokens = sort_tokens(expert_idx, 3)
        as_fourth = sort_tokens(expert_idx.where(expert_idx != expert, 3), 4)
        assert tokens.offs.tolist() == [150, 300, 450]
        for name in ("order", "inverse", "gather"):
            assert torch.equal(getattr(tokens, name), getattr(as_fourth, name))
    else:
        with pytest.raises(ValueError, match=f"contains {expert}, expected experts between 0 and 2, or -1"):
            sort_tokens(expert_idx, 3)


def some_unassigned(tokens, top_k, experts, device, share):
    """Return choices of which `share` are unassigned, including all choices of the first token."""
    chosen = choose(tokens, top_k, experts, device)
    generator = torch.Generator().manual_seed(1)
    unassigned = torch.rand(tokens, top_k, generator=generator) < share
    unassigned[:1] = True
    return chosen.masked_fill(unassigned.to(device), -1)


def test_worked_example_of_unassigned_rows(device):
    tokens = sort_tokens(torch.tensor([[1, -1], [-1, 0]], device=device), 2)
    assert [tokens.offs.tolist(), tokens.inverse.tolist()] == [[1, 2], [1, 2, 3, 0]]
    assert tokens.cut(2).order.tolist() == [3, 0] and tokens.cut(2).gather.tolist() == [1, 0]


@pytest.mark.parametrize("index_dtype", [torch.int64, torch.int32], ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("share", [0.4, 1.0])
def test_sort_puts_unassigned_rows_last(share, case, index_dtype, device):
    tokens, top_k, experts, _ = case
    chosen = some_unassigned(tokens, top_k, experts, device, share).to(index_dtype)
    ours, as_last = sort_tokens(chosen, experts), sort_tokens(chosen.where(chosen >= 0, experts), experts + 1)
    assert torch.equal(ours.offs, as_last.offs[:-1])
    for name in ("order", "inverse", "gather"):
        assert torch.equal(getattr(ours, name), getattr(as_last, name))


@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("share", [0.4, 1.0])
def test_unassigned_rows_count_as_zero(share, case, dtype, cut, device):
    """Unassigned rows, weights and gradients may have any value, and rows may be absent."""
    tokens, top_k, experts, hidden = case
    chosen = some_unassigned(tokens, top_k, experts, device, share)
    sorted_tokens = sort_tokens(chosen, experts)
    end, rows = int(sorted_tokens.offs[-1]), chosen.numel()
    if cut:
        sorted_tokens, rows = sorted_tokens.cut(end), end
    order = sorted_tokens.order[:end].long()

    def with_nan(shape, seed):  # in every row past the end
        values = random(shape, dtype, device, seed)
        values[end:] = float("nan")
        return values

    x, d_out = random((tokens, hidden), dtype, device), random((tokens, hidden), dtype, device, 4)
    y, d_rows = with_nan((rows, hidden), 1), with_nan((rows, hidden), 3)
    weights = random(chosen.shape, dtype, device, 2).masked_fill(chosen < 0, float("nan"))
    d_out[:1] = float("nan")  # of a token that has no expert
    leaves = x, y, weights = tuple(t.requires_grad_() for t in (x, y, weights))
    wide_x, wide_y, wide_weights = wide = tuple(t.detach().double().requires_grad_() for t in leaves)
    copied = dispatch_tokens(x, sorted_tokens, top_k)
    assert copied.shape == (rows, hidden) and torch.equal(copied[:end], x[order // top_k])
    plain, weighted = combine_tokens(y, None, sorted_tokens, top_k=top_k), combine_tokens(y, weights, sorted_tokens)

    def summed(values):  # the rows of the sum, in float64
        return values.new_zeros(tokens, hidden).index_add(0, order // top_k, values)

    expected = summed(wide_y[:end]), summed(wide_y[:end] * wide_weights.flatten()[order][:, None])
    for actual, want in zip((plain, weighted), expected):
        assert_close(actual, want, dtype, TOLERANCE[dtype])
    (dx,) = torch.autograd.grad(copied, x, d_rows)
    (want_dx,) = torch.autograd.grad(wide_x[order // top_k], wide_x, d_rows[:end].double())
    assert_close(dx, want_dx, dtype, TOLERANCE[dtype])
    for actual, want, inputs in ((plain, expected[0], 2), (weighted, expected[1], 3)):
        got = torch.autograd.grad(actual, leaves[1:inputs], d_out)
        wanted = torch.autograd.grad(want, wide[1:inputs], d_out.double(), retain_graph=True)
        assert_close(got[0][:end], wanted[0][:end], dtype, TOLERANCE[dtype])
        for d_weights, want_d in zip(got[1:], wanted[1:]):
            assert_close(d_weights, want_d.where(chosen >= 0, 0), dtype, TOLERANCE[dtype])
            assert (d_weights[chosen < 0] == 0).all()


@pytest.mark.gpu
def test_expert_out_of_range_fails_with_the_debug_switch():
    program = """
        import torch
        from dualpipe.kernels.routing import sort_tokens
        sort_tokens(torch.tensor([[4]], device="cuda"), 4).offs.tolist()
    """
    assert "an expert is not between" in run_with_debug_switch(program)


BAD_SORTS = {
    r"of shape \(4,\), expected int32 or int64 of shape \(T, K\)": (torch.zeros(4, dtype=torch.long), 3),
    r"shape \(4, 0\)": (torch.zeros(4, 0, dtype=torch.long), 3),
    "expert_idx is torch.float32": (torch.zeros(4, 2), 3),
    "num_experts is 0, expected at least 1": (torch.zeros(4, 2, dtype=torch.long), 0),
    r"2147483648 rows, but at most 2\^31 - 1": (torch.zeros(1, 1, dtype=torch.long).expand(2**30, 2), 3),
}


@pytest.mark.parametrize("message", BAD_SORTS)
def test_misfit_in_sort_is_a_value_error(message):
    with pytest.raises(ValueError, match=message):
        sort_tokens(*BAD_SORTS[message])


BAD_COMBINES = {
    r"y is .* of shape \(6,\).* expected a floating-point matrix": {"y": torch.zeros(6)},
    "y has 5 rows, expected one for each of 6 sorted rows": {"y": torch.zeros(5, 4)},
    "on meta": {"y": torch.zeros(6, 4, device="meta"), "weights": torch.zeros(3, 2, device="meta")},
    "weights are torch.int64": {"weights": torch.zeros(3, 2, dtype=torch.long)},
    r"shape \(2, 2\).* one element for each of 6 rows": {"weights": torch.zeros(2, 2)},
    "top_k is 3": {"top_k": 3},
    "weights and top_k are None": {"weights": None},
    "top_k is 4, expected a divisor of the 6 sorted rows": {"weights": None, "top_k": 4},
}


@pytest.mark.parametrize("message", BAD_COMBINES)
def test_misfit_in_combine_is_a_value_error(message):
    tokens = sort_tokens(torch.tensor([[0, 1]] * 3), 2)
    good = {"y": torch.zeros(6, 4), "weights": torch.zeros(3, 2), "tokens": tokens}
    with pytest.raises(ValueError, match=message):
        combine_tokens(**(good | BAD_COMBINES[message]))


def test_misfit_in_dispatch_is_a_value_error():
    tokens = sort_tokens(torch.tensor([[0, 1]] * 3), 2)
    with pytest.raises(ValueError, match="x has 4 rows"):
        dispatch_tokens(torch.zeros(4, 5), tokens, 2)
    with pytest.raises(ValueError, match=r"x is .* of shape \(3,\).* expected a floating-point matrix"):
        dispatch_tokens(torch.zeros(3), tokens, 2)


# Choices (T, K), ranks, experts of each: fewer ranks than choices and more, one choice, one rank, many ranks, empty
DESTINATIONS = [(40, 8, 4, 3), (7, 3, 8, 2), (5, 1, 3, 2), (33, 2, 1, 4), (70, 6, 16, 5), (9, 4, 4, 1), (0, 2, 2, 2)]


def check_destinations(experts, weights, num_ranks, per_rank):
    """Compare with a loop over tokens, and with the reference, which must be equal."""
    tokens, top_k = experts.shape
    depth = min(top_k, num_ranks)
    weights = weights.requires_grad_()
    found = find_destinations(experts, weights, num_ranks, per_rank)
    assert found.ranks.shape == (tokens, depth) and found.weights.shape == (tokens, depth, top_k)
    assert found.weights.dtype is torch.promote_types(weights.dtype, torch.float32)
    rows, choices = [0] * num_ranks, [0] * num_ranks
    for token in range(tokens):
        ranks = [expert // per_rank for expert in experts[token].tolist() if expert >= 0]
        places = found.ranks[token].tolist()
        assert [rank for rank in places if rank >= 0] == sorted({*ranks})
        for place, rank in enumerate(places):
            here = [e >= 0 and rank >= 0 and e // per_rank == rank for e in experts[token].tolist()]
            local = [e % per_rank if is_here else -1 for e, is_here in zip(experts[token].tolist(), here)]
            copies = [w if is_here else 0.0 for w, is_here in zip(weights[token].tolist(), here)]
            assert found.local_experts[token, place].tolist() == local
            assert found.weights[token, place].tolist() == copies
        for rank in {*ranks}:
            rows[rank] += 1
        for rank in ranks:
            choices[rank] += 1
    assert found.counts.tolist() == [list(pair) for pair in zip(rows, choices)] and found.counts.dtype is torch.int64
    reference = MODULE.find_destinations_reference(experts, weights.detach(), num_ranks, per_rank)
    assert all(torch.equal(a.detach().cpu(), b.cpu()) for a, b in zip(found, reference))
    d_copies = random(found.weights.shape, found.weights.dtype, experts.device)
    (d_weights,) = torch.autograd.grad(found.weights, weights, d_copies)
    expected = torch.where(found.local_experts >= 0, d_copies, 0).sum(1).to(weights.dtype)
    assert torch.equal(d_weights, expected)


@pytest.mark.parametrize("index", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("case", DESTINATIONS, ids=str)
def test_destinations_equal_a_loop(case, dtype, index, device):
    tokens, top_k, num_ranks, per_rank = case
    generator = torch.Generator().manual_seed(0)
    experts = torch.rand(tokens, num_ranks * per_rank, generator=generator).argsort(-1)[:, :top_k]
    experts = experts.masked_fill(torch.rand(tokens, top_k, generator=generator) < 0.2, -1).to(device, index)
    check_destinations(experts, random((tokens, top_k), dtype, device), num_ranks, per_rank)


def test_worked_example_of_destinations(device):
    experts = torch.tensor([[3, 2], [0, 3]], device=device)
    found = find_destinations(experts, torch.tensor([[0.25, 0.75], [0.5, 0.5]], device=device), 2, 2)
    assert found.ranks.tolist() == [[-1, 1], [0, 1]]
    assert found.local_experts.tolist() == [[[-1, -1], [1, 0]], [[0, -1], [-1, 1]]]
    assert found.weights.tolist() == [[[0, 0], [0.25, 0.75]], [[0.5, 0], [0, 0.5]]]
    assert found.counts.tolist() == [[1, 1], [2, 3]]


@pytest.mark.parametrize("experts, weights, message", [
    (torch.zeros(4, dtype=torch.long), torch.zeros(4), r"experts have shape \(4,\)"),
    (torch.zeros(4, 2, dtype=torch.long), torch.zeros(4, 3), r"of shape \(4, 3\), expected \(T, K\)"),
    (torch.zeros(4, 2, dtype=torch.long), torch.zeros(4, 2, dtype=torch.long), "weights are torch.int64"),
])
def test_destinations_of_operands_that_do_not_match(experts, weights, message):
    with pytest.raises(ValueError, match=message):
        find_destinations(experts, weights, 2, 2)
