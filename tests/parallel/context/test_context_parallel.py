"""Context-parallel sequences against one process with whole sequences: gradients, bytes, memory, failures."""

from __future__ import annotations

import dataclasses
import time
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._pytree import tree_leaves

from device_book import the_device
from device_steps import booked_transfers, watched_steps
from dualpipe import Pipeline
from dualpipe.models import DeepseekV3Config, GptOssConfig, Qwen3MoeConfig, build_stages, decoder
from dualpipe.models.stages import Recompute
from dualpipe.nn import GroupedLinear
from dualpipe.nn.attention import Context, Rotary, SequenceSplit, packed_positions
from dualpipe.nn.deferral import WeightGradStore
from dualpipe.parallel.context import ring
from dualpipe.parallel.context import ulysses as heads
from dualpipe.parallel.context.context_parallel import ContextParallel
from dualpipe.parallel.experts.dispatcher import ExpertParallel
from dualpipe.pipeline.compiled_stage import compile_segments
from dualpipe.pipeline.microbatch_state import MicrobatchState
from dualpipe.pipeline.overlap import walk
from dualpipe.pipeline.stage_runner import StageRunner
from ranks import run_ranks
from refusals import refusal
from threads import Rank, run_threads
from toys import relative_error, stages_of_rank

ROWS, MICRO_BATCHES = 4, 2
COMMON = {"vocab_size": 31, "hidden_size": 16, "initializer_range": 0.3}
QWEN = Qwen3MoeConfig(
    **COMMON, num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=4, head_dim=4, num_experts=4,
    num_experts_per_tok=2, moe_intermediate_size=8, norm_topk_prob=True, mlp_only_layers=(1,), intermediate_size=12,
)
DEEPSEEK = DeepseekV3Config(
    **COMMON, num_hidden_layers=2, num_attention_heads=4, q_lora_rank=6, kv_lora_rank=8, qk_nope_head_dim=4,
    qk_rope_head_dim=4, v_head_dim=5, intermediate_size=12, moe_intermediate_size=8, n_routed_experts=4,
    n_shared_experts=1, num_experts_per_tok=2, n_group=None, topk_group=None, first_k_dense_replace=1,
)
GPT_OSS = GptOssConfig(
    **COMMON, num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=4, head_dim=4, num_experts=4,
    num_experts_per_tok=2, intermediate_size=8, sliding_window=3, layer_types=("full_attention", "sliding_attention"),
)
FAMILIES = {"qwen3_moe": QWEN, "deepseek": DEEPSEEK, "gpt_oss": GPT_OSS}
# Documents that cross the cuts between ranks, and one of a single token.
STARTS = {11: [0, 4, 5, 11, 19, 22, 31], 16: [0, 7, 8, 22, 32, 50], 19: [0, 2, 30, 57], 6: [0, 1, 9, 12]}


