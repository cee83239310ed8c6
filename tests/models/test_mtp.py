"""Layers for multi-token prediction, against the formulas of DeepSeek-V3's report written out in torch alone."""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dualpipe import Pipeline, PipelineError
from dualpipe.models import build_stages, config_from_dict
from dualpipe.models.stages import Recompute
from dualpipe.nn import GroupedLinear
from dualpipe.nn.attention import packed_positions
from dualpipe.parallel.experts.dispatcher import ExpertParallel
from dualpipe.schedule import build
from dualpipe.train.data.token_stream import shift_targets
from dualpipe.train.loss import MicroBatchLoss, tokens_ahead
from dualpipe.train.parity.errors import difference
from models import randomize_vectors, whole
from threads import run_threads

HUB = {
    "model_type": "deepseek_v3", "vocab_size": 31, "hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 3,
    "num_attention_heads": 2, "q_lora_rank": 6, "kv_lora_rank": 5, "qk_nope_head_dim": 4, "qk_rope_head_dim": 6,
    "v_head_dim": 3, "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 2,
    "topk_group": 1, "moe_intermediate_size": 8, "first_k_dense_replace": 2, "initializer_range": 0.3,
    "rms_norm_eps": 1e-5, "rope_theta": 100.0,
}
ROWS, MICRO_BATCHES, WEIGHT = 2, 3, 0.3  # of a micro-batch; of a step; of the losses
NAMED = "mlp.experts.gate_up_proj.weight", "mlp.experts.down_proj.weight"


def config(depth=1, **changes):
    return config_from_dict(HUB | {"num_nextn_predict_layers": depth} | changes).with_mtp()


@lru_cache
def tensors(depth, **changes):
    """Return all tensors of the model, by name."""
    torch.manual_seed(0)
    model = whole(config(depth, **changes), dtype=torch.float64)
    randomize_vectors(model)
    return model.state_dict()


# -- the formulas, for one document after the other


def norm(x, weight, eps=HUB["rms_norm_eps"]):
    return weight * x / (x.square().mean(-1, keepdim=True) + eps).sqrt()


def swiglu(x, gate, up, down):
    return (F.silu(x @ gate.T) * (x @ up.T)) @ down.T


def turned(x, position):
    """Rotate x (..., P), neighbours together."""
    size = x.shape[-1]
    angles = position * HUB["rope_theta"] ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)
    pairs = torch.complex(x[..., ::2], x[..., 1::2]) * torch.polar(torch.ones_like(angles), angles)
    return torch.view_as_real(pairs).flatten(-2)


def attention(of, x):
    """Compute latent attention of one document's tokens (n, H); each sees itself and those before it."""
    heads, nope, value = HUB["num_attention_heads"], HUB["qk_nope_head_dim"], HUB["v_head_dim"]
    rope = HUB["qk_rope_head_dim"]
    q = norm(x @ of["q_a_proj.weight"].T, of["q_a_layernorm.weight"], 1e-6) @ of["q_b_proj.weight"].T
    latent, k_rope = (x @ of["kv_a_proj_with_mqa.weight"].T).split((HUB["kv_lora_rank"], rope), -1)
    kv = (norm(latent, of["kv_a_layernorm.weight"], 1e-6) @ of["kv_b_proj.weight"].T).unflatten(-1, (heads, -1))
    q, k_rope = q.unflatten(-1, (heads, -1)), torch.stack([turned(k, i) for i, k in enumerate(k_rope)])
    found = []
    for i, each in enumerate(q):
        seen = kv[: i + 1]
        scores = torch.einsum("hd,jhd->hj", each[:, :nope], seen[..., :nope])
        scores = (scores + turned(each[:, nope:], i) @ k_rope[: i + 1].T) / (nope + rope) ** 0.5
        found.append(torch.einsum("hj,jhd->hd", scores.softmax(-1), seen[..., nope:]).reshape(heads * value))
    return torch.stack(found) @ of["o_proj.weight"].T


def experts(of, token):
    """Sum the best group's two best experts by score and bias, weighted by their scores, and the shared expert."""
    scores = torch.sigmoid(of["gate.weight"] @ token)
    choice = scores + of["gate.e_score_correction_bias"]
    group = choice.view(2, 2).sum(-1).argmax()
    chosen = torch.stack([2 * group, 2 * group + 1])
    y = swiglu(token, *(of[f"shared_experts.{name}_proj.weight"] for name in ("gate", "up", "down")))
    for weight, expert in zip(2.5 * scores[chosen] / scores[chosen].sum(), chosen):
        gate, up = of["experts.gate_up_proj.weight"][expert].chunk(2)
        y = y + weight * swiglu(token, gate, up, of["experts.down_proj.weight"][expert])
    return y


def part(of, prefix):
    return {name.removeprefix(prefix): tensor for name, tensor in of.items() if name.startswith(prefix)}


