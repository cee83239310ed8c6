"""The dtype plan: the precedence of rules, refusals, its printed form, and its assertion."""

import warnings

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from dualpipe import Pipeline
from dualpipe.kernels.formats import FORMATS
from dualpipe.models import Qwen3MoeConfig, build_stages
from dualpipe.parallel import (
    ContractError,
    DTypePolicy,
    Rule,
    TensorDTypes,
    assert_contract,
    checkpoint_dtypes,
    resolve_dtypes,
    shard,
)
from dualpipe.quantized import QuantizedTensor, quantize_weights
from hub import FAMILIES
from ranks import run_ranks
from refusals import refusal

BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64
CONFIG = Qwen3MoeConfig(
    vocab_size=16, hidden_size=16, num_hidden_layers=4, num_attention_heads=2, num_key_value_heads=1, head_dim=8,
    num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, norm_topk_prob=True,
)


class Mixer(nn.Module):
    """Has a pinned parameter, as a state-space layer does."""

    keep_fp32 = ("decay.A_log",)

    def __init__(self):
        super().__init__()
        self.decay = nn.ParameterDict({"A_log": nn.Parameter(torch.zeros(4))})
        self.gate = nn.Linear(4, 4)
        self.gate_up_proj = nn.Linear(4, 8, bias=False)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("running", torch.zeros(4))

    def forward(self, x):
        return self.gate(x) * self.running + self.gate_up_proj(x)[..., :4] * self.decay["A_log"].exp().to(x.dtype)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(4, 4, bias=False)
        self.layers = nn.ModuleList(Mixer() for _ in range(2))
        self.head = nn.Linear(4, 4, bias=False)

    def forward(self, x):
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def policy(*rules, param=BF16, reduce=FP32, output=BF16):
    return DTypePolicy(param, reduce, output, rules)


def resolve(model, policy, source=None):
    """Resolve dtypes without the check that FSDP2 can keep them apart, which has its own tests."""
    return resolve_dtypes(model, policy, source, sharded=False)


def computing_in(plan, dtype):
    return {name for name, dtypes in plan.tensors.items() if dtypes.compute is dtype}


# -- rules


@pytest.mark.parametrize(
    ("pattern", "matched"),
    [
        ("*.A_log", {"layers.0.decay.A_log", "layers.1.decay.A_log"}),
        ("layers.0.gate", {"layers.0.gate.weight", "layers.0.gate.bias"}),
        ("*.gate", {f"layers.{i}.gate.{n}" for i in (0, 1) for n in ("weight", "bias")}),
        ("layers.?.*_up_*.weight", {"layers.0.gate_up_proj.weight", "layers.1.gate_up_proj.weight"}),
        ("layers.[1-9].gate.bias", {"layers.1.gate.bias"}),
        ("head.weight", {"head.weight"}),
    ],
)
def test_given_a_glob_then_it_matches_whole_segments(pattern, matched):
    plan = resolve(Model(), policy((pattern, FP64)))
    assert computing_in(plan, FP64) == matched


@pytest.mark.parametrize(("pattern", "nearest"), [
    ("gate", "*.gate"), ("layers.*.gat.bias", "layers.*.gate.bias"), ("Embed", "embed"), ("*.gat", ""),
    ("layers.2.*", ""), ("head.weight.data", ""), ("*.steps", ""),
])
def test_given_a_rule_that_matches_nothing_then_the_error_names_it_and_the_nearest_that_does(pattern, nearest):
    with pytest.raises(ValueError, match="matches") as error:
        resolve(Model(), policy((pattern, FP32), ("*.bias", FP32)))
    assert repr(pattern) in str(error.value) and "'*.bias' (fp32)" not in str(error.value)
    if nearest:
        assert f"nearest: {nearest!r}" in str(error.value)
        resolve(Model(), policy((nearest, FP32)))


