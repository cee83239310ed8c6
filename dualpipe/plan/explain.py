"""Explanation of a row of a plan: each term, its formula with numbers, and its value."""

from __future__ import annotations

from collections.abc import Iterator

from dualpipe.models.decoder import SparseMLP
from dualpipe.models.flops import flops_per_token, meta_layer
from dualpipe.plan.communication import row_share, takes_two_hops
from dualpipe.plan.memory import DECIMAL, GB, sent_bytes, table, unit_for
from dualpipe.plan.predict import PRODUCTS, Prediction
from dualpipe.plan.stage_costs import ATTENTION_BACKWARD, TILE, context_seconds
from dualpipe.runtime.nccl import EXPERTS

Row = tuple[str, str, str]  # term, formula with numbers, value


def explain(run: Prediction) -> Iterator[str]:
    """Yield the lines of a table of terms, formulas and values, then those of the memory of each rank."""
    rows = [("term", "formula", "value"), *_operator_rows(run), *_compute_rows(run), *_transfer_rows(run),
            *_shard_rows(run), *_step_rows(run)]
    term_width, formula_width, _ = (max(map(len, column)) for column in zip(*rows))
    for term, formula, value in rows:
        yield f"{term:<{term_width}}  {formula:<{formula_width}}  {value}".rstrip()
    yield ""
    yield from table(run.memory, units=DECIMAL)


def _operator_rows(run: Prediction) -> Iterator[Row]:
    """Yield a row per kind of operator, and notes on how some of them are counted."""
    m = run.machine
    p = run.config.parallel
    yield "operators, by kind", f"max(TFLOP / rate, GB / {m.hbm:g} GB/s x {m.bandwidth:g}), summed", ""
    for kind, totals in run.spent.items():
        peak = m.fp8 if kind.startswith("fp8") else m.tflops
        efficiency = kind.removeprefix("fp8 ").replace(" ", "_")
        rate = f" at {peak:g} x {getattr(m, efficiency):g}" if kind in PRODUCTS else ""
        yield (
            f"  {kind}",
            f"{totals.launches:,.0f} launches, {totals.flops / 1e12:,.1f} TFLOP{rate}, {totals.bytes / GB:,.1f} GB, "
            "whole model",
            _ms(totals.seconds),
        )
    rows = run.setting.tokens * p.ep * run.model.num_experts_per_tok / run.model.num_experts
    imbalance = m.imbalance if p.ep > 1 else 1
    yield "  of grouped", f"rows x {imbalance:g} imbalance x (1 + {TILE // 2} / {rows:,.0f} rows per expert)", ""
    yield "  of attention backward", f"{ATTENTION_BACKWARD} x the FLOPs of the forward", ""
    grouped = m.launch_grouped or m.launch
    kernel = m.launch_kernel or m.launch
    yield (
        "  of host",
        f"launches x {m.launch:g} us, {grouped:g} for grouped GEMMs and {kernel:g} for other Triton kernels, beyond "
        "the device's time",
        "",
    )


def _compute_rows(run: Prediction) -> Iterator[Row]:
    """Yield the rows of the parts that compute."""
    pp = run.config.parallel.pp
    num_microbatches = run.config.train.num_chunks
    all_operators = sum(totals.seconds for totals in run.spent.values())
    not_recomputed = 1 - sum(stage.recomputed for stage in run.stages) / all_operators
    for name in ("GEMMs", "memory traffic", "host"):
        formula = (f"its operators x {num_microbatches} micro-batches / {pp} pipeline ranks x {not_recomputed:.3f} not "
                   "recomputed")
        if name == "GEMMs" and run.merged_seconds:
            formula += f", less {_ms(run.merged_seconds)} by merged weight gradients"
        yield name, formula, _ms(run.parts[name])
    recomputed = _ms(all_operators * (1 - not_recomputed))
    yield "recomputation", f"{recomputed} x {num_microbatches} / {pp}", _ms(run.parts["recomputation"])


