"""`dualpipe dtypes` prints the plan that `dualpipe train` runs: compared with the tensors of a run."""

import json
import re
import shlex
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from dualpipe import cli
from dualpipe.kernels.formats import FORMATS
from dualpipe.parallel import (
    ContractError,
    DTypePlan,
    DTypePolicy,
    TensorDTypes,
    assert_contract,
    checkpoint_dtypes,
)
from dualpipe.runtime.dtypes import dtype_of
from dualpipe.train.config.load import load_config
from hub import FAMILIES, TINY, read_all, rewrite, save_qwen
from ranks import run_ranks
from trainers import built_trainer

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted(path for path in (ROOT / "examples").glob("*.toml") if path.stem != "lora-tiny")  # needs its base
BF16, FP32 = torch.bfloat16, torch.float32
SMALL = ["--parallel.device", "cpu", "--train.steps", "1", "--train.sequence_length", "8", "--train.num_chunks", "4",
         "--train.micro_batch_size", "1", "--train.eval_interval", "0", "--train.eval_batches", "0",
         "--train.compile", "False"]  # which takes longer on CPU than ranks wait for each other here


@pytest.fixture
def printed(capsys):
    """Return the plan that `dualpipe dtypes *arguments` prints, as text and as far as it can be parsed."""

    def run(*arguments):
        capsys.readouterr()
        assert cli.main(["dtypes", *map(str, arguments)]) == 0, capsys.readouterr().err
        text = capsys.readouterr().out
        return text, read(text)

    return run


def read(text):
    tensors = {}
    for line in text.splitlines()[1:]:
        name, stored, compute, reduce, save, reason = re.split("  +", line, maxsplit=5)
        storage, gather = re.fullmatch(r"(\w+)(?:, gathered as (\w+))?(?: \+ fp32 masters)?", stored).groups()
        format = FORMATS.get(gather or storage)
        dtypes = TensorDTypes(dtype_of("fp32" if storage in FORMATS else storage), dtype_of(compute), dtype_of(save),
                              reason, reduce=None if reduce == "-" else dtype_of(reduce), format=format,
                              gathered=bool(gather), master="masters" in stored)
        layers = re.search(r"(?<=\.)\d[\d,-]*(?=\.)", name)
        for part in layers[0].split(",") if layers else [None]:
            first, _, last = (part or "0").partition("-")
            for layer in range(int(first), int(last or first) + 1):
                tensors[name if part is None else name.replace(layers[0], str(layer), 1)] = dtypes
    return DTypePlan(DTypePolicy(BF16, FP32, BF16), tensors)


def trained(toml, options, plan):
    """Train a step on this rank and compare with the plan; return the names of the rank's tensors."""
    with built_trainer(toml, options) as run:
        run.saver.resume(run.state)
        stages, loader = run.runner.model.stages, run.data.loader
        with loader.batches(loader.step + 1) as batches:
            assert_contract(stages, plan, run=lambda: run._step(0, batches))
        return [name for stage in stages for name in stage.state_dict()]


def trained_as(rank, *arguments):
    return trained(*arguments)


def all_trained(rank, runs):
    """Return the names of all ranks for each (toml, options, plan), or the first difference on this rank."""
    found = []
    for toml, options, plan in runs:
        try:
            names = trained(toml, options, plan)
        except ContractError as error:
            return f"{toml} {options}: {error}"
        everywhere = [[]] * dist.get_world_size()
        dist.all_gather_object(everywhere, names)
        found.append(sorted({name for names in everywhere for name in names}))
    return found


def shrunken(config, folder):
    """Write the same model in small: with its family's features, but not its sizes."""
    values = json.loads((ROOT / "examples" / config).read_text())
    small = {"qwen3_moe": TINY | {"mlp_only_layers": values.get("mlp_only_layers")}, **FAMILIES}[values["model_type"]]
    layers, depth = values["num_hidden_layers"], small["num_hidden_layers"]
    values = {key: value[:depth] if isinstance(value, list) and len(value) == layers else value
              for key, value in values.items()} | small | {"vocab_size": 257}
    for key in ("quantization_config", "experts_per_token"):
        values.pop(key, None)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(values))
    return folder / "config.json"