def test_given_rules_that_disagree_then_the_error_names_both_and_the_tensor():
    with pytest.raises(ValueError, match="disagree") as error:
        resolve(Model(), policy(("*.gate.weight", FP32), ("layers.0.*", FP64)))
    assert all(part in str(error.value) for part in ("layers.0.gate.weight", "*.gate.weight", "layers.0.*", "fp64"))
    resolve(Model(), policy(("*.gate.weight", FP32), ("layers.0.*", FP32)))  # these two agree


@pytest.mark.parametrize(("pattern", "dtype"), [("", FP32), ("a..b", FP32), ("a", torch.int32), ("a", "fp32")])
def test_given_a_rule_that_cannot_be_then_it_is_refused(pattern, dtype):
    with pytest.raises(ValueError, match="rule"):
        Rule(pattern, dtype)
    with pytest.raises(ValueError, match="floating"):
        DTypePolicy(BF16, torch.int8, BF16)


# -- precedence


def sources(model, dtype, **others):
    names = [name for name, _ in [*model.named_parameters(), *model.named_buffers()]]
    return {name: others.get(name.rsplit(".", 1)[-1], dtype) for name in names}


def test_given_all_four_reasons_then_rule_pin_checkpoint_policy_decide_in_this_order():
    model = Model()
    source = sources(model, BF16, A_log=FP32, bias=FP32)
    plan = resolve(model, policy(("layers.0.decay.A_log", BF16), ("layers.1.gate.bias", BF16)), source)
    of = {name: (plan.of(name).compute, plan.of(name).reason) for name in plan.tensors}
    assert of["layers.0.decay.A_log"] == (BF16, "rule 'layers.0.decay.A_log'")
    assert of["layers.1.decay.A_log"] == (FP32, "Mixer.keep_fp32 'decay.A_log'")
    assert of["layers.1.gate.bias"] == (BF16, "rule 'layers.1.gate.bias'")
    assert of["layers.0.gate.bias"] == (FP32, "fp32 in a lower-precision checkpoint")
    assert of["layers.0.gate.weight"] == (BF16, "policy")


def test_given_a_checkpoint_then_storage_is_its_dtype_promoted_with_the_requested_one():
    def stored(requested, source):
        model = Model().to(requested)
        return resolve(model, policy(), sources(model, source, bias=FP32))

    assert {t.storage for n, t in stored(FP32, BF16).tensors.items() if "steps" not in n} == {FP32}
    plan = stored(BF16, BF16)
    assert plan.of("layers.0.gate.bias") == TensorDTypes(FP32, FP32, FP32, "fp32 in a lower-precision checkpoint")
    assert plan.of("layers.0.gate.weight") == TensorDTypes(BF16, BF16, BF16, "policy")
    assert stored(BF16, torch.float16).of("head.weight").storage is FP32  # neither holds the other
    assert stored(BF16, torch.float8_e4m3fn).of("head.weight").storage is BF16


def test_given_a_checkpoint_in_fp32_throughout_then_the_policy_still_computes_in_bf16():
    model = Model().to(BF16)
    plan = resolve(model, policy(), sources(model, FP32))
    assert plan.of("head.weight") == TensorDTypes(FP32, BF16, BF16, "policy")
    assert plan.of("layers.0.decay.A_log").compute is FP32  # the model's pin


def test_given_pinned_tensors_then_they_are_stored_and_saved_in_fp32_even_if_built_in_bf16():
    plan = resolve(Model().to(BF16), policy(("*.gate.bias", FP32)))
    for name in ("layers.0.decay.A_log", "layers.0.gate.bias"):
        assert (plan.of(name).storage, plan.of(name).compute, plan.of(name).save) == (FP32, FP32, FP32)
    assert resolve(Model(), policy(param=FP64)).of("layers.0.decay.A_log").compute is FP64  # at least fp32


