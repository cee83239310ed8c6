"""GEMMs of expert layers by other libraries: the same results as this library's, without reading sizes back."""

import sys
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from dualpipe.kernels.routing import sort_tokens
from dualpipe.nn import GroupedLinear, GroupedSwiGLU
from dualpipe.nn.expert_gemm import expert_gemm, expert_gemm_dgrad

E, H, N, T, K = 4, 32, 48, 40, 2


def quack_gemm(a, b, *, cu_seqlens_m, tuned):
    """The function of quack-kernels that is called, with its meaning of operands."""
    assert not tuned and cu_seqlens_m.dtype is torch.int32 and cu_seqlens_m.shape == (b.shape[0] + 1,)
    y = a.new_full((a.shape[0], b.shape[2]), float("nan"))
    bounds = cu_seqlens_m.tolist()
    for expert, (start, end) in enumerate(pairwise(bounds)):
        y[start:end] = a[start:end] @ b[expert]
    return y


@pytest.fixture
def quack(monkeypatch):
    monkeypatch.setitem(sys.modules, "quack", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "quack.gemm_interface", SimpleNamespace(gemm=quack_gemm))


def operands(ends, *, tokens=T, rows=None):
    torch.manual_seed(0)
    x = torch.randn(tokens, H, dtype=torch.bfloat16)
    weight = torch.randn(E, N, H, dtype=torch.bfloat16) / H**0.5
    bias = torch.randn(E, N, dtype=torch.bfloat16)
    gather = torch.randint(0, tokens, (rows or ends[-1],), dtype=torch.int32)
    return x, weight, bias, gather, torch.tensor(ends, dtype=torch.int32)


@pytest.mark.parametrize("library", ["dualpipe", "grouped_mm", "quack"])
@pytest.mark.parametrize("ends", [[10, 20, 30, 40], [0, 0, 39, 40], [1, 1, 1, 1], [0, 7, 7, 7]], ids=str)
def test_it_equals_float64(library, ends, quack):
    x, weight, bias, gather, ends_E = operands(ends, rows=44)
    gather[ends[-1]:] = 2**30  # of rows that belong to no expert; anything may stand there
    y = expert_gemm(library, x, weight, ends_E, bias_EN=bias, gather_M=gather)[: ends[-1]]
    expert = torch.repeat_interleave(torch.arange(E), torch.diff(ends_E, prepend=ends_E.new_zeros(1)))
    rows = x.double()[gather[: ends[-1]].long()]
    expected = torch.einsum("mh,mnh->mn", rows, weight.double()[expert]) + bias.double()[expert]
    # The GEMM and, for all libraries but ours, the sum with the bias round to bfloat16, whose eps is 2**-7.
    torch.testing.assert_close(y.double(), expected, rtol=2**-7, atol=2**-7)
    dx = expert_gemm_dgrad(library, F.pad(y, (0, 0, 0, 4)), weight, ends_E)[: ends[-1]]
    expected = torch.einsum("mn,mnh->mh", y.double(), weight.double()[expert])
    torch.testing.assert_close(dx.double(), expected, rtol=2**-7, atol=2**-6)


def test_no_size_is_read_back(monkeypatch):
    """The host would wait for the device: on it, `item` and `tolist` of a tensor are such waits."""
    x, weight, bias, gather, ends_E = operands([10, 20, 30, 40])
    monkeypatch.setattr(F, "grouped_mm", lambda a, b, offs: a.new_empty(a.shape[0], b.shape[2]))
    for name in ("item", "tolist", "__int__", "__bool__", "__index__"):
        monkeypatch.setattr(torch.Tensor, name, lambda *_: pytest.fail("a size was read back"))
    expert_gemm("grouped_mm", x, weight, ends_E, bias_EN=bias, gather_M=gather)


def test_no_tokens(quack):
    x = torch.empty(0, H, dtype=torch.bfloat16)
    weight = torch.randn(E, N, H, dtype=torch.bfloat16)
    gather = torch.empty(0, dtype=torch.int32)
    ends_E = torch.zeros(E, dtype=torch.int32)
    for library in ("dualpipe", "grouped_mm", "quack"):
        assert expert_gemm(library, x, weight, ends_E, gather_M=gather).shape == (0, N)


@pytest.mark.parametrize("library", ["grouped_mm", "quack"])
@pytest.mark.parametrize("clamped", [False, True])
def test_layers_have_the_same_gradients(library, clamped, quack, monkeypatch):
    calls = []
    grouped_mm = F.grouped_mm
    monkeypatch.setattr(F, "grouped_mm", lambda *args, **kwargs: (calls.append(1), grouped_mm(*args, **kwargs))[1])
    torch.manual_seed(1)
    first = GroupedSwiGLU(E, H, 24, bias=clamped, dtype=torch.bfloat16, clamped=clamped)
    second = GroupedLinear(E, 24, H, bias=True, dtype=torch.bfloat16)
    index = torch.randint(0, E, (T, K))
    scale = torch.rand(T * K)
    x = torch.randn(T, H, dtype=torch.bfloat16)
    results = []
    for name in ("dualpipe", library):
        first.gemm_library = second.gemm_library = name
        calls.clear()
        leaf = x.clone().requires_grad_()
        rows = sort_tokens(index, E)
        y = second(first(leaf, rows, scale), rows.offs)
        parameters = [leaf, *first.parameters(), *second.parameters()]
        results.append([y, *torch.autograd.grad(y.float().square().sum(), parameters)])
    assert len(calls) >= 4 or library == "quack"
    for ours, others in zip(*results):
        # Sums of bfloat16 in another order or with one more rounding; eps is 2**-7.
        error = (ours.double() - others.double()).norm() / ours.double().norm()
        assert error < 2**-6, error
