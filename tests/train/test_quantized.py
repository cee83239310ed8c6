"""Training with quantized weights: a step is that of what they dequantize to, and a run ends where one in bf16 does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from dualpipe.parallel.mesh import build_mesh
from dualpipe.train import parity
from dualpipe.train.config import fit_world, load_config
from dualpipe.train.job import Job
from hub import FAMILIES
from ranks import run_ranks

TINY = Path(__file__).parents[2] / "examples" / "tiny-cpu.toml"
LAYOUTS = {"pp2 x ep2": ("--parallel.ep", "2"), "pp2 x dp2": ("--parallel.dp", "2")}


def job_of(config):
    p, cpu = config.parallel, torch.device("cpu")
    return Job(cpu, build_mesh(p.pp, p.dp, p.ep, cpu) if dist.is_initialized() else None)


def differences(rank, toml, runs):
    """The largest relative difference of each run."""
    found = []
    for options in runs:
        config = fit_world(load_config(toml, options), 4)
        found.append(max(each.relative for each in parity.compare(config, job_of(config), torch.float32)))
    return found


def step_options(folder, family, layout, *rules):
    path = folder / f"{family}.json"
    path.write_text(json.dumps(FAMILIES[family] | {"model_type": family}))
    return ["--model.config", str(path), *LAYOUTS[layout], "--dtypes.rules", *rules]


STEPS = [("gpt_oss", "pp2 x ep2", "*,gather=mxfp8"), ("deepseek_v3", "pp2 x dp2", "*,storage=nvfp4"),
         ("deepseek_v2", "pp2 x ep2", "*.experts,storage=fp8_block", "*.self_attn,gather=fp8_tensor"),
         ("gpt_oss", "pp2 x dp2", "*.experts,storage=mxfp4", "*.self_attn,storage=mxfp8")]
MORE = [(family, layout, f"*,{way}={format}") for family in FAMILIES for layout in LAYOUTS
        for way in ("storage", "gather") for format in ("mxfp8", "nvfp4", "mxfp4", "fp8_tensor")]


@pytest.mark.parametrize("steps", [STEPS, pytest.param(MORE, marks=pytest.mark.slow)], ids=["some", "all"])
def test_a_step_is_that_of_the_dequantized_weights(run_toml, steps):
    """In float32 a product takes what a weight dequantizes to, so nothing but the order of sums may differ."""
    runs = [step_options(run_toml.parent, *step) for step in steps]
    for found in run_ranks(differences, 4, str(run_toml), runs, timeout=60 + 20 * len(runs)):
        assert max(found) < parity.TOLERANCES["float32"], dict(zip(steps, found))