def test_given_buffers_and_integers_then_only_frozen_modules_cast_them():
    model = Model()
    model.layers[1].requires_grad_(False)
    plan = resolve(model, policy())
    assert plan.of("layers.0.running").compute is FP32 and plan.of("layers.1.running").storage is BF16
    assert plan.of("layers.1.gate.weight").storage is BF16  # a frozen parameter has no master weight
    assert plan.of("layers.1.decay.A_log").storage is FP32  # but a pin holds
    assert {plan.of(f"layers.{i}.steps").storage for i in (0, 1)} == {torch.int64}


def test_given_a_pin_that_matches_nothing_then_it_is_refused_unless_a_parameter_is_left_out():
    class Gate(nn.Linear):
        keep_fp32 = ("bias",)

    class Block(nn.Module):
        keep_fp32 = ("gate.weigth",)

        def __init__(self, bias):
            super().__init__()
            self.gate = Gate(2, 2, bias=bias)

    with pytest.raises(ValueError, match=r"matches Block.keep_fp32 'gate.weigth', nearest: 'gate.weight'") as refused:
        resolve(nn.Sequential(Block(True)), policy())
    assert "\n" not in str(refused.value)
    Block.keep_fp32 = ("gate.weight",)
    plan = resolve(nn.ModuleList([Block(False), Block(True)]), policy())
    assert plan.of("1.gate.bias").reason == "Gate.keep_fp32 'bias'" and "0.gate.bias" not in plan.tensors
    assert resolve(Block(False), policy()).of("gate.weight").reason == "Block.keep_fp32 'gate.weight'"


def test_given_a_pin_that_is_a_string_then_it_is_refused():
    class Wrong(nn.Linear):
        keep_fp32 = "weight"

    with pytest.raises(ValueError, match=r"Wrong.keep_fp32 must be a tuple"):
        resolve(Wrong(2, 2), policy())
    for attribute in ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict"):
        module = nn.Linear(2, 2)
        setattr(module, attribute, "weight")
        with pytest.raises(ValueError, match=f"Linear.{attribute} must be a tuple, list or set of names; got 'weight'"):
            resolve(module, policy())


# -- pins of transformers


@pytest.mark.parametrize("kind", [tuple, list, set])
def test_given_transformers_pins_then_they_are_found_anywhere_in_a_name_and_a_rule_comes_first(kind):
    model = Model()
    model.layers[0]._keep_in_fp32_modules_strict = kind(["up_proj", "decay*log"])  # of an instance, as after post_init
    model._keep_in_fp32_modules = kind(["head"])
    plan = resolve(model, policy(("layers.0.gate_up_proj", FP64)))
    assert computing_in(plan, FP32) >= {f"layers.{i}.decay.A_log" for i in (0, 1)}
    assert plan.of("layers.0.gate_up_proj.weight").reason == "rule 'layers.0.gate_up_proj'"
    assert plan.of("layers.1.gate_up_proj.weight").compute is BF16, "of another instance"
    assert plan.of("head.weight").reason == "Model._keep_in_fp32_modules 'head'"
    plan = resolve(model, policy(param=torch.float16))
    assert plan.of("head.weight").reason == "Model._keep_in_fp32_modules 'head'"
    assert plan.of("layers.0.gate_up_proj.weight").reason == "Mixer._keep_in_fp32_modules_strict 'up_proj'"
    assert resolve(model, policy(param=FP64)).of("layers.0.gate_up_proj.weight").compute is FP64


@pytest.mark.parametrize("model_type", ["gpt_oss", "deepseek_v3", "ernie4_5_moe"])
def test_given_a_model_of_transformers_then_both_of_its_lists_are_pinned(tmp_path, model_type):
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = FAMILIES.get(model_type) or FAMILIES["gpt_oss"] | {"moe_num_experts": 4, "moe_k": 2}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **sizes))
    model.save_pretrained(tmp_path)
    pinned = {}
    for dtype in (BF16, torch.float16):
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
        pinned[dtype] = {name for name, tensor in loaded.state_dict().items() if tensor.dtype is FP32}
    parameters = {name for name, _ in model.named_parameters()}
    for dtype in pinned:
        computed = computing_in(resolve(model, policy(param=dtype)), FP32)
        assert pinned[torch.float16] and pinned[torch.float16] & parameters == computed & parameters
        assert pinned[dtype] <= computed


