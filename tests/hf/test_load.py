"""Models of transformers in a pipeline of real ranks: loaded by stages, sharded, trained, and saved."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from dualpipe import DualPipeV
from dualpipe.hf import load_stages, save_stages
from dualpipe.parallel import DTypePolicy
from dualpipe.parallel.experts.dispatcher import stacked_parameters
from dualpipe.parallel.mesh import Mesh, build_mesh
from hf_families import (
    FAMILIES,
    MICROBATCHES,
    MOE,
    PP2,
    PP2_DP2,
    PP2_EP2,
    ROUNDING_ROUTERS,
    batch_of,
    config_of,
    error_of,
    loss_fn,
    save_tiny,
    tiny_model,
    train_step,
    whole_losses,
)
from ranks import run_ranks

FAST = {("qwen3_moe", PP2_EP2), ("qwen3_next", PP2), ("llama", PP2)}
CASES = [
    pytest.param(family, layout, marks=[] if (family, layout) in FAST else pytest.mark.slow)
    for family in FAMILIES for layout in (PP2, PP2_EP2, PP2_DP2)
    if family in MOE or layout != PP2_EP2
]


def pipeline(rank, folder, layout, **options):
    """Return the mesh, this rank's stages of a V, and their pipeline."""
    pp, dp, ep = layout
    mesh = build_mesh(pp, dp, ep, torch.device("cpu"))
    place = Mesh.of(mesh)
    number = place.rank("pp")
    mine = (number, 2 * pp - 1 - number)
    stages = load_stages(folder, 2 * pp, mine, mesh=mesh, dtype=torch.float64, **options)
    return mesh, stages, DualPipeV(stages, process_group=place.group("pp"))


def errors_of(rank, folder, layout, overlap=True):
    """Return the errors of losses and gradients against the whole model, and the number of layers that are cut."""
    mesh, stages, pipe = pipeline(rank, folder, layout, overlap=overlap)
    losses = train_step(mesh, pipe)
    whole = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, experts_implementation="eager").train()
    expected_losses = whole_losses(whole, layout[1] * layout[2])
    expected = {name: parameter.grad for name, parameter in whole.named_parameters(remove_duplicate=False)}
    errors = {}
    for stage in stages:
        for name, parameter in stage.named_parameters(remove_duplicate=False):
            grad = parameter.grad
            whole_grad = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
            errors[name] = error_of(whole_grad, expected[name])
    if losses is not None:
        own = torch.tensor(expected_losses[Mesh.of(mesh).replica], dtype=torch.float64)
        errors["losses"] = error_of(losses, own)
    return errors, sum(len(stage.splits) for stage in stages)


@pytest.mark.parametrize("family, layout", CASES)
def test_losses_and_gradients_are_those_of_the_whole_model(family, layout, tmp_path):
    save_tiny(tmp_path, family)
    results = run_ranks(errors_of, layout[0] * layout[1] * layout[2], tmp_path, layout, timeout=120)
    tolerance = 1e-5 if family in ROUNDING_ROUTERS else 1e-10
    for errors, num_splits in results:
        assert max(errors.values()) < tolerance, {n: e for n, e in errors.items() if e >= tolerance}
        assert (num_splits > 0) is (family in MOE and layout[2] > 1), "layers are cut if tokens change ranks"
    assert "losses" in results[0][0]


@pytest.mark.slow
def test_layers_run_as_a_whole_without_overlap(tmp_path):
    save_tiny(tmp_path, "qwen3_moe")
    for errors, num_splits in run_ranks(errors_of, 4, tmp_path, PP2_EP2, False, timeout=120):
        assert max(errors.values()) < 1e-10 and num_splits == 0


@pytest.mark.parametrize("layout", [PP2, pytest.param(PP2_EP2, marks=pytest.mark.slow)])
def test_tied_embeddings_at_both_ends(layout, tmp_path):
    save_tiny(tmp_path, "qwen3_moe", tie_word_embeddings=True)
    for errors, _ in run_ranks(errors_of, layout[0] * layout[2], tmp_path, layout, timeout=120):
        assert max(errors.values()) < 1e-10, errors


