"""Rows in two hops between pretended nodes, against one hop: bits, bytes between nodes, layouts that fit."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from dualpipe.nn.routing.router import ExpertGroups, Router, Scoring
from dualpipe.parallel.experts.dispatcher import ExpertParallel
from dualpipe.parallel.experts.two_hop import TwoHopDispatcher, take_rows
from expert_layers import CASES, DTYPES, E, Experts, H, batch, ours
from ranks import run_ranks


def ep_mesh():
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("ep",))


def bits(rank, per_node, names, cases):
    """Return the cases with a bit that differs between one hop and two; check that the second takes two hops."""
    mesh, wrong = ep_mesh(), []
    torch.use_deterministic_algorithms(True)  # uninitialised memory is NaN
    ways = [ExpertParallel(E, mesh, dispatch=way, ranks_per_node=per_node) for way in ("all_to_all", "two_hop")]
    assert [type(way.dispatcher()) is TwoHopDispatcher for way in ways] == [False, True]
    for name in names:
        for case in cases:
            results = []
            for way in ways:
                experts = Experts(DTYPES[name], mesh)
                found = ours(way, experts, case, rank, DTYPES[name])
                results.append([*found, *(param.grad.to_local() for param in experts.parameters())])
            same = [a.dtype is b.dtype and a.shape == b.shape
                    and torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(*results, strict=True)]
            wrong += [] if all(same) and len(same) == 6 else [(name, case, same)]
    return wrong


@pytest.mark.parametrize("ranks, per_node, dtypes", [
    (4, 2, ["bfloat16", "float32"]), (2, 1, ["bfloat16"]),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in (
        (4, 2, ["float64"]), (4, 1, ["bfloat16"]), (8, 2, ["bfloat16"]), (8, 4, ["bfloat16"]))),
])
def test_results_and_all_gradients_have_the_bits_of_one_hop(ranks, per_node, dtypes):
    assert run_ranks(bits, ranks, per_node, dtypes, list(CASES)) == [[]] * ranks


def quantized(rank, block, dtype, case):
    """Compare the experts' FP8 inputs by one hop and by two, bit for bit, in the dispatch and in its recompute."""
    mesh, found = ep_mesh(), []
    x, weights, choices, _ = batch(case, rank, dtype)
    x = x.repeat(1, 10)  # 160 columns: neither 128 nor a multiple of it
    for way in ("all_to_all", "two_hop"):
        dispatcher = ExpertParallel(E, mesh, fp8_rows=block, dispatch=way, ranks_per_node=2).dispatcher()
        made = dispatcher.plan(x, weights, choices)
        pending = dispatcher.dispatch.forward(made)
        pending.advance()
        (rows, received_weights, received), context = pending.wait()
        again = dispatcher.dispatch.recompute(context, made)
        again.advance()
        (rows_again, weights_again, received_again), _ = again.wait()
        assert torch.equal(weights_again, received_weights)
        assert torch.equal(received_again.ids, received.ids)
        found.append([rows, *received.quantized, received_weights, received.ids, rows_again, *received_again.quantized])
    return [torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(*found, strict=True)]


@pytest.mark.parametrize("block, dtype", [(128, torch.bfloat16), (32, torch.float32)], ids=str)
@pytest.mark.parametrize("case", ["random", "a rank without tokens"])
def test_rows_in_fp8_have_the_bits_of_one_hop(block, dtype, case):
    assert run_ranks(quantized, 4, block, dtype, case) == [[True] * 8] * 4


