"""What a mesh will cost: operators counted, rooflines, overlap played through, and the command that lists the runs."""

from __future__ import annotations

import json
import re
import tomllib
from dataclasses import fields, replace
from math import isfinite
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

from dualpipe.cli import main
from dualpipe.models import read_config
from dualpipe.models.flops import head_flops, layer_flops, parameter_counts
from dualpipe.models.stages import meta_stages
from dualpipe.plan import meshes
from dualpipe.plan.activations import kinds_of
from dualpipe.plan.costs import Seconds, Setting, context_seconds, stage_costs, walk
from dualpipe.plan.machines import Machine, read_machine
from dualpipe.plan.operators import LayerParts, head_parts, layer_parts
from dualpipe.plan.predict import PARTS, Prediction, play
from dualpipe.schedule import Costs, build, simulate
from dualpipe.train.config.load import load_config
from dualpipe.train.config.resolve import fit_world
from schedules import SCHEDULES

EXAMPLES = Path(__file__).parents[2] / "examples"
TINY = EXAMPLES / "tiny-cpu.toml"


def operators(parts: LayerParts, *, forward: bool = True):
    sides = parts if forward else parts[1:]
    return [each for side in sides for part in side for each in (*part.operators, *part.deferred)]


# -- what a layer gives to a device


@pytest.mark.parametrize("name, layer", [("qwen3-30b-a3b", 0), ("deepseek-v3", 0), ("deepseek-v3", 5),
                                         ("gpt-oss-20b", 1)])
@pytest.mark.parametrize("ep", [1, 4])
def test_products_are_those_of_the_model(name, layer, ep):
    config = read_config(EXAMPLES / "models" / name)
    plain, again = (layer_parts(config, kinds_of(config, [layer], rules)[0], ep, torch.bfloat16)
                    for rules in ((), ("layer",)))
    expected = layer_flops(config, layer, 0)
    assert sum(each.flops for each in operators(plain)) == pytest.approx(3 * expected, rel=1e-3)
    assert sum(each.flops for each in operators(again)) == pytest.approx(4 * expected, rel=1e-3)
    fused = [each.kind for each in operators(plain) if each.kind.startswith("attention")]
    assert fused == ["attention", "attention backward"]
    assert sum(each.flops for each in operators(head_parts(config, torch.bfloat16))) == pytest.approx(
        3 * head_flops(config), rel=1e-3)


@pytest.mark.parametrize("ep, counted", [(1, 76), (8, 118)])
def test_launches_are_about_those_that_are_counted_on_a_pretend_device(ep, counted):
    """By tests/models/test_launches.py, which runs the dispatcher as well."""
    config = read_config(EXAMPLES / "models/qwen3-30b-a3b")
    parts = layer_parts(config, kinds_of(config, [0])[0], ep, torch.bfloat16)
    assert sum(each.launches for each in operators(parts)) == pytest.approx(counted, rel=0.1)
    assert [part.sent > 0 for part in parts.forward] == ([True, True, False] if ep > 1 else [False])


def test_experts_on_more_ranks_read_fewer_weights():
    config = read_config(EXAMPLES / "models/qwen3-30b-a3b")
    few, many = (layer_parts(config, kinds_of(config, [0])[0], ep, torch.bfloat16) for ep in (2, 16))
    weights = [sum(each.bytes for each in operators(parts) if each.kind == "grouped") for parts in (few, many)]
    assert weights[0] == pytest.approx(8 * weights[1], rel=0.01)