def tied_over_two_ranks(rank, folder):
    """Return the gradient of this rank's copy of a tied embedding, in a pipeline with one stage per rank."""
    from dualpipe import Pipeline

    mesh = build_mesh(2, 1, 1, torch.device("cpu"))
    (stage,) = load_stages(folder, 2, (rank,), mesh=mesh, dtype=torch.float64)
    pipe = Pipeline([stage], process_group=mesh["pp"].get_group())
    tokens, labels = batch_of(0)
    inputs = () if rank else (tokens,)
    pipe.step(*inputs, num_chunks=MICROBATCHES, criterion=loss_fn, labels=(labels,) if rank else ())
    return stage.tied_parameters()[0].grad


def test_a_tied_embedding_on_two_ranks_gets_the_sum_on_both(tmp_path):
    save_tiny(tmp_path, "qwen3_moe", tie_word_embeddings=True)
    whole = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64, experts_implementation="eager").train()
    whole_losses(whole, 1)
    for grad in run_ranks(tied_over_two_ranks, 2, tmp_path):
        assert error_of(grad, whole.get_input_embeddings().weight.grad) < 1e-10


def saved(rank, folder, target, layout):
    mesh, stages, _ = pipeline(rank, folder, layout)
    save_stages(stages, target, mesh=mesh, max_shard_size="20KB")


@pytest.mark.parametrize("family, tied", [
    ("qwen3_moe", True), ("gpt_oss", False), pytest.param("deepseek_v3", False, marks=pytest.mark.slow),
    pytest.param("qwen3_next", False, marks=pytest.mark.slow), pytest.param("mixtral", True, marks=pytest.mark.slow)])
def test_transformers_loads_the_checkpoint_of_four_ranks_with_the_same_bits(family, tied, tmp_path):
    source, target = tmp_path / "source", tmp_path / "target"
    save_tiny(source, family, tie_word_embeddings=tied)
    run_ranks(saved, 4, source, target, PP2_EP2, timeout=120)
    found, report = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float64, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    expected = tiny_model(family, tie_word_embeddings=tied).state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.state_dict().items())
    names = {name for file in source.glob("*.safetensors") for name in load_file(file)}
    index = json.loads((target / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == names, "the names of the hub's files"
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in found.state_dict().values()) - (
        found.lm_head.weight.nbytes if tied else 0)
    assert {path.name for path in tmp_path.iterdir()} == {"source", "target"}


@pytest.mark.parametrize("stored", ["both", "equal", "head only"])
def test_a_head_is_tied_if_transformers_ties_it(stored, tmp_path):
    """config.json ties the two, whatever the files have."""
    save_tiny(tmp_path / "source", "qwen3")
    (file,) = (tmp_path / "source").glob("*.safetensors")
    tensors = load_file(file)
    if stored == "equal":
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    if stored == "head only":
        del tensors["model.embed_tokens.weight"]
    save_file(tensors, file, metadata={"format": "pt"})
    config = json.loads((tmp_path / "source" / "config.json").read_text()) | {"tie_word_embeddings": True}
    (tmp_path / "source" / "config.json").write_text(json.dumps(config))
    tokens, _ = batch_of(0)
    expected = AutoModelForCausalLM.from_pretrained(tmp_path / "source", dtype=torch.float64)(tokens).logits
    for count in (1, 2, 3):
        stages = load_stages(tmp_path / "source", count, tuple(range(count)), dtype=torch.float64)
        x = tokens
        for stage in stages:
            x = stage(x)
        assert error_of(x, expected) < 1e-12
        target = tmp_path / f"saved by {count}"
        save_stages(stages, target)
        assert json.loads((target / "config.json").read_text())["tie_word_embeddings"] == (stored != "both")
        saved_model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float64)
        assert error_of(saved_model(tokens).logits, expected) < 1e-12


def killed_save(rank, folder, target, place):
    """Die while the export to `target` is written: in the middle, or before its directory gets its name."""
    from dualpipe.checkpoint.hub import save as hub_save
    from dualpipe.hf import save as stage_save

    stages = load_stages(folder, 2, (0, 1))
    module = stage_save if place == "_join" else hub_save
    setattr(module, place, lambda *arguments: os._exit(9))
    save_stages(stages, target)


