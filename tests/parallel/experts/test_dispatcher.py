"""Expert parallelism against one process with all experts: results, gradients, bytes, failures."""

import functools
import os
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from dualpipe.kernels import combine_tokens, dispatch_tokens, sort_tokens
from dualpipe.models import DeepseekV3Config, Stage
from dualpipe.nn import GroupedLinear
from dualpipe.parallel.experts.dispatcher import ExpertParallel, run_experts, shard_experts
from expert_layers import CASES, DTYPES, WIDTH, E, Experts, H, advance, batch, ours, through_experts
from ranks import run_ranks
from refusals import refusal
from toys import relative_error

# Sums in another order round differently. In bfloat16, gate and up, h, a row's sum and a token's sum round to 2^-9
# each, in the forward and in the backward.
TOLERANCE = {"float64": 1e-13, "float32": 1e-6, "bfloat16": 1.2e-2}


def naive(experts, x, weights, choices):
    """Compute one token and one choice at a time, in float64."""
    gate_up, bias, down = (p.double() for p in (experts.gate_up.weight, experts.gate_up.bias, experts.down.weight))
    rows = []
    for t in range(len(x)):
        total = torch.zeros(H, dtype=torch.float64)
        for k, e in enumerate(choices[t].tolist()):
            if e >= 0:
                gate, up = (gate_up[e] @ x[t].double() + bias[e]).chunk(2)
                total = total + down[e] @ (nn.functional.silu(gate) * up * weights[t, k].double())
        rows.append(total)
    return torch.stack(rows) if rows else x.double()


def reference(case, ranks, dtype):
    """Return results and gradients of tokens and weights by rank, and the experts' gradients, summed over ranks."""
    zeros = lambda t: torch.zeros_like(t) if t.grad is None else t.grad  # noqa: E731
    experts, by_rank = Experts(dtype), []
    for rank in range(ranks):
        x, weights, choices, dy = batch(case, rank, dtype)
        y = naive(experts, x.requires_grad_(), weights.requires_grad_(), choices)
        if y.requires_grad:
            (y * dy.double()).sum().backward()
        by_rank.append([y.detach(), zeros(x), zeros(weights)])
    return by_rank, {name: zeros(p) for name, p in experts.named_parameters()}


def error(actual, expected):
    if not expected.numel() or not expected.double().norm():
        return float(actual.double().norm())
    return relative_error(actual.double(), expected.double())