def test_products_in_fp8_take_their_rate_and_rows_their_bytes():
    """Experts in blocks of 128 x 128, whose input gradients are in FP8 too; in mxfp8, forward alone."""
    def run(gpu: str, *options: str) -> Prediction:
        config = load_config(EXAMPLES / "qwen3-30b-a3b.toml", ("--parallel.dp", "1", "--parallel.ep", "8", *options))
        return Prediction(config, read_config(config.model.config), read_machine(gpu))

    plain, rows = run("h100"), run("h100", "--dtypes.fp8_dispatch", "True")
    for format, share in (("fp8_block", 2 / 3), ("mxfp8", 1 / 3)):
        fp8 = run("h100", "--dtypes.rules", f"*.experts,gather={format}")
        of = fp8.spent["fp8 grouped"]
        assert of.flops == pytest.approx(share * plain.spent["grouped"].flops)
        assert of.flops + fp8.spent["grouped"].flops == pytest.approx(plain.spent["grouped"].flops)
        assert of.seconds == pytest.approx(of.flops / (1979e12 * 0.6), rel=0.1)
        assert fp8.spent["memory"].bytes > plain.spent["memory"].bytes, "rows are quantized"
        assert sum(fp8.parts.values()) == pytest.approx(fp8.step)
    sent, less = (sum(stage.sent for stage in each.stages) for each in (plain, rows))
    assert less == pytest.approx(sent * (1 - 0.484 / 4), rel=0.02), "of four ways, that to the experts forward"
    assert run("a100", "--dtypes.rules", "*.experts,gather=fp8_block").spent.keys() == plain.spent.keys()


@pytest.mark.parametrize("ep", [1, 4])
def test_layers_for_multi_token_prediction_are_in_the_last_stage(ep):
    """As many operations as the model has, in two depths; and the head three times."""
    model = read_config(EXAMPLES / "models/deepseek-v3")
    config = replace(model, num_nextn_predict_layers=2).with_mtp()
    kinds = kinds_of(config, config.mtp_layers)
    assert kinds[0] == kinds[1] != kinds_of(config, [60])[0]
    layer, plain = (layer_parts(config, kind, ep, torch.bfloat16) for kind in (kinds[0], kinds_of(config, [60])[0]))
    for parts, expected in ((layer, layer_flops(config, 61, 0)), (head_parts(config, torch.bfloat16),
                                                                 3 * head_flops(config))):
        assert sum(each.flops for each in operators(parts)) == pytest.approx(3 * expected, rel=1e-3)
    assert [part.sent for part in layer.forward] == [part.sent for part in plain.forward]
    setting = Setting(config, read_machine("h100"), torch.bfloat16, ep, 4096, 4096)
    with_them, without = (stage_costs(replace(setting, model=each), range(58, 61), last=True)
                          for each in (config, model))
    more = sum(one.flops - without.spent[kind].flops for kind, one in with_them.spent.items()
               if not kind.startswith(("attention", "grouped", "memory")))
    dense = layer_flops(config, 61, 0) - 8 * 6 * 7168 * 2048  # without routed experts, some of whose tiles are empty
    assert more == pytest.approx(3 * 2 * (dense + head_flops(config)) * 4096, rel=1e-3)
    assert stage_costs(setting, range(3, 6), last=False).spent == stage_costs(
        replace(setting, model=model), range(3, 6), last=False).spent


@pytest.mark.slow
def test_deepseek_v3_has_room_for_its_layer_for_multi_token_prediction():
    """Its last stage has no other layer, so that a step takes no longer; rank 0 alone has more in memory."""
    config = load_config(EXAMPLES / "deepseek-v3.toml")
    config = fit_world(config, config.parallel.world_size)
    model, gpu = read_config(config.model.config), read_machine("h100")
    plain, trained = Prediction(config, model, gpu), Prediction(config, model.with_mtp(), gpu)
    assert trained.step == pytest.approx(plain.step, rel=0.005) and trained.mfu > 1.03 * plain.mfu
    assert sum(trained.parts.values()) == pytest.approx(trained.step)
    experts = 256 * 3 * 7168 * 2048
    dense = parameter_counts(model.with_mtp()).total - parameter_counts(model).total - experts
    more = [after.parameters - before.parameters for before, after in zip(plain.memory, trained.memory)]
    assert more == [pytest.approx(4 * (experts + dense) / 64, rel=1e-3), *[0] * 15]
    assert trained.memory[0].activations > plain.memory[0].activations
    assert [rank.total for rank in trained.memory[1:]] == pytest.approx([rank.total for rank in plain.memory[1:]], 1e-4)


