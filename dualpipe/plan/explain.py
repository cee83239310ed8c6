"""Where the numbers of a row come from: each term, its formula with numbers, and what it gives."""

from __future__ import annotations

from collections.abc import Iterator

from dualpipe.models.flops import flops_per_token
from dualpipe.plan.memory import DECIMAL, GB, sent_bytes, table, unit_for
from dualpipe.plan.predict import PRODUCTS, Prediction
from dualpipe.plan.stage_costs import ATTENTION_BACKWARD, TILE, context_seconds
from dualpipe.runtime.nccl import EXPERTS


def explain(run: Prediction) -> Iterator[str]:
    """Lines of a table: term, formula with numbers, value."""
    rows = [("term", "formula", "value"), *_terms(run)]
    first, second, _ = (max(map(len, column)) for column in zip(*rows))
    for term, formula, value in rows:
        yield f"{term:<{first}}  {formula:<{second}}  {value}".rstrip()
    yield ""
    yield from table(run.memory, units=DECIMAL)


def _terms(run: Prediction) -> Iterator[tuple[str, str, str]]:
    m, s, c = run.machine, run.setting, run.config
    p, t, chunks = c.parallel, c.train, c.train.num_chunks
    parts, share = run.parts, chunks / p.pp
    yield "a kind of operator, for each", f"max(TFLOP / rate, GB / {m.hbm:g} GB/s x {m.bandwidth:g}), summed", ""
    for kind, one in run.spent.items():
        peak, name = m.fp8 if kind.startswith("fp8") else m.tflops, kind.removeprefix("fp8 ").replace(" ", "_")
        rate = f" at {peak:g} x {getattr(m, name):g}" if kind in PRODUCTS else ""
        yield (f"  {kind}", f"{one.launches:,.0f} launches, {one.flops / 1e12:,.1f} TFLOP{rate}, {one.bytes / GB:,.1f} "
               "GB, whole model", _ms(one.seconds))
    rows = s.tokens * p.ep * run.model.num_experts_per_tok / run.model.num_experts
    yield "  of grouped", (f"rows x {m.imbalance if p.ep > 1 else 1:g} imbalance x (1 + {TILE // 2} / {rows:,.0f} rows "
                           "an expert)"), ""
    yield "  of attention backward", f"{ATTENTION_BACKWARD} x the operations of the forward", ""
    grouped, kernel = m.launch_grouped or m.launch, m.launch_kernel or m.launch
    yield ("  of host", f"launches x {m.launch:g} us, {grouped:g} of grouped and {kernel:g} of Triton's, beyond the "
           "device's time", "")
    everything = sum(one.seconds for one in run.spent.values())
    once = 1 - sum(stage.again for stage in run.stages) / everything
    for name in ("products", "memory traffic", "host"):
        formula = f"its operators x {chunks} micro-batches / {p.pp} pipeline ranks x {once:.3f} not again"
        yield name, formula, _ms(parts[name])
    yield "recomputation", f"{_ms(everything * (1 - once))} x {chunks} / {p.pp}", _ms(parts["recomputation"])
    sent = sum(stage.sent for stage in run.stages)
    near = f"{min(p.ep, m.node) - 1}/{p.ep} at {m.nvlink:g} x {m.links:g} GB/s"
    far = f", {p.ep - m.node}/{p.ep} at {m.network:g} x {m.networks:g} GB/s" if p.ep > m.node else ""
    yield "  all-to-all, not hidden", f"bytes x {m.imbalance:g}, {near}{far}, + latency, whole model", _ms(sent)
    if p.cp > 1:
        each = sum(map(sum, (context_seconds(s, i) for i in run.model.all_layers)))
        yield "  of context parallelism", f"{p.cp_method}, {p.cp} ranks {p.ep} apart, whole model", _ms(each)
    yield "  all of it", f"{_ms(sent)} x {chunks} / {p.pp}", _ms(sent * share)
    if sent:
        yield "all-to-all", (f"pairs played through; {EXPERTS.ctas} of {m.multiprocessors:g} multiprocessors; hidden "
                             f"{1 - parts['all-to-all'] / (sent * share):.0%}"), _ms(parts["all-to-all"])
    size = s.tokens * sent_bytes(run.model, s.dtype)
    yield "sends", f"the schedule with {_ms(run.send)} for {size / 1e6:,.1f} MB, less without", _ms(parts["sends"])
    yield "gather", "the first stage's parameters, around the ring of those that share them", _ms(parts["gather"])
    if p.dp_replicate > 1:
        yield "  of reduce", (f"around the ring of {p.dense_shards} ranks, then over {p.dp_replicate} parts of dp, "
                              f"twice 1/{p.dense_shards} of dense and 1/{p.expert_shards} of experts"), ""
    yield "reduce", "the schedule with the stages' gradients in float32 reduced beside it, less without", \
        _ms(parts["reduce"])
    muon = f", + {run.muon_flops:.3g} of Muon / ({m.tflops:g} x {m.gemm:g} TFLOP/s)" if run.muon_flops else ""
    yield "optimizer", f"2 x what is stored and gradients / ({m.hbm:g} x {m.bandwidth:g} GB/s){muon}", \
        _ms(parts["optimizer"])
    yield "bubble", f"the schedule {p.schedule} of {p.pp} ranks, {chunks} micro-batches, less what a rank does", \
        _ms(parts["bubble"])
    yield "step", "the sum of these", f"{run.step_seconds:.4g} s"
    speed = f"{run.tokens_per_second:,.0f}"
    yield "tokens/s/GPU", f"{run.tokens:,} tokens / {run.step_seconds:.4g} s / {p.world_size} GPUs", speed
    flops = flops_per_token(run.model, t.sequence_length).both
    yield "MFU", f"{flops / 1e9:,.1f} GFLOP a token x {speed} / {m.tflops:g} TFLOP/s", f"{run.mfu:.1%}"
    unit = unit_for(run.peak, DECIMAL)
    yield "memory", "the worst pipeline rank below", f"{run.peak / unit.bytes:.1f} {unit.name}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.2f} ms"