def batch(length: int, packed: bool = True, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Return tokens, labels and positions (ROWS, length)."""
    generator = torch.Generator().manual_seed(length + seed)
    tokens, labels = torch.randint(31, (2, ROWS, length), generator=generator)
    starts = STARTS[length] if packed else list(range(0, ROWS * length, length))
    return tokens, labels, packed_positions(torch.tensor([*starts, ROWS * length]), ROWS, length)


def criterion(logits: Tensor, labels: Tensor) -> Tensor:
    """Sum the losses, so that the sum over ranks is the loss of the sequence."""
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


def make(config, count: int, dtype: torch.dtype):
    stages = build_stages(config, count)
    for stage in stages:
        stage.init_weights(0)
        for name, parameter in stage.named_parameters():
            if name.endswith("sinks"):
                torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(1))
        stage.to(dtype)
    return stages


def with_context(ranks, config, method: str, dtype: torch.dtype = torch.float64):
    """Return a model of one stage whose sequences `ranks` share, and how they do."""
    (stage,) = make(config, 1, dtype)
    context = ContextParallel(ranks, method=method)
    stage.use_context_parallelism(context)
    return stage, context


def step(pipe: Pipeline, own: Tensor, length: int, packed: bool = True, seed: int = 0, device="cpu"):
    tokens, labels, positions = (x.to(device) for x in batch(length, packed, seed))
    own = own.to(device)
    pipe.step(tokens[:, own], num_chunks=MICRO_BATCHES, criterion=criterion, labels=(labels[:, own].contiguous(),),
              side={"positions": positions})


def gradients(module: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.grad for name, parameter in module.named_parameters()}


def whole_gradients(config, length: int, packed: bool = True, seeds=(0,)) -> dict[str, Tensor]:
    """Return the gradients of one process with whole sequences, in float64."""
    (stage,) = make(config, 1, torch.float64)
    for seed in seeds:
        tokens, labels, positions = batch(length, packed, seed)
        criterion(stage(tokens, positions), labels).backward()
    return gradients(stage)


def shared(rank: Rank, config, cp: int, method: str, length: int, recompute=(), dtype=torch.float64, packed=True):
    """Return the gradients of a rank's tokens, and the bytes it has sent."""
    stage, context = with_context(rank.all_to_all("cp", range(cp)), config, method, dtype)
    stage.recompute = Recompute(recompute)
    pipe = Pipeline([stage], process_group=rank.group(f"pp of {rank.number}", (rank.number,)))
    step(pipe, context.split.token_indices(length), length, packed)
    return gradients(stage), context.sent_bytes


def error_of_sum(found, expected) -> float:
    """Return the worst relative error of the sum of all ranks' gradients."""
    return max(relative_error(sum(grads[name].double() for grads in found), grad) for name, grad in expected.items())


def error(config, cp: int, method: str, length: int, recompute=(), dtype=torch.float64, packed=True) -> float:
    found = run_threads(shared, cp, config, cp, method, length, recompute, dtype, packed)
    return error_of_sum([grads for grads, _ in found], whole_gradients(config, length, packed))


def slow(*arguments):
    return pytest.param(*arguments, marks=pytest.mark.slow)


@pytest.mark.parametrize("cp", [2, slow(4)])
@pytest.mark.parametrize("method", ["ring", "all_to_all"])
@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_are_those_of_the_whole_sequence(family, method, cp):
    assert error(FAMILIES[family], cp, method, 19) < 1e-10


@pytest.mark.parametrize("length, cp, packed", [
    (6, 3, True), slow(11, 2, True), slow(16, 2, False), slow(11, 4, False),
])
def test_odd_lengths_and_whole_rows(length, cp, packed):
    """Sequences of odd lengths are cut into chunks of different lengths, down to single tokens."""
    assert error(DEEPSEEK, cp, "ring", length, packed=packed) < 1e-10
    assert error(GPT_OSS, cp, "ring", length, packed=packed) < 1e-10


@pytest.mark.parametrize("window, cp", [
    (1, 2), (5, 4), (40, 2), *(slow(window, cp) for window in (2, 4, 9, 18) for cp in (2, 4)), slow(1, 4), slow(5, 2),
    slow(40, 4),
])
def test_windows_smaller_and_larger_than_a_chunk_and_than_the_sequence(window, cp):
    assert error(dataclasses.replace(GPT_OSS, sliding_window=window), cp, "auto", 16) < 1e-10


@pytest.mark.parametrize("method", ["ring", "all_to_all"])
@pytest.mark.parametrize("recompute", [
    ("layer",), slow(("attention",)), slow(("norms",)), slow(("layer:0", "attention:1")),
], ids=str)
def test_gradients_where_more_is_computed_again(recompute, method):
    for config in FAMILIES.values():
        assert error(config, 2, method, 11, recompute) < 1e-10


@pytest.mark.parametrize("method", ["ring", slow("all_to_all")])
def test_bfloat16_is_as_far_from_float64_as_without(method):
    """bfloat16 is compared on dense layers, as routers choose by small differences."""
    config = dataclasses.replace(QWEN, mlp_only_layers=(0, 1))
    alone, expected = make(config, 1, torch.bfloat16)[0], whole_gradients(config, 16)
    tokens, labels, positions = batch(16)
    criterion(alone(tokens, positions), labels).backward()
    assert error(config, 4, method, 16, dtype=torch.bfloat16) < 1.5 * error_of_sum([gradients(alone)], expected)


def outside(rank: Rank, config, method: str):
    stage, context = with_context(rank.all_to_all("cp", range(2)), config, method)
    tokens, labels, positions = batch(11)
    own = context.split.token_indices(11)
    with torch.no_grad():
        alone = stage(tokens[:, own], positions)
    logits = stage(tokens[:, own], positions)
    assert torch.equal(alone, logits)
    criterion(logits, labels[:, own]).backward()
    return gradients(stage)


@pytest.mark.parametrize("method", ["ring", "all_to_all"])
def test_outside_of_a_pipeline(method):
    for config in (DEEPSEEK, GPT_OSS):
        assert error_of_sum(run_threads(outside, 2, config, method), whole_gradients(config, 11)) < 1e-10


def of_inputs(rank: Rank, method: str) -> Tensor:
    """Return the gradient of the embeddings by `autograd.grad`, which must leave the weights alone."""
    stage, context = with_context(rank.all_to_all("cp", range(2)), QWEN, method)
    tokens, labels, positions = batch(11)
    own = context.split.token_indices(11)
    embeddings: list[Tensor] = []
    stage.embed_tokens.register_forward_hook(lambda *args: embeddings.append(args[-1]))
    loss = criterion(stage(tokens[:, own], positions), labels[:, own])
    (gradient,) = torch.autograd.grad(loss, embeddings)
    assert set(gradients(stage).values()) == {None}
    return gradient


def test_gradients_of_inputs_alone():
    assert all(gradient.abs().max() > 0 for gradient in run_threads(of_inputs, 2, "all_to_all"))
    with pytest.raises(ValueError, match="ring attention was differentiated"):
        run_threads(of_inputs, 2, "ring")


# -- pipelines, with experts on several ranks


def in_layout(
    rank: Rank, config, pp: int, ep: int, cp: int, method: str, length: int, overlap: bool, steps: int = 1,
):
    """Return the gradients of a rank's stages; the ranks of an expert-parallel group have different sequences."""
    mine, rest = divmod(rank.number, ep * cp)
    e, c = divmod(rest, cp)
    built = make(config, 2 * pp, torch.float64)
    stages = [built[number] for number in stages_of_rank("dualpipev", pp, mine)]
    experts = rank.all_to_all(f"ep {mine} {c}", [(mine * ep + other) * cp + c for other in range(ep)])
    context = ContextParallel(rank.all_to_all(f"cp {mine} {e}", [(mine * ep + e) * cp + r for r in range(cp)]),
                              method=method)
    for stage in stages:
        if ep > 1:
            for layer in stage.modules():
                if isinstance(layer, GroupedLinear):
                    for name, parameter in list(layer.named_parameters(recurse=False)):
                        setattr(layer, name, nn.Parameter(parameter.detach().chunk(ep)[e].clone()))
            stage.use_expert_parallelism(ExpertParallel(config.num_experts, experts))
        stage.use_context_parallelism(context)
        stage.to(rank.device)
    group = rank.group(f"pp {e} {c}", [(p * ep + e) * cp + c for p in range(pp)])
    pipe = Pipeline(stages, process_group=group, schedule="dualpipev", overlap=overlap)
    for _ in range(steps):
        step(pipe, context.split.token_indices(length), length, seed=e, device=rank.device)
    return e, {name: grad for stage in stages for name, grad in gradients(stage).items()}


@pytest.mark.parametrize("pp, ep, cp, overlap", [
    (2, 1, 2, True), *(slow(*shape, overlap) for overlap in (True, False)
                       for shape in ((1, 1, 2), (1, 2, 2), (2, 2, 2), (2, 1, 4))), slow(2, 1, 2, False),
])
def test_pipelines_with_experts_on_several_ranks(pp, ep, cp, overlap):
    for config, method in ((DEEPSEEK, "ring"), (GPT_OSS, "ring"), (QWEN, "all_to_all")):
        found = run_threads(in_layout, pp * ep * cp, config, pp, ep, cp, method, 19, overlap)
        for name, grad in whole_gradients(config, 19, seeds=range(ep)).items():
            here = [(e, grads[name]) for e, grads in found if name in grads]
            if ep > 1 and ".experts." in name:
                total = torch.cat([sum(g for other, g in here if other == e) for e in range(ep)])
            else:
                total = sum(g for _, g in here)
            assert relative_error(total, grad) < 1e-10, name


# -- bytes


def of_windows(length: int, cp: int, window: int, rank: int) -> tuple[int, int]:
    """Return the number of a rank's tokens that other ranks need, and of others' that it needs, counted one by one."""
    own = [SequenceSplit(r, cp).token_indices(length).tolist() for r in range(cp)]
    reached = [{key for query in mine for key in range(max(0, query - window + 1), query + 1)} for mine in own]
    there = sum(len(reached[other] & set(own[rank])) for other in range(cp) if other != rank)
    return there, len(reached[rank] - set(own[rank]))


@pytest.mark.parametrize("family, method, cp", [
    ("qwen3_moe", "ring", 2), ("deepseek", "all_to_all", 2), slow("qwen3_moe", "all_to_all", 4),
    slow("deepseek", "ring", 4),
])
def test_bytes_are_those_of_the_formula(family, method, cp):
    config, length = FAMILIES[family], 16
    for _, sent in run_threads(shared, cp, config, cp, method, length, (), torch.float32, False):
        layer = config.layer(0).self_attn
        heads = layer.num_heads + layer.num_kv_heads
        each = (3 * (cp - 1) * ring.row_width(layer) if method == "ring"
                else 2 * (cp - 1) * heads * (layer.qk_dim + layer.v_dim) // cp)
        assert sent == config.num_hidden_layers * ROWS * length // cp * each * 4


@pytest.mark.parametrize("window", [2, 5, 40])
def test_windows_send_what_they_reach_each_token_once(window):
    cp, length = 4, 19
    config = dataclasses.replace(GPT_OSS, sliding_window=window, layer_types=("sliding_attention",) * 2)
    found = run_threads(shared, cp, config, cp, "ring", length, (), torch.float32)
    width, by_ring = ring.row_width(config.layer(0).self_attn), []
    for rank, (_, sent) in enumerate(found):
        there, back = of_windows(length, cp, window, rank)  # gradients go back
        assert sent == 2 * ROWS * width * 4 * (2 * there + back)
        by_ring.append(3 * (cp - 1) * length / cp * 2 * ROWS * width * 4)
    assert sum(sent for _, sent in found) <= sum(by_ring)


def test_auto_takes_what_sends_less():
    ranks = [mock.Mock(spec=["rank", "size", "device", "group"], rank=0, size=n, device=torch.device("cpu"), group=None)
             for n in (2, 4, 8)]
    # 16 heads and 4, of 4 + 4 elements: 160 by heads, of which each rank gets a part, and rows of 32.
    layer = dataclasses.replace(QWEN, num_attention_heads=16).layer(0).self_attn
    assert [ContextParallel(r).method_of(layer) for r in ranks] == ["ring", "all_to_all", "ring"]
    with pytest.raises(ValueError, match=r"16 heads of queries and 4 of keys and values cannot be .*8 context"):
        ContextParallel(ranks[2], method="all_to_all").method_of(layer)
    assert ContextParallel(ranks[0], method="all_to_all").method_of(GPT_OSS.layer(1).self_attn) == "window"


# -- memory


def kept(rank: Rank, config, cp: int, method: str, length: int) -> int:
    """Return the bytes that the layers save in a forward, without parameters."""
    stage, context = with_context(rank.all_to_all("cp", range(cp)), config, method, torch.float32)
    x = torch.randn(1, len(context.split.token_indices(length)), config.hidden_size, requires_grad=True)
    store, state = WeightGradStore(), MicrobatchState()
    segmented = StageRunner(compile_segments(stage.segments()[1:-1], ("x",)), store)  # no embedding, no head
    state.begin({"x": x, "positions": torch.arange(length).unsqueeze(0)}, ("x",))
    found: dict[int, Tensor] = {}
    keep = lambda t: found.setdefault(t.untyped_storage()._cdata, t)  # noqa: E731
    with store.activate(), torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        walk([segmented.forward(state)])
    held = tree_leaves([(record.leaves, record.saved_inputs, record.context) for record in state.records])
    found |= {t.untyped_storage()._cdata: t for t in held if isinstance(t, Tensor)}
    own = {p.untyped_storage()._cdata for p in stage.parameters()}
    return sum(t.untyped_storage().nbytes() for key, t in found.items() if key not in own)


def fused(q: Tensor, k: Tensor, v: Tensor, context: Context, *, scale: float, **rest) -> Tensor:
    """Compute attention without saving the scores, which the CPU's own attention keeps and a device's does not."""
    return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)


@pytest.mark.parametrize("family, method, share", [
    ("qwen3_moe", "ring", 1.0),
    ("deepseek", "ring", 0.7),  # latents are saved, not keys and values
    ("qwen3_moe", "all_to_all", 1.47),  # in the order of arrival and in the order of the sequence
])
def test_activations_fall_with_the_number_of_ranks(family, method, share):
    changes = {"deepseek": {"v_head_dim": 8}, "qwen3_moe": {"num_key_value_heads": 8}}  # sizes of the fused kernel
    config = dataclasses.replace(FAMILIES[family], **changes[family])
    with mock.patch.object(decoder, "attend", fused), mock.patch.object(heads, "attend", fused):
        whole, *parts = (run_threads(kept, cp, config, cp, method, 256) for cp in (1, 2, 4))
    for cp, found in zip((2, 4), parts):  # each rank has all of the experts' offsets
        assert sum(found) == pytest.approx(share * whole[0], rel=0.05), (whole, parts)
        assert max(found) < 1.1 * share * whole[0] / cp


@pytest.mark.parametrize("method, recompute", [("ring", ()), ("ring", ("layer",)), slow("all_to_all", ())])
def test_what_expands_the_latent_is_trained_though_all_before_it_is_frozen(method, recompute):
    def frozen(module: nn.Module) -> nn.Module:
        for name, parameter in module.named_parameters():
            parameter.requires_grad_("kv_b_proj" in name)
        return module

    with mock.patch(f"{__name__}.make", lambda *args, make=make: [*map(frozen, make(*args))]):
        found = run_threads(shared, 2, DEEPSEEK, 2, method, 11, recompute)
        expected = whole_gradients(DEEPSEEK, 11)
    for name in (name for name, gradient in expected.items() if gradient is not None):
        assert relative_error(sum(of_rank[name] for of_rank, _ in found), expected[name]) < 1e-10


# -- compiled


def compiled(rank: int, family: str, method: str) -> tuple[float, list[str]]:
    """Return the error of the sum of gradients, and the calls within the graphs that the compiler gets."""
    config, called = FAMILIES[family], []

    def record(graph, inputs):  # without code generation, which takes a minute
        called.extend(str(getattr(node.target, "__name__", node.target)) for node in graph.graph.nodes)
        return graph.forward

    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    pp = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "pp"))
    (stage,) = make(config, 1, torch.float64)
    context = ContextParallel(mesh, method=method)
    stage.compile_dense(backend=record)
    stage.use_context_parallelism(context)
    step(Pipeline([stage], process_group=pp["pp"].get_group()), context.split.token_indices(11), 11)
    found = gradients(stage)
    for grad in found.values():
        dist.all_reduce(grad)
    return error_of_sum([found], whole_gradients(config, 11)), called


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("method", ["ring", "all_to_all"])
def test_the_rotation_is_compiled_though_attention_is_cut_there(family, method):
    for wrong, called in run_ranks(compiled, 2, family, method, timeout=120):
        assert wrong < 1e-10 and "cat" in called