# -- overlap


def test_a_pair_hides_what_fits_behind_the_other():
    action = [Seconds(1.0, 2.0), Seconds(3.0)]
    assert walk([action], 0.0) == 6
    # F 0-1, B 1-2; F's message 1-3, B's 3-5; F 3-6, B 6-9
    assert walk([action, action], 0.0) == 9
    # messages go one after the other: 1-5 and 5-9
    assert walk([[Seconds(1.0, 4.0), Seconds(1.0)]] * 2, 0.0) == 10
    # alone, a backward hides its message behind its own weight gradients
    assert walk([[Seconds(1.0, 2.0, deferred=1.5), Seconds(3.0)]], 0.0) == 6
    # what computes beside a message is slower by half: 1, then 1 of 2 seconds
    assert walk([[Seconds(1.0, 2.0, deferred=1.0), Seconds(0.0)]], 0.5) == 3
    assert walk([[Seconds(1.0, 2.0, deferred=1.5), Seconds(0.0)]], 0.5) == 3.5


# -- machines


def test_bytes_go_over_the_links_that_there_are():
    machine = replace(read_machine("h100"), links=1, networks=1, latency=0, network_latency=0, imbalance=1)
    assert machine.all_to_all(8e9, 8) == pytest.approx(7e9 / 450e9)
    assert machine.all_to_all(16e9, 16) == pytest.approx(8e9 / 50e9)
    assert machine.all_to_all(1e9, 1) == machine.ring(1e9, 1) == machine.send(1e9, 1, 8) == 0
    assert machine.ring(8e9, 8) == pytest.approx(7e9 / 450e9)
    assert machine.ring(16e9, 16) == pytest.approx(15e9 / 400e9)
    assert machine.ring(16e9, 16, 8) == pytest.approx(15e9 / 50e9)
    assert machine.send(1e9, 2, 4) == pytest.approx(1 / 450) and machine.send(1e9, 2, 8) == pytest.approx(1 / 50)


@pytest.mark.parametrize("name, method, layer, forward, backward", [
    ("qwen3-30b-a3b", "ring", 0, 7 * 2 * 4 * 128, 14 * 2 * 4 * 128),  # 4 heads; there, again and back
    ("deepseek-v3", "auto", 5, 7 * 576, 14 * 576),  # the latent and the rotated key
    ("deepseek-v3", "all_to_all", 5, 7 / 8 * 2 * 128 * (192 + 128), 7 / 8 * 2 * 128 * (192 + 128)),
    ("gpt-oss-20b", "ring", 0, 2 * 127 * 8 / 32768 * 2 * 8 * 64, 2 * 2 * 127 * 8 / 32768 * 2 * 8 * 64),  # its window
])
def test_what_ranks_that_share_sequences_send(name, method, layer, forward, backward):
    machine = replace(read_machine("h100"), links=1, latency=0, network_latency=0)
    model, tokens = read_config(EXAMPLES / "models" / name), 4096
    setting = Setting(model, machine, torch.bfloat16, 1, tokens, 8 * tokens, cp=8, cp_method=method)
    expected = [numbers * tokens * 2 / 450e9 for numbers in (forward, backward)]
    assert context_seconds(setting, layer) == pytest.approx(expected)
    assert context_seconds(replace(setting, cp=1), layer) == (0, 0)
    whole, shared = (stage_costs(one, range(layer, layer + 1), last=False) for one in (replace(setting, cp=1), setting))
    assert shared.sent - whole.sent == pytest.approx(sum(expected)) and shared.costs.F > whole.costs.F


