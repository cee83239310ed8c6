"""Hugging Face checkpoints in and out, on one process and in every layout: bit for bit."""

import hashlib
import json
import warnings
from math import prod
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from dualpipe.checkpoint import hub_dtypes, load_hf, save_hf
from dualpipe.checkpoint.hub.files import read_headers
from dualpipe.checkpoint.hub.load import open_hf, stage_tensors
from dualpipe.models import KimiK2Config, build_stages, config_from_dict, read_config
from dualpipe.nn import cross_entropy_loss
from dualpipe.nn.init import local_part
from dualpipe.parallel import DTypePolicy, Rule, resolve_dtypes
from dualpipe.parallel.fsdp.materialize import build_on_meta
from hub import FAMILIES, TINY, read_all, reads_of, rewrite, save_family, save_qwen, stages_on_meta
from models import from_hub
from ranks import run_ranks

LAYOUTS = [(2, 1, 1), (1, 2, 1), (2, 1, 2), (1, 2, 2)]


def whole(folder, rules=(), dtype=torch.float32):
    """Return the loaded model in one stage, and its plan."""
    config = read_config(folder)
    stages = build_on_meta(lambda: build_stages(config, 1))
    plan = resolve_dtypes(stages, DTypePolicy(dtype, torch.float32, dtype, rules), hub_dtypes(folder, config))
    load_hf(stages, folder, None, plan)
    return stages[0], plan


def logits_and_loss(model, vocab_size):
    tokens = torch.randint(vocab_size, (3, 12), generator=torch.Generator().manual_seed(1))
    logits = model(tokens[:, :-1])
    logits = getattr(logits, "logits", logits)
    loss = cross_entropy_loss(logits, tokens[:, 1:])
    loss.backward()
    return logits.detach(), loss.detach()


def hash_of(folder):
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(Path(folder).iterdir())}


def assert_same(actual, expected):
    assert actual.keys() == expected.keys()
    for name in expected:
        assert actual[name].dtype is expected[name].dtype, name
        assert torch.equal(actual[name], expected[name]), name


# -- one process


@pytest.mark.parametrize("shard_size", ["40KB", "1GB"])
@pytest.mark.parametrize("tied", [False, True])
def test_loaded_is_transformers(tmp_path, tied, shard_size):
    theirs = save_qwen(tmp_path, shard_size, tie_word_embeddings=tied)
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == (shard_size != "1GB")
    assert_trains_alike(whole(tmp_path)[0], theirs)


@pytest.mark.parametrize("changes", [{"num_experts_per_tok": 1, "norm_topk_prob": False},
                                     {"mlp_only_layers": [0, 1, 2, 3]}, {"decoder_sparse_step": 2},
                                     {"attention_bias": True, "num_hidden_layers": 1, "mlp_only_layers": []}],
                         ids=["one expert", "dense", "every second", "one layer"])
def test_odd_models_loaded_are_transformers(tmp_path, changes):
    theirs = save_qwen(tmp_path, **changes)
    assert_trains_alike(whole(tmp_path)[0], theirs)


@pytest.mark.parametrize("family", FAMILIES)
def test_other_families_loaded_are_transformers(tmp_path, family):
    theirs = save_family(tmp_path, family)
    assert_trains_alike(whole(tmp_path)[0], theirs)


def assert_trains_alike(ours, theirs):
    for actual, expected in zip(logits_and_loss(ours, 61), logits_and_loss(theirs, 61)):
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    gradients = {name: param.grad for name, param in ours.named_parameters()}
    hub = {name: param.grad for name, param in theirs.named_parameters()}
    expected = from_hub(ours.config, {name: grad.shape for name, grad in gradients.items()}, hub)
    for name, gradient in gradients.items():
        assert (gradient - expected[name]).norm() <= 1e-5 * expected[name].norm(), name


