"""gpt-oss against transformers' implementation, and its stages over ranks against the whole."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from transformers import GptOssConfig as HFConfig
from transformers import GptOssForCausalLM, modeling_rope_utils
from transformers.models.gpt_oss import modeling_gpt_oss

from dualpipe import Pipeline
from dualpipe.kernels import dispatch_tokens, sort_tokens
from dualpipe.models import GptOssConfig, build_stages, read_config
from dualpipe.models.flops import parameter_counts
from dualpipe.nn import cross_entropy_loss
from dualpipe.nn.attention import Yarn, packed_positions
from dualpipe.nn.init import local_part
from dualpipe.parallel.experts.dispatcher import Received, run_experts
from dualpipe.parallel.fsdp.materialize import build_on_meta
from dualpipe.parallel.mesh import Mesh, build_mesh
from dualpipe.schedule import build
from dualpipe.train.config.schema import Config, MemoryConfig
from dualpipe.train.loss import MicroBatchLoss
from dualpipe.train.parity.errors import difference
from dualpipe.train.step import build_model, build_whole
from models import Float64Torch, batch, compare_gradients, grads, ours, relative, train, whole
from ranks import run_ranks

EXAMPLES = Path(__file__).parents[2] / "examples" / "models"
YARN = {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
        "original_max_position_embeddings": 4096}
TINY = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "num_local_experts": 6, "num_experts_per_tok": 2, "sliding_window": 4,
    "initializer_range": 0.2, "rope_parameters": YARN | {"rope_theta": 150_000.0},
}
ONLY = {kind: {"layer_types": [f"{kind}_attention"] * 3} for kind in ("full", "sliding")}
VARIANTS = {
    "in turn, grouped-query": {},
    "multi-head, all experts": {"num_key_value_heads": 4, "num_experts_per_tok": 6},
    "multi-query, top 1": {"num_key_value_heads": 1, "num_experts_per_tok": 1},
    "unbiased attention": {"attention_bias": False},
    "no window": ONLY["full"],
    "windows only": ONLY["sliding"],
    "only the token itself": {"sliding_window": 1, **ONLY["sliding"]},
    "window of the sequence": {"sliding_window": 11},
    "window longer than the sequence": {"sliding_window": 64},
    "one layer": {"num_hidden_layers": 1},
    "one layer, no window": {"num_hidden_layers": 1, "layer_types": ["full_attention"]},
    "tied": {"tie_word_embeddings": True},
    "clamped early": {"swiglu_limit": 0.5, "swiglu_alpha": 2.0},
    "whole ramp": {"rope_parameters": YARN | {"rope_theta": 1e4, "truncate": True, "factor": 4.0}},
    "unstretched": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
}


def tiny(**changes):
    return GptOssConfig.from_dict(TINY | changes)


def hf_model(changes, dtype):
    hf_config = HFConfig(**(TINY | changes), attn_implementation="eager", experts_implementation="eager")
    torch.manual_seed(0)
    model = GptOssForCausalLM(hf_config).to(dtype)
    with torch.no_grad():  # transformers starts norms at one and most biases at zero, which would hide a mix-up
        for name, param in model.named_parameters():
            if param.dim() == 1 or name.endswith("_bias"):
                param.add_(torch.randn_like(param) * (1.0 if name.endswith("sinks") else 0.1))
    return model


def check(changes, dtype, positions=None, **packed):
    """Compare logits, loss and every gradient; `packed` tells transformers what `positions` tells us."""
    reference, config = hf_model(changes, dtype), tiny(**changes)
    model = whole(config, dtype=dtype)
    model.load_state_dict(ours(config, model.state_dict(), reference.state_dict()))
    expected, expected_loss = train(reference, config, **packed)
    actual, loss = train(model, config, positions=positions)
    tolerance = 1e-5 if dtype is torch.float32 else 1e-10
    assert relative(actual, expected) < tolerance
    assert relative(loss, expected_loss) < tolerance
    expected_grads = ours(config, grads(model), grads(reference))
    assert grads(model).keys() == expected_grads.keys()
    # One choice has weight 1 whatever the router says: its gradient is zero up to rounding.
    largest = max(grad.norm().item() for grad in expected_grads.values())
    for name, grad in grads(model).items():
        floor = largest if config.num_experts_per_tok == 1 and ".mlp.gate." in name else 1e-30
        assert relative(grad, expected_grads[name], floor) < tolerance, name


@pytest.fixture(params=[torch.float32, torch.float64], ids=str)
def dtype(request, monkeypatch):
    if request.param is torch.float64:  # transformers casts norms and rotary angles to float32
        for file in (modeling_gpt_oss, modeling_rope_utils):
            monkeypatch.setattr(file, "torch", Float64Torch())
    return request.param


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)
def test_logits_and_gradients_equal_transformers(changes, dtype):
    check(changes, dtype)


@pytest.mark.parametrize("window", [1, 3, 64])
def test_documents_in_a_row_equal_transformers(window, dtype):
    lengths = [[11], [4, 7], [1, 1, 6, 3]]
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])
    documents = torch.stack([torch.arange(len(row)).repeat_interleave(torch.tensor(row)) for row in lengths])
    # Passed as masks, because transformers' gpt-oss does not look for documents in position ids.
    query, key = torch.arange(11).unsqueeze(1), torch.arange(11)
    seen = (documents.unsqueeze(1) == documents.unsqueeze(2)) & (key <= query)
    masks = {"full_attention": seen, "sliding_attention": seen & (key > query - window)}
    masks = {
        kind: torch.zeros(mask.shape, dtype=dtype).masked_fill(~mask, torch.finfo(dtype).min).unsqueeze(1)
        for kind, mask in masks.items()
    }
    check({"sliding_window": window}, dtype, positions, position_ids=positions, attention_mask=masks)


def test_bfloat16_is_as_near_to_float32_as_transformers_is():
    changes = {"num_experts_per_tok": 6}  # all: rounding must not choose other experts
    config, exact = tiny(**changes), hf_model(changes, torch.float32)
    expected, expected_loss = train(exact, config)
    rounded, model = hf_model(changes, torch.bfloat16), whole(config, dtype=torch.bfloat16)
    rounded.load_state_dict(exact.state_dict())  # torch 2.11 draws other numbers in bfloat16
    model.load_state_dict(ours(config, model.state_dict(), rounded.state_dict()))
    errors = []
    for each in (model, rounded):
        logits, loss = train(each, config)
        assert logits.dtype is torch.bfloat16
        assert all(grad.dtype is torch.bfloat16 for grad in grads(each).values())
        assert loss.item() == pytest.approx(expected_loss.item(), rel=0.01)
        errors.append(relative(logits.float(), expected))
    assert errors[0] < 1.5 * errors[1] < 0.05  # three layers of 8 bits


def test_segments_have_the_bits_of_the_forward():
    config = tiny()
    plain, cut = whole(config), whole(config)
    tokens, labels = batch(config)
    loss = cross_entropy_loss(plain(tokens), labels)
    loss.backward()
    pipe = Pipeline([cut], schedule="1f1b")
    losses, _ = pipe.step(tokens, num_chunks=1, criterion=cross_entropy_loss, labels=(labels,))
    assert torch.equal(losses[0], loss)
    for name, grad in grads(plain).items():
        assert torch.equal(cut.get_parameter(name).grad, grad), name


def randomised_experts():
    experts = whole(tiny(), dtype=torch.float64).layers["0"].mlp.experts
    with torch.no_grad():
        for bias in (experts.gate_up_proj.bias, experts.down_proj.bias):
            bias.normal_(generator=torch.Generator().manual_seed(0))
    return experts


def test_experts_take_tokens_or_rows_that_are_sorted_already():
    experts, generator = randomised_experts(), torch.Generator().manual_seed(0)
    x_TH = torch.randn(7, 32, generator=generator, dtype=torch.float64)
    tokens = sort_tokens(torch.randint(6, (7, 2), generator=generator), 6)
    weight_M = torch.rand(14, generator=generator, dtype=torch.float64)
    rows_MH = dispatch_tokens(x_TH, tokens, 2)
    assert torch.equal(experts(x_TH, tokens, weight_M), experts(rows_MH, tokens.offs, weight_M))


@pytest.mark.parametrize("pairs", [3, 6], ids=["cut", "with room"])
def test_a_weight_multiplies_the_last_bias_and_nobody_s_rows_are_zero(pairs):
    """Experts of one expert-parallel rank: of each row's two experts, none, one or both are on the rank."""
    experts = randomised_experts()
    rows_RH = torch.randn(3, 32, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    weights_RK = torch.tensor([[0.5, 0.25], [3.0, 7.0], [0.75, 9.0]], dtype=torch.float64, requires_grad=True)
    local_RK = torch.tensor([[4, 1], [-1, -1], [1, -1]])

    y_RH = run_experts(experts, rows_RH, weights_RK, Received(local_RK, 6, pairs, None))
    y_RH.sum().backward()

    def one(expert, row):
        gate_up = experts.gate_up_proj.weight[expert] @ rows_RH[row] + experts.gate_up_proj.bias[expert]
        gate, up = gate_up[::2].clamp(max=7.0), gate_up[1::2].clamp(-7.0, 7.0)
        h = (up + 1) * gate * torch.sigmoid(1.702 * gate)
        return experts.down_proj.weight[expert] @ h + experts.down_proj.bias[expert]

    expected = torch.stack([0.5 * one(4, 0) + 0.25 * one(1, 0), torch.zeros(32).double(), 0.75 * one(1, 2)])
    torch.testing.assert_close(y_RH, expected)
    slopes = [[one(4, 0).sum().item(), one(1, 0).sum().item()], [0.0, 0.0], [one(1, 2).sum().item(), 0.0]]
    torch.testing.assert_close(weights_RK.grad, torch.tensor(slopes, dtype=torch.float64))
    bias_grad = torch.zeros(6, 32, dtype=torch.float64)
    bias_grad[4], bias_grad[1] = 0.5, 0.25 + 0.75
    torch.testing.assert_close(experts.down_proj.bias.grad, bias_grad)


def test_float32_weights_do_not_widen_the_rows():
    experts = randomised_experts().to(torch.bfloat16)
    rows_MH, ends = torch.ones(6, 32, dtype=torch.bfloat16), torch.arange(1, 7, dtype=torch.int32)
    assert experts(rows_MH, ends, torch.ones(6)).dtype is torch.bfloat16


def test_a_fresh_model_has_sinks():
    sinks = whole(tiny()).layers["0"].self_attn.sinks
    assert 0 < sinks.abs().max() < 1
    with torch.device("meta"):
        (stage,) = build_stages(tiny(), 1)
    stage.to_empty(device="cpu").init_weights(0)
    assert torch.equal(stage.layers["0"].self_attn.sinks, sinks)


# -- configurations


def test_config_from_both_hub_forms(tmp_path):
    older = {key: value for key, value in TINY.items() if key != "rope_parameters"} | {
        "rope_theta": 150000, "rope_scaling": YARN, "model_type": "gpt_oss", "experts_per_token": 2,
        "swiglu_limit": 7.0, "initial_context_length": 4096, "quantization_config": {"quant_method": "mxfp4"},
        "router_aux_loss_coef": 0.9,
    }
    HFConfig(**TINY).save_pretrained(tmp_path)
    (tmp_path / "older.json").write_text(json.dumps(older))
    expected = GptOssConfig(
        vocab_size=61, hidden_size=32, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
        num_experts=6, num_experts_per_tok=2, intermediate_size=24, sliding_window=4, initializer_range=0.2,
        layer_types=("sliding_attention", "full_attention", "sliding_attention"),
        yarn=Yarn(32.0, 4096, 32.0, 1.0, truncate=False),
    )
    assert read_config(tmp_path / "config.json") == expected
    assert read_config(tmp_path / "older.json") == expected
    for missing in ({"num_experts_per_tok"}, {"rope_theta", "rope_scaling"}, {"rope_scaling"}):
        assert GptOssConfig.from_dict({key: value for key, value in older.items() if key not in missing}) == expected
    unstretched = older | {"rope_scaling": {"rope_type": "default"}}
    assert GptOssConfig.from_dict(unstretched) == dataclasses.replace(expected, yarn=None)


REFUSED = {
    "hidden_act='gelu'.* attention_dropout=0.1.* num_expert=3 \\(unknown\\)": {
        "hidden_act": "gelu", "attention_dropout": 0.1, "num_expert": 3,
    },
    "num_local_experts \\(6\\) and num_experts \\(5\\) are the same": {"num_experts": 5},
    "experts_per_token \\(3\\) and num_experts_per_tok \\(2\\) are the same": {"experts_per_token": 3},
    "rope_type 'llama3'": {"rope_parameters": {"rope_type": "llama3", "factor": 4.0}},
    "model_type must be 'gpt_oss'": {"model_type": "qwen3_moe"},
    "must be a multiple of num_key_value_heads \\(3\\)": {"num_key_value_heads": 3},
    "head_dim must be even": {"head_dim": 7},
    "num_experts_per_tok must be 1 to num_experts \\(6\\); got 7": {"num_experts_per_tok": 7},
    "layer_types must name .* 3 layers; got \\['full_attention'\\]": {"layer_types": ["full_attention"]},
    "got \\['linear_attention'": {"layer_types": ["linear_attention"] * 3},
    "sliding_window must be at least 1": {"sliding_window": None},
    "lacks vocab_size, head_dim": {"vocab_size": None, "head_dim": None},
}


@pytest.mark.parametrize("message", REFUSED)
def test_unsupported_options_are_named(message):
    with pytest.raises(ValueError, match=message):
        tiny(**REFUSED[message])


# Published sizes (arXiv:2508.10925, table 1) in billions. The active counts leave out the embedding, of which a token
# reads one row, but not the head.
@pytest.mark.parametrize(
    ("name", "total", "active", "published"),
    [
        ("gpt-oss-20b", 20_914_757_184, 3_608_307_264, (20.91, 3.61)),
        ("gpt-oss-120b", 116_829_156_672, 5_132_849_472, (116.83, 5.13)),
    ],
)
def test_real_models_have_the_published_sizes(name, total, active, published):
    config = read_config(EXAMPLES / name)
    with torch.device("meta"):
        (model,) = build_on_meta(lambda: build_stages(config, 1))
    sizes = {key: param.numel() for key, param in model.named_parameters()}
    experts = sum(size for key, size in sizes.items() if ".experts." in key)
    assert sum(sizes.values()) == total
    used = experts // config.num_experts * config.num_experts_per_tok
    assert total - experts + used - sizes["embed_tokens.weight"] == active
    assert (round(total / 1e9, 2), round(active / 1e9, 2)) == published
    counts = parameter_counts(config)
    assert (counts.total, counts.active - counts.embedding) == (total, active)


@pytest.mark.parametrize("name", ["gpt-oss-20b", "gpt-oss-120b"])
def test_real_models_have_transformers_names_and_shapes(name):
    path = EXAMPLES / name / "config.json"
    config, hf_config = read_config(path), HFConfig.from_dict(json.loads(path.read_text()))
    with torch.device("meta"):
        (model,) = build_on_meta(lambda: build_stages(config, 1))
        expected = {key: tuple(tensor.shape) for key, tensor in GptOssForCausalLM(hf_config).state_dict().items()}
    found = {}
    for key, param in model.named_parameters():
        ((part,),) = config.hub_parts(key, param.shape)
        assert part.shape == (*param.shape[:-2], *param.shape[:-3:-1]) if part.transposed else param.shape
        found[part.name] = part.shape
    assert found == expected


# -- over ranks

RANKED = tiny(num_hidden_layers=5, num_local_experts=8, num_experts_per_tok=3, sliding_window=3)
MICRO_BATCHES = 4


def with_biases(model):
    """Randomize the biases, which start at zero and would hide a mix-up; equal values in every layout."""
    with torch.no_grad():
        for name, param in model.named_parameters():
            if name.endswith(".bias"):
                local, part = local_part(param)
                local.copy_(torch.linspace(-0.3, 0.3, param.shape[-1]).expand(param.shape)[part])


def layout(rank: int, shape: tuple[int, int, int], schedule: str, packed: bool) -> tuple[float, float]:
    """Return the worst gradient and loss error of this rank; `packed`: documents in a row, and recomputed layers."""
    mesh = build_mesh(*shape, torch.device("cpu"))
    replicas, replica = Mesh.of(mesh).replicas, Mesh.of(mesh).replica
    common = {"dtypes": torch.float64, "device": torch.device("cpu")}
    plan = build(schedule, shape[0], MICRO_BATCHES)
    recompute = ("layer", "dispatch") if packed else ()
    model = build_model(RANKED, plan, mesh["pp"].get_local_rank(), mesh=mesh,
                        settings=Config(memory=MemoryConfig(recompute=recompute)), **common)
    unpipelined = build_whole(RANKED, **common)
    for stage in (*model.stages, unpipelined):
        with_biases(stage)
    generator = torch.Generator().manual_seed(2)
    rows = torch.randint(61, (2 * MICRO_BATCHES * replicas, 8), generator=generator)
    tokens, targets = rows[:, :-1], rows[:, 1:].contiguous()
    count = tokens.numel()
    cuts = torch.cat((torch.tensor([0, count]), torch.randperm(count, generator=generator)[: count // 4])).unique()
    positions = packed_positions(cuts, *tokens.shape)
    mine = slice(replica * 2 * MICRO_BATCHES, (replica + 1) * 2 * MICRO_BATCHES)
    pipe = Pipeline(model.stages, process_group=mesh["pp"].get_group(), schedule=schedule)
    loss, _ = pipe.step(
        *((tokens[mine],) if model.has_first else ()), num_chunks=MICRO_BATCHES,
        criterion=MicroBatchLoss(MICRO_BATCHES) if model.has_last else None,
        labels=(targets[mine],) if model.has_last else (),
        side={"positions": positions[mine]} if packed and model.has_first else None,
    )
    criterion, losses = MicroBatchLoss(MICRO_BATCHES * replicas), []
    for xs, ys, places in zip(tokens.split(2), targets.split(2), positions.split(2)):
        one = criterion(unpipelined(xs, places if packed else None), ys)
        one.backward()
        losses.append(one.detach())
    expected = torch.stack(losses).split(MICRO_BATCHES)[replica] * replicas
    worst = max(d.relative for d in compare_gradients(model.stages, unpipelined))
    return worst, 0.0 if loss is None else difference("loss", loss, expected).relative


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "schedule", "packed"),
    [*(pytest.param(*layout, "dualpipev", packed, marks=pytest.mark.slow)
       for *layout, packed in (((2, 1, 1), False), ((2, 1, 2), False), ((2, 1, 1), True))),
     pytest.param((2, 1, 2), "1f1b", False, marks=pytest.mark.slow), ((2, 1, 2), "dualpipev", True)], ids=str,
)
def test_pipelined_equals_the_whole_model(shape, schedule, packed):
    pp, dp, ep = shape
    for gradients, losses in run_ranks(layout, pp * dp * ep, shape, schedule, packed):
        assert gradients < 1e-10 and losses < 1e-10
