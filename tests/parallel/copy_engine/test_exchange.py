"""The all-to-all by copies has the bits of the process group's, for any sizes, on ranks of one host."""

import contextlib
import os
import signal
import time

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from dualpipe.parallel.all_to_all import GroupAllToAll
from dualpipe.parallel.copy_engine.exchange import METHODS, CopyEngineAllToAll, expert_ranks
from dualpipe.parallel.experts.dispatcher import ExpertParallel
from expert_layers import CASES, E, Experts, advance, ours
from ranks import run_ranks

TINY = 96  # bytes of a rank's slots on four ranks: 16 for each, so that nearly all messages take several rounds


def mesh_of_all():
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("ep",))


# -- the exchange alone

COUNTS = {  # name: rows from each rank to each rank
    "even": [[2, 2, 2], [2, 2, 2], [2, 2, 2]],
    "uneven": [[0, 5, 1], [7, 3, 0], [2, 0, 9]],
    "one way": [[0, 0, 40], [0, 0, 0], [0, 0, 0]],
    "itself alone": [[3, 0, 0], [0, 4, 0], [0, 0, 5]],
    "nothing": [[0, 0, 0], [0, 0, 0], [0, 0, 0]],
    "all to one": [[50, 0, 0], [30, 0, 0], [20, 0, 0]],
}
ROW_SHAPES = {torch.float32: (3,), torch.int64: (), torch.uint8: (7,), torch.bfloat16: (2, 5)}


def exchanged(all_to_all, rank, counts, dtype, factor):
    """Return the rows that a rank receives."""
    sent_rows = [factor * number for number in counts[rank]]
    received_rows = [factor * row[rank] for row in counts]
    generator = torch.Generator().manual_seed(rank)
    shape = ROW_SHAPES[dtype]
    sent = torch.randint(0, 100, (sum(sent_rows), *shape), generator=generator).to(dtype)
    received = torch.full((sum(received_rows), *shape), 101).to(dtype)
    all_to_all.start(received, sent, received_rows, sent_rows).wait()
    return received


def exchanges(rank, buffer_bytes):
    """Return the names of exchanges whose bits differ; sizes grow, and shrink again."""
    mesh = mesh_of_all()
    copies = CopyEngineAllToAll.connect(mesh, buffer_bytes)
    group = GroupAllToAll(mesh)
    wrong = []
    for factor in (1, 5, 2):
        for name, counts in COUNTS.items():
            for dtype in ROW_SHAPES:
                by_copies, by_group = (exchanged(ranks, rank, counts, dtype, factor) for ranks in (copies, group))
                if not torch.equal(by_copies, by_group):
                    wrong.append((name, dtype, factor))
    return wrong


@pytest.mark.parametrize("buffer_bytes", [256, 8192])
def test_received_bits_equal_those_of_the_group(buffer_bytes):
    assert run_ranks(exchanges, 3, buffer_bytes) == [[], [], []]


def several_in_flight(rank):
    """Return, per exchange in flight, whether it brings its own rows, whatever the order of the waits."""
    copies = CopyEngineAllToAll.connect(mesh_of_all(), 64)
    ones = [100] * dist.get_world_size()
    received = [torch.zeros(sum(ones), dtype=torch.int64) for _ in range(5)]
    works = [copies.start(into, torch.full_like(into, 10 * number + rank), ones, ones)
             for number, into in enumerate(received)]
    for work in reversed(works):
        work.wait()
    ranks = torch.arange(dist.get_world_size()).repeat_interleave(100)
    return [torch.equal(into, ranks + 10 * number) for number, into in enumerate(received)]


def test_exchanges_under_way_are_kept_apart():
    assert run_ranks(several_in_flight, 3) == [[True] * 5] * 3


def test_rows_that_are_not_announced_are_refused():
    assert run_ranks(not_announced, 2) == ["5 rows of a tensor, but 4 are exchanged"] * 2


def not_announced(rank):
    copies = CopyEngineAllToAll.connect(mesh_of_all())
    try:
        copies.start(torch.empty(4, 1), torch.empty(5, 1), [2, 2], [2, 2])
    except AssertionError as error:
        return str(error)