@pytest.mark.parametrize("place", ["_join", "_finish"])
def test_an_export_after_a_killed_one_replaces_it(place, tmp_path):
    source, target = tmp_path / "source", tmp_path / "target"
    save_tiny(source, "llama")
    run_ranks(killed_save, 1, source, target, place, check=False, fresh=True)
    assert not target.exists()
    save_stages(load_stages(source, 2, (0, 1)), target, source=source)
    assert {path.name for path in tmp_path.iterdir()} == {"source", "target"}
    expected = tiny_model("llama").state_dict()
    found = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float64).state_dict()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_store_is_no_place_for_an_export(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="s3://bucket/out"):
        save_stages(load_stages(config_of("llama"), 1, (0,)), "s3://bucket/out")
    assert not list(tmp_path.iterdir())


def refused_save(rank, folder, target):
    mesh, stages, _ = pipeline(rank, folder, PP2)
    with pytest.raises(ValueError, match="exists already; give a new directory"):
        save_stages(stages, target, mesh=mesh)


def test_a_model_is_not_overwritten(tmp_path):
    save_tiny(tmp_path, "llama")
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    run_ranks(refused_save, 2, tmp_path, tmp_path)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before


def test_a_tensor_of_two_stages_is_not_saved(tmp_path):
    """Otherwise one of the two would be lost silently."""
    stages = load_stages(config_of("llama"), 2, (0, 1))
    stages[1].causal_lm.model.scale = torch.nn.Parameter(torch.ones(()))
    stages[0].causal_lm.model.scale = torch.nn.Parameter(torch.zeros(()))
    with pytest.raises(ValueError, match=r"model\.scale"):
        save_stages(stages, tmp_path / "saved")
    assert not list(tmp_path.iterdir())


def test_weights_from_a_configuration_do_not_depend_on_the_cut():
    config = config_of("qwen3_moe")
    (whole,) = load_stages(config, 1, (0,), seed=3)
    stages = load_stages(config_of("qwen3_moe"), 3, (0, 1, 2), seed=3)
    expected = whole.state_dict()
    found = {name: tensor for stage in stages for name, tensor in stage.state_dict().items()}
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)
    (other,) = load_stages(config_of("qwen3_moe"), 1, (0,), seed=4)
    assert not torch.equal(other.state_dict()["lm_head.weight"], expected["lm_head.weight"])
    assert 0 < expected["model.layers.1.mlp.experts.down_proj"].std() < 0.05
    x = torch.arange(6).view(1, 6)
    assert torch.isfinite(whole(x)).all(), "rotary tables and all buffers are there"


def failing(rank, folder, match, options):
    with pytest.raises(ValueError, match=match):
        pipeline(rank, folder, options.pop("layout", PP2), **options)


def remove_a_weight(folder: Path, name: str) -> None:
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    del tensors[name]
    save_file(tensors, file, metadata={"format": "pt"})


def test_a_checkpoint_that_lacks_a_weight_is_refused_on_all_ranks(tmp_path):
    """The weight is missing from one stage only; otherwise the other rank would wait forever."""
    save_tiny(tmp_path, "llama")
    name = "model.layers.1.self_attn.q_proj.weight"
    remove_a_weight(tmp_path, name)
    run_ranks(failing, 2, tmp_path, f"lacks 1 of a stage's weights, such as '{name}'", {})


@pytest.mark.parametrize("options, match", [
    ({"layers_per_stage": (1, 1)}, "layers_per_stage must be 4 numbers"),
    ({"experts": "grouped_mm", "layout": PP2_EP2}, "cannot be sharded over 2 expert-parallel ranks"),
    ({"dispatch": "two_hop", "layout": PP2_EP2}, "two_hop"),
    ({"dispatch": "post", "layout": PP2_EP2}, "post"),
])
def test_wrong_arguments_are_refused_on_all_ranks(options, match, tmp_path):
    save_tiny(tmp_path, "qwen3_moe")
    pp, dp, ep = options.get("layout", PP2)
    run_ranks(failing, pp * dp * ep, tmp_path, match, options)


