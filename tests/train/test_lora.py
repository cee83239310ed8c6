"""Adapters of a run of the trainer: gradients, checkpoints, resuming, exports, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from dualpipe import DualPipeV, cli
from dualpipe.checkpoint.hub.commands import export_checkpoint
from dualpipe.models import read_config
from dualpipe.parallel.mesh import Mesh, build_mesh
from dualpipe.schedule import build
from dualpipe.train.config.schema import Config, LoRAConfig, MemoryConfig
from dualpipe.train.step import build_model
from hf_families import PP2, PP2_DP2, PP2_EP2
from ranks import run_ranks

peft = pytest.importorskip("peft", reason='needs peft: pip install "dualpipe[hf]"')

from lora_cases import assert_small, save_case, step_errors  # noqa: E402

FAST = {("deepseek_v3", PP2_EP2), ("qwen3_moe", PP2_DP2)}
CASES = [pytest.param(family, layout, marks=[] if (family, layout) in FAST else pytest.mark.slow)
         for family in ("qwen3_moe", "gpt_oss", "deepseek_v3") for layout in (PP2, PP2_EP2, PP2_DP2)]


def errors_of(rank, folder, family, layout, recompute):
    """Return the errors of a step of this library's own model against peft."""
    pp, dp, ep = layout
    mesh = build_mesh(pp, dp, ep, torch.device("cpu"))
    place = Mesh.of(mesh)
    settings = Config(lora=LoRAConfig(adapter=str(folder / "adapter")), memory=MemoryConfig(recompute=recompute))
    model = build_model(
        read_config(folder / "base"), build("dualpipev", pp, 4), place.rank("pp"), dtypes=torch.float64,
        device=torch.device("cpu"), settings=settings, from_hf=str(folder / "base"), mesh=mesh)
    pipe = DualPipeV(model.stages, process_group=place.group("pp"))
    return step_errors(mesh, model.stages, pipe, folder, family, {}, wide=True)


@pytest.mark.parametrize("family, layout", CASES)
def test_losses_and_gradients_are_those_of_peft(family, layout, tmp_path):
    save_case(tmp_path, family)
    recompute = ("layer", "dispatch") if layout == PP2_EP2 else ()
    assert_small(run_ranks(
        errors_of, layout[0] * layout[1] * layout[2], tmp_path, family, layout, recompute, timeout=120))


LORA = [("--lora.rank", "2"), ("--lora.targets", "q_proj", "experts.gate_up_proj", "experts.down_proj", "lm_head")]
RUN = ["train", "run.toml", "--parallel.pp", "1", "--train.eval_batches", "0"]


@pytest.fixture
def train(run_toml, monkeypatch, capsys):
    """Train on one rank in this process; return the exit status and the output."""
    monkeypatch.chdir(run_toml.parent)

    def run(*options):
        given = [] if any(option.startswith("--lora.adapter") for option in options) else [*LORA]
        given = [option for name, *values in given for option in (name, *values) if name not in options]
        status = cli.main([*RUN, *given, *options])
        captured = capsys.readouterr()
        return status, captured.out + captured.err

    return run


@pytest.fixture
def base(train, capsys):
    """A base model in the form of the hub, as an earlier run exported it; return its folder."""
    assert cli.main([*RUN, "--train.steps", "1", "--output.dir", "pretrained", "--export.to_hf", "base"]) == 0
    capsys.readouterr()
    return Path("base")


def adapters_of(folder):
    return load_file(Path(folder) / "adapter_model.safetensors")


def logits_of(model, tokens):
    with torch.no_grad():
        return model.eval()(tokens, use_cache=False).logits


@pytest.mark.parametrize("backend", ["dualpipe", "transformers"])
def test_an_export_is_read_by_peft_and_merging_gives_the_same_model(train, base, backend):
    options = ["--init.from_hf", str(base), "--model.config", "", "--train.steps", "3", "--optimizer.lr", "0.05",
               "--model.backend", backend]
    status, said = train(*options, "--export.to_hf", "adapter")
    assert status == 0 and "parameters of adapters beside" in said and "the adapters: adapter" in said, said
    status, said = train(*options, "--export.to_hf", "merged", "--export.merged", "True", "--output.dir", "again")
    assert status == 0 and "the model: merged" in said, said
    whole = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    tokens = torch.randint(0, whole.config.vocab_size, (2, 9), generator=torch.Generator().manual_seed(0))
    before = logits_of(whole, tokens)
    adapted = peft.PeftModel.from_pretrained(whole, "adapter")
    after = logits_of(adapted, tokens)
    merged = logits_of(AutoModelForCausalLM.from_pretrained("merged", dtype=torch.float32), tokens)
    assert (after - before).abs().max() > 1e-2, "the adapters have learned something"
    assert torch.allclose(merged, after, rtol=1e-4, atol=1e-4)
    assert json.loads(Path("adapter/adapter_config.json").read_text())["base_model_name_or_path"] == str(base)