# -- what a rule may say besides


def test_given_a_rule_then_each_dtype_is_decided_by_itself():
    rules = (Rule("head", save=FP32), Rule("head.weight", reduce=FP64), Rule("embed", storage=BF16),
             Rule("layers.0.gate", FP32, storage=FP64), Rule("*.running", storage=FP64))
    plan = resolve(Model(), policy(*rules))
    assert plan.of("head.weight") == TensorDTypes(
        FP32, BF16, FP32, "policy; rule 'head', 'head.weight'", reduce=FP64
    )
    assert plan.reduce_dtype("head.weight") is FP64 and plan.reduce_dtype("embed.weight") is FP32
    assert plan.of("embed.weight") == TensorDTypes(BF16, BF16, BF16, "policy; rule 'embed'")
    assert plan.of("layers.0.gate.bias") == TensorDTypes(FP64, FP32, FP32, "rule 'layers.0.gate'")
    assert plan.of("layers.1.running") == TensorDTypes(FP64, FP64, FP64, "rule '*.running'")


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ([Rule("head", FP32, storage=BF16)], "head.weight computes in fp32, but rule 'head' .*"
         "stores it in bf16, which is narrower"),
        ([Rule("*.running", FP32, storage=BF16)], "computes in fp32, but rule .* in bf16; a buffer or frozen"),
        ([Rule("head", save=FP32), Rule("*", save=BF16)], r"rules disagree on embed|rules disagree on head.weight: "
         r"'head' \(saved in fp32\) and '\*' \(saved in bf16\)"),
    ],
)
def test_given_a_rule_that_contradicts_then_it_is_refused(rules, message):
    with pytest.raises(ValueError, match=message):
        resolve(Model(), policy(*rules))
    with pytest.raises(ValueError, match="names no dtype"):
        Rule("head")


def test_given_names_of_another_library_then_source_dtypes_are_refused():
    with pytest.raises(ValueError, match=r"model\.embed\.weight"):
        resolve(Model(), policy(), {"model.embed.weight": FP32})


def test_given_a_whole_model_on_meta_then_its_plan_serves_each_stage():
    rules = (Rule("layers.2.mlp.gate.weight", FP32), Rule("lm_head", FP32))
    with torch.device("meta"):
        plan = resolve_dtypes(build_stages(CONFIG, 1)[0].to(BF16), policy(*rules))
    first, last = (stage.to(BF16) for stage in build_stages(CONFIG, 2))
    for stage in (first, last):
        shard(stage, None, plan)
    hidden = first(torch.zeros(1, 4, dtype=torch.int64))
    assert_contract(last, plan, run=lambda: last(hidden))
    pinned = {name for name, param in last.named_parameters() if param.dtype is FP32}
    assert pinned == {"layers.2.mlp.gate.weight", "lm_head.weight"}
    with pytest.raises(ValueError, match="matches 'lm_head'"):  # a stage alone does not know the other stages' modules
        resolve_dtypes(first, policy(Rule("lm_head", FP32)))


def test_given_a_plan_of_another_model_then_shard_says_what_differs():
    plan = resolve(nn.ModuleDict({"a": nn.Linear(2, 2, dtype=BF16)}), policy())
    with pytest.raises(ValueError, match=r"the dtype plan lacks 'b\.weight'"):
        shard(nn.ModuleDict({"b": nn.Linear(2, 2)}), None, plan)
    with pytest.raises(ValueError, match=r"a\.weight is fp32 and trainable, but the plan stores it in bf16"):
        shard(nn.ModuleDict({"a": nn.Linear(2, 2)}), None, plan)