def test_experts_outside_of_the_experts_interface_are_refused_on_all_ranks(tmp_path):
    """JetMoE multiplies expert by expert in a module of its own."""
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 16, "num_hidden_layers": 2, "kv_channels": 8,
             "num_key_value_heads": 2, "num_attention_heads": 4, "num_local_experts": 4, "num_experts_per_tok": 2}
    AutoConfig.for_model("jetmoe", **sizes).save_pretrained(tmp_path)
    message = "a JetMoeForCausalLM has no experts that transformers calls through its experts interface"
    run_ranks(failing, 4, tmp_path, message, {"layout": PP2_EP2})


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, "bfloat16", torch.complex64])
def test_a_dtype_that_cannot_be_trained_is_refused(dtype):
    with pytest.raises(ValueError, match=r"dtype=.* cannot be trained; expected one of torch\.f"):
        load_stages(config_of("llama"), 2, (0, 1), dtype=dtype)


def test_other_implementations_of_experts_run_whole(tmp_path):
    save_tiny(tmp_path, "qwen3_moe")
    (stage,) = load_stages(tmp_path, 1, [0], dtype=torch.float64, experts="eager")
    tokens, _ = batch_of(0, rows=2)
    assert not stage.splits
    assert torch.equal(stage(tokens), tiny_model("qwen3_moe")(tokens, use_cache=False).logits)


def whole_with_jitter(rank, folder):
    """Run a step with layers that run as a whole; the log names them and the reason."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logging.getLogger("dualpipe.hf.load").addHandler(handler)
    mesh, stages, pipe = pipeline(rank, folder, PP2_EP2)
    assert any("MixtralDecoderLayer" in line and "mlp.jitter_noise = 0.01" in line for line in messages)
    losses = train_step(mesh, pipe)
    grads = [p.grad for stage in stages for p in stage.parameters()]
    assert not any(stage.splits for stage in stages) and all(grad is not None for grad in grads)
    assert pipe.deferral_report().share > 0.95, "experts that run inside a layer defer too"
    return None if losses is None else losses.isfinite().all().item()


def test_layers_that_cannot_be_cut_train_over_ranks_of_experts(tmp_path):
    tiny_model("mixtral", router_jitter_noise=0.01).save_pretrained(tmp_path)
    results = run_ranks(whole_with_jitter, 4, tmp_path, timeout=120)
    assert [found for found in results if found is not None] == [True] * 2


def bfloat16_grads(rank, folder):
    """Return the gradients of this rank's stages, in bfloat16."""
    mesh = build_mesh(2, 1, 2, torch.device("cpu"))
    place = Mesh.of(mesh)
    number = place.rank("pp")
    stages = load_stages(folder, 4, (number, 3 - number), mesh=mesh, dtype=torch.bfloat16)
    train_step(mesh, DualPipeV(stages, process_group=place.group("pp")))
    return {name: p.grad.full_tensor() for stage in stages for name, p in stage.named_parameters() if p.requires_grad}


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "deepseek_v3", "qwen3_next"])
def test_bfloat16_is_as_near_to_float64_as_transformers_is(family, tmp_path):
    """Compare the mean error of all gradients: routers use rounded values, so single gradients differ by 100%."""
    save_tiny(tmp_path, family)
    grads = []
    for dtype in (torch.float64, torch.bfloat16):
        whole = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype, experts_implementation="eager").train()
        whole_losses(whole, 2)
        grads.append({name: p.grad.double() for name, p in whole.named_parameters() if p.grad is not None})
    exact, rounded = grads
    found = {name: grad.double() for of_rank in run_ranks(bfloat16_grads, 4, tmp_path, timeout=120)
             for name, grad in of_rank.items()}
    assert found.keys() == exact.keys()
    errors = [sum(((grads[name] - grad).norm() / grad.norm()).item() for name, grad in exact.items()) / len(exact)
              for grads in (found, rounded)]
    assert errors[0] < 1.1 * errors[1], errors