def test_what_was_measured_replaces_what_is_assumed(tmp_path):
    (tmp_path / "own.json").write_text('{"attention": 0.6}')
    rows = [{"product": "up forward", "of dense": share} for share in (0.8, 0.9, 0.95)]
    (tmp_path / "bench.json").write_text(json.dumps({"dense_tflops": 712.08, "copy_gb_per_s": 2847.5, "rows": rows}))
    machine = read_machine("h100", measured=(str(tmp_path / "own.json"), str(tmp_path / "bench.json")))
    assert machine.attention == 0.6 and machine.gemm == pytest.approx(0.72) and machine.bandwidth == pytest.approx(0.85)
    assert machine.grouped == pytest.approx(0.9 * 0.72)
    assert (machine.tflops, machine.node) == (989, 8)
    rows = [{"work": "F&B", "ms": 2.0, "beside 16": share} for share in (0.8, 0.9, 0.95)]
    (tmp_path / "overlap.json").write_text(json.dumps({"rows": rows}))
    assert read_machine("h100", measured=(str(tmp_path / "overlap.json"),)).beside == 0.9


@pytest.mark.parametrize("text, message", [
    ('{"gem": 0.5}', "unknown field 'gem'; the nearest is 'gemm'"),
    ('{"gemm": -1}', "gemm is -1; give a positive number"),
    ('{"latency": -1}', "latency is -1; give a number of at least 0"),
    ('{"launch": true}', "launch is True; give a number of at least 0"),
    ('{"host_waits": 2}', "host_waits is 2; give true or false"),
    ("[1]", "must hold an object"), ("{", "is not valid JSON"), ('{"rows": []}', "has no rates of kernels"),
])
def test_costs_that_cannot_be_used(tmp_path, text, message):
    (tmp_path / "costs.json").write_text(text)
    with pytest.raises(ValueError, match=message):
        read_machine("h100", measured=(str(tmp_path / "costs.json"),))


def test_a_field_that_may_be_zero_has_an_effect_that_is_finite(tmp_path):
    """What something is divided by must be positive, wherever it is among the fields."""
    divisors = {"tflops", "hbm", "memory", "multiprocessors", "nvlink", "network", "gemm", "grouped", "attention",
                "attention_backward", "bandwidth", "links", "networks"}
    path, mine = tmp_path / "costs.json", {}
    for field in fields(Machine):
        if field.name in ("node", "host_waits"):
            continue
        path.write_text(json.dumps({field.name: 0}))
        if field.name in divisors:
            with pytest.raises(ValueError, match=f"{field.name} is 0; give a positive number"):
                read_machine("h100", measured=(str(path),))
        else:
            mine[field.name] = 0
    path.write_text(json.dumps(mine))
    machine = read_machine("h100", measured=(str(path),))
    assert (machine.latency, machine.reserve, machine.fp8) == (0, 0, 0)
    assert isfinite(machine.all_to_all(1e6, 16) + machine.ring(1e6, 16) + machine.send(1e6, 16, 8))


