"""Activations of a micro-batch in a stage, counted without memory, against the bytes of real tensors."""

import gc
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from dualpipe.models import Qwen3MoeConfig, Stage
from dualpipe.models.stages import Recompute
from dualpipe.nn.deferral import WeightGradStore
from dualpipe.parallel.experts.dispatcher import ExpertParallel
from dualpipe.parallel.mesh import build_mesh
from dualpipe.pipeline.compiled_stage import compile_segments
from dualpipe.pipeline.microbatch_state import MicrobatchState
from dualpipe.pipeline.overlap import walk
from dualpipe.pipeline.stage_runner import StageRunner
from dualpipe.plan.activations import PairedAction, activation_bytes, pair_bytes
from dualpipe.plan.meta_dispatch import ExpertChoice
from ranks import run_ranks

CONFIG = Qwen3MoeConfig(
    vocab_size=61, hidden_size=32, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
    num_experts=16, num_experts_per_tok=4, moe_intermediate_size=24, mlp_only_layers=(1,), intermediate_size=40,
)
LAYERS = range(3)
BATCH, LENGTH = 4, 128


def kept(rank: int, recompute: tuple[str, ...], ep: int, first: bool) -> int:
    """Return the bytes that a stage holds after a forward, without attention's scores and repeated keys and values."""
    stage = Stage(CONFIG, LAYERS, first=first, last=False)
    stage.init_weights(0)
    stage.recompute = Recompute(recompute)
    if ep > 1:
        mesh = build_mesh(1, 1, ep, torch.device("cpu"))
        stage.use_expert_parallelism(ExpertParallel(CONFIG.num_experts, mesh["ep"]))
        for layer in stage.layers.values():
            for module in layer.modules():  # the experts of a rank
                for name, param in list(module.named_parameters(recurse=False)):
                    if param.dim() == 3:
                        setattr(module, name, torch.nn.Parameter(param.detach()[: CONFIG.num_experts // ep].clone()))
    found: dict[int, Tensor] = {}
    generator = torch.Generator().manual_seed(rank)
    x = torch.randint(61, (BATCH, LENGTH), generator=generator)
    if not first:
        x = torch.randn(BATCH, LENGTH, 32, generator=generator).requires_grad_()
    segmented, state = StageRunner(compile_segments(stage.segments(), ("x",)), WeightGradStore()), MicrobatchState()
    state.begin({"x": x, "positions": None})
    keep = lambda t: found.setdefault(t.untyped_storage()._cdata, t)  # noqa: E731
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        walk([segmented.forward(state)])
    held = tree_leaves([(record.leaves, record.saved_inputs, record.context) for record in state.records])
    found |= {t.untyped_storage()._cdata: t for t in held if isinstance(t, Tensor)}
    own = {p.untyped_storage()._cdata for p in stage.parameters()}
    scores = {(torch.float32, 4 * 4 * LENGTH * LENGTH * BATCH), (torch.bool, LENGTH * LENGTH)}  # and the mask
    return sum(
        tensor.untyped_storage().nbytes() for key, tensor in found.items()
        if key not in own and (tensor.dtype, tensor.untyped_storage().nbytes()) not in scores
    )


@pytest.mark.parametrize("recompute", [(), ("experts",), ("norms", "attention:0"), ("layer",)], ids=str)
@pytest.mark.parametrize("first", [True, False])
def test_a_stage_keeps_what_is_counted(recompute, first):
    real = kept(0, recompute, 1, first)
    counted = activation_bytes(CONFIG, LAYERS, batch=BATCH, sequence_length=LENGTH, dtype=torch.float32,
                               recompute=recompute).saved
    again = Recompute(recompute)
    # By layer and token: a float32 for each of 4 heads more, and 2 heads of keys and values of 16 less.
    by_formula = sum(4 * 4 - 2 * (16 + 16) * 4 for layer in LAYERS if not again("attention", layer)) * BATCH * LENGTH
    tokens = 8 * BATCH * LENGTH if first else 0  # which the embedding keeps
    # The tables of the rotary embedding and the ends of the experts' rows do not grow with the batch.
    assert counted + tokens - by_formula == pytest.approx(real, rel=0.02)


@pytest.mark.parametrize("recompute", [
    (), ("layer", "dispatch"),
    *(pytest.param(each, marks=pytest.mark.slow) for each in (("experts",), ("layer",), ("dispatch",))),
], ids=str)
def test_expert_parallel_ranks_keep_about_what_is_counted(recompute):
    """An untrained router sends tokens to almost as many ranks as random choices do."""
    real = sum(run_ranks(kept, 2, recompute, 2, False)) / 2
    counted = activation_bytes(CONFIG, LAYERS, batch=BATCH, sequence_length=LENGTH, dtype=torch.float32,
                               recompute=recompute, ep=2).saved
    again = Recompute(recompute)
    by_formula = sum(4 * 4 - 2 * (16 + 16) * 4 for layer in LAYERS if not again("attention", layer)) * BATCH * LENGTH
    assert counted - by_formula == pytest.approx(real, rel=0.02)


@pytest.mark.parametrize("recompute", [(), ("layer", "dispatch")], ids=str)
def test_rows_between_two_hops_are_there_at_once_and_their_indices_are_kept(recompute):
    """The rows of the first hop, and those of the second once more, are held until these are in order.

    With one hop, the peak is at another place, so that the difference is less than that.
    """
    config = replace(CONFIG, hidden_size=512, moe_intermediate_size=8)
    one, two = (activation_bytes(config, LAYERS, batch=BATCH, sequence_length=LENGTH, recompute=recompute, ep=8,
                                 nodes=nodes) for nodes in (1, 2))
    tokens = BATCH * LENGTH
    first, rows = (ExpertChoice(16, 4).expected_places(places) * tokens for places in (2, 8))
    in_transit = (first + rows) * 512 * 2
    indices = 4 * (2 * tokens + 4 * first) + 8 * rows  # int32 for both hops, int64 for the order of the rows
    if recompute:  # `finish` keeps the plan: weights and ids of 4 experts by token and node, and 5 more counts by rank
        indices += 2 * 4 * 4 * 2 * tokens + 5 * 8 * 8 * tokens / 128  # counts are of 128 tokens
    assert two.saved - one.saved == pytest.approx(2 * indices, rel=0.01), "two layers have experts"
    assert 0.25 * in_transit < two.forward - one.forward < in_transit + 2 * indices


def most(run, references: bool) -> tuple[int, int]:
    """Return the most bytes that torch allocated during `run`, and the bytes left, beyond those present before.

    Memory that the `references` of our kernels allocate inside, which kernels need not, counts when they end, or as it
    is allocated.
    """
    gc.collect()  # cycles of earlier tests: freed during `run`, their tensors would count as freed by it
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    events = sorted(profiler.profiler.kineto_results.events(), key=lambda event: event.start_ns())
    total = peak = inside = 0  # inside: until when
    for event in events:
        if event.name().startswith("dualpipe::") and not references:
            inside = max(inside, event.start_ns() + event.duration_ns())
        elif event.name() == "[memory]":
            if event.start_ns() > inside:
                peak = max(peak, total)
            total += event.nbytes()
            if event.start_ns() > inside:
                peak = max(peak, total)
    return peak, total


@pytest.mark.parametrize("recompute", [(), ("layer",)], ids=str)
@pytest.mark.parametrize("cpu", [False, True])
def test_what_there_is_at_once_is_counted(recompute, cpu):
    """Sequences are so short that scores take nothing.

    Memory that torch's own operators take inside is not counted: those of GPUs take none.
    """
    length, batch, dtype = 8, BATCH * LENGTH // 8, torch.bfloat16 if cpu else torch.float32
    stage = Stage(CONFIG, LAYERS, first=False, last=False)
    stage.init_weights(0)
    stage.to(dtype).recompute = Recompute(recompute)
    store, state = WeightGradStore(), MicrobatchState()
    segmented = StageRunner(compile_segments(stage.segments(), ("x",)), store)

    def forward():
        state.begin({"x": torch.randn(batch, length, 32, dtype=dtype, requires_grad=True), "positions": None}, ("x",))
        walk([segmented.forward(state)])
        state.gradients = {"x": state.carry.pop("x")}

    with store.activate():
        forward_peak, after = most(forward, cpu)
        state.gradients["x"] = torch.ones_like(state.gradients["x"])
        backward_peak, left = most(lambda: walk([segmented.backward(state, "I", "I")]), cpu)
    counted = activation_bytes(CONFIG, LAYERS, batch=batch, sequence_length=length, dtype=dtype, recompute=recompute,
                               cpu=cpu)
    again = Recompute(recompute)
    by_formula = sum(4 * 4 - 2 * (16 + 16) * 4 for layer in LAYERS if not again("attention", layer)) * batch * length
    by_formula, low = (0, 0.95) if cpu else (by_formula, 0.8)
    assert low * forward_peak < counted.forward - by_formula < 1.05 * forward_peak
    assert low * (after + backward_peak) < counted.input_backward - by_formula < 1.05 * (after + backward_peak)
    assert counted.deferred == pytest.approx(after + left, rel=0.05)


def test_several_long_runs_of_like_layers_add_up():
    """Three runs of four layers add up; the middle one recomputes its experts, and saves as much in each layer."""
    config = replace(CONFIG, num_hidden_layers=12, mlp_only_layers=())
    sizes = {"batch": BATCH, "sequence_length": LENGTH}
    saved = [activation_bytes(config, range(3), recompute=rules, **sizes).saved for rules in ((), ("experts",))]
    whole = activation_bytes(config, range(12), **sizes).saved
    part = activation_bytes(config, range(12), recompute=("experts:4-7",), **sizes).saved
    assert part == pytest.approx(whole - 4 * (saved[0] - saved[1]) / 3, rel=0.01)


@pytest.mark.parametrize("cpu", [True, False])
def test_a_pair_holds_the_first_parts_of_its_forward_beside_all_that_its_backward_needs(cpu):
    """Before a pair, its backward is saved; its forward saves some before the backward has released anything."""
    config = replace(CONFIG, num_hidden_layers=12, mlp_only_layers=())
    sizes = {"batch": BATCH, "sequence_length": 16, "ep": 2, "cpu": cpu}

    def beyond_saved(num_layers, *kinds):
        return pair_bytes(config, tuple(PairedAction(kind, range(num_layers), False) for kind in kinds), **sizes)

    stage = activation_bytes(config, range(2), **sizes)
    alone = stage.backward - stage.saved
    assert alone + 0.1 * stage.saved < beyond_saved(2, "F", "B") < alone + stage.forward
    assert beyond_saved(2, "F", "B") == beyond_saved(2, "B", "F")
    assert beyond_saved(12, "F", "B") == beyond_saved(4, "F", "B")
    # Two forwards end with both saved, two backwards begin so.
    assert 0 < beyond_saved(2, "F", "F") < stage.forward
    assert 0 < beyond_saved(2, "B", "B") <= 2 * alone