def test_given_several_stages_then_a_rule_may_match_in_any_of_them_and_tied_names_share_it():
    first, last = nn.ModuleDict({"embed": nn.Embedding(4, 4)}), nn.ModuleDict({"head": nn.Linear(4, 4, bias=False)})
    last["head"].weight = first["embed"].weight
    plan = resolve([first, last], policy(("head.weight", FP32)))
    assert plan.of("embed.weight") == plan.of("head.weight") and plan.of("head.weight").compute is FP32
    with pytest.raises(ValueError, match=r"embed\.weight = head\.weight"):
        resolve([first, last], policy(("head.weight", FP32), ("embed.weight", BF16)))


def of_one_rank(rank):
    """Return a rank's dtypes by a rule for one of two ranks' stages, and the errors by a rule that matches none."""
    stage = nn.ModuleDict([{"embed": nn.Embedding(4, 4)}, {"head": nn.Linear(4, 4, bias=False)}][rank])
    plan = resolve_dtypes([stage], policy(("head", FP32)), group=torch.distributed.group.WORLD)
    wrong = policy(("head", FP32), ("heat", FP32))
    said = [refusal(lambda group=group: resolve_dtypes([stage], wrong, group=group))
            for group in (torch.distributed.group.WORLD, None)]
    return {name: dtypes.compute for name, dtypes in plan.tensors.items()}, said


def test_given_the_stages_of_one_rank_then_a_rule_may_match_on_another_of_the_group():
    (first, first_said), (last, last_said) = run_ranks(of_one_rank, 2)
    assert first == {"embed.weight": BF16} and last == {"head.weight": FP32}
    assert first_said[0] == last_said[0], "one error, on every rank"
    assert "matches 'heat' (fp32), nearest: 'head'" in first_said[0] and "'head' (fp32)" not in first_said[0]
    assert "'head' (fp32)" in first_said[1] and "for the whole model, on the meta device, or pass" in first_said[1]


# -- the boundary


def test_given_no_boundary_dtype_then_it_is_the_policys_output_dtype(recwarn):
    for output, explicit in ((FP32, None), (BF16, BF16)):
        model = nn.Linear(4, 4, dtype=BF16)
        shard(model, None, resolve_dtypes(model, policy(output=output)), output_dtype=explicit)
        assert model(torch.ones(1, 4)).dtype is output
    assert not recwarn.list
    with pytest.raises(ValueError, match=r"output_dtype must be a floating-point dtype; got torch.int8"):
        shard(model, None, resolve_dtypes(model, policy()), output_dtype=torch.int8)


def test_given_another_boundary_dtype_then_it_is_honoured_with_a_warning():
    model, x = nn.Linear(4, 4, dtype=BF16), torch.ones(1, 4)
    plan = resolve_dtypes(model, policy())
    with pytest.warns(UserWarning, match="fp32, not the policy's output_dtype bf16"):
        assert shard(model, None, plan, output_dtype=FP32)(x).dtype is FP32
    assert shard(nn.Linear(4, 4, dtype=BF16), None, plan)(x).dtype is BF16


def crossing(rank, output, explicit):
    """Return the dtypes of activations arriving at the second of two pipeline ranks, and of gradients at the first."""
    stage = nn.Linear(4, 4, dtype=BF16)
    plan = resolve_dtypes(stage, policy(output=output))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        shard(stage, None, plan, output_dtype=explicit)
    arrived = []
    stage.register_forward_pre_hook(lambda m, args: arrived.append(args[0].dtype), prepend=True)
    stage.register_full_backward_pre_hook(lambda m, grads: arrived.append(grads[0].dtype))
    x = torch.ones(4, 4)
    pipe = Pipeline([stage], schedule="1f1b")
    first, last = ((x,), {}) if rank == 0 else ((), {"criterion": lambda y, t: (y - t).square().mean(), "labels": (x,)})
    pipe.step(*first, num_chunks=2, **last)
    return arrived[rank - 1], len(said)