RULES = ["--dtypes.rules", "*.mlp.gate,compute=fp32", "lm_head,reduce=bf16,save=fp32", "embed_tokens,storage=bf16",
         "*.o_proj,compute=fp32,output=bf16"]
QUANTIZED = ["--dtypes.rules", "*.experts,gather=mxfp8", "*.self_attn,storage=nvfp4",
             "*.v_proj,compute=fp32,output=bf16"]


@pytest.mark.slow
def test_the_printed_plan_is_that_of_the_tensors_that_train_makes(tmp_path, printed):
    """Examples run with their own dtypes and recomputation, at pp 2 x ep 2; one of them with rules and formats too."""
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text("the cat sat on the mat. " * 200)
    runs = []
    for toml in EXAMPLES:
        config = re.search(r'^config = "(.*)"', toml.read_text(), re.M)[1]
        options = ["--model.config", str(shrunken(config, tmp_path / toml.stem)), "--data.path", str(tmp_path / "text"),
                   "--data.validation_fraction", "0", "--output.dir", str(tmp_path / "out"), "--parallel.pp", "2",
                   "--parallel.ep", "2", "--parallel.cp", "1", *SMALL]
        rules = (RULES, QUANTIZED) if toml.stem == "tiny-cpu" else ()
        several = [options, *([*options, *each, "--train.dtype", "bf16"] for each in rules)]
        runs += [(str(toml), each, printed(toml, *each)[1]) for each in several]
    for found in run_ranks(all_trained, 4, runs, timeout=120):
        assert [*map(len, found)] == [len(plan.tensors) for _, _, plan in runs], found
        assert all(set(names) == plan.tensors.keys() for names, (_, _, plan) in zip(found, runs))
    ruled, quantized = (plan for _, _, plan in runs[-2:])
    assert quantized.of("layers.2.mlp.experts.down_proj.weight").gathered
    assert quantized.of("layers.1.self_attn.v_proj.weight").master
    assert ruled.of("layers.2.mlp.gate.weight").compute is FP32
    assert (ruled.reduce_dtype("lm_head.weight"), ruled.of("lm_head.weight").save) == (BF16, FP32)
    assert ruled.of("embed_tokens.weight").storage is BF16


# -- checkpoints with float32 parts


def mixed_checkpoint(folder):
    """Save a bfloat16 checkpoint whose router of layer 1, and one head, are float32."""
    save_qwen(folder, dtype=BF16, vocab_size=257)
    tensors = read_all(folder)
    for name in ("model.layers.1.mlp.gate.weight", "lm_head.weight"):
        tensors[name] = tensors[name].float()
    rewrite(folder, tensors)
    return folder