@pytest.mark.parametrize("from_source", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_saved_is_what_was_loaded(tmp_path, tied, from_source):
    source, target = tmp_path / "source", tmp_path / "new" / "target"
    theirs = save_qwen(source, tie_word_embeddings=tied, rope_theta=5e5)
    (source / "tokenizer.json").write_text("{}")
    stages, plan = whole(source)
    save_hf([stages], target, None, plan, source=source if from_source else None, max_shard_bytes=30_000)
    assert_same(read_all(target), read_all(source))
    again = AutoModelForCausalLM.from_pretrained(target)
    assert_same(again.state_dict(), theirs.state_dict())
    assert torch.equal(logits_and_loss(again, 61)[0], logits_and_loss(theirs, 61)[0])
    carried = {"tokenizer.json", "generation_config.json"}
    assert {path.name for path in target.iterdir()} & carried == (carried if from_source else set())
    assert read_config(target) == read_config(source)
    assert (tmp_path / "new").stat().st_mode == target.stat().st_mode


def test_files_are_numbered_without_gaps_and_indexed(tmp_path):
    save_qwen(tmp_path / "source")
    stage, plan = whole(tmp_path / "source")
    save_hf([stage], tmp_path / "target", None, plan, max_shard_bytes=30_000)
    files = sorted(path.name for path in (tmp_path / "target").glob("*.safetensors"))
    assert files == [f"model-{n:05}-of-{len(files):05}.safetensors" for n in range(1, len(files) + 1)]
    index = json.loads((tmp_path / "target" / "model.safetensors.index.json").read_text())
    header = read_headers(tmp_path / "target")
    assert index["weight_map"] == {name: info.file for name, info in header.items()}
    assert index["metadata"]["total_size"] == sum(info.nbytes for info in header.values())
    sizes = dict.fromkeys(files, 0)
    for info in header.values():
        sizes[info.file] += info.nbytes
    assert max(sizes.values()) <= 30_000


def test_tied_stages_of_one_rank(tmp_path):
    """The first and the last stage share a tensor: written once, and read for both."""
    theirs = save_qwen(tmp_path / "source", tie_word_embeddings=True)
    stages, mesh, plan = stages_on_meta(tmp_path / "source", stages_per_rank=4)
    load_hf(stages, tmp_path / "source", mesh, plan)
    assert stages[0].embed_tokens.weight is stages[-1].lm_head.weight
    save_hf(stages, tmp_path / "target", mesh, plan)
    assert_same(read_all(tmp_path / "target"), read_all(tmp_path / "source"))
    assert "lm_head.weight" not in read_all(tmp_path / "target")
    assert theirs.lm_head.weight is theirs.model.embed_tokens.weight


def test_a_head_is_tied_unless_the_files_have_another_one(tmp_path, monkeypatch):
    """As in transformers; an export of an untied model says so."""
    source = tmp_path / "source"
    save_qwen(source, tie_word_embeddings=True)
    tensors = read_all(source)
    embedding = tensors.pop("model.embed_tokens.weight")
    for head_only in ({}, {"model.embed_tokens.weight": embedding}):
        rewrite(source, tensors | head_only | {"lm_head.weight": embedding.clone()})
        assert torch.equal(whole(source)[0].lm_head.weight, embedding)
    head = embedding.roll(1)
    rewrite(source, tensors | {"model.embed_tokens.weight": embedding, "lm_head.weight": head})
    with pytest.raises(ValueError, match=r"lm_head.weight differs from the embedding"):
        hub_dtypes(source, config_from_dict(TINY | {"model_type": "qwen3_moe", "tie_word_embeddings": True}))
    with pytest.warns(UserWarning, match=r"lm_head.weight beside it differs from the embedding"):
        stage, plan = whole(source)
        save_hf([stage], tmp_path / "target", None, plan, source=source)
    monkeypatch.setenv("RANK", "1")
    with warnings.catch_warnings(action="error"):  # rank 0 has warned
        read_config(source)
    assert torch.equal(stage.embed_tokens.weight, embedding) and torch.equal(stage.lm_head.weight, head)
    assert json.loads((tmp_path / "target" / "config.json").read_text())["tie_word_embeddings"] is False
    assert torch.equal(read_all(tmp_path / "target")["lm_head.weight"], head)


def test_fused_experts(tmp_path):
    save_qwen(tmp_path)
    tensors = read_all(tmp_path)
    apart, _ = whole(tmp_path)
    state = {f"model.{name}": tensor for name, tensor in apart.state_dict().items() if ".experts." in name}
    fused = {name.removesuffix(".weight"): tensor for name, tensor in state.items()}
    rewrite(tmp_path, {name: tensor for name, tensor in tensors.items() if ".experts." not in name} | fused)
    assert_same(whole(tmp_path)[0].state_dict(), apart.state_dict())


def test_pins_stay_float32(tmp_path):
    """A router is float32 among bfloat16: by a rule when loaded from bfloat16, and afterwards by the file's dtype."""
    save_qwen(tmp_path / "source", dtype=torch.bfloat16)
    stage, plan = whole(tmp_path / "source", [Rule("*.mlp.gate", torch.float32)], torch.bfloat16)
    with torch.no_grad():  # what bfloat16 would lose
        stage.layers["1"].mlp.gate.weight.fill_(1 + 2**-20)
    save_hf([stage], tmp_path / "target", None, plan)
    found = {name: info.dtype for name, info in read_headers(tmp_path / "target").items()}
    assert {name for name, dtype in found.items() if dtype is torch.float32} == {
        f"model.layers.{index}.mlp.gate.weight" for index in (1, 2, 3)
    }
    assert set(found.values()) == {torch.float32, torch.bfloat16}
    again, plan = whole(tmp_path / "target", dtype=torch.bfloat16)
    assert plan.of("layers.1.mlp.gate.weight").save is torch.float32
    assert_same(again.state_dict(), dict(stage.state_dict()))
    assert json.loads((tmp_path / "target" / "config.json").read_text())["dtype"] == "bfloat16"


def test_values_that_the_plan_would_round_are_refused(tmp_path):
    save_qwen(tmp_path)
    stages = build_on_meta(lambda: build_stages(read_config(tmp_path), 1))
    stages[0].to(torch.bfloat16)
    plan = resolve_dtypes(stages, DTypePolicy(torch.bfloat16, torch.float32, torch.bfloat16))
    with pytest.raises(ValueError, match=r"would be rounded to torch.bfloat16"):
        load_hf(stages, tmp_path, None, plan)
    assert all(param.device.type == "meta" for param in stages[0].parameters())


# -- quantized checkpoints


def test_fp8_checkpoint(tmp_path):
    save_qwen(tmp_path, dtype=torch.bfloat16)
    tensors, expected = read_all(tmp_path), {}
    for name, tensor in list(tensors.items()):
        expected[name] = tensor
        if "_proj" in name:  # (N, H) in blocks of 16 x 8
            scales = torch.rand(-(-tensor.shape[0] // 16), -(-tensor.shape[1] // 8)) + 0.5
            tensors[name] = tensor.to(torch.float8_e4m3fn)
            tensors[f"{name}_scale_inv"] = scales
            each = scales.repeat_interleave(16, 0)[: tensor.shape[0]].repeat_interleave(8, 1)[:, : tensor.shape[1]]
            expected[name] = tensors[name].float() * each
    rewrite(tmp_path, tensors, quantization_config={"quant_method": "fp8", "weight_block_size": [16, 8]})
    for dtype in (torch.bfloat16, torch.float32):
        stages = build_on_meta(lambda: build_stages(read_config(tmp_path), 1))
        stages[0].to(dtype)
        plan = resolve_dtypes(stages, DTypePolicy(dtype, torch.float32, dtype), hub_dtypes(tmp_path, stages[0].config))
        load_hf(stages, tmp_path, None, plan)
        shapes = {name: tensor.shape for name, tensor in stages[0].state_dict().items()}
        reference = from_hub(stages[0].config, shapes, expected)
        assert_same(stages[0].state_dict(), {name: tensor.to(dtype) for name, tensor in reference.items()})


def test_mxfp4_gpt_oss_is_transformers(tmp_path):
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    theirs = save_family(tmp_path / "plain", "gpt_oss").to(torch.bfloat16)
    packed = {}
    for name, param in theirs.state_dict().items():
        if name.endswith(("gate_up_proj", "down_proj")):
            experts, inputs, outputs = param.shape
            blocks = torch.randint(256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8)
            scales = torch.randint(118, 124, blocks.shape[:-1], dtype=torch.uint8)
            packed |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            param.copy_(convert_moe_packed_tensors(blocks, scales))
        else:
            packed[name] = param
    theirs.save_pretrained(tmp_path / "packed")
    rewrite(tmp_path / "packed", packed, quantization_config={"quant_method": "mxfp4"})
    ours, plan = whole(tmp_path / "packed", dtype=torch.float32)
    expected = logits_and_loss(theirs.float(), 61)
    for actual, wanted in zip(logits_and_loss(ours, 61), expected):
        torch.testing.assert_close(actual, wanted, rtol=1e-5, atol=1e-5)
    # Written again, it is not quantized, and transformers reads the same values.
    save_hf([ours], tmp_path / "target", None, plan, source=tmp_path / "packed", max_shard_bytes=30_000)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "target", dtype=torch.float32)
    assert_same(again.state_dict(), theirs.float().state_dict())


# -- configurations


@pytest.mark.parametrize("extra", [{}, {"rope_parameters": {
    "rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 128}}])
def test_a_configuration_survives(tmp_path, extra):
    from transformers import AutoConfig

    save_qwen(tmp_path, **extra)
    config = read_config(tmp_path)
    assert config_from_dict(json.loads(json.dumps(config.to_dict()))) == config
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    AutoConfig.from_pretrained(tmp_path).save_pretrained(tmp_path / "again")
    assert read_config(tmp_path / "again") == config


def test_kimi_k2_is_deepseek_v3_by_its_own_name(tmp_path):
    theirs = save_family(tmp_path / "v3", "deepseek_v3", num_nextn_predict_layers=0)
    expected, _ = whole(tmp_path / "v3")
    code = {"auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config",
                         "AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM"}}
    source = tmp_path / "v3"
    rewrite(source, read_all(source), model_type="kimi_k2", **code)
    for name in ("configuration_deepseek.py", "modeling_deepseek.py", "tiktoken.model"):
        (source / name).write_text(f"{name} of the source")
    (source / "additional_chat_templates").mkdir()
    (source / "additional_chat_templates/tool_use.jinja").write_text("a second template")
    stage, plan = whole(source)
    assert type(stage.config) is KimiK2Config
    assert_same(stage.state_dict(), expected.state_dict())

    save_hf([stage], tmp_path / "carried", None, plan, source=source)
    save_hf([stage], tmp_path / "alone", None, plan)
    for path in (source / "configuration_deepseek.py", source / "modeling_deepseek.py"):
        path.unlink()
    save_hf([stage], tmp_path / "no code", None, plan, source=source)
    published = dict(KimiK2Config.auto_map)
    assert published["AutoConfig"] == "moonshotai/Kimi-K2-Instruct--configuration_deepseek.DeepseekV3Config"
    for name, auto_map, carries in (("carried", code["auto_map"], True), ("alone", published, False),
                                    ("no code", published, False)):
        written = json.loads((tmp_path / name / "config.json").read_text())
        assert written["model_type"] == "kimi_k2"
        assert written["architectures"] == ["DeepseekV3ForCausalLM"]
        assert written["auto_map"] == auto_map
        assert (tmp_path / name / "modeling_deepseek.py").exists() == carries
        assert_same(read_all(tmp_path / name), read_all(source))
        again, _ = whole(tmp_path / name)
        assert again.config == stage.config
        assert_same(again.state_dict(), stage.state_dict())
    assert (tmp_path / "carried" / "tiktoken.model").read_text() == "tiktoken.model of the source"
    assert (tmp_path / "carried/additional_chat_templates/tool_use.jinja").read_text() == "a second template"
    assert torch.equal(logits_and_loss(stage, 61)[0], logits_and_loss(expected, 61)[0])
    torch.testing.assert_close(logits_and_loss(stage, 61)[0], logits_and_loss(theirs, 61)[0], rtol=1e-5, atol=1e-5)


def test_a_source_of_another_model_is_refused(tmp_path):
    save_qwen(tmp_path / "source")
    stage, plan = whole(tmp_path / "source")
    save_qwen(tmp_path / "other", num_experts_per_tok=3)
    with pytest.raises(ValueError, match=r"another model \(num_experts_per_tok: 3 there, 2 in the model\)"):
        save_hf([stage], tmp_path / "target", None, plan, source=tmp_path / "other")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other", "source"]


# -- layouts


def load_and_save(rank, source, target, shape):
    """Return the names of this rank's wrong parameters, and the bytes it has read; all ranks write the model."""
    stages, mesh, plan = stages_on_meta(source, shape)
    read = load_hf(stages, source, mesh, plan)
    hub, wrong = read_all(source), []
    for stage in stages:
        tensors = stage_tensors(stage)
        reference = from_hub(stage.config, {name: tensor.shape for name, tensor in tensors.items()}, hub)
        for name, tensor in tensors.items():
            local, part = local_part(tensor)
            if local.dtype is not reference[name].dtype or not torch.equal(local, reference[name][part]):
                wrong.append(name)
    save_hf(stages, target, mesh, plan, source=source, max_shard_bytes=30_000)
    return wrong, read


@pytest.mark.parametrize("shape", [
    *(pytest.param(shape, marks=pytest.mark.slow) for shape in LAYOUTS[:3]), *LAYOUTS[3:],
])
def test_layouts(tmp_path, shape):
    source, target, alone = (str(tmp_path / name) for name in ("source", "target", "alone"))
    save_qwen(source, vocab_size=59)  # uneven shards
    results = run_ranks(load_and_save, prod(shape), source, target, shape)
    config = read_config(source)
    reader, tensors = open_hf(source, config)
    header = reader.header
    for rank, (wrong, read) in enumerate(results):
        assert not wrong
        reads = reads_of(tensors, config, shape, rank)
        assert read == sum(box.numel * header[name].dtype.itemsize for name, box in reads)
    total = sum(info.nbytes for info in header.values())
    assert sum(read for _, read in results) == total  # nothing twice
    stage, plan = whole(source)
    save_hf([stage], alone, None, plan, source=source, max_shard_bytes=30_000)
    assert hash_of(target) == hash_of(alone)
    assert_same(read_all(target), read_all(source))


@pytest.mark.parametrize("family", [
    pytest.param(family, marks=() if family == "deepseek_v3" else pytest.mark.slow) for family in FAMILIES
])
def test_layouts_of_other_families(tmp_path, family):
    """Some experts are transposed on the hub. A buffer is on every rank, and one rank writes it."""
    source, target = str(tmp_path / "source"), str(tmp_path / "target")
    theirs = save_family(source, family, max_shard_size="40KB")
    for wrong, _ in run_ranks(load_and_save, 4, source, target, (1, 2, 2)):
        assert not wrong
    assert_same(read_all(target), read_all(source))
    assert_same(AutoModelForCausalLM.from_pretrained(target).state_dict(), theirs.state_dict())


@pytest.mark.parametrize("family", FAMILIES)
def test_other_families_without_a_source(tmp_path, family):
    """The written configuration is enough for transformers to compute the same logits."""
    theirs = save_family(tmp_path / "source", family)
    ours, plan = whole(tmp_path / "source")
    save_hf([ours], tmp_path / "target", None, plan)
    assert read_config(tmp_path / "target") == ours.config
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "target")
    assert torch.equal(logits_and_loss(again, 61)[0], logits_and_loss(theirs, 61)[0])
    torch.testing.assert_close(logits_and_loss(ours, 61)[0], logits_and_loss(theirs, 61)[0], rtol=1e-5, atol=1e-5)
