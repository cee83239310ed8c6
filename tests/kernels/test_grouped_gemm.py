"""Grouped products against a plain loop in float64, on odd and empty sizes, with poisoned rows past the end."""

import pytest
import torch

from dualpipe.kernels import grouped_gemm, grouped_gemm_dgrad, grouped_gemm_wgrad

# Half precision rounds the result once; float32 sums over at most 80 products.
TOLERANCE = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4}
COUNTS = {
    "balanced": [3, 3, 3],
    "first empty": [0, 5, 2],
    "middle empty": [1, 0, 64],
    "last empty": [65, 1, 0],
    "all empty": [0, 0, 0],
    "one expert": [7],
}
SIZES = [(16, 24), (8, 8), (5, 7), (80, 12)]  # H, N: with and without rows of 16-byte multiples


def make(counts, hidden, out, dtype, extra=2):
    """Operands with `extra` rows of NaN past the last offset."""
    generator = torch.Generator().manual_seed(0)
    experts, rows = len(counts), sum(counts)
    x, dy, w = (torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)
                for shape in ((rows + extra, hidden), (rows + extra, out), (experts, out, hidden)))  # fmt: skip
    x[rows:], dy[rows:] = float("nan"), float("nan")
    return x, dy, w, torch.tensor(counts).cumsum(0).to(torch.int32)


def experts_of(counts):
    return torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))


def check(actual, expected, dtype):
    assert actual.dtype is dtype
    error = (actual.double() - expected).norm() / expected.norm().clamp(min=1e-30)
    assert error <= TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("hidden", "out"), SIZES)
@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
def test_products_equal_a_loop(counts, hidden, out, dtype):
    x, dy, w, offs = make(counts, hidden, out, dtype)
    rows, of = sum(counts), experts_of(counts)
    check(grouped_gemm(x, w, offs)[:rows], torch.einsum("mh,mnh->mn", x[:rows].double(), w[of].double()), dtype)
    check(grouped_gemm_dgrad(dy, w, offs)[:rows], torch.einsum("mn,mnh->mh", dy[:rows].double(), w[of].double()), dtype)
    outer = torch.einsum("mn,mh->mnh", dy[:rows].double(), x[:rows].double())
    expected = torch.zeros(w.shape, dtype=torch.float64).index_add_(0, of, outer)
    poisoned = torch.full_like(w, float("nan"))
    grouped_gemm_wgrad(dy, x, offs, out=poisoned, accumulate=False)
    check(poisoned, expected, dtype)
    ones = torch.ones_like(w)
    grouped_gemm_wgrad(dy, x, offs, out=ones, accumulate=True)
    check(ones, expected + 1, dtype)


def test_worked_example():
    x = torch.tensor([[1.0], [2], [3], [4], [5]])
    w = torch.tensor([[[10.0]], [[100]], [[1000]]])
    offs = torch.tensor([2, 2, 5], dtype=torch.int32)
    assert grouped_gemm(x, w, offs).flatten().tolist() == [10, 20, 3000, 4000, 5000]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_bias_and_gather(dtype):
    counts, gather = [2, 0, 3], torch.tensor([3, 0, 0, 1, 2])
    x, dy, w, offs = make(counts, 16, 8, dtype, extra=0)
    bias = torch.randn(3, 8).to(dtype)
    of, taken = experts_of(counts), x[gather]
    expected = torch.einsum("mh,mnh->mn", taken.double(), w[of].double()) + bias[of].double()
    check(grouped_gemm(x, w, offs, bias=bias, gather=gather), expected, dtype)
    plain, gathered = torch.empty_like(w), torch.empty_like(w)
    grouped_gemm_wgrad(dy, taken, offs, out=plain, accumulate=False)
    grouped_gemm_wgrad(dy, x, offs, out=gathered, accumulate=False, gather=gather.int())
    assert torch.equal(plain, gathered)


def test_wgrad_into_float32_is_not_rounded_to_bfloat16():
    x, dy, w, offs = make([40, 3, 0], 16, 8, torch.bfloat16)
    out = torch.empty(w.shape, dtype=torch.float32)
    grouped_gemm_wgrad(dy, x, offs, out=out, accumulate=False)
    exact = torch.empty(w.shape, dtype=torch.float64)
    grouped_gemm_wgrad(dy.double(), x.double(), offs, out=exact, accumulate=False)
    check(out, exact, torch.float32)


def test_no_rows_at_all():
    x, dy, w, offs = make([0, 0], 16, 8, torch.bfloat16, extra=0)
    assert grouped_gemm(x, w, offs).shape == (0, 8)
    assert grouped_gemm_dgrad(dy, w, offs).shape == (0, 16)
    out = torch.full_like(w, float("nan"))
    grouped_gemm_wgrad(dy, x, offs, out=out, accumulate=False)
    assert (out == 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_views_work(dtype):
    x, _, w, offs = make([2, 3], 16, 8, dtype, extra=0)
    x_view, w_view = x.t().contiguous().t(), w.transpose(1, 2).contiguous().transpose(1, 2)
    torch.testing.assert_close(grouped_gemm(x_view, w_view, offs), grouped_gemm(x, w, offs))
    ones = torch.ones(()).to(dtype).expand(5, 8)  # what sum().backward() hands over
    torch.testing.assert_close(grouped_gemm_dgrad(ones, w, offs), grouped_gemm_dgrad(ones.contiguous(), w, offs))


BAD = {
    "x must be a floating-point": {"x": torch.zeros(5, 4, dtype=torch.long)},
    "w must be a floating-point": {"w": torch.zeros(3, 4)},
    "x.shape\\[1\\] must equal": {"x": torch.zeros(5, 3)},
    "must have one dtype": {"x": torch.zeros(5, 4, dtype=torch.bfloat16)},
    "offs must be int32": {"offs": torch.tensor([1, 2])},
    "one end for each of 2": {"offs": torch.tensor([1, 2, 3], dtype=torch.int32)},
    "offs must rise": {"offs": torch.tensor([3, 2], dtype=torch.int32)},
    "offs must rise from 0 to at most 5": {"offs": torch.tensor([3, 6], dtype=torch.int32)},
    "one device": {"w": torch.zeros(2, 6, 4, device="meta")},
    "bias must have shape": {"bias": torch.zeros(6)},
    "gather must be": {"gather": torch.zeros(5)},
}


@pytest.mark.parametrize("message", BAD)
def test_misfit_is_a_value_error(message):
    good = {"x": torch.zeros(5, 4), "w": torch.zeros(2, 6, 4), "offs": torch.tensor([2, 5], dtype=torch.int32)}
    with pytest.raises(ValueError, match=message):
        grouped_gemm(**(good | BAD[message]))


def test_wgrad_refuses_a_wrong_out():
    x, dy, w, offs = make([2, 3], 4, 6, torch.float32, extra=0)
    with pytest.raises(ValueError, match=r"out must have shape \(E, 6, 4\)"):
        grouped_gemm_wgrad(dy, x, offs, out=w.transpose(1, 2), accumulate=False)
    with pytest.raises(ValueError, match="rows of dy"):
        grouped_gemm_wgrad(dy[:4], x, offs, out=w, accumulate=False)
