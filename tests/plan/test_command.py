"""`dualpipe plan`: its table, its pictures, what it writes, and what it refuses."""

from __future__ import annotations

import json
import re
import tomllib
from xml.etree import ElementTree

import pytest

from dualpipe.cli import main
from dualpipe.plan import command, meshes
from dualpipe.plan.predict import PARTS
from dualpipe.train.config.load import load_config
from plans import EXAMPLES, TINY, plan


def test_parts_of_dp_are_planned_explained_and_written(capsys, tmp_path):
    toml = tmp_path / "row.toml"
    lines = plan(capsys, "--parallel.dp_replicate", "4", "--explain", "1", "--write", "1", str(toml))
    assert lines[1].split()[:4] == ["1", "1", "4x1", "1"] and not lines[2].lstrip().startswith("2 "), "no other mesh"
    assert any(line.startswith("dp 4x1: 4 parts (parallel.dp_replicate)") for line in lines)
    assert any("of reduce" in line and "over 4 parts of dp" in line for line in lines)
    written = load_config(toml).parallel
    assert (written.dp, written.dp_replicate) == (4, 4)


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
    assert on_pipelines == ["8"], "as the document says"


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


@pytest.mark.parametrize("options, node", [
    ((), 8), (("--nodes-of", "2"), 2), (("--parallel.ranks_per_node", "4"), 4),
    (("--parallel.ranks_per_node", "4", "--nodes-of", "2"), 2),
], ids=str)
def test_nodes_are_those_of_the_option_or_of_the_file(capsys, monkeypatch, tmp_path, options, node):
    requests = []
    monkeypatch.setattr(command, "plan", lambda request, rows: requests.append(request) or meshes.plan(request, rows))
    toml = tmp_path / "row.toml"
    plan(capsys, "--rows", "1", "--write", "1", str(toml), *options)
    (request,) = requests
    assert request.machine.node == node
    assert load_config(toml).parallel.ranks_per_node in (0, node), "the plan is of the nodes that a run has"


def test_lists_of_tables_are_written(capsys, tmp_path):
    toml, tables = tmp_path / "row.toml", [
        "--dtypes.rules", "*.mlp.gate,compute=fp32", "lm_head,save=bf16", "--dtypes.fp8_weight_grad", "True",
        "--optimizer.groups", "*.q_proj,lr=0.001", "*.gate,weight_decay=0.0,algorithm=adamw", "--optimizer.lr", "0.01",
    ]
    plan(capsys, "--write", "1", str(toml), "--rows", "1", *tables)
    written, given = load_config(toml), load_config(TINY, tables)
    assert len(given.dtypes.rules) == len(given.optimizer.groups) == 2
    assert (written.dtypes, written.optimizer) == (given.dtypes, given.optimizer)


@pytest.mark.parametrize("options, message", [
    (["--memory.capacity", "6.001", "--gpus", "1"], "nothing fits into 0 GB of a GPU; the nearest is pp"),
    (["--global-batch", "4100"], "--global-batch 4100 is no multiple of a sequence's 128 tokens; give 4096"),
    (["--explain", "7", "--rows", "1"], "there is no row 7; give one of 1 to 1"),
    (["--gpus", "0"], "--gpus is 0; give 1 or more"),
    (["--nodes-of", "0"], "--nodes-of is 0; give 1 or more"),
    (["--gpus", "7"], "no mesh of 7 GPUs takes 32 sequences a step"),
    (["--optimizer.groups", "nope,lr=1"], "no trained parameter matches 'nope'; nearest: "),
    (["--trian.steps", "3"], "unknown option '--trian.steps'; the nearest valid name is '--train.steps'"),
])
def test_plans_that_cannot_be_made(capsys, options, message):
    assert main(["plan", str(TINY), "--gpus", "4", "--global-batch", "4096", *options]) == 2
    err = capsys.readouterr().err
    assert message in err and err.count("\n") == 1
