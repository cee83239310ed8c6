"""Training with quantized weights: a step equals one of the dequantized weights; a run ends where one in bf16 does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from config_parity import largest_error
from dualpipe.train.metrics import read_metrics
from dualpipe.train.parity.errors import TOLERANCES
from hub import FAMILIES
from ranks import run_ranks
from trainers import built_trainer, resolve_job

TINY = Path(__file__).parents[2] / "examples" / "tiny-cpu.toml"
LAYOUTS = {"pp2 x ep2": ("--parallel.ep", "2"), "pp2 x dp2": ("--parallel.dp", "2")}


def differences(rank, toml, runs):
    """Return the largest relative difference of each run."""
    return [largest_error(*resolve_job(toml, options), torch.float32) for options in runs]


def step_options(folder, family, layout, *rules):
    path = folder / f"{family}.json"
    path.write_text(json.dumps(FAMILIES[family] | {"model_type": family}))
    return ["--model.config", str(path), *LAYOUTS[layout], "--dtypes.rules", *rules]


STEPS = [("gpt_oss", "pp2 x ep2", "*,gather=mxfp8")]
MORE = [("deepseek_v2", "pp2 x ep2", "*.experts,storage=fp8_block", "*.self_attn,gather=nvfp4"),
        ("gpt_oss", "pp2 x dp2", "*.experts,storage=mxfp4", "*.self_attn,storage=mxfp8"),
        *((family, layout, f"*,{way}={format}") for family in FAMILIES for layout in LAYOUTS
          for way in ("storage", "gather") for format in ("mxfp8", "nvfp4", "mxfp4"))]


@pytest.mark.parametrize("steps", [STEPS, pytest.param(MORE, marks=[pytest.mark.slow, pytest.mark.long])],
                         ids=["some", "all"])
def test_a_step_is_that_of_the_dequantized_weights(run_toml, steps):
    """A float32 GEMM takes the dequantized weights, so only the order of sums may differ."""
    runs = [step_options(run_toml.parent, *step) for step in steps]
    for found in run_ranks(differences, 4, str(run_toml), runs, timeout=60 + 20 * len(runs)):
        assert max(found) < TOLERANCES["float32"], dict(zip(steps, found))


def train(rank, toml, runs):
    for options in runs:
        with built_trainer(toml, options) as run:
            run.train()


def losses(toml, folder, runs, *options, timeout):
    """Return the loss of each step by run, given its rules, on two ranks that share experts and storage."""
    every = ["--parallel.pp", "1", "--parallel.ep", "2", "--train.dtype", "bf16", "--checkpoint.resume", "never",
             "--train.eval_interval", "0", "--train.eval_batches", "0", *options]
    asked = [[*every, "--output.dir", str(folder / name), *(["--dtypes.rules", *rules] if rules else [])]
             for name, rules in runs.items()]
    run_ranks(train, 2, str(toml), asked, timeout=timeout, group_timeout=120)
    return {name: [row["loss"] for row in read_metrics(folder / name / "metrics.jsonl")] for name in runs}


@pytest.mark.slow
@pytest.mark.parametrize("format", ["mxfp8", pytest.param("nvfp4", marks=pytest.mark.slow)])
def test_stored_and_gathered_weights_train_alike(run_toml, tmp_path, format):
    """Both have the bytes of the same float32 values, so training is the same, bit for bit."""
    runs = {way: (f"*,{way}={format}",) for way in ("storage", "gather")}
    found = losses(run_toml, tmp_path, runs, "--train.steps", "3", "--train.num_chunks", "2", timeout=120)
    assert found["storage"] == found["gather"]
    assert found["gather"][-1] < found["gather"][0]


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(1200)  # four runs of about half a minute each on two idle cores
def test_60_steps_end_where_bf16_does(tmp_path):
    """The tiny run ends no more than 5% away from bf16.

    The losses are means of the last 20 steps, as single ones differ by percents both ways. These means differ by
    percents between CPUs, which round differently: mxfp8 ended less than 1% above bf16 on one CPU, 2.7% on another.
    Dense weights are too narrow here for two ranks to cut between blocks of 128 rows. In 200 steps, fp8_block ended
    1.7, 0.1 and 0.9% below bf16 with seeds 0, 1 and 2.
    """
    rules = {"mxfp8": "*", "fp8_block": "*.experts", "nvfp4": "*"}
    runs = {format: (f"{pattern},gather={format}",) for format, pattern in rules.items()}
    options = ["--train.steps", "60", "--train.num_chunks", "2"]  # as many sequences as on one rank
    found = losses(TINY, tmp_path, {"bf16": (), **runs}, *options, timeout=1200)
    ends = {name: sum(values[-20:]) / 20 for name, values in found.items()}
    for format in rules:
        above = ends[format] / ends["bf16"] - 1
        assert abs(above) < 0.05, ends