def layer(of, x):
    x = x + attention(part(of, "self_attn."), norm(x, of["input_layernorm.weight"]))
    normed, mlp = norm(x, of["post_attention_layernorm.weight"]), part(of, "mlp.")
    if "gate.weight" in mlp:
        return x + torch.stack([experts(mlp, token) for token in normed])
    return x + swiglu(normed, *(mlp[f"{name}_proj.weight"] for name in ("gate", "up", "down")))


def document(of, depth, tokens, targets):
    """Return the summed cross-entropy of each depth. targets: the token after each of `tokens`, or -100."""
    x = of["embed_tokens.weight"][tokens]
    for index in range(HUB["num_hidden_layers"]):
        x = layer(part(of, f"layers.{index}."), x)
    hidden = norm(x, of["norm.weight"])
    sums = [F.cross_entropy(hidden @ of["lm_head.weight"].T, targets, reduction="sum")]
    for k in range(1, depth + 1):
        count = max(0, len(tokens) - k)  # tokens with k more after them
        mtp = part(of, f"layers.{HUB['num_hidden_layers'] + k - 1}.")
        if not count:
            sums.append(torch.zeros_like(sums[0]))
            hidden = hidden[:0]
            continue
        embedded = of["embed_tokens.weight"][tokens[k:]]
        both = torch.cat((norm(embedded, mtp["enorm.weight"]), norm(hidden[:count], mtp["hnorm.weight"])), -1)
        hidden = norm(layer(mtp, both @ mtp["eh_proj.weight"].T), mtp["shared_head.norm.weight"])
        sums.append(F.cross_entropy(hidden @ of["lm_head.weight"].T, targets[k:], reduction="sum"))
    return torch.stack(sums)


class Reference(NamedTuple):
    losses: Tensor  # (micro-batches, 1 + depth), each divided by the number of micro-batches of a step
    gradients: dict[str, Tensor]


def batch(length, documents, replicas=1):
    """Return rows of tokens, one longer than the model's input, and the positions of all in documents, or None."""
    generator, count = torch.Generator().manual_seed(length), ROWS * MICRO_BATCHES * replicas
    rows = torch.randint(HUB["vocab_size"], (count, length + 1), generator=generator)
    if not documents:
        return rows, None
    end = count * (length + 1)
    bounds = torch.randint(end, (2 * count,), generator=generator).sort().values
    return rows, packed_positions(torch.cat((torch.tensor([0]), bounds, torch.tensor([end]))), count, length + 1)


@lru_cache
def reference(depth, length, documents, replicas=1, **changes):
    rows, positions = batch(length, documents, replicas)
    of = {name: tensor.clone() for name, tensor in tensors(depth, **changes).items()}
    for name, tensor in of.items():
        tensor.requires_grad_(not name.endswith("correction_bias"))
    losses = []
    for number, row in enumerate(rows):
        cuts = [0] if positions is None else [i for i in range(length) if positions[number, i] == 0 or i == 0]
        targets = row[1:].clone()
        if positions is not None:
            targets[positions[number, 1:] == 0] = -100  # the first token of another document
        each = [document(of, depth, row[a:b], targets[a:b]) for a, b in pairwise([*cuts, length])]
        losses.append(torch.stack(each).sum(0) / (ROWS * length * MICRO_BATCHES))
    found = torch.stack(losses).view(-1, ROWS, 1 + depth).sum(1)
    (found[:, 0] + WEIGHT / depth * found[:, 1:].sum(1)).sum().backward()
    return Reference(found.detach(), {n: t.new_zeros(t.shape) if t.grad is None else t.grad for n, t in of.items()
                                      if t.requires_grad})


# -- the library


def arguments(rows, positions, depth):
    """Return tokens, targets and side inputs of a step."""
    places = None if positions is None else positions.numpy()
    targets = torch.from_numpy(shift_targets(rows.numpy(), depth, places).copy())
    inputs = None if positions is None else positions[:, :-1]
    return rows[:, :-1], targets, {"positions": inputs, "ahead": tokens_ahead(targets)}


def share_experts(stage, all_to_all):
    for module in stage.modules():
        if isinstance(module, GroupedLinear):
            module.weight = nn.Parameter(module.weight.detach().chunk(all_to_all.size)[all_to_all.rank].clone())
    stage.use_expert_parallelism(ExpertParallel(HUB["n_routed_experts"], all_to_all))


