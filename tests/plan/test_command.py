"""`dualpipe plan`: its table, what it writes, and what it refuses."""

import re
import tomllib
from pathlib import Path

import pytest

from dualpipe.cli import main
from dualpipe.plan import command, search
from dualpipe.train.config.fit import resolve_tokenizer
from dualpipe.train.config.load import load_config
from plans import EXAMPLES, TINY, plan


def test_parts_of_dp_are_planned_and_written(capsys, tmp_path):
    toml = tmp_path / "row.toml"
    lines = plan(capsys, "--parallel.dp_replicate", "4", "--write", "1", str(toml))
    assert lines[1].split()[:4] == ["1", "1", "4x1", "1"] and not lines[2].lstrip().startswith("2 "), "no other mesh"
    written = load_config(toml).parallel
    assert (written.dp, written.dp_replicate) == (4, 4)


@pytest.mark.slow
@pytest.mark.long
def test_the_table_in_the_documentation_is_that_of_its_command(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    document = (EXAMPLES.parent / "docs" / "planning.md").read_text()
    block = r"^    dualpipe (plan .*)\n\n```\n(row .*?)```$"
    command, printed = re.search(block, document, re.MULTILINE | re.DOTALL).groups()
    model = str(EXAMPLES / "qwen3-30b-a3b.toml")
    assert main([model if argument.endswith(".toml") else argument for argument in command.split()]) == 0
    assert capsys.readouterr().out == printed
    deferring = [line.split()[0] for line in printed.splitlines() if line.split()[4:5] == ["dualpipev"]]
    on_pipelines = [row for row in deferring if printed.splitlines()[int(row)].split()[1] != "1"]
    assert on_pipelines == ["8"], "as the document says"


@pytest.mark.parametrize("columns", [120, 80])
def test_a_plan_fits_the_terminal_and_says_that_it_works(capsys, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    assert main(["plan", str(TINY), "--gpus", "4", "--global-batch", "4096"]) == 0
    out, err = capsys.readouterr()
    header, *rows = out.splitlines()[:7]
    assert max(map(len, [header, *rows])) <= columns
    names = header.replace("step s", "step").replace("limited by", "limit").split()
    assert all(len(row.split()) >= len(names) for row in rows), "each column has a value"
    assert {"row", "pp", "dp", "ep", "schedule", "chunks", "step", "GB"} <= set(names)
    assert "sends" not in names and f"left out, as lines would be longer than {columns}: sends" in out
    assert err.startswith("searching for layouts of 4 GPUs: 0% done")


def test_a_plan_is_of_gpus_whatever_the_file_says(capsys):
    on_cpu, on_gpus = (plan(capsys, "--rows", "3", "--parallel.device", device) for device in ("cpu", "cuda"))
    assert on_cpu == on_gpus


def test_a_plan_is_listed_and_written(capsys, tmp_path, monkeypatch):
    toml = tmp_path / "row.toml"
    lines = plan(capsys, "--write", "2", str(toml), "--rows", "3")
    rows = [line.split() for line in lines[1:4]]
    assert [row[0] for row in rows] == ["1", "2", "3"]
    assert all(int(row[1]) * int(row[2]) * int(row[3]) == 4 for row in rows)
    steps = [float(row[7]) for row in rows]
    assert any(row[1] == "1" for row in rows) and steps[0] == min(steps)
    assert "no schedule is searched for here" in "".join(plan(capsys, "--parallel.schedule", "auto", "--rows", "1"))
    assert lines[4].startswith("predicted, not measured: a row is the fastest run that fits on its mesh, of all ")
    assert lines[5].startswith("4,096 tokens a step") and "pipeline" in lines[6]
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
    monkeypatch.setattr(command, "plan", lambda request, *rest: requests.append(request) or search.plan(request, *rest))
    toml = tmp_path / "row.toml"
    plan(capsys, "--rows", "1", "--write", "1", str(toml), *options)
    (request,) = requests
    assert request.machine.node == node
    assert load_config(toml).parallel.ranks_per_node in (0, node), "the plan is of the nodes that a run has"


def test_paths_are_written_relative_to_the_file(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    Path("folder").mkdir()
    plan(capsys, "--write", "1", "folder/row.toml", "--rows", "1", "--data.sources", "text,weight=2", "stdlib")
    paths = [source.path for source in load_config("folder/row.toml").data.sources]
    assert paths == ["folder/../text", "stdlib"]


def test_the_tokenizer_of_a_later_checkpoint_stays_open(capsys, tmp_path):
    toml = tmp_path / "row.toml"
    plan(capsys, "--write", "1", str(toml), "--rows", "1", "--data.tokenizer", "auto")
    (tmp_path / "tokenizer.json").write_text("{}")
    config = resolve_tokenizer(load_config(toml, ["--init.from_hf", str(tmp_path)]))
    assert config.data.tokenizer == str(tmp_path)


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
    (["--memory.capacity", "6.001", "--gpus", "1"], "nothing fits into 0 GB"),
    (["--global-batch", "4100"], "give 4096"),
    (["--write", "7", "row.toml", "--rows", "1"], "row 7"),
    (["--write", "one", "row.toml"], "'one'"),
    (["--write", "1", "/nowhere/row.toml"], "/nowhere"),
    (["--gpus", "0"], "--gpus is 0"),
    (["--nodes-of", "0"], "--nodes-of is 0"),
    (["--gpus", "7"], "multiple of 896 tokens"),
    (["--parallel.dp_replicate", "3"], "parallel.dp_replicate = 3"),
    (["--optimizer.groups", "nope,lr=1"], "'nope'"),
    (["--trian.steps", "3"], "'--train.steps'"),
])
def test_plans_that_cannot_be_made(capsys, options, message):
    assert main(["plan", str(TINY), "--gpus", "4", "--global-batch", "4096", *options]) == 2
    err = capsys.readouterr().err
    assert message in err and len([line for line in err.splitlines() if "searching" not in line]) == 1
