"""`dualpipe dtypes` prints the plan that `dualpipe train` runs: held against the tensors that it makes."""

import json
import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from dualpipe import cli
from dualpipe.parallel import DTypePlan, DTypePolicy, TensorDTypes, assert_contract, checkpoint_dtypes
from dualpipe.parallel.contract import ContractError
from dualpipe.parallel.mesh import build_mesh
from dualpipe.parallel.sharding import dtype_of
from dualpipe.train.config import fit_world, load_config
from dualpipe.train.job import Job
from dualpipe.train.loop import Run
from dualpipe.train.resume import Saver
from hub import FAMILIES, TINY, save_qwen
from ranks import run_ranks

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.toml"))
BF16, FP32 = torch.bfloat16, torch.float32
SMALL = ["--parallel.device", "cpu", "--train.steps", "1", "--train.sequence_length", "8", "--train.num_chunks", "4",
         "--train.micro_batch_size", "1", "--train.eval_interval", "0", "--train.eval_batches", "0"]  # fmt: skip


@pytest.fixture
def printed(capsys):
    """The plan that `dualpipe dtypes *arguments` prints, as text and as far as it can be read."""

    def run(*arguments):
        capsys.readouterr()
        assert cli.main(["dtypes", *map(str, arguments)]) == 0, capsys.readouterr().err
        text = capsys.readouterr().out
        return text, read(text)

    return run


def read(text):
    tensors = {}
    for line in text.splitlines()[1:]:
        name, storage, compute, reduce, save, reason = line.split(maxsplit=5)
        dtypes = TensorDTypes(dtype_of(storage), dtype_of(compute), dtype_of(save), reason,
                              reduce=None if reduce == "-" else dtype_of(reduce))  # fmt: skip
        layers = re.search(r"(?<=\.)\d[\d,-]*(?=\.)", name)
        for part in layers[0].split(",") if layers else [None]:
            first, _, last = (part or "0").partition("-")
            for layer in range(int(first), int(last or first) + 1):
                tensors[name if part is None else name.replace(layers[0], str(layer), 1)] = dtypes
    return DTypePlan(DTypePolicy(BF16, FP32, BF16), tensors)


def trained(toml, options, plan):
    """Train a step on this rank and compare with the plan; the names that the rank has."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    config = fit_world(load_config(toml, options), world)
    p = config.parallel
    cpu, mesh = torch.device("cpu"), None
    if world > 1:
        mesh = build_mesh(p.pp, p.dp, p.ep, cpu)
    job = Job(dist.get_rank() if mesh else 0, world, cpu, dist.group.WORLD if mesh else None, mesh)
    with Saver(config, job, lambda line: None) as saver:
        run = Run(config, job, saver)
        saver.resume(run.state)
        stages = run.model.stages
        assert_contract(stages, plan, run=lambda: run._step(0, iter(run.loader)))
        return [name for stage in stages for name in stage.state_dict()]


def all_trained(rank, runs):
    """For each (toml, options, plan), the names of all ranks, or what differs on this one."""
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
    """The same model in small: its families' features, but not their sizes."""
    values = json.loads((ROOT / "examples" / config).read_text())
    small = {"qwen3_moe": TINY | {"mlp_only_layers": values.get("mlp_only_layers")}, **FAMILIES}[values["model_type"]]
    layers, depth = values["num_hidden_layers"], small["num_hidden_layers"]
    values = {key: value[:depth] if isinstance(value, list) and len(value) == layers else value
              for key, value in values.items()} | small | {"vocab_size": 257}  # fmt: skip
    for key in ("quantization_config", "experts_per_token"):
        values.pop(key, None)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(values))
    return folder / "config.json"


RULES = ["--dtypes.rules", "*.mlp.gate,compute=fp32", "lm_head,reduce=bf16,save=fp32", "embed_tokens,storage=bf16",
         "*.o_proj,compute=fp32,output=bf16"]  # fmt: skip


def test_the_printed_plan_is_that_of_the_tensors_that_train_makes(tmp_path, printed):
    """Every example, with its own dtypes and recomputation, at pp 2 x ep 2; one of them with rules as well."""
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text("the cat sat on the mat. " * 200)
    runs = []
    for toml in EXAMPLES:
        config = re.search(r'^config = "(.*)"', toml.read_text(), re.M)[1]
        options = ["--model.config", str(shrunken(config, tmp_path / toml.stem)), "--data.path", str(tmp_path / "text"),
                   "--data.validation_fraction", "0", "--output.dir", str(tmp_path / "out"), "--parallel.pp", "2",
                   "--parallel.ep", "2", *SMALL]  # fmt: skip
        rules = [*RULES, "--train.dtype", "bf16"] if toml.stem == "tiny-cpu" else []
        for extra in [[], rules] if rules else [[]]:
            runs.append((str(toml), options + extra, printed(toml, *options, *extra)[1]))
    assert len(runs) == 9
    for found in run_ranks(all_trained, 4, runs, timeout=120):
        assert [*map(len, found)] == [len(plan.tensors) for _, _, plan in runs], found
        assert all(set(names) == plan.tensors.keys() for names, (_, _, plan) in zip(found, runs))
    ruled = runs[-1][2]
    assert ruled.of("layers.2.mlp.gate.weight").compute is FP32
    assert (ruled.reduce_dtype("lm_head.weight"), ruled.of("lm_head.weight").save) == (BF16, FP32)
    assert ruled.of("embed_tokens.weight").storage is BF16