def step(rank, schedule, pp, ep, depth, length, documents, recompute, overlap, changes):
    """Run one step as rank (pipeline rank) * ep + (expert-parallel rank); return losses by depth, gradients by name."""
    mine, replica = divmod(rank.number, ep)
    built = build(schedule, pp, MICRO_BATCHES)
    stages = build_stages(config(depth, **changes), built.num_stages, built.rank_stages(mine))
    for stage in stages:
        stage.double().load_state_dict({name: tensors(depth, **changes)[name] for name in stage.state_dict()})
        stage.recompute = Recompute(recompute, HUB["num_hidden_layers"] + depth)
        if ep > 1:
            share_experts(stage, rank.all_to_all(f"ep of {mine}", [mine * ep + e for e in range(ep)]))
    group = rank.group(f"pp of {replica}", [p * ep + replica for p in range(pp)])
    pipe = Pipeline(stages, process_group=group, schedule=schedule, overlap=overlap)
    rows, positions = batch(length, documents, ep)
    parts = (None if each is None else each.tensor_split(ep)[replica] for each in (rows, positions))
    tokens, targets, side = arguments(*parts, depth)
    criterion = MicroBatchLoss(MICRO_BATCHES, WEIGHT)
    pipe.step(tokens, num_chunks=MICRO_BATCHES, criterion=criterion, labels=targets, side=side)
    noted = torch.stack(criterion.depth_losses) if criterion.depth_losses else None
    return noted, {name: p.grad for stage in stages for name, p in stage.named_parameters()}


def check(schedule="dualpipev", pp=1, ep=1, depth=1, length=7, documents=True, recompute=(), overlap=True, **changes):
    expected = reference(depth, length, documents, ep, **changes)  # first: it draws the tensors, which threads share
    results = run_threads(step, pp * ep, schedule, pp, ep, depth, length, documents, recompute, overlap, changes)
    losses = torch.cat([noted for noted, _ in results if noted is not None])
    assert difference("losses", losses, expected.losses).relative < 1e-10
    found = {}
    for first in range(0, pp * ep, ep):
        for name in results[first][1]:
            parts = [gradients[name] for _, gradients in results[first : first + ep]]
            found[name] = torch.cat(parts) if name.endswith(NAMED) else torch.stack(parts).sum(0)
    assert found.keys() == expected.gradients.keys()
    for name, gradient in expected.gradients.items():
        assert difference(name, found[name], gradient).relative < 1e-10, name


@pytest.mark.parametrize("documents", [False, True], ids=["rows", "documents"])
@pytest.mark.parametrize(("depth", "length"), [(1, 7), (2, 7), (2, 2), (2, 1), (1, 1)])
def test_a_model_on_one_rank_is_the_formulas(depth, length, documents):
    check("1f1b", depth=depth, length=length, documents=documents)


@pytest.mark.parametrize(("schedule", "pp"), [("dualpipev", 1), ("dualpipev", 2), ("zbv", 2)])
@pytest.mark.parametrize("depth", [1, 2])
def test_a_v_whose_ends_share_the_embedding_is_the_formulas(schedule, pp, depth):
    check(schedule, pp, depth=depth)


@pytest.mark.parametrize("recompute", [("layer",), ("attention", "norms"), ("experts:3", "dispatch")], ids=str)
@pytest.mark.parametrize("ep", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_what_is_computed_again_is_the_same(recompute, ep):
    check(pp=2, ep=ep, depth=2, recompute=recompute)


@pytest.mark.parametrize("overlap", [True, False])
def test_beside_another_micro_batch_it_is_the_same(overlap):
    check(pp=2, ep=2, depth=2, overlap=overlap)


def test_layers_for_prediction_may_be_all_there_is_behind_the_first_stage():
    check(pp=2, depth=2, first_k_dense_replace=5)  # dense MLPs


@pytest.mark.parametrize("depth", [1, 2])
def test_segments_have_the_bits_of_the_forward(depth):
    model = whole(config(depth))
    rows, positions = batch(7, True)
    tokens, targets, side = arguments(rows, positions, depth)
    outputs = model(tokens, **side)
    assert len(outputs) == 1 + depth
    expected, criterion = MicroBatchLoss(1, WEIGHT), MicroBatchLoss(1, WEIGHT)
    expected(*outputs, targets).backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    Pipeline([model], schedule="1f1b").step(tokens, num_chunks=1, criterion=criterion, labels=targets, side=side)
    assert torch.equal(criterion.depth_losses[0], expected.depth_losses[0])
    assert all(torch.equal(p.grad, gradients[name]) for name, p in model.named_parameters())


def test_without_the_tokens_ahead_there_is_no_training():
    rows, positions = batch(7, True)
    tokens, targets, _ = arguments(rows, positions, 1)
    model = whole(config())
    model.recompute = Recompute(["layer"])
    with pytest.raises(PipelineError, match=r'give the step side=\{"ahead": tokens \(B, S, depth\)\}'):
        Pipeline([model], schedule="1f1b").step(
            tokens, num_chunks=1, criterion=MicroBatchLoss(1, WEIGHT), labels=targets,
            side={"positions": positions[:, :-1]})


def test_recomputation_knows_the_layers_for_prediction():
    with pytest.raises(ValueError, match="the model has layers 0 to 3"):
        Recompute(["experts:4"], HUB["num_hidden_layers"] + 1)