@pytest.mark.slow
def test_what_a_checkpoint_keeps_in_float32_is_printed_computed_and_resumed(run_folder, tmp_path, printed, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options = ["--model.config", "", "--init.from_hf", str(mixed_checkpoint(tmp_path / "hub")), "--train.dtype", "bf16",
               "--data.path", str(run_folder / "text"), "--parallel.pp", "1", *SMALL]
    rules = ["--dtypes.rules", "layers.2.input_layernorm,compute=fp32", "layers.3.mlp.gate,save=fp32"]
    toml, fp32 = run_folder / "run.toml", {"layers.1.mlp.gate.weight", "lm_head.weight"}

    def kept(plan, what):
        return {name for name, dtypes in plan.tensors.items() if getattr(dtypes, what) is FP32}

    text, plan = printed(toml, *options, "--parallel.ep", "2")
    assert kept(plan, "compute") == fp32 and kept(plan, "storage") == plan.tensors.keys()
    assert "layers.1.mlp.gate.weight" in text and "fp32 in a lower-precision checkpoint" in text
    assert all(map(len, run_ranks(trained_as, 2, str(toml), [*options, "--parallel.ep", "2"], plan)))
    text, plan = printed(toml, *options)
    assert kept(plan, "storage") == fp32, "one replica stores what it computes in"
    assert len(trained(str(toml), options, plan)) == len(plan.tensors)

    # A run with rules saves a checkpoint. It goes on in its previous dtypes, without the rules too.
    saves = ["--checkpoint.interval", "1", "--export.to_hf", "exported"]
    assert cli.main(["train", str(toml), *options, *rules, *saves]) == 0
    exported = kept_on_disk(tmp_path / "exported")
    assert exported == {"model.layers.1.mlp.gate.weight", "model.layers.2.input_layernorm.weight", "lm_head.weight",
                        "model.layers.3.mlp.gate.weight"}
    with_rules, without = printed(toml, *options, *rules)[1], printed(toml, *options)[1]
    assert kept(with_rules, "compute") == kept(without, "compute") == fp32 | {"layers.2.input_layernorm.weight"}
    assert "layers.3.mlp.gate.weight" in kept(with_rules, "save") - kept(without, "save")
    assert kept(printed(toml, *options, "--checkpoint.resume", "never")[1], "compute") == fp32
    assert len(trained(str(toml), options, without)) == len(without.tensors)


def loaded(rank, toml, options, plan):
    """Check that masters are the checkpoint's values, and parameters those rounded; then train a step."""
    with built_trainer(toml, options) as run:
        hub = read_all(Path(run.config.init.from_hf))
        masters = {parameter: tensors["master"] for parameter, tensors in run.state.optimizer.state_tensors().items()}
        for stage in run.runner.model.stages:
            for name, parameter in stage.named_parameters():
                master = masters[parameter]
                assert (master.dtype, parameter.dtype) == (FP32, BF16), name
                assert torch.equal(parameter, master.to(BF16)), name
                if f"model.{name}" in hub:
                    assert torch.equal(master, hub[f"model.{name}"]), name
    return trained(toml, options, plan)


@pytest.mark.parametrize("pp, tied", [(1, False), (1, True), pytest.param(2, False, marks=pytest.mark.slow)])
def test_one_replica_computes_in_bf16_from_a_float32_checkpoint(run_folder, tmp_path, printed, monkeypatch, pp, tied):
    """If tied, the embedding and the head are one parameter, which two stages see."""
    monkeypatch.chdir(tmp_path)
    save_qwen(tmp_path / "hub", vocab_size=257, tie_word_embeddings=tied)
    options = ["--model.config", "", "--init.from_hf", "hub", "--train.dtype", "bf16", "--data.path",
               str(run_folder / "text"), "--parallel.pp", str(pp), "--parallel.schedule", "dualpipev", *SMALL]
    toml = str(run_folder / "run.toml")
    _, plan = printed(toml, *options)
    assert {(dtypes.storage, dtypes.compute, dtypes.save) for dtypes in plan.tensors.values()} == {(BF16, BF16, BF16)}
    names = run_ranks(loaded, pp, toml, options, plan) if pp > 1 else [loaded(0, toml, options, plan)]
    assert sorted(name for each in names for name in each) == sorted(plan.tensors)


def test_one_replica_goes_on_in_bf16_from_a_float32_run(run_folder, tmp_path, printed, monkeypatch):
    """The values of a run's own checkpoint are the masters, too."""
    monkeypatch.chdir(tmp_path)
    options = ["--data.path", str(run_folder / "text"), "--parallel.pp", "1", *SMALL]
    toml = str(run_folder / "run.toml")
    assert cli.main(["train", toml, *options, "--checkpoint.interval", "1", "--checkpoint.dir", "first"]) == 0
    again = [*options, "--train.dtype", "bf16", "--train.steps", "2", "--checkpoint.resume", "first", "--output.dir",
             "second"]
    _, plan = printed(toml, *again)
    assert {(dtypes.storage, dtypes.compute) for dtypes in plan.tensors.values()} == {(BF16, BF16)}
    assert len(trained(toml, again, plan)) == len(plan.tensors)


def test_a_rule_narrows_what_a_mixed_checkpoint_has_in_float32(run_folder, tmp_path, printed, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options = ["--model.config", "", "--init.from_hf", str(mixed_checkpoint(tmp_path / "hub")), "--train.dtype", "bf16",
               "--data.path", str(run_folder / "text"), "--parallel.pp", "1", "--dtypes.rules", "lm_head,compute=bf16",
               *SMALL]
    toml = str(run_folder / "run.toml")
    _, plan = printed(toml, *options)
    assert plan.of("lm_head.weight").storage is BF16 and plan.of("layers.1.mlp.gate.weight").storage is FP32
    assert len(trained(toml, options, plan)) == len(plan.tensors)


def kept_on_disk(folder):
    dtypes = checkpoint_dtypes(folder)
    assert set(dtypes.values()) == {BF16, FP32}
    return {name for name, dtype in dtypes.items() if dtype is FP32}


# -- rules, and their document


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--dtypes.rules", "*.mlp.gat,compute=fp32"], "nearest: '*.mlp.gate'"),
        (["--dtypes.rules", "*.mlp.gate,comput=fp32"], "the nearest valid name is 'compute'"),
        (["--dtypes.rules", "*.mlp.gate,storage=mxfp8"], "matches '*.mlp.gate' (stored"),
        (["--dtypes.rules", "lm_head"], "at least one of storage, compute"),
        (["--dtypes.rules", "lm_head,storage=bf16", "--train.dtype", "fp32"], "bf16, which is narrower"),
        (["--dtypes.rules", "lm_head,storage=fp32", "--train.dtype", "bf16"], "which only a sharded module can"),
        (["--dtypes.rules", "lm_head,save=fp32", "*,save=bf16"], "rules disagree on lm_head.weight"),
    ],
)
def test_a_rule_that_cannot_be_is_one_line(run_folder, monkeypatch, capsys, options, message):
    monkeypatch.chdir(run_folder)
    assert cli.main(["dtypes", "run.toml", "--parallel.pp", "1", *SMALL, *options]) == 2, "no plan that train refuses"
    assert message in capsys.readouterr().err
    assert cli.main(["train", "run.toml", "--output.dir", "none", "--parallel.pp", "1", *SMALL, *options]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_a_rule_for_another_ranks_stage_is_none_of_its_business(run_folder, tmp_path, printed):
    """The rules each match on one of two pipeline ranks only."""
    options = ["--dtypes.rules", "lm_head,compute=fp32", "layers.1.mlp.gate,compute=fp32", "--train.dtype", "bf16",
               "--output.dir", str(tmp_path), *SMALL]
    plan = printed(run_folder / "run.toml", *options)[1]
    first, second = run_ranks(trained_as, 2, str(run_folder / "run.toml"), options, plan)
    assert sorted(first + second) == sorted(plan.tensors)


def test_the_document_shows_what_is_printed(printed, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(ROOT)
    text = (ROOT / "docs" / "precision.md").read_text()
    program = re.search(r"```python\n(.*?)```", text, re.S)[1]
    of_program, of_command = re.findall(r"```text\n(.*?)```", text, re.S)
    exec(compile(program, "docs/precision.md", "exec"), {"__name__": "document"})
    assert capsys.readouterr().out == of_program
    command, = re.findall(r"^    dualpipe dtypes (.*)", text, re.M)
    arguments = shlex.split(command)
    assert printed(*arguments, "--checkpoint.resume", "never")[0] == of_command
    rules = re.search(r"```toml\n(.*?)```", text, re.S)[1]
    (tmp_path / "rules.toml").write_text(f'[model]\nconfig = "x"\n{rules}')
    assert load_config(tmp_path / "rules.toml").dtypes == load_config(arguments[0], arguments[1:]).dtypes