@pytest.mark.parametrize("family", FAMILIES)
def test_at_least_95_percent_of_the_weight_gradients_are_deferred(family):
    """By FLOPs. The rest are routers, which are bare parameters, and convolutions of linear attention."""
    pipe = DualPipeV(load_stages(config_of(family), 2, (0, 1), dtype=torch.float64))
    tokens, labels = batch_of(0)
    pipe.step(tokens, num_chunks=MICROBATCHES, criterion=loss_fn, labels=(labels,))
    report = pipe.deferral_report()
    names = " ".join(parameter.name for parameter in report.parameters if parameter.flops_share)
    assert report.share >= (0.95 if family in MOE else 1.0), report
    assert "experts.gate_up_proj" not in names and "experts.down_proj" not in names and "q_proj" not in names


def context_mesh(rank):
    mesh = build_mesh(1, 1, 1, torch.device("cpu"), cp=2)
    with pytest.raises(ValueError, match="2 context-parallel ranks, but models of transformers cannot share"):
        load_stages(config_of("llama"), 2, (0, 1), mesh=mesh)


def test_context_parallel_ranks_are_refused():
    run_ranks(context_mesh, 2)


@pytest.mark.parametrize("mine, match", [((1, 0), "ascending"), ((0, 0), "repetition"), ((), "at least one"),
                                         ((0, 2), r"\[2\]")])
def test_stages_that_are_not_there_or_not_in_order_are_refused(mine, match):
    with pytest.raises(ValueError, match=match):
        load_stages(config_of("llama"), 2, mine)


def test_experts_that_cannot_be_divided_are_refused_on_all_ranks(tmp_path):
    """The rank with dense layers raises as well."""
    save_tiny(tmp_path, "glm4_moe", n_routed_experts=9, n_group=1)
    options = {"layout": PP2_EP2, "layers_per_stage": (1, 1, 1, 1)}
    run_ranks(failing, 4, tmp_path, "9 experts cannot be divided evenly among 2 expert-parallel ranks", options)


def test_the_policy_applies_without_sharding():
    policy = DTypePolicy(torch.bfloat16, torch.float32, torch.bfloat16)
    pipe = DualPipeV(load_stages(config_of("qwen3_moe"), 2, (0, 1), dtype=torch.bfloat16, policy=policy))
    tokens, labels = batch_of(0)
    pipe.step(tokens, num_chunks=MICROBATCHES, criterion=loss_fn, labels=(labels,))
    assert {parameter.grad.dtype for parameter in pipe.parameters()} == {torch.float32}


@pytest.mark.parametrize("left", [
    {"output_router_logits": True}, {"return_dict": False}, {"gradient_checkpointing": True},
    {"unsloth_version": "2026.1", "temperature": 0.7, "output_attentions": True, "output_hidden_states": True}])
def test_keys_that_tools_leave_in_the_configuration_change_nothing(left, tmp_path):
    save_tiny(tmp_path, "qwen3_moe")
    tokens, _ = batch_of(0)
    expected = tiny_model("qwen3_moe")(tokens).logits
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | left))
    x = tokens
    for stage in load_stages(tmp_path, 3, (0, 1, 2), dtype=torch.float64):
        x = stage(x)
    assert error_of(x, expected) < 1e-12


def test_a_configuration_with_a_language_model_inside(tmp_path):
    """Like Qwen3.5-MoE's configuration on the hub; transformers' causal LM is its text part."""
    save_tiny(tmp_path, "qwen3_5_moe_text")
    path = tmp_path / "config.json"
    text = json.loads(path.read_text())
    path.write_text(json.dumps({"model_type": "qwen3_5_moe", "text_config": text}))
    stages = load_stages(tmp_path, 2, (0, 1), dtype=torch.float64, experts="eager")
    experts = [module for stage in stages for module in stage.modules() if stacked_parameters(module)]
    assert {module.config._experts_implementation for module in experts} == {"eager"}
    tokens, _ = batch_of(0, rows=2)
    expected = tiny_model("qwen3_5_moe_text")(tokens, use_cache=False).logits
    assert torch.allclose(stages[1](stages[0](tokens)), expected, rtol=1e-10)