def parity(rank, names, cases):
    """Return the worst error of each case and dtype on this rank."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("ep",))
    torch.use_deterministic_algorithms(True)  # uninitialised memory is NaN
    ep, errors = ExpertParallel(E, mesh), {}
    for name in names:
        dtype = DTYPES[name]
        for case in cases:
            experts = Experts(dtype, mesh)
            results = ours(ep, experts, case, rank, dtype)
            by_rank, grads = reference(case, mesh.size(), dtype)
            assert [t.dtype for t in results] == [dtype] * 3
            found = [error(a, b) for a, b in zip(results, by_rank[rank])]
            each = E // mesh.size()
            for key, param in experts.named_parameters():
                found.append(error(param.grad.to_local(), grads[key][rank * each :][:each]))
            errors[name, case] = max(found)
    return errors


@pytest.mark.parametrize("ranks, dtype", [
    (4, "float64"), (2, "bfloat16"), *(pytest.param(*case, marks=pytest.mark.slow) for case in (
        (2, "float64"), (4, "bfloat16"), (2, "float32"), (4, "float32"))),
])
def test_results_and_all_gradients_equal_those_of_one_process(ranks, dtype):
    for errors in run_ranks(parity, ranks, [dtype], list(CASES)):
        wrong = {key: value for key, value in errors.items() if not value <= TOLERANCE[dtype]}
        assert not wrong


# -- one rank


def todays_layer(experts, x, weights, choices):
    """Run a layer without expert parallelism."""
    tokens = sort_tokens(choices, E)
    weights = dispatch_tokens(weights.reshape(-1, 1), tokens, 1).squeeze(1)
    return combine_tokens(experts(x, tokens, weights), None, tokens, top_k=choices.shape[1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", [case for case in CASES if "unassigned" not in case])
def test_alone_a_rank_computes_the_same_bits_as_without_a_dispatcher(case, dtype):
    results = []
    for layer in (functools.partial(through_experts, ExpertParallel(E).dispatcher()), todays_layer):
        experts, (x, weights, choices, dy) = Experts(DTYPES[dtype]), batch(case, 3, DTYPES[dtype])
        y = layer(experts, x.requires_grad_(), weights.requires_grad_(), choices)
        y.backward(dy)
        results.append([y.detach(), x.grad, weights.grad, *(p.grad for p in experts.parameters())])
    assert all(a.dtype is b.dtype and torch.equal(a, b) for a, b in zip(*results))


def test_a_mesh_of_one_rank_sends_nothing():
    assert all(run_ranks(one_rank, 2))


def one_rank(rank):
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "ep"))
    experts = shard_experts(Experts(torch.float64), mesh["ep"])
    ep = ExpertParallel(E, mesh["ep"])
    ours(ep, experts, "random", rank, torch.float64)
    return ep.sent_bytes == 0 and not any(isinstance(p, DTensor) for p in experts.parameters())


# -- a model, by its forward alone

CONFIG = DeepseekV3Config(
    vocab_size=31, hidden_size=H, num_hidden_layers=2, num_attention_heads=2, q_lora_rank=None, kv_lora_rank=8,
    qk_nope_head_dim=4, qk_rope_head_dim=4, v_head_dim=4, intermediate_size=24, moe_intermediate_size=WIDTH,
    n_routed_experts=E, n_shared_experts=1, num_experts_per_tok=3, n_group=None, topk_group=None,
    first_k_dense_replace=1, initializer_range=0.3,
)


def outside_of_a_pipeline(rank):
    """Return the errors of all gradients of a rank's batch.

    The model runs an ordinary forward and backward, with shared experts besides.
    """
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("ep",))
    model, whole = (Stage(CONFIG, range(2), first=True, last=True).double() for _ in range(2))
    for stage in (model, whole):
        stage.init_weights(0)
    shard_experts(model, mesh)
    model.use_expert_parallelism(ExpertParallel(E, mesh))
    batches = [torch.randint(31, (2, 5 + r), generator=torch.Generator().manual_seed(r)) for r in range(mesh.size())]
    model(batches[rank]).square().mean().backward()
    errors = []
    losses = [whole(tokens).square().mean() for tokens in batches]
    for (name, param), like in zip(model.named_parameters(), whole.parameters(), strict=True):
        if isinstance(param, DTensor):
            expected = torch.autograd.grad(sum(losses), like, retain_graph=True)[0].chunk(mesh.size())[rank]
            errors.append((name, error(param.grad.to_local(), expected)))
        else:
            expected = torch.autograd.grad(losses[rank], like, retain_graph=True)[0]
            errors.append((name, error(param.grad, expected)))
    return [name for name, found in errors if not found < 1e-10], len(errors)


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_model_outside_of_a_pipeline_has_the_gradients_of_one_process(ranks):
    for wrong, count in run_ranks(outside_of_a_pipeline, ranks):
        assert not wrong and count > 20


# -- communications one by one


def without_gradients(rank):
    """Return the errors of the gradients where rank 1 has no gradient of the results.

    Rank 1 sends zeros, as others expect its rows.
    """
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("ep",))
    dispatcher, experts = ExpertParallel(E, mesh).dispatcher(), Experts(torch.float64, mesh)
    x, weights, choices, dy = batch("random", rank, torch.float64)
    x, weights = x.requires_grad_(), weights.requires_grad_()
    rows, row_weights, plan = dispatcher.plan(x, weights, choices)
    sent = rows.detach(), row_weights.detach(), plan
    (rows_there, weights_there, received), dispatched = advance(dispatcher.dispatch.forward(sent))
    there = rows_there.requires_grad_(), weights_there.requires_grad_()
    back = run_experts(experts, *there, received)
    (returned,), combined = advance(dispatcher.combine.forward((back.detach(), received)))
    gradient = None
    if rank != 1:
        dispatcher.finish(returned.requires_grad_(), plan).backward(dy)
        gradient = returned.grad
    (d_back, none), _ = advance(dispatcher.combine.backward(combined, (gradient,)))
    assert none is None
    back.backward(d_back)
    (d_rows, d_weights, none), _ = advance(dispatcher.dispatch.backward(dispatched, (*(t.grad for t in there), None)))
    assert none is None
    torch.autograd.backward((rows, row_weights), (d_rows, d_weights))
    expected = batch("random", rank, torch.float64)
    whole, whole_weights = expected[0].requires_grad_(), expected[1].requires_grad_()
    naive(Experts(torch.float64), whole, whole_weights, choices).backward(dy if rank != 1 else torch.zeros_like(dy))
    nothing, _ = advance(dispatcher.dispatch.backward(dispatched, (None, None, None)))  # no rank has a gradient
    assert [t.shape for t in nothing[:2]] == [rows.shape, row_weights.shape]
    assert not any(t[: len(returned)].any() for t in nothing[:2])
    return max(error(x.grad, whole.grad), error(weights.grad, whole_weights.grad))


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_rank_without_gradients_sends_zeros(ranks):
    assert max(run_ranks(without_gradients, ranks, group_timeout=10)) < 1e-13


def two_at_once(rank):
    """Run two micro-batches through one layer, the communications of one behind those of the other."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("ep",))
    dispatcher, experts = ExpertParallel(E, mesh).dispatcher(), Experts(torch.float64, mesh)
    pending, expected = [], []
    for case in ("uneven", "random"):
        x, weights, choices, _ = batch(case, rank, torch.float64)
        made = dispatcher.plan(x, weights, choices)
        pending.append((made[2], dispatcher.dispatch.forward(made)))
        expected.append(naive(Experts(torch.float64), x, weights, choices))
    combining = []
    for plan, dispatching in pending:
        (rows, weights, received), _ = advance(dispatching)
        back = run_experts(experts, rows, weights, received), received
        combining.append((plan, dispatcher.combine.forward(back)))
    results = [dispatcher.finish(advance(combine)[0][0], plan) for plan, combine in combining]
    return max(error(result, y) for result, y in zip(results, expected))


