"""QK-clip: the largest logits of attention heads, and weights scaled back if they exceed the limit."""

import pytest
import torch
from torch import nn

from dualpipe.models.deepseek import DeepseekV3Config
from dualpipe.models.gpt_oss import GptOssConfig
from dualpipe.models.qwen3_moe import Qwen3MoeConfig
from dualpipe.nn import cross_entropy_loss
from dualpipe.nn.deferral import WeightGradStore
from dualpipe.parallel.context.context_parallel import ContextParallel
from dualpipe.parallel.mesh import build_mesh
from dualpipe.pipeline.compiled_stage import compile_segments
from dualpipe.pipeline.microbatch_state import MicrobatchState
from dualpipe.pipeline.overlap import walk
from dualpipe.pipeline.stage_runner import StageRunner
from dualpipe.train.optim.optimizer import Optimizer, QKClip
from models import whole
from ranks import run_ranks
from run_files import MODEL

CONFIGS = {
    "gpt_oss": (GptOssConfig, {
        "vocab_size": 61, "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 2, "head_dim": 16,
        "num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2,
        "sliding_window": 4, "initializer_range": 0.4}),
    "deepseek": (DeepseekV3Config, {
        "vocab_size": 61, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4,
        "q_lora_rank": 12, "kv_lora_rank": 10, "qk_nope_head_dim": 6, "qk_rope_head_dim": 8, "v_head_dim": 5,
        "n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 3, "moe_intermediate_size": 24,
        "first_k_dense_replace": 1, "initializer_range": 0.6, "rms_norm_eps": 1e-5, "n_group": 4, "topk_group": 2,
        "num_nextn_predict_layers": 0}),
}
ADAMW = {"lr": 0.0, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.0}


def build(family):
    kind, values = CONFIGS[family]
    model = whole(kind.from_dict(values))
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("q_proj.bias", "k_proj.bias")):
                parameter.normal_()
    tokens = torch.randint(61, (3, 12), generator=torch.Generator().manual_seed(1))
    return model, tokens, torch.tensor([list(range(8)) + list(range(4))] * 3)


def max_logits(model, tokens, positions):
    """Return the largest logit of each head of each layer in a forward with gradients."""
    layers = [layer.self_attn for _, layer in model.numbered()]
    for layer in layers:
        layer.max_logits_A.fill_(-torch.inf)
    model(tokens, positions)
    return torch.stack([layer.max_logits_A.clone() for layer in layers])


@pytest.mark.parametrize("family", CONFIGS)
def test_heads_above_the_limit_are_scaled_back_and_others_are_not(family):
    model, *inputs = build(family)
    clip = QKClip([model], 1e9, group=None, device=torch.device("cpu"))
    before = max_logits(model, *inputs)
    first, limit = before[0], before[0].sort().values[2:].mean().item()  # between the heads of the first layer
    assert (first > limit).any() and (first < limit).any() and limit > 0
    with torch.no_grad():
        model(*inputs)  # an evaluation, which counts nothing
    clip._limit = limit
    optimizer = Optimizer([model], **ADAMW)
    assert clip(optimizer, torch.tensor(1.0)) == before.max()
    after = max_logits(model, *inputs)
    torch.testing.assert_close(after[0], first.clamp(max=limit))  # later layers see other inputs now


def test_a_norm_that_is_not_finite_scales_nothing():
    model, *inputs = build("gpt_oss")
    clip = QKClip([model], 1e-3, group=None, device=torch.device("cpu"))
    max_logits(model, *inputs)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    clip(Optimizer([model], **ADAMW), torch.tensor(float("nan")))
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    assert all(layer.self_attn.max_logits_A.isneginf().all() for _, layer in model.numbered())


def test_narrow_weights_are_scaled_in_their_masters():
    model, *inputs = build("gpt_oss")
    model.bfloat16()
    optimizer, clip = Optimizer([model], **ADAMW), QKClip([model], 1e9, group=None, device=torch.device("cpu"))
    clip._limit = max_logits(model, *inputs).min().item() / 3
    weight = model.layers["0"].self_attn.q_proj.weight
    before = optimizer.state_tensors()[weight]["master"].clone()
    share = (clip._limit / model.layers["0"].self_attn.max_logits_A).repeat_interleave(16).unsqueeze(1)
    clip(optimizer, torch.tensor(1.0))
    master = optimizer.state_tensors()[weight]["master"]
    torch.testing.assert_close(master, before * share)
    assert torch.equal(weight, master.bfloat16())


def test_refuses_norms_and_limits_that_are_not_positive():
    model = whole(Qwen3MoeConfig.from_dict(MODEL))
    with pytest.raises(ValueError, match="queries and keys have norms, which bound their scores"):
        QKClip([model], 100.0, group=None, device=torch.device("cpu"))
    with pytest.raises(ValueError, match="must be positive; got 0"):
        QKClip([nn.Linear(2, 2)], 0, group=None, device=torch.device("cpu"))


def shared_max_logits(rank, family, method):
    """Return the largest logit of a sequence that two ranks share, as the clip returns it on each."""
    mesh = build_mesh(1, 1, 1, torch.device("cpu"), cp=2)["cp"]
    model, tokens, positions = build(family)
    context = ContextParallel(mesh, method=method)
    model.use_context_parallelism(context)
    clip = QKClip([model], 1e9, group=mesh.get_group(), device=torch.device("cpu"))
    local_tokens, state = tokens[:, context.split.token_indices(12)], MicrobatchState()
    stage = StageRunner(compile_segments(model.segments(), ("x",)), WeightGradStore())
    state.begin({"x": local_tokens, "positions": positions}, ())
    walk([stage.forward(state)])
    loss = cross_entropy_loss(logits := state.carry.pop("x").requires_grad_(), local_tokens)
    state.gradients = {"x": torch.autograd.grad(loss, logits)[0]}
    walk([stage.backward(state, "B", 0)])
    return clip(Optimizer([model], **ADAMW), torch.tensor(1.0)).item()


@pytest.mark.parametrize(("family", "method"), [
    ("gpt_oss", "ring"), pytest.param("deepseek", "ring", marks=pytest.mark.slow),
    pytest.param("deepseek", "all_to_all", marks=pytest.mark.slow)])
def test_ranks_that_share_a_sequence_see_all_of_its_logits(family, method):
    model, *inputs = build(family)
    QKClip([model], 1e9, group=None, device=torch.device("cpu"))
    expected = max_logits(model, *inputs).max().item()
    assert run_ranks(shared_max_logits, 2, family, method) == [pytest.approx(expected)] * 2