def _transfer_rows(run: Prediction) -> Iterator[Row]:
    """Yield the rows of the all-to-all, of context parallelism, and of sends between stages."""
    m = run.machine
    p = run.config.parallel
    num_microbatches = run.config.train.num_chunks
    setting = run.setting
    sent = sum(stage.sent for stage in run.stages)
    links = f"{min(p.ep, m.node) - 1}/{p.ep} at {m.nvlink:g} x {m.links:g} GB/s"
    if p.ep > m.node:
        links += f", {p.ep - m.node}/{p.ep} at {m.network:g} x {m.networks:g} GB/s"
    yield "  all-to-all, before overlap", f"bytes x {m.imbalance:g}, {links}, + latency, whole model", _ms(sent)
    if takes_two_hops(m.node, p.ep, p.dispatch):
        yield from _two_hop_rows(run)
    if p.cp > 1:
        seconds = sum(sum(context_seconds(setting, layer)) for layer in run.model.all_layers)
        yield "  of context parallelism", f"{p.cp_method}, {p.cp} ranks {p.ep} apart, whole model", _ms(seconds)
    sent_per_rank = sent * num_microbatches / p.pp
    yield "  per rank", f"{_ms(sent)} x {num_microbatches} / {p.pp}", _ms(sent_per_rank)
    if sent:
        hidden = 1 - run.parts["all-to-all"] / sent_per_rank
        yield (
            "all-to-all",
            f"overlap simulated; {EXPERTS.ctas} of {m.multiprocessors:g} multiprocessors; {hidden:.0%} hidden",
            _ms(run.parts["all-to-all"]),
        )
    size = setting.tokens * sent_bytes(run.model, setting.dtype)
    formula = f"the simulated schedule with {_ms(run.send)} per send of {size / 1e6:,.1f} MB, minus that without sends"
    yield "sends", formula, _ms(run.parts["sends"])


def _two_hop_rows(run: Prediction) -> Iterator[Row]:
    """Yield a line on dispatches in two hops, once for each value of `row_share` among the routers of the layers."""
    m = run.machine
    ep = run.config.parallel.ep
    mlps = (meta_layer(run.model, index).mlp for index in run.model.all_layers)
    shares = {row_share(m, ep, mlp.gate) for mlp in mlps if isinstance(mlp, SparseMLP)}
    for share in sorted(shares):
        yield (
            "  of two hops",
            f"dispatch and its repetition, backward of combine: {share:.2f} of the rows, {ep // m.node - 1} of "
            f"{ep // m.node} at {m.network:g} x {m.networks:g} GB/s, then all rows, {m.node - 1} of {m.node} at "
            f"{m.nvlink:g} x {m.links:g} GB/s",
            "",
        )


def _shard_rows(run: Prediction) -> Iterator[Row]:
    """Yield the rows of gather, reduce and optimizer."""
    m = run.machine
    p = run.config.parallel
    yield "gather", "the first stage's parameters, all-gathered in a ring of the ranks that shard them", _ms(run.gather)
    if p.dp_replicate > 1:
        yield (
            "  of reduce",
            f"reduce-scatter in a ring of {p.dense_shards} ranks, then all-reduce over {p.dp_replicate} parts of dp: "
            f"2 x (1/{p.dense_shards} of dense and 1/{p.expert_shards} of expert gradients)",
            "",
        )
    formula = "the simulated schedule with reductions of float32 gradients, minus that without"
    yield "reduce", formula, _ms(run.parts["reduce"])
    formula = f"2 x (stored + gradients) / ({m.hbm:g} x {m.bandwidth:g} GB/s)"
    if run.host_moments:
        formula = (f"2 x (stored + gradients) + 4 x moments in host memory / ({m.hbm:g} x {m.bandwidth:g} GB/s), or if "
                   "longer the link to the host")
    if run.muon_flops:
        formula += f", + {run.muon_flops:.3g} of Muon / ({m.tflops:g} x {m.gemm:g} TFLOP/s)"
    yield "optimizer", formula, _ms(run.parts["optimizer"])
    if run.host_moments:
        unit = unit_for(run.host_moments, DECIMAL)
        yield (
            "  of the link to the host",
            f"{run.host_moments / unit.bytes:,.1f} {unit.name} of moments, once to and once from the host, both at "
            f"once, / {m.host_link:g} GB/s",
            _ms(run.host_link_seconds),
        )


def _step_rows(run: Prediction) -> Iterator[Row]:
    """Yield the rows of the bubble, the step, its speed and its memory."""
    p = run.config.parallel
    t = run.config.train
    formula = f"the schedule {p.schedule} of {p.pp} ranks, {t.num_chunks} micro-batches, minus a rank's busy time"
    yield "bubble", formula, _ms(run.parts["bubble"])
    yield "step", "the sum of these", f"{run.step_seconds:.4g} s"
    speed = f"{run.tokens_per_second:,.0f}"
    yield "tokens/s/GPU", f"{run.tokens:,} tokens / {run.step_seconds:.4g} s / {p.world_size} GPUs", speed
    flops = flops_per_token(run.model, t.sequence_length).both
    formula = f"{flops / 1e9:,.1f} GFLOP per token x {speed} / {run.machine.tflops:g} TFLOP/s"
    yield "MFU", formula, f"{run.mfu:.1%}"
    unit = unit_for(run.peak, DECIMAL)
    yield "memory", "the worst pipeline rank below", f"{run.peak / unit.bytes:.1f} {unit.name}"


def _ms(seconds: float) -> str:
    """Format seconds as milliseconds."""
    return f"{seconds * 1e3:,.2f} ms"