def test_machines_of_ones_own(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text("tflops = 100\nhbm = 1000\nmemory = 24\nmultiprocessors = 80\nnvlink = 25\nnetwork = 12.5\n")
    assert read_machine(str(path)).tflops == 100 and read_machine(str(path)).gemm == read_machine("h100").gemm
    path.write_text("tflops = 100\nhbm = 1000\nmemory = 24\nnvlink = 25\n")
    with pytest.raises(ValueError, match=r"mine\.toml does not say multiprocessors, network; see .*machines\.toml"):
        read_machine(str(path))
    with pytest.raises(ValueError, match="no GPU is called 'h101'; known are h100, h800, h200, b200, a100"):
        read_machine("h101")


# -- a run


def prediction(*options: str) -> Prediction:
    config = load_config(TINY, options)
    config = fit_world(config, config.parallel.world_size)
    return Prediction(config, read_config(config.model.config), read_machine("h100"))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_middle_of_a_long_step_need_not_be_played(schedule):
    run = prediction("--parallel.schedule", schedule, "--train.num_chunks", "43", "--parallel.ep", "2")
    played = simulate(build(schedule, 2, 43), run.costs()).makespan
    assert run.step - run.gather - run.optimizer == pytest.approx(played, rel=1e-3)


@pytest.mark.parametrize("schedule, too_short", [("interleaved_1f1b", 0.0139), ("zbv", 0.0019)])
def test_stages_that_differ_take_some_periods_until_the_middle_repeats_itself(schedule, too_short):
    """The second period is shorter than later ones, by which the whole would be `too_short`."""
    stages = [Costs(F=size, B=2 * size, W=0.6 * size, FB=2.9 * size, R=2) for size in (1.17, *[1] * 7)]
    costs = Costs(p2p=0.05, per_stage=stages)
    one, two, whole = (simulate(build(schedule, 4, count), costs).makespan for count in (8 + 3, 16 + 3, 64 + 3))
    assert one + 7 * (two - one) == pytest.approx(whole * (1 - too_short), rel=1e-4)
    assert play(schedule, 4, 67, costs).makespan == pytest.approx(whole, rel=1e-6)


def test_the_parts_of_a_step_add_up():
    run = prediction("--parallel.dp", "2", "--parallel.ep", "2", "--memory.recompute", "layer", "dispatch")
    assert tuple(run.parts) == PARTS and sum(run.parts.values()) == pytest.approx(run.step)
    assert min(run.parts.values()) > -1e-3 * run.step and run.parts["recomputation"] > 0 < run.parts["all-to-all"]
    assert run.bound <= run.step and run.limit in PARTS
    assert prediction("--parallel.pp", "1", "--parallel.schedule", "1f1b").parts["bubble"] == pytest.approx(0, abs=1e-9)


def test_muons_products_take_their_time():
    adamw, muon = (prediction("--optimizer.name", name, "--parallel.dp", "2") for name in ("adamw", "muon"))
    (stage, *_) = meta_stages(muon.model)
    each = [10 * p.numel() * min(p.shape[-2:]) * (2 * max(p.shape[-2:]) + min(p.shape[-2:])) / max(p.shape[-2:])
            for name, p in stage.named_parameters() if name.split(".")[-2].endswith("_proj")]
    assert muon.muon_flops == pytest.approx(sum(each) / 2 / 2, rel=1e-6), "two ranks of a pipeline that are alike"
    less = (muon.memory[0].optimizer - adamw.memory[0].optimizer) * 2 / (3350e9 * 0.75)
    assert muon.optimizer - adamw.optimizer == pytest.approx(muon.muon_flops / (989e12 * 0.7) + less, rel=0.2)


def test_parts_of_dp_gather_within_a_node_and_sum_over_nodes():
    """16 ranks of two nodes as 2 parts of 8: the rings are those of 8 ranks, and what a rank has of the gradients is
    reduced over the two nodes, and gathered again."""
    base = ("--parallel.pp", "1", "--parallel.schedule", "1f1b", "--parallel.dp")
    whole, one = prediction(*base, "16"), prediction(*base, "8")
    parts, m = prediction(*base, "16", "--parallel.dp_replicate", "2"), whole.machine
    ((gather, reduce),), ((gather_8, reduce_8),), ((gather_16, _),) = parts.shards, one.shards, whole.shards
    assert gather == gather_8 < gather_16
    size = 4 * parameter_counts(parts.model).total / 8
    one_way = size / 2 / (m.network * m.networks * 1e9) + m.network_latency * 1e-6
    assert reduce - reduce_8 == pytest.approx(2 * one_way)
    assert parts.tokens == whole.tokens == 2 * one.tokens
    assert parts.memory[0].parameters == one.memory[0].parameters


def test_parts_of_dp_are_planned_explained_and_written(capsys, tmp_path):
    toml = tmp_path / "row.toml"
    lines = plan(capsys, "--parallel.dp_replicate", "4", "--explain", "1", "--write", "1", str(toml))
    assert lines[1].split()[:4] == ["1", "1", "4x1", "1"] and not lines[2].lstrip().startswith("2 "), "no other mesh"
    assert any(line.startswith("dp 4x1: 4 parts (parallel.dp_replicate)") for line in lines)
    assert any("of reduce" in line and "over 4 parts of dp" in line for line in lines)
    written = load_config(toml).parallel
    assert (written.dp, written.dp_replicate) == (4, 4)


# -- the command


def plan(capsys, *options: str) -> list[str]:
    status = main(["plan", str(TINY), "--gpus", "4", "--global-batch", "4096", *options])
    out, err = capsys.readouterr()
    assert status == 0, err
    return out.splitlines()


@pytest.mark.slow
def test_the_table_in_the_documentation_is_that_of_its_command(capsys):
    document = (EXAMPLES.parent / "docs" / "planning.md").read_text()
    block = r"^    dualpipe (plan .*) --svg plan.svg\n\n```\n(row .*?)```$"
    command, printed = re.search(block, document, re.MULTILINE | re.DOTALL).groups()
    model = str(EXAMPLES / "qwen3-30b-a3b.toml")
    assert main([model if argument.endswith(".toml") else argument for argument in command.split()]) == 0
    assert capsys.readouterr().out == printed
    deferring = [line.split()[0] for line in printed.splitlines() if line.split()[4:5] == ["dualpipev"]]
    on_pipelines = [row for row in deferring if printed.splitlines()[int(row)].split()[1] != "1"]
    assert printed.splitlines()[1].split()[4] == "dualpipev_full" and on_pipelines == ["8"], "as README says"


def test_meshes_whose_heads_do_not_divide_are_left_out(capsys, monkeypatch):
    monkeypatch.setattr(meshes, "LONG", 8)
    lines = plan(capsys, "--parallel.cp_method", "all_to_all", "--rows", "100")
    ranks = {line.split()[3] for line in lines if line.split()[:1] != ["row"] and line.split()[0].isdigit()}
    assert ranks == {"1", "2"}, "of 2 heads of keys and values"


def test_a_plan_is_listed_explained_drawn_and_written(capsys, tmp_path, monkeypatch):
    svg, html, toml = (tmp_path / name for name in ("plan.svg", "plan.html", "row.toml"))
    lines = plan(capsys, "--explain", "1", "--svg", str(svg), "--html", str(html), "--write", "2", str(toml),
                 "--rows", "3")
    rows = [line.split() for line in lines[1:4]]
    assert [row[0] for row in rows] == ["1", "2", "3"]
    assert all(int(row[1]) * int(row[2]) * int(row[3]) == 4 for row in rows)
    steps = [float(row[7]) for row in rows]
    assert any(row[1] == "1" for row in rows) and steps[0] == min(steps)
    assert "no schedule is searched for here" in "".join(plan(capsys, "--parallel.schedule", "auto", "--rows", "1"))
    assert lines[4] == "a row is the fastest run that fits on its mesh, of all schedules; shortest step first"
    assert lines[5].startswith("4,096 tokens a step") and "pipeline" in lines[6]
    terms = {line.strip().split("  ")[0]: line for line in lines[7:]}
    assert terms["step"].endswith(f"{steps[0]:.4g} s") and {"bubble", "gemm", "MFU", "memory"} < terms.keys()
    assert terms["memory"].endswith("MB") and "MB of rank" in "\n".join(lines) and "iB" not in "\n".join(lines)
    drawn = ElementTree.fromstring(svg.read_text())
    assert sum("title" in each.tag for each in drawn.iter()) == 3 * len(PARTS)
    page = json.loads(re.search(r'<script type="application/json"[^>]*>(.*?)</script>', html.read_text(), re.S)[1])
    drawn = [(line["name"], len(line["ranks"])) for line in page["timelines"]]
    assert drawn == [(f"row {row[0]}: {row[4]}", int(row[1])) for row in rows]
    for line, row, step in zip(page["timelines"], rows, steps):
        _, length, _, causes, grey = line["words"]
        busy = sum(end - start for rank in line["ranks"] for start, end, *_ in rank) / len(line["ranks"])
        before, after = (end - start for start, end in line["around"])
        idle = 1 - (busy + before + after) / line["makespan"]
        assert (length, line["makespan"]) == ("step", pytest.approx(step, rel=1e-3)), "gather and optimizer included"
        assert causes.startswith(f" (bubble {row[10]}, sends {row[12]}, reduce "), "as in the table"
        assert sum(map(float, re.findall(r"([\d.]+)%", causes))) == pytest.approx(100 * idle, abs=0.2)
        assert float(row[13][:-1]) == pytest.approx(
            sum(map(float, re.findall(r"(?:reduce|gather|optimizer) ([\d.]+)%", causes + grey))), abs=0.2)
    written = load_config(toml)
    assert [str(n) for n in (written.parallel.pp, written.parallel.dp, written.parallel.ep)] == rows[1][1:4]
    assert written.train.num_chunks * written.train.micro_batch_size * written.parallel.replicas * 128 == 4096
    assert written.optimizer == load_config(TINY).optimizer
    assert "path" not in tomllib.loads(toml.read_text())["data"], "as it is without"
    assert tomllib.loads(toml.read_text())["data"]["tokenizer"] == "bytes", "no path"
    monkeypatch.chdir(tmp_path)
    assert main(["memory", "row.toml"]) == 0


def test_lists_of_tables_are_written(capsys, tmp_path):
    toml, tables = tmp_path / "row.toml", [
        "--dtypes.rules", "*.mlp.gate,compute=fp32", "lm_head,save=bf16", "--dtypes.fp8_dispatch", "True",
        "--optimizer.groups", "*.q_proj,lr=0.001", "*.gate,weight_decay=0.0,algorithm=adamw", "--optimizer.lr", "0.01",
    ]
    plan(capsys, "--write", "1", str(toml), "--rows", "1", *tables)
    written, given = load_config(toml), load_config(TINY, tables)
    assert len(given.dtypes.rules) == len(given.optimizer.groups) == 2
    assert (written.dtypes, written.optimizer) == (given.dtypes, given.optimizer)


def test_least_memory_first(capsys):
    lines = plan(capsys, "--objective", "memory", "--rows", "4")
    assert lines[5] == "a row is the smallest run that fits on its mesh, of all schedules; least memory first"
    sizes = [float(line.split()[-2 if line.split()[-1] != "traffic" else -3]) for line in lines[1:5]]
    assert sizes == sorted(sizes)


@pytest.mark.parametrize("options, message", [
    (["--memory.capacity", "6.001"], "nothing fits into 0 GB of a GPU; the nearest is pp"),
    (["--global-batch", "4100"], "--global-batch 4100 is no multiple of a sequence's 128 tokens; give 4096"),
    (["--explain", "7", "--rows", "1"], "there is no row 7; give one of 1 to 1"),
    (["--gpus", "0"], "--gpus is 0; give 1 or more"),
    (["--gpus", "7"], "no mesh of 7 GPUs takes 32 sequences a step"),
    (["--trian.steps", "3"], "unknown option '--trian.steps'; the nearest valid name is '--train.steps'"),
])
def test_plans_that_cannot_be_made(capsys, options, message):
    assert main(["plan", str(TINY), "--gpus", "4", "--global-batch", "4096", *options]) == 2
    err = capsys.readouterr().err
    assert message in err and err.count("\n") == 1