@pytest.mark.parametrize(
    ("output", "explicit", "expected"), [(BF16, None, BF16), (FP32, None, FP32), (BF16, FP32, FP32)]
)
def test_given_two_pipeline_ranks_then_the_output_dtype_crosses_both_ways(output, explicit, expected):
    assert run_ranks(crossing, 2, output, explicit) == [(expected, int(explicit is not None))] * 2


# -- formats


def formats(model, *rules):
    """Return a plan's quantized tensors by name: format, gathered, master."""
    return {name: (str(each.format), each.gathered, each.master)
            for name, each in resolve(model, policy(*rules)).tensors.items() if each.format}


def test_given_a_wildcard_then_it_quantizes_linear_layers_and_experts_but_for_head_and_routers():
    with torch.device("meta"):
        (whole,) = build_stages(CONFIG, 1)
    names = {name.replace("layers.0.", "") for name in formats(whole, Rule("*", storage="mxfp8")) if ".0." in name}
    assert names == {*(f"self_attn.{part}_proj.weight" for part in "qkvo"), "mlp.experts.gate_up_proj.weight",
                     "mlp.experts.down_proj.weight"}
    assert {name.partition(".")[0] for name in formats(whole, Rule("*", gather="nvfp4"))} == {"layers"}


def test_given_formats_then_what_is_stored_trained_and_frozen_is_told_apart():
    model = Model()
    model.embed.requires_grad_(False)
    rules = (Rule("embed", storage="mxfp8"), Rule("layers.0", storage=FORMATS["fp8_block"]),
             Rule("*.1.gate", gather="nvfp4"))
    assert formats(model, *rules) == {
        "embed.weight": ("mxfp8", False, False), "layers.0.gate.weight": ("fp8_block", False, True),
        "layers.0.gate_up_proj.weight": ("fp8_block", False, True), "layers.1.gate.weight": ("nvfp4", True, False),
    }
    plan = resolve(model, policy(*rules))
    assert plan.of("embed.weight").stored == FORMATS["mxfp8"] and plan.of("layers.1.gate.weight").stored is FP32
    assert plan.of("layers.0.gate.bias") == TensorDTypes(FP32, BF16, BF16, "policy")
    words = (" mxfp8  ", "fp8_block + fp32 masters  ", "fp32, gathered as nvfp4  ")
    assert all(word in plan.table() for word in words)
    assert str(plan) == plan.table(), "what print(plan) shows"
    narrow = resolve(Model(), policy(Rule("*.gate", storage=BF16, gather="mxfp8"))).of("layers.0.gate.weight")
    assert narrow.stored is BF16 and narrow.gathered


def test_given_a_pinned_weight_then_a_wildcard_leaves_it_alone():
    class Pinned(Mixer):
        keep_fp32 = ("gate",)

    assert formats(Pinned(), Rule("*", storage="mxfp8")).keys() == {"gate_up_proj.weight"}


def test_given_quantized_weights_then_the_plan_takes_them_as_they_are():
    model = Model()
    quantize_weights(model, "mxfp8", "embed.*")
    assert formats(model) == {"embed.weight": ("mxfp8", False, True)}
    with pytest.raises(ValueError, match=r"to nvfp4, as rule 'embed' says: .* mxfp8 already"):
        resolve(model, policy(Rule("embed", storage="nvfp4")))


def tied():
    model = Model()
    model.layers[1].gate.weight = model.embed.weight
    return model


def odd():
    return nn.Sequential(nn.Linear(5, 4))