def test_given_two_dispatches_under_way_then_each_combine_answers_its_own():
    assert max(run_ranks(two_at_once, 2, group_timeout=10)) < 1e-13


def dies(rank, hangs):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("ep",))
    ep, experts = ExpertParallel(E, mesh), Experts(torch.float64, mesh)
    ours(ep, experts, "random", rank, torch.float64)
    if rank == 1 and hangs:
        time.sleep(6)
    elif rank == 1:
        os._exit(1)
    ours(ep, experts, "random", rank, torch.float64)


@pytest.mark.parametrize("hangs", [False, True])
def test_given_a_rank_that_is_gone_then_the_others_raise_within_the_timeout(hangs):
    start = time.monotonic()
    results = run_ranks(dies, 2, hangs, group_timeout=2 if hangs else 10, timeout=30, check=False, fresh=True)
    assert isinstance(results[0], RuntimeError)
    assert time.monotonic() - start < 10


# -- bytes


def counted(rank, dtype, weights_dtype):
    """Return the counted bytes and those of the formula.

    Rows go to other ranks, once to each rank that holds experts of the token.
    """
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("ep",))
    ep, experts = ExpertParallel(E, mesh), Experts(dtype, mesh)
    ours(ep, experts, "random", rank, dtype)
    rows, top_k = torch.zeros(mesh.size(), mesh.size(), dtype=torch.int64), CASES["random"][1]  # source, destination
    for source in range(mesh.size()):
        for chosen in batch("random", source, dtype)[2].tolist():
            for destination in {e // (E // mesh.size()) for e in chosen} - {source}:
                rows[source, destination] += 1
    sent, received = rows[rank].sum(), rows[:, rank].sum()
    row, weights = H * dtype.itemsize, top_k * weights_dtype.itemsize
    there = sent * (row + weights + 4 * top_k) + received * row
    back = sent * row + received * (row + weights)
    return ep.sent_bytes, int(there + back)


@pytest.mark.parametrize(
    ("dtype", "weights"), [(torch.float64, torch.float64), (torch.bfloat16, torch.float32)], ids=str
)
def test_the_counted_bytes_are_those_of_deduplicated_dispatch(dtype, weights):
    for counted_bytes, formula in run_ranks(counted, 4, dtype, weights):
        assert counted_bytes == formula > 0


class Nowhere:
    """Eight ranks to which nothing is sent."""

    rank, size, device, group = 0, 8, torch.device("cpu"), None


def test_worked_example_of_a_plan():
    choices, x = torch.tensor([[2, 3], [3, 0]]), torch.tensor([[10.0], [20.0]])
    ranks = Nowhere()
    ranks.size = 2
    rows, weights, plan = ExpertParallel(4, ranks).dispatcher().plan(x, torch.tensor([[0.1, 0.9], [0.3, 0.7]]), choices)
    assert plan.counts.tolist() == [[1, 1], [2, 3]]
    assert rows[:3].flatten().tolist() == [20, 10, 20]
    assert plan.ids[:3].tolist() == [[-1, 0], [0, 1], [1, -1]]
    torch.testing.assert_close(weights[:3], torch.tensor([[0.0, 0.7], [0.1, 0.9], [0.3, 0.0]]))


# -- parameters


def in_parts(rank):
    """Shard experts with values, half of them frozen and one parameter tied; return which require gradients."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("ep",))
    experts, whole = Experts(torch.bfloat16), Experts(torch.bfloat16)
    experts.again, experts.down.weight.grad_dtype = experts.down, torch.float32
    experts.tied = GroupedLinear(E, WIDTH, H)
    experts.tied.weight = experts.down.weight
    experts.gate_up.requires_grad_(False)
    shard_experts(experts, mesh)
    for name, param in whole.named_parameters():
        part = experts.get_parameter(name)
        assert torch.equal(part.full_tensor(), param) and part.to_local().shape[0] == E // mesh.size()
        assert part.to_local().untyped_storage().nbytes() == part.to_local().nbytes  # the rest is not kept
    assert experts.tied.weight is experts.down.weight and experts.down.weight.grad_dtype is torch.float32
    return [p.requires_grad for p in (experts.gate_up.bias, experts.down.weight)]


def test_experts_with_values_keep_their_part():
    assert run_ranks(in_parts, 2) == [[False, True]] * 2


def experts_of_other_forms(rank):
    """Return the errors of shard_experts for modules without GroupedLinear; "" for those without experts."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))

    def modules(**children):
        return nn.ModuleDict(children)

    def linears():
        return nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    stacked = nn.Module()
    stacked.w1 = nn.Parameter(torch.zeros(4, 4, 4))
    named = nn.Sequential()
    named.add_module("experts", nn.Linear(4, 16))
    block = nn.TransformerEncoderLayer(4, 2)
    texts = {}
    for name, module in {
        "list": modules(gate=nn.Linear(4, 4), mlps=linears()),
        "in a layer": modules(layers=nn.ModuleList([modules(mlp=modules(w=linears()))])),
        "stacked": modules(moe=stacked),
        "named": named,
        "dense": modules(embed=nn.Embedding(4, 4), layers=nn.ModuleList([block, block]), conv=nn.Conv1d(4, 4, 2)),
        "empty": nn.Identity(),
        "mixed": modules(shared_experts=nn.Linear(4, 4), routed=GroupedLinear(4, 4, 4)),
    }.items():
        texts[name] = refusal(lambda module=module: shard_experts(module, mesh))
    return texts


def test_experts_that_are_not_stacked_are_refused_with_the_recipe():
    for texts in run_ranks(experts_of_other_forms, 2):
        places = {"list": "mlps (ModuleList)", "in a layer": "layers.0.mlp.w (ModuleList)", "stacked": "moe (Module)",
                  "named": "experts (Linear)"}
        assert {name for name, text in texts.items() if text} == places.keys()
        for name, place in places.items():
            assert f"{place} is no GroupedLinear" in texts[name]


def tied_experts():
    first, second = Experts(torch.float32), Experts(torch.float32)
    second.down.weight = first.down.weight
    return first, second


def what_is_refused(rank):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))
    uneven = nn.Sequential(GroupedLinear(5, 4, 4))
    ep, experts = ExpertParallel(E, mesh), Experts(torch.float64, mesh)
    inputs = list(batch("random", rank, torch.float64))
    inputs[0] = inputs[0].to(torch.float32 if rank else torch.float64)
    messages = [refusal(call) for call in (
        lambda: ExpertParallel(15, mesh),
        lambda: shard_experts(uneven, mesh),
        lambda: [shard_experts(experts, mesh) for experts in [Experts(torch.float32)] * 2],
        lambda: [shard_experts(experts, mesh) for experts in tied_experts()],
        lambda: through_experts(ep.dispatcher(), experts, *inputs[:3]),
    )]
    assert not isinstance(uneven[0].weight, DTensor)
    dispatcher = ep.dispatcher()
    made = dispatcher.plan(*batch("random", rank, torch.float64)[:3])
    rows, _, received = advance(dispatcher.dispatch.forward(made))[0]
    return [*messages, refusal(lambda: dispatcher.combine.forward((rows.float(), received)))]