def alone(rank):
    """Return whether a rank alone gets its own rows, and the class that `expert_ranks` returns for each method."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "ep"))
    copies, sent = CopyEngineAllToAll.connect(mesh["ep"]), torch.arange(6).view(3, 2)
    received = torch.zeros_like(sent)
    copies.start(received, sent, [3], [3]).wait()
    kinds = [type(expert_ranks(mesh[name], method)).__name__ for name in ("dp", "ep") for method in METHODS]
    return torch.equal(received, sent), kinds


def test_a_rank_alone_needs_no_copies():
    expected = ["DeviceMesh", "CopyEngineAllToAll", "DeviceMesh", "DeviceMesh"]
    assert run_ranks(alone, 2) == [(True, expected)] * 2


def test_another_method_is_refused():
    with pytest.raises(ValueError, match="all_to_all must be one of nccl, copy_engine; got 'sm'"):
        expert_ranks(None, "sm")


# -- through experts


def layers(rank, cases, fp8_rows):
    """Return the cases whose results or gradients differ in any bit from those over the process group."""
    torch.use_deterministic_algorithms(True)  # uninitialised memory is NaN
    mesh = mesh_of_all()
    dtype = torch.float64 if fp8_rows is None else torch.bfloat16
    results = []
    for ranks in (GroupAllToAll(mesh), CopyEngineAllToAll.connect(mesh, TINY)):
        parallel = ExpertParallel(E, ranks, fp8_rows=fp8_rows)
        experts = Experts(dtype, mesh)
        by_case = [ours(parallel, experts, case, rank, dtype) for case in cases]
        gradients = [param.grad.to_local() for param in experts.parameters()]
        results.append([*by_case, gradients])
    by_group, by_copies = results
    assert any(tensor.any() for tensor in by_group[-1])
    return [name for name, one, other in zip([*cases, "experts"], by_group, by_copies)
            if not all(torch.equal(a, b) for a, b in zip(one, other, strict=True))]


@pytest.mark.slow
def test_results_and_gradients_through_experts_equal_those_over_the_group():
    assert run_ranks(layers, 4, list(CASES), None) == [[]] * 4


def again(rank, fp8_rows):
    """Return the results of a dispatch and of its recompute over both, and whether they agree."""
    mesh = mesh_of_all()
    results = []
    for ranks in (GroupAllToAll(mesh), CopyEngineAllToAll.connect(mesh, TINY)):
        dispatcher = ExpertParallel(E, ranks, fp8_rows=fp8_rows).dispatcher()
        generator = torch.Generator().manual_seed(rank)
        x = torch.randn(6 + rank, 256, generator=generator, dtype=torch.float32).bfloat16()
        choices = torch.rand(6 + rank, E, generator=generator).topk(3).indices
        weights = torch.rand(6 + rank, 3, generator=generator)
        inputs = dispatcher.plan(x, weights, choices)
        (first, first_weights, received), context = advance(dispatcher.dispatch.forward(inputs))
        (second, second_weights, repeated), _ = advance(dispatcher.dispatch.recompute(context, inputs))
        quantized = [] if fp8_rows is None else [*received.quantized, *repeated.quantized]
        results.append([first, first_weights, received.ids, second, second_weights, *quantized])
    return [torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(*results, strict=True)]


@pytest.mark.parametrize("fp8_rows", [None, 128, 32])
def test_a_dispatch_and_its_recompute_equal_those_over_the_group(fp8_rows):
    for equal in run_ranks(again, 2, fp8_rows):
        assert len(equal) == (5 if fp8_rows is None else 9) and all(equal)


# -- failures


def gone(rank, how):
    """Return the error of a rank whose peer ends, or does not come."""
    mesh = mesh_of_all()
    parallel, experts = ExpertParallel(E, CopyEngineAllToAll.connect(mesh)), Experts(torch.float64, mesh)
    ours(parallel, experts, "random", rank, torch.float64)
    if rank == 1 and how == "sleeps":
        time.sleep(6)
        os._exit(1)
    elif rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    errors = []
    for _ in range(2):
        try:
            ours(parallel, experts, "random", rank, torch.float64)
        except RuntimeError as error:
            errors.append(str(error))
    return errors


@pytest.mark.parametrize("how, text", [
    ("is killed", "rank 1, which has left (shared memory closed by peer: rank 1 has ended or failed)"),
    ("sleeps", "(timed out after 2 s: rank 1 did not come)"),
])
def test_a_peer_that_is_gone_ends_the_wait(how, text):
    began = time.monotonic()
    timeout = 2 if how == "sleeps" else 60
    results = run_ranks(gone, 2, how, group_timeout=timeout, timeout=90, check=False, fresh=True)
    assert len(results[0]) == 2  # the next exchange raises as well, at once
    for error in results[0]:
        assert error.startswith("waited ") and error.endswith(text)
    assert time.monotonic() - began < 30


def hung_up(rank):
    """Return whether `hang_up` has ended this rank's exchange, and the errors of two exchanges; rank 0 hangs up."""
    copies = CopyEngineAllToAll.connect(mesh_of_all())
    received = torch.zeros(2, dtype=torch.int64)
    works = [copies.start(received, torch.tensor([rank, rank]), [1, 1], [1, 1])] if rank == 0 else []
    has_ended = True
    if rank == 0:
        time.sleep(0.1)  # it waits for rank 1
        copies.hang_up()
        has_ended = works[0].is_completed()
    dist.barrier()
    if rank == 1:
        dist.barrier()
        return True, []
    errors = []
    works.append(copies.start(received, torch.tensor([rank, rank]), [1, 1], [1, 1]))
    for work in works:
        with pytest.raises(dist.DistNetworkError) as raised:
            work.wait()
        errors.append(str(raised.value))
    dist.barrier()
    return has_ended, errors


def test_hang_up_ends_an_exchange_before_it_returns():
    """A thread inside a copy would abort the process at its end."""
    text = "a step failed and closed the shared memory of this rank"
    assert run_ranks(hung_up, 2) == [(True, [text] * 2), (True, [])]


def last_signals(rank):
    """Rank 1 ends as soon as its rows are through; rank 0 comes later and still gets them."""
    copies = CopyEngineAllToAll.connect(mesh_of_all())
    received = torch.zeros(2, dtype=torch.int64)
    if rank == 0:
        dist.recv(torch.empty(1), 1)  # rank 1 has written and signalled
        with contextlib.suppress(RuntimeError):
            dist.recv(torch.empty(1), 1)  # it has ended
    work = copies.start(received, torch.tensor([rank, rank]), [1, 1], [1, 1])
    if rank == 1:
        time.sleep(0.3)
        dist.send(torch.ones(1), 0)
        os._exit(1)
    work.wait()
    return received.tolist()


def test_rows_of_a_rank_that_has_ended_since_are_received():
    results = run_ranks(last_signals, 2, check=False, fresh=True)
    assert results[0] == [0, 1]