@pytest.mark.parametrize(
    ("make", "rules", "message"),
    [
        (Model, [Rule("*", storage="mxfp8"), Rule("embed", gather="mxfp8")], "rules disagree on embed.weight"),
        (Model, [Rule("*", storage="mxfp8"), Rule("embed", storage="nvfp4")], "rules disagree on embed.weight"),
        (Model, [Rule("*", storage="mxfp8"), Rule("embed", storage=BF16)], "rules disagree on embed.weight"),
        (Model, [Rule("head", storage="mxfp8")], r"heads, .* matches 'head' \(stored in mxfp8\), nearest: "),
        (Model, [Rule("*.decay", gather="mxfp8")], "gathered as mxfp8.*, nearest: "),
        (tied, [Rule("*", storage="mxfp8")], "embed.weight = layers.1.gate.weight cannot be quantized .* tied"),
        (odd, [Rule("*", gather="nvfp4")],
         r"0.weight cannot be quantized to nvfp4, as rule .* the shape is \(4, 5\), but .* even; choose a format"),
    ],
)
def test_given_a_format_that_cannot_be_then_it_is_refused(make, rules, message):
    with pytest.raises(ValueError, match=message):
        resolve(make(), policy(*rules))


@pytest.mark.parametrize("given", [{"storage": "mxfp9"}, {"gather": FP32}, {"storage": "mxfp8", "gather": "nvfp4"}])
def test_given_a_rule_with_no_or_two_formats_then_it_is_refused(given):
    with pytest.raises(ValueError, match=r"rule '\*'.* mxfp8"):
        Rule("*", **given)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda weight: None, ""),
        (lambda weight: weight.dequantize(), "0.weight: is stored in fp32, planned mxfp8"),
        (lambda weight: QuantizedTensor.quantize(weight.dequantize(), "nvfp4"), "is stored in nvfp4, planned mxfp8"),
        (lambda weight: QuantizedTensor.quantize(weight.dequantize(), "mxfp8"), "is stored without masters, planned"),
    ],
)
def test_given_quantized_weights_then_the_contract_holds_their_formats(spoil, message):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, bias=False))
    plan = resolve_dtypes(model, policy(Rule("*", storage="mxfp8"), param=FP32))
    quantize_weights(model, "mxfp8")
    assert_contract(model, plan, run=lambda: model(torch.ones(2, 4)))
    if message:
        model[0].weight = nn.Parameter(spoil(model[0].weight))
        with pytest.raises(ContractError, match=message):
            assert_contract(model, plan, run=lambda: model(torch.ones(2, 4)))


# -- asserting


def tiny():
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)).to(BF16)
    plan = resolve_dtypes(model, policy(("1", FP32)))
    return shard(model, None, plan), plan


def step(model):
    return lambda: model(torch.ones(2, 4)).float().sum().backward()


def test_given_no_mesh_then_storage_compute_and_accumulators_are_as_planned():
    model, plan = tiny()
    assert_contract(model, plan, run=step(model))
    assert {p.dtype for p in model[0].parameters()} == {BF16} and {p.dtype for p in model[1].parameters()} == {FP32}
    assert {p.grad.dtype for p in model.parameters()} == {FP32}


@pytest.mark.parametrize(
    ("spoil", "messages"),
    [
        (lambda m: m[1].bfloat16(), ["1.weight: is stored in bf16, planned fp32", "1.bias: computes in bf16"]),
        (lambda m: setattr(m[0].weight, "grad_dtype", BF16), ["0.weight: accumulates in bf16, planned fp32"]),
        (lambda m: setattr(m[0].bias, "grad_dtype", None), ["0.bias: accumulates in any dtype, planned fp32"]),
    ],
)
def test_given_a_module_that_was_changed_then_the_contract_fails(spoil, messages):
    model, plan = tiny()
    for module in model.modules():
        module._forward_pre_hooks.clear()  # the hook would make the accumulator right again
    spoil(model)
    with pytest.raises(ContractError) as error:
        assert_contract(model, plan, run=lambda: [layer(torch.ones(2, 4, dtype=layer.weight.dtype)) for layer in model])
    assert all(message in str(error.value) for message in messages)