def test_what_does_not_fit_is_refused_with_the_sizes_that_would():
    for model, layer, twice, tied, disagree, combine in run_ranks(what_is_refused, 2):
        assert "15 experts" in model and "2 expert-parallel ranks" in model and "1, 3, 5, 15" in model
        assert "0.weight: 5 experts" in layer and "1, 5" in layer
        assert "sharded already" in twice
        assert "down.weight is tied to experts that are sharded already" in tied
        assert "[(64, 24, 12, 0), (128, 24, 12, 0)]" in disagree
        assert "one row of 128 bytes" in combine and "torch.float32" in combine


@pytest.mark.parametrize(
    ("message", "operands"),
    {
        "got tokens, weights and experts of shapes": (torch.zeros(3, 2), torch.zeros(3, 2),
                                                      torch.zeros(2, 2, dtype=torch.long)),
        "between 0 and 15, or -1": (torch.zeros(3, 2), torch.zeros(3, 2), torch.full((3, 2), 16)),
        "got -2 to": (torch.zeros(3, 2), torch.zeros(3, 2), torch.tensor([[0, -2]] * 3)),
    }.items(),
)
def test_misfits_in_a_plan_are_value_errors(message, operands):
    with pytest.raises(ValueError, match=message):
        ExpertParallel(16, Nowhere()).dispatcher().plan(*operands)