@pytest.mark.parametrize("backend", ["dualpipe", pytest.param("transformers", marks=pytest.mark.slow)])
def test_a_resumed_run_has_the_same_bits_and_its_checkpoints_hold_the_adapters_alone(train, base, backend):
    options = ["--init.from_hf", str(base), "--model.config", "", "--train.steps", "4", "--checkpoint.interval", "2",
               "--checkpoint.keep_last", "0", "--model.backend", backend, "--export.to_hf", "auto", "--lora.targets",
               "q_proj", "o_proj", "lm_head", "--lora.dropout", "0.2"]
    assert train(*options)[0] == 0
    half = Path("out/checkpoints/step-00000002")
    status, said = train(*options, "--output.dir", "resumed", "--checkpoint.resume", str(half))
    assert status == 0 and "resuming from" in said, said
    expected, found = adapters_of("out/hf"), adapters_of("resumed/hf")
    assert expected.keys() == found.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    names = {name for file in half.glob("rank-*.safetensors") for name in load_file(file)}
    assert names and all(".adapter.lora_" in name or name.startswith("routers/") for name in names), names
    if backend == "dualpipe":
        with pytest.raises(ValueError, match="has adapters of the base 'base' alone"):
            export_checkpoint(half, "exported", torch.float32, 10**9)


def test_adapters_of_another_base_are_refused(train, base):
    options = ["--init.from_hf", str(base), "--model.config", "", "--checkpoint.interval", "1", "--train.steps"]
    assert train(*options, "1")[0] == 0
    weights = next(base.glob("*.safetensors"))
    tensors = load_file(weights)
    tensors["lm_head.weight"][0, 0] += 1
    save_file(tensors, weights, {"format": "pt"})
    status, said = train(*options, "2")
    assert status == 2 and "has adapters of the base 'base' (xxh3_128:" in said, said


def test_a_run_begins_with_an_adapter_of_peft(train, base):
    options = ["--init.from_hf", str(base), "--model.config", "", "--train.steps", "1"]
    assert train(*options, "--export.to_hf", "first")[0] == 0
    more = ["--optimizer.lr", "1e-12", "--lora.adapter", "first", "--output.dir", "more", "--export.to_hf", "second"]
    assert train(*options, *more)[0] == 0
    first, second = adapters_of("first"), adapters_of("second")
    assert first.keys() == second.keys()
    assert all(torch.allclose(first[name], second[name], atol=1e-9) for name in first)


@pytest.mark.parametrize("options, message", [
    (["--lora.targets", "nothing"], "[lora]: "),
    (["--lora.dropout", "0.1"], "does not work with lora_dropout"),
    (["--lora.targets", "embed_tokens"], "embed_tokens is a Embedding, and adapters are for linear layers"),
    (["--lora.rank", "0"], "give both lora.rank and lora.targets"),
    (["--lora.config", "somewhere"], "the adapter_config.json sets all of these"),
    (["--router.bias_update_rate", "0.1"], "the base is frozen; leave it out"),
])
def test_settings_that_adapters_do_not_have_are_refused_in_a_line(train, options, message):
    status, said = train(*options)
    assert status == 2 and message in said, said
    assert len(said.strip().splitlines()) == 1, said


def trained_alone(rank, folder, options):
    """Train a step on two ranks; return the adapters' gradient norm in the metrics, and what this rank trains."""
    from trainers import built_trainer

    with built_trainer(folder / "run.toml", options) as trainer:
        trainer.train()
        return len(trainer.runner.parameters), trainer.done


def test_a_rank_may_have_no_adapters_beside_a_quantized_base(run_toml, tmp_path, monkeypatch):
    """Layers by number, from a file of peft: rank 0 of a 1F1B pipeline has none. Experts are stored in MXFP8."""
    peft.LoraConfig(r=2, target_modules=["q_proj"], layers_to_transform=[3]).save_pretrained(tmp_path / "settings")
    options = ["--parallel.pp", "2", "--parallel.schedule", "1f1b", "--train.steps", "2", "--checkpoint.interval", "1",
               "--output.dir", str(tmp_path / "out"), "--lora.config", str(tmp_path / "settings"), "--export.to_hf",
               "auto", "--dtypes.rules", "*.mlp.experts.down_proj.weight,storage=mxfp8"]
    results = run_ranks(trained_alone, 2, run_toml.parent, options, fresh=True)
    assert results == [(0, 2), (2, 2)]
    factors = adapters_of(tmp_path / "out/hf")
    assert len(factors) == 2 and all(".layers.3.self_attn.q_proj." in name for name in factors)