def quantized_bytes(rank, block):
    """Return the bytes between nodes that FP8 saves in a dispatch's forward, and the rows that the rank sends there."""
    mesh, sent = ep_mesh(), []
    x, weights, choices, _ = batch("random", rank, torch.bfloat16)
    for fp8_rows in (None, block):
        ep = ExpertParallel(E, mesh, fp8_rows=fp8_rows, dispatch="two_hop", ranks_per_node=2)
        pending = ep.dispatcher().dispatch.forward(made := ep.dispatcher().plan(x, weights, choices))
        pending.wait()
        sent.append(ep.sent_between_nodes)
    return sent[0] - sent[1], made[2].counts[2 - rank // 2 * 2, 2].item()


def test_rows_in_fp8_go_between_nodes_in_fewer_bytes():
    for saved, rows in run_ranks(quantized_bytes, 4, 32):
        assert saved == rows * (H - 1) > 0  # one byte for each element, and one scale


# -- bytes


def between_nodes(rank, per_node, dtype, weights_dtype, two_hops):
    """Return this rank's bytes to other nodes and to other ranks, and both by the formula."""
    mesh = ep_mesh()
    ep = ExpertParallel(E, mesh, dispatch="two_hop" if two_hops else "all_to_all", ranks_per_node=per_node)
    ours(ep, Experts(dtype, mesh), "random", rank, dtype)
    size, top_k = mesh.size(), CASES["random"][1]
    row, packed = H * dtype.itemsize, top_k * (weights_dtype.itemsize + 4)
    node, elsewhere, all_other = rank // per_node, 0, 0
    for source in range(size):
        for chosen in batch("random", source, dtype)[2].tolist():
            ranks = {e // (E // size) for e in chosen}
            nodes = {r // per_node for r in ranks}
            forwarder = {n: n * per_node + source % per_node for n in nodes}
            # Dispatch: the rows with weights and choices, and their gradients from the combine.
            hops = [(source, r) for r in ranks]
            if two_hops:
                hops = [(source, forwarder[n]) for n in nodes] + [(forwarder[r // per_node], r) for r in ranks]
            there = [(to, row + packed + row) for by, to in hops if by == rank]
            # Combine: outputs, then the gradients of rows and weights, from each rank of the token.
            back = [(source, row + row + top_k * weights_dtype.itemsize)] if rank in ranks else []
            for to, size_of_row in there + back:
                elsewhere += size_of_row * (to // per_node != node)
                all_other += size_of_row * (to != rank)
    return (ep.sent_between_nodes, ep.sent_bytes), (elsewhere, all_other)


@pytest.mark.parametrize("dtype, weights", [(torch.float64, torch.float64), (torch.bfloat16, torch.float32)], ids=str)
def test_the_counted_bytes_are_those_of_the_formula(dtype, weights):
    two = run_ranks(between_nodes, 4, 2, dtype, weights, True)
    one = run_ranks(between_nodes, 4, 2, dtype, weights, False)
    for counted, formula in two + one:
        assert counted == formula
        assert min(counted) > 0
    assert sum(counted[0] for counted, _ in two) < sum(counted[0] for counted, _ in one)


def limited(rank):
    """Return the first hop's rows per token for a router limited to 1 of 2 groups, and to 2 of 4."""
    mesh = ep_mesh()
    rows = []
    for groups in (2, 4):
        router = Router(H, E, 2, scoring=Scoring("sigmoid"), groups=ExpertGroups(groups, groups // 2, 1))
        torch.manual_seed(rank)
        x = torch.randn(50, H)
        torch.nn.init.normal_(router.weight)
        ep = ExpertParallel(E, mesh, dispatch="two_hop", ranks_per_node=4 // groups)
        plan = ep.dispatcher().plan(x, *router(x))[2]
        per_node = 4 // groups
        rows.append(plan.counts[::per_node, 2].sum().item() / 50)
        assert plan.counts[:, 0].sum() > plan.counts[::per_node, 2].sum() or per_node == 1
    return rows


def test_a_router_limited_to_groups_limits_the_rows_between_nodes():
    for one_of_two, two_of_four in run_ranks(limited, 4):
        assert one_of_two == 1
        assert 1 < two_of_four <= 2


# -- the worked example of the module


class Place:
    """Rank 0 of 4 ranks in 2 nodes."""

    rank, size, device, group = 0, 4, torch.device("cpu"), None


def test_worked_example_of_a_plan():
    x, choices = torch.tensor([[10.0], [20.0]]), torch.tensor([[2, 3], [3, 0]])
    dispatcher = ExpertParallel(4, Place(), dispatch="two_hop", ranks_per_node=2).dispatcher()
    rows, _, plan = dispatcher.plan(x, torch.tensor([[0.1, 0.9], [0.3, 0.7]]), choices)
    # Per rank: rows and pairs, rows for its node, rows for each rank of its node.
    assert plan.counts.tolist() == [[1, 1, 1, 1, 0], [0, 0, 1, 1, 0], [1, 1, 2, 1, 2], [2, 2, 2, 1, 2]]
    node_rows = plan.node_rows
    assert take_rows(rows, node_rows.rows[:3]).flatten().tolist() == [20, 10, 20]
    assert node_rows.ids[:3].tolist() == [[-1, 0], [0, 1], [1, -1]]
    torch.testing.assert_close(node_rows.weights[:3], torch.tensor([[0.3, 0.7], [0.1, 0.9], [0.3, 0.7]]))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("width", [1, 2, 12, 16])
def test_rows_of_any_width_and_dtype_are_taken(dtype, width):
    rows = torch.arange(5 * width).view(5, width).to(dtype)
    taken = take_rows(rows, torch.tensor([3, 0, 3]))
    assert taken.dtype is dtype
    assert torch.equal(taken.float(), rows.float()[[3, 0, 3]])
    assert take_rows(rows[:0], torch.tensor([], dtype=torch.int64)).shape == (0, width)


# -- nodes


@pytest.mark.parametrize("size, per_node, kind", [
    (4, 2, True), (8, 4, True), (4, 4, False), (4, 8, False), (4, 1, False), (6, 4, False), (4, None, False)])
def test_the_way_that_is_chosen_by_the_nodes(size, per_node, kind):
    place = Place()
    place.size = size
    dispatcher = ExpertParallel(24, place, ranks_per_node=per_node).dispatcher()
    assert (type(dispatcher) is TwoHopDispatcher) is kind


def by_environment(rank, monkeypatch_size):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCAL_WORLD_SIZE", f"{monkeypatch_size}")
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
        whole = type(ExpertParallel(E, ep_mesh()).dispatcher()) is TwoHopDispatcher
        return whole, type(ExpertParallel(E, mesh["ep"]).dispatcher()) is TwoHopDispatcher


def test_the_nodes_of_processes_are_those_of_their_launcher():
    assert run_ranks(by_environment, 4, 2) == [(True, False)] * 4  # each pair of expert-parallel ranks is in one node
    assert run_ranks(by_environment, 4, 4) == [(False, False)] * 4


def test_what_does_not_fit_is_refused():
    place = Place()
    with pytest.raises(ValueError, match=r"'two_hop' between 4 expert-parallel ranks with \[4\] on a node, but it"):
        ExpertParallel(E, place, dispatch="two_hop")
    with pytest.raises(ValueError, match=r"with \[3, 1\] on a node"):
        ExpertParallel(E, place, dispatch="two_hop", ranks_per_node=3)
    with pytest.raises(ValueError, match=r"dispatch must be auto, all_to_all, two_hop; got 'three_hop'"):
        ExpertParallel(E, place, dispatch="three_hop")
