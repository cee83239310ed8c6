"""The adapter for DeepEP on a stand-in with its signatures, against one hop; DeepEP itself has never run here."""

import inspect
import sys
from importlib.util import find_spec

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import deep_ep_stand_in
from dualpipe.parallel.all_to_all import GroupAllToAll
from dualpipe.parallel.experts.deep_ep import DeepEPDispatcher, create_buffer
from dualpipe.parallel.experts.dispatcher import ExpertParallel
from expert_layers import CASES, E, Experts, H, batch, through_experts
from ranks import run_ranks
from toys import relative_error

TOLERANCE = 1.2e-2  # as between one process and several in bfloat16: a sum more is rounded


def ep_mesh():
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("ep",))


def trained(dispatcher, mesh, case, rank):
    """Results and gradients of one batch, of the rank's experts too."""
    experts = Experts(torch.bfloat16, mesh)
    x, weights, choices, dy = batch(case, rank, torch.bfloat16)
    x, weights = x.requires_grad_(), weights.requires_grad_()
    y = through_experts(dispatcher, experts, x, weights, choices)
    y.backward(dy)
    return [y.detach(), x.grad, weights.grad, *(param.grad.to_local() for param in experts.parameters())]


def parity(rank, cases):
    """The largest error of each case, and the calls of the library in one of them."""
    mesh, errors = ep_mesh(), {}
    torch.use_deterministic_algorithms(True)  # what is not initialised is NaN
    for case in cases:
        buffer = deep_ep_stand_in.Buffer(mesh.get_group())
        found = trained(DeepEPDispatcher(E, buffer), mesh, case, rank)
        expected = trained(ExpertParallel(E, mesh, dispatch="all_to_all").dispatcher(), mesh, case, rank)
        assert [t.dtype for t in found] == [t.dtype for t in expected]
        errors[case] = max(relative_error(a.double(), b.double()) if b.double().norm() else float(a.double().norm())
                           for a, b in zip(found, expected, strict=True))
    return errors, buffer.calls


def test_results_and_gradients_are_those_of_one_hop():
    for errors, calls in run_ranks(parity, 4, list(CASES)):
        assert {case: error for case, error in errors.items() if not error <= TOLERANCE} == {}
        assert calls == ["dispatch", "combine", "dispatch again", "combine"]


def repeated(rank, fp8_rows):
    """Received rows, the first time and again, beside those of one hop with the same format."""
    mesh, found = ep_mesh(), []
    x, weights, choices, _ = batch("random", rank, torch.bfloat16)
    x = x.repeat(1, 16)  # 256 columns
    buffer = deep_ep_stand_in.Buffer(mesh.get_group())
    for dispatcher in (ExpertParallel(E, mesh, fp8_rows=fp8_rows, dispatch="all_to_all").dispatcher(),
                       DeepEPDispatcher(E, buffer, fp8_rows)):
        made = dispatcher.plan(x, weights, choices)
        pending = dispatcher.dispatch.forward(made)
        assert dispatcher.dispatch.group is mesh.get_group()
        pending.advance()
        pending.advance()
        (rows, row_weights, received), context = pending.wait()
        again = dispatcher.dispatch.recompute(context, made)
        again.advance()
        (rows_again, _, received_again), _ = again.wait()
        assert received_again.pairs == received.pairs
        quantized = () if fp8_rows is None else (*received.quantized, *received_again.quantized)
        found.append((rows, rows_again, row_weights, received.ids, *quantized))
    return [torch.equal(a.float(), b.float()) for a, b in zip(*found, strict=True)]


@pytest.mark.parametrize("fp8_rows", [None, 128])
def test_a_dispatch_and_its_repetition_have_the_rows_of_one_hop(fp8_rows):
    assert run_ranks(repeated, 4, fp8_rows) == [[True] * (4 if fp8_rows is None else 8)] * 4


def without_gradients(rank):
    """Gradients where rank 1 has none of the results: it takes part with zeros."""
    mesh = ep_mesh()
    dispatcher = DeepEPDispatcher(E, deep_ep_stand_in.Buffer(mesh.get_group()))
    x, weights, choices, dy = batch("random", rank, torch.bfloat16)
    (rows, _, received), context = dispatcher.dispatch.forward(dispatcher.plan(x, weights, choices)).wait()
    _, combined = dispatcher.combine.forward((rows, received)).wait()
    (d_rows, none), _ = dispatcher.combine.backward(combined, (None if rank == 1 else dy,)).wait()
    assert none is None
    (d_x, d_weights, none), _ = dispatcher.dispatch.backward(context, (d_rows, None, None)).wait()
    assert none is None
    assert d_weights.shape == weights.shape and not d_weights.any()
    return bool(d_x.any())


def test_a_rank_without_gradients_sends_zeros():
    assert run_ranks(without_gradients, 2) == [True, False]


# -- what does not fit


class Ranks:
    """Two ranks on CUDA."""

    rank, size, device, group = 0, 2, torch.device("cuda"), "a group"


class Sized(deep_ep_stand_in.Buffer):
    """A buffer that notes its arguments."""

    def __init__(self, group, num_nvl_bytes, num_rdma_bytes):
        self.arguments = group, num_nvl_bytes, num_rdma_bytes


def test_the_buffer_has_the_size_of_a_row_in_bfloat16(monkeypatch):
    monkeypatch.setitem(sys.modules, "deep_ep", deep_ep_stand_in)
    monkeypatch.setattr(deep_ep_stand_in, "Buffer", Sized)
    assert create_buffer(Ranks(), 100).arguments == ("a group", 2 * 200 * 2, 3 * 200 * 2)


def test_what_is_missing_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "deep_ep", None)  # as if not installed
    with pytest.raises(ValueError, match="the package deep_ep is not installed; install it from"):
        create_buffer(Ranks(), 100)
    with pytest.raises(ValueError, match="'deep_ep' without hidden_size"):
        create_buffer(Ranks(), None)
    with pytest.raises(ValueError, match="fp8_rows is 32 with dispatch = 'deep_ep', which takes rows"):
        DeepEPDispatcher(E, None, 32)
    assert run_ranks(on_the_cpu, 2) == [True] * 2


def on_the_cpu(rank):
    mesh = ep_mesh()
    with pytest.raises(ValueError, match="'deep_ep' on cpu ranks, but DeepEP needs CUDA and a process group"):
        ExpertParallel(E, mesh, dispatch="deep_ep", hidden_size=H)
    assert GroupAllToAll(mesh).group is not None
    dispatcher = DeepEPDispatcher(E, deep_ep_stand_in.Buffer(mesh.get_group()))
    with pytest.raises(ValueError, match=r"got rows of 16 columns in torch\.float32, expected bfloat16; give"):
        dispatcher.dispatch.forward(dispatcher.plan(*batch("random", rank, torch.float32)[:3]))
    return True


@pytest.mark.skipif(find_spec("deep_ep") is None, reason="DeepEP is not installed")
@pytest.mark.parametrize("name", ["__init__", "capture", "get_dispatch_layout", "dispatch", "combine"])
def test_the_stand_in_has_the_signatures_of_the_library(name):
    import deep_ep

    real, ours = (list(inspect.signature(getattr(each, name)).parameters)
                  for each in (deep_ep.Buffer, deep_ep_stand_in.Buffer))
    assert real[: len(ours)] == ours