def test_given_a_gradient_in_another_dtype_then_the_contract_fails():
    model, plan = tiny()
    model[0].weight.grad_dtype = None
    model[0].weight.grad = torch.zeros_like(model[0].weight)
    with pytest.raises(ContractError, match=r"0\.weight: has a gradient in bf16, planned fp32"):
        assert_contract(model, plan)


def test_given_a_replaced_parameter_then_the_next_forward_gives_it_its_accumulator():
    model, plan = tiny()
    model[0].bias = nn.Parameter(model[0].bias.detach().clone())
    assert_contract(model, plan, run=step(model))


def test_given_a_run_that_calls_no_module_then_the_contract_fails():
    model, plan = tiny()
    with pytest.raises(ContractError, match="no module with parameters ran"):
        assert_contract(model, plan, run=lambda: None)


def save_distributed(rank, path):
    """Save a sharded model in fp32, and one in bf16 with an optimizer; return their dtypes on disk."""
    from torch.distributed.device_mesh import init_device_mesh

    from dualpipe.checkpoint import save, training_state
    from dualpipe.parallel.mesh import build_mesh
    from dualpipe.train.optim.optimizer import Optimizer

    wide, narrow = (nn.Sequential(nn.Linear(4, 4, bias=False), nn.BatchNorm1d(4, affine=False)) for _ in range(2))
    mesh = build_mesh(1, 2, 1, torch.device("cpu"))
    plan = resolve_dtypes(wide, policy())
    shard(wide, init_device_mesh("cpu", (2,)), plan)
    narrow.to(BF16)
    optimizer = Optimizer([narrow], lr=0.1, betas=(0.9, 0.9), eps=1e-8, weight_decay=0.0)
    saved = [save(path / "wide", training_state([wide]), step=1, mesh=mesh, plan=plan)]
    for name, state in (("narrow", training_state([narrow])), ("masters", training_state([narrow], optimizer))):
        saved.append(save(path / f"{name}-{rank}", state, step=1))
    names = ("0.weight", "1.running_mean")
    return [tuple(checkpoint_dtypes(each)[name] for name in names) for each in saved]


def test_given_a_distributed_checkpoint_then_it_has_storage_dtypes_or_masters(tmp_path):
    for wide, narrow, masters in run_ranks(save_distributed, 2, tmp_path):
        assert wide == (FP32, FP32)
        assert narrow == (BF16, BF16)
        assert masters == (FP32, BF16)


def test_given_a_checkpoint_of_torchs_own_then_its_dtypes_are_found(tmp_path):
    import torch.distributed.checkpoint as dcp

    dcp.save({"a": torch.zeros(2, dtype=BF16), "b": {"c": torch.zeros(1)}}, checkpoint_id=tmp_path, no_dist=True)
    assert checkpoint_dtypes(tmp_path) == {"a": BF16, "b.c": FP32}
    (tmp_path / ".metadata").write_bytes(b"cos\nsystem\n(S'false'\ntR.")  # would run something; another file is there
    save_file({"c": torch.zeros(1)}, tmp_path / "model.safetensors")
    assert checkpoint_dtypes(tmp_path) == {"c": FP32}


# -- printing


def test_given_a_plan_then_its_table_has_a_line_per_kind_of_tensor_with_the_reason():
    lines = resolve(Model(), policy(("layers.1.gate.bias", FP32))).table().splitlines()
    assert lines[0].split() == ["tensor", "storage", "compute", "reduce", "save", "reason"]
    rows = {line.split()[0]: line.split(maxsplit=5)[1:] for line in lines[1:]}
    assert rows["layers.0-1.gate.weight"] == ["fp32", "bf16", "fp32", "bf16", "policy"]
    assert rows["layers.1.gate.bias"] == ["fp32", "fp32", "fp32", "fp32", "rule 'layers.1.gate.bias'"]
    assert rows["layers.0.gate.bias"][1] == "bf16"
    assert rows["layers.0-1.steps"] == ["int64", "int64", "-", "int64", "not floating point"]
