"""Options in `[dtypes]` for GEMMs with quantized weights, besides the rules."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from dualpipe.models import build_stages
from dualpipe.nn import GroupedLinear, Linear
from dualpipe.schedule import build
from dualpipe.train import describe_run
from dualpipe.train.config.fit import Resolved
from dualpipe.train.config.load import load_config
from dualpipe.train.config.model_config import read_model
from dualpipe.train.config.schema import Config, DTypesConfig
from dualpipe.train.step import build_model, resolve_run_dtypes
from ranks import run_ranks
from trainers import built_trainer

STEPS = 2
SMALL = ["--parallel.pp", "1", "--parallel.ep", "2", "--train.num_chunks", "2", "--train.eval_interval", "0",
         "--train.eval_batches", "0", "--train.dtype", "bf16", "--train.compile", "False"]


def trained(rank, toml, runs):
    """Return, for the options of each run, the norms of parameters after some steps and the bytes sent to experts."""
    found = []
    for options in runs:
        with built_trainer(toml, [*SMALL, *options]) as run:
            stages = run.runner.model.stages
            sent = stages[0].layers["0"].mlp.dispatcher.dispatch._stream
            with run.data.loader.batches(STEPS) as batches:
                for step in range(STEPS):
                    run._step(step, batches)
            layers = [m for stage in stages for m in stage.modules() if isinstance(m, Linear | GroupedLinear)]
            assert {(m.gemm_precision, m.fp8_weight_grad) for m in layers} == {
                (run.config.dtypes.gemm_precision, run.config.dtypes.fp8_weight_grad)}
            norm = torch.stack([p.detach().to_local().double().norm() for p in run.runner.pipeline.parameters()])
            found.append((norm.tolist(), sent.sent_bytes))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["*,gather=mxfp8", pytest.param("*.experts,gather=fp8_block", marks=pytest.mark.slow)])
def test_rows_that_are_dispatched_in_fp8_train_the_same(run_toml, rule):
    common = ["--dtypes.rules", rule, "--dtypes.fp8_weight_grad", "True"]
    runs = [common, [*common, "--dtypes.fp8_dispatch", "True"], [*common, "--dtypes.gemm_precision", "weight-only"]]
    for (plain, sent), (fp8, fewer), (weight_only, _) in run_ranks(trained, 2, str(run_toml), runs, timeout=90):
        assert fp8 == plain and weight_only != plain
        assert 0.8 * sent < fewer < 0.92 * sent  # 33 or 36 bytes a row instead of 64, on one of the four ways


@pytest.mark.parametrize("rule, dtype, precision, found", [
    ("*.experts.down_proj,gather=mxfp8", "bf16", "auto", "None in bf16"), ("*,storage=nvfp4", "bf16", "auto", "nvfp4"),
    ("*,gather=mxfp8", "fp32", "auto", "mxfp8 in fp32"), ("*,gather=mxfp8", "bf16", "weight-only", "mxfp8.*only'"),
])
def test_fp8_dispatch_is_for_experts_with_products_in_fp8(run_toml, rule, dtype, precision, found):
    config = load_config(run_toml, ["--dtypes.rules", rule, "--train.dtype", dtype])
    model = read_model(config).config
    plan = resolve_run_dtypes(Resolved.of(config, model), None)
    with pytest.raises(ValueError, match=rf"fp8_dispatch: got experts with .*{found}.*needs expert GEMMs in FP8"):
        build_model(model, build("1f1b", 1, 1), 0, dtypes=plan, device=torch.device("cpu"),
                    settings=Config(dtypes=DTypesConfig(gemm_precision=precision, fp8_dispatch=True)))


def test_a_run_warns_of_gemms_that_are_slower_in_fp8(run_toml, monkeypatch):
    asked = []
    monkeypatch.setattr(describe_run, "slower_in_fp8", lambda *call: asked.append(call) or "a reason")
    config = load_config(run_toml, ["--dtypes.rules", "*.experts,gather=mxfp8", "--train.dtype", "bf16"])
    model = read_model(config).config
    plan, device = resolve_run_dtypes(Resolved.of(config, model), None), torch.device("cpu")
    (stage,) = build_stages(model, 1)
    built = SimpleNamespace(config=model, plan=plan, stages=(stage,))
    assert describe_run.slow_fp8_weights(built, 64, device) == ["gate_up_proj: a reason", "down_proj: a reason"]
    assert {(format.name, shape, rows) for format, shape, rows, _ in asked} == {
        ("mxfp8", (4, 64, 32), 32.0), ("mxfp8", (4, 32, 32), 32.0)}
    for module in stage.modules():
        module.gemm_precision = "weight-only"
    assert describe_run.slow_fp8_weights(built, 64, device) == []
