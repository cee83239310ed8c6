"""Adapters of a run of the trainer: gradients, checkpoints, resuming, exports, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from dualpipe import DualPipeV, cli
from dualpipe.checkpoint.hub.commands import export_checkpoint
from dualpipe.models import read_config
from dualpipe.parallel.mesh import Mesh, build_mesh
from dualpipe.quantized.quantize_model import quantized_part
from dualpipe.schedule import build
from dualpipe.train.config.schema import Config, LoRAConfig, MemoryConfig
from dualpipe.train.metrics import read_metrics
from dualpipe.train.parity.errors import TOLERANCES, difference
from dualpipe.train.step import StepRunner, build_model
from faults import planting
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


def change_a_weight(base):
    """Change one number of a base model."""
    weights = next(base.glob("*.safetensors"))
    tensors = load_file(weights)
    tensors["lm_head.weight"][0, 0] += 1
    save_file(tensors, weights, {"format": "pt"})


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
    change_a_weight(base)
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


# -- quantized bases


def frozen_bits(stages):
    """Return copies of the frozen parameters by name, those in blocks as bytes, and the names of these."""
    bits, quantized = {}, set()
    for stage in stages:
        for module in stage.modules():
            if isinstance(module, FSDPModule):
                module.reshard()  # the root stays unsharded after a forward
        for name, parameter in stage.named_parameters():
            if not parameter.requires_grad:
                part = quantized_part(parameter)
                quantized |= {name} if part is not None else set()
                local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
                bits[name] = (local if part is None else part.block_rows).detach().clone()
    return bits, quantized


def train_on_frozen(rank, toml, options):
    """Train; return the gradients of the first step, and the names of the frozen weights that are in blocks."""
    from trainers import built_trainer

    gradients = []
    update = StepRunner.update

    def recorded_update(runner, *arguments):
        trained = {name: p.grad for stage in runner.model.stages for name, p in stage.named_parameters()
                   if p.requires_grad}
        gradients.append({name: grad.full_tensor() if isinstance(grad, DTensor) else grad.clone()
                          for name, grad in trained.items()})
        update(runner, *arguments)

    with built_trainer(toml, options) as trainer, mock.patch.object(StepRunner, "update", recorded_update):
        stages = trainer.runner.model.stages
        before, quantized = frozen_bits(stages)
        trainer.train()
        after, _ = frozen_bits(stages)
        assert before.keys() == after.keys() and all(torch.equal(after[name], bits) for name, bits in before.items())
        assert trainer.state.optimizer.state_tensors().keys() == {
            parameter for stage in stages for name, parameter in stage.named_parameters() if ".adapter.lora_" in name}
    return gradients[0], quantized


def losses_in(folder):
    return [row["loss"] for row in read_metrics(folder / "metrics.jsonl")]


def same_sum(found, expected):
    return abs(found - expected) <= TOLERANCES["float32"] * abs(expected)


@pytest.fixture
def on_blocks(base, tmp_path):
    """Options of a run whose adapters begin with random factors, beside a frozen base that is stored in a format."""
    modules = ["q_proj", "o_proj", "lm_head"]
    peft.LoraConfig(r=2, target_modules=modules, target_parameters=["experts.gate_up_proj", "experts.down_proj"],
                    init_lora_weights=False).save_pretrained(tmp_path / "settings")

    def options(format, output, *more):
        return ["--init.from_hf", str(base.resolve()), "--model.config", "", "--lora.config",
                str(tmp_path / "settings"), "--dtypes.rules", f"*,storage={format}", "--train.batch_size", "8",
                "--train.micro_batch_size", "1", "--train.steps", "2", "--train.eval_batches", "0",
                "--optimizer.clip_norm", "0", "--checkpoint.interval", "1", "--checkpoint.keep_last", "0",
                "--export.to_hf", "auto", "--output.dir", str(tmp_path / output), *more]

    return options


@pytest.mark.slow
@pytest.mark.parametrize("format, layout", [("fp8_block", PP2), ("mxfp4", PP2_EP2)])
def test_adapters_of_a_quantized_base_train_as_without_a_pipeline(run_toml, on_blocks, tmp_path, format, layout):
    pp, _, ep = layout
    parallel = ["--parallel.pp", str(pp), "--parallel.ep", str(ep)]
    expected, quantized = train_on_frozen(0, run_toml, on_blocks(format, "alone", "--parallel.pp", "1"))
    results = run_ranks(train_on_frozen, pp * ep, run_toml, on_blocks(format, "out", *parallel), timeout=120)
    assert set().union(*(names for _, names in results)) == quantized
    assert {name.split(".")[-2] for name in quantized} == {
        "q_proj", "k_proj", "v_proj", "o_proj", "gate_up_proj", "down_proj"}
    found = {name: gradient for gradients, _ in results for name, gradient in gradients.items()}
    assert found.keys() == expected.keys()
    errors = {name: difference(name, gradient, expected[name]).relative for name, gradient in found.items()}
    assert max(errors.values()) < TOLERANCES["float32"], errors
    assert all(map(same_sum, losses_in(tmp_path / "out"), losses_in(tmp_path / "alone")))
    half = tmp_path / "out/checkpoints/step-00000001"
    names = {name for file in half.glob("rank-*.safetensors") for name in load_file(file)}
    assert names and all(".adapter.lora_" in name or name.startswith("routers/") for name in names), names
    resumed = on_blocks(format, "resumed", *parallel, "--checkpoint.resume", str(half))
    run_ranks(train_on_frozen, pp * ep, run_toml, resumed, timeout=120)
    whole, continued = adapters_of(tmp_path / "out/hf"), adapters_of(tmp_path / "resumed/hf")
    assert whole.keys() == continued.keys() and all(torch.equal(continued[name], whole[name]) for name in whole)
    assert losses_in(tmp_path / "resumed") == losses_in(tmp_path / "out")[1:]


def test_a_merged_export_of_a_quantized_base_is_refused_in_a_line(train, on_blocks):
    status, said = train("--lora.adapter", "", *on_blocks("mxfp4", "out", "--export.merged", "True"))
    assert status == 2 and "is stored in blocks with scales, which a sum would be rounded to" in said, said
    assert len(said.strip().splitlines()) == 1, said


def merge_refused(rank, toml, options):
    from trainers import built_trainer

    with pytest.raises(ValueError) as refusal, built_trainer(toml, options):
        pass
    return str(refusal.value)


def test_a_merged_export_is_refused_before_training_by_the_rank_that_has_the_weight(run_toml, on_blocks, tmp_path):
    """Rank 0 of a 1F1B pipeline has no adapters, and so nothing to refuse."""
    peft.LoraConfig(r=2, target_modules=["q_proj"], layers_to_transform=[3]).save_pretrained(tmp_path / "last")
    options = on_blocks("mxfp4", "out", "--export.merged", "True", "--parallel.pp", "2", "--parallel.schedule", "1f1b",
                        "--lora.config", str(tmp_path / "last"))
    for message in run_ranks(merge_refused, 2, run_toml, options):
        assert message.startswith("rank 1 (pp 1): the weight of layers.3.self_attn.q_proj.adapter is stored"), message


# -- bundles


@pytest.mark.slow
@pytest.mark.parametrize("options", [
    ["--lora.dropout", "0.2", "--lora.targets", "q_proj", "o_proj"],
    ["--lora.targets", "q_proj", "experts.down_proj", "--dtypes.rules", "*,storage=mxfp4"],
], ids=["dropout", "quantized"])
def test_a_replayed_step_has_the_numbers_of_its_run(base, dualpipe, tmp_path, options):
    """Step 2 of the adapters, on the base of the run, which the bundle does not hold."""
    nan = planting("nan rank=1 step=2 action=F")
    options = ["--init.from_hf", "base", "--model.config", "", "--lora.rank", "2", "--train.steps", "3",
               "--train.eval_batches", "0", "--optimizer.clip_norm", "0", *options]
    sound = dualpipe(tmp_path, "train", "run.toml", *options, "--output.dir", "sound")
    assert sound.returncode == 0, sound.stderr
    bad = dualpipe(tmp_path, "train", "run.toml", *options, before=nan)
    assert bad.returncode == 1 and "the gradient norm is nan at step 2" in bad.stderr, bad.stderr
    bundle = "out/bundles/step-00000002"
    again = dualpipe(tmp_path, "replay", bundle, before=nan)
    assert again.returncode == 0 and again.stdout.endswith("reproduced\n"), again.stdout + again.stderr
    without_nan = dualpipe(tmp_path, "replay", bundle)
    row = read_metrics(tmp_path / "sound/metrics.jsonl")[1]
    assert f"NOT reproduced: loss {row['loss']}, norm {row['grad_norm']}\n" in without_nan.stdout, without_nan.stdout
    change_a_weight(tmp_path / "base")
    on_another = dualpipe(tmp_path, "replay", bundle)
    assert on_another.returncode == 2 and "has adapters of the base 'base'" in on_another.stderr, on_another.stderr
