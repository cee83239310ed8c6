"""Linear layers, ours beside PyTorch's and transformers', and how their gradients are compared."""

import copy

import torch
from torch import nn

from dualpipe.nn import Linear, defer_weight_grads

KINDS = ["Linear", "Linear without bias", "Conv1D"]


class Conv1D(nn.Module):
    """transformers' class of this name."""

    def __init__(self, nf, nx):
        super().__init__()
        self.nf = nf
        self.nx = nx
        self.weight = nn.Parameter(torch.randn(nx, nf))
        self.bias = nn.Parameter(torch.randn(nf))

    def forward(self, x):
        size_out = x.size()[:-1] + (self.nf,)  # noqa: RUF005 - as it is there
        x = torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight)
        x = x.view(size_out)
        return x


def backward(module, x, dy, store=None):
    """Plain, or, with a store, deferred and not yet run."""
    if store is None:
        module(x).backward(dy)
    else:
        with store.activate(), store.defer("I"):
            module(x).backward(dy)


def pair(dtype=torch.float32, kind="Linear"):
    """Return a plain layer of 6 inputs and 4 outputs and ours of the same values; `kind` is one of `KINDS`."""
    torch.manual_seed(0)
    if kind == "Conv1D":
        plain = Conv1D(4, 6).to(dtype)
        return plain, defer_weight_grads(copy.deepcopy(plain))
    bias = kind == "Linear"
    plain = nn.Linear(6, 4, bias=bias, dtype=dtype)
    ours = Linear(6, 4, bias=bias, dtype=dtype)
    ours.load_state_dict(plain.state_dict())
    return plain, ours


def assert_same_grads(actual, expected):
    for (name, a), (_, b) in zip(actual.named_parameters(), expected.named_parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None), name
        if b.grad is not None:
            assert a.grad.dtype is b.grad.dtype, name
            assert torch.equal(a.grad, b.grad), name