# -- ranks that fail


class OutOfLuck(Exception):
    pass


def failing(rank: int, where: str, method: str) -> tuple[str, float]:
    """Return the error of a step in which rank 1 fails, and the seconds until it was raised."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    pp = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "pp"))
    stage, context = with_context(mesh, DEEPSEEK, method)
    pipe = Pipeline([stage], process_group=pp["pp"].get_group())
    part = {"projection": stage.layers["1"].self_attn.kv_a_proj_with_mqa, "head": stage.lm_head,
            "between": stage.layers["0"].self_attn.kv_b_proj}.get(where, stage.embed_tokens)

    def fails(*args, **kwargs):
        raise OutOfLuck

    if rank == 1:
        part.forward = fails
    began = time.monotonic()
    return refusal(lambda: step(pipe, context.split.token_indices(11), 11)), time.monotonic() - began


@pytest.mark.parametrize("where, method", [
    ("embedding", "ring"), *(slow(where, "ring") for where in ("projection", "between", "head")),
    *(slow(where, "all_to_all") for where in ("embedding", "projection", "between", "head")),
])
def test_given_a_rank_that_fails_then_nobody_waits(where, method):
    for raised, seconds in run_ranks(failing, 2, where, method, group_timeout=50, timeout=120, fresh=True):
        assert "OutOfLuck" in raised and seconds < 30


# -- what is given to a device

# The first step loads kernels, so its messages between stages go through the host.
BY_HOST = [f"copy in dualpipe/pipeline/p2p.py: P2PMessages.{method}" for method in ("send", "take")]


def test_a_pipeline_on_a_device_waits_for_messages_alone():
    with watched_steps() as device, booked_transfers():
        run_threads(in_layout, 4, GPT_OSS, 2, 1, 2, "ring", 16, True, 2, device="cuda")
    device.traces = [trace for trace in device.traces if trace.ends]
    # Each of two links of two pipelines carries a hidden state and positions, and a gradient back.
    assert device.report(waits=dict.fromkeys(BY_HOST, 3 * 2 * 2 * MICRO_BATCHES)) == []


def on_device(rank: Rank, config, method: str, recompute) -> None:
    the_device().of_thread.trace.name = f"rank {rank.number}"
    (stage,) = make(config, 1, torch.float32)
    stage = stage.to(rank.device)
    context = ContextParallel(rank.all_to_all("cp", range(2)), method=method)
    stage.use_context_parallelism(context)
    stage.recompute = Recompute(recompute)
    pipe = Pipeline([stage], process_group=rank.group(f"pp of {rank.number}", (rank.number,)))
    for _ in range(2):
        step(pipe, context.split.token_indices(16), 16, device=rank.device)


@pytest.mark.parametrize("config, method, recompute", [
    (DEEPSEEK, "ring", ()), slow(GPT_OSS, "ring", ()),
    *(slow(config, *how) for config in (DEEPSEEK, GPT_OSS) for how in (("ring", ("layer",)), ("all_to_all", ()))),
], ids=lambda value: value if isinstance(value, str) else type(value).__name__)
def test_streams_are_in_order_and_the_host_waits_for_nothing(config, method, recompute):
    with watched_steps() as device, booked_transfers():
        run_threads(on_device, 2, config, method, recompute, device="cuda")
    device.traces = [trace for trace in device.traces if trace.ends]
    assert device.report(waits={}) == []
    assert device.launches > 1000


# -- parts


def test_worked_example_of_a_merge():
    y, lse = ring.merge(torch.tensor([[[[2.0], [4.0]]]]), torch.zeros(1, 1, 2), torch.tensor([[[[8.0]]]]),
                   torch.zeros(1, 1, 1), first=1)
    assert y.flatten().tolist() == [2, 6]
    torch.testing.assert_close(lse.flatten(), torch.tensor([0.0, 2.0]).clamp(max=torch.tensor(2.0).log().item()))


def test_blocks_that_are_merged_without_their_shares_are_seen():
    ring_merge = ring.merge
    even = lambda y, lse, y_i, lse_i, first: ring_merge(y, torch.zeros_like(lse), y_i, torch.zeros_like(lse_i), first)  # noqa: E731
    with mock.patch.object(ring, "merge", even):
        assert error(dataclasses.replace(GPT_OSS, sliding_window=40), 2, "ring", 16) > 1e-3


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="one of auto, ring, all_to_all; got 'rings'"):
        ContextParallel(None, method="rings")
    split, x = SequenceSplit(1, 2), torch.empty(3, 4, 8)
    with pytest.raises(ValueError, match="got no positions, but 2 ranks share a sequence"):
        Context(Rotary(16, 1e4), x, None, split)
    with pytest.raises(ValueError, match="got 4 tokens, expected 2, the share of rank 1 of 2 in the 4 tokens"):
        Context(Rotary(16, 1e4), x, torch.zeros(3, 4, dtype=torch.long), split)


def test_one_rank_alone_is_as_without():
    (stage,) = make(GPT_OSS, 1, torch.float64)
    before = len(stage.segments())
    context = ContextParallel(None)
    stage.use_context_parallelism(context)
    assert len(stage.segments()) == before and context.sent_bytes == 0 and context.split.size == 1
