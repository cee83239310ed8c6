"""Rooms: what each may import and how large it is. Nothing imports upwards, and nothing in a circle."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cache
from importlib import import_module
from pathlib import Path

import pytest

import dualpipe

ROOT = Path(dualpipe.__file__).parent
DOCUMENTS = Path(__file__).parents[1]
ORDER = (  # a room imports those before it, and itself; those of one entry do not import each other
    {"_moved", "_cli_arguments"}, {"runtime"}, {"schedule", "kernels"}, {"trace", "quantized"}, {"nn"}, {"parallel"},
    {"pipeline"}, {"utils", "models"}, {"checkpoint"}, {"hf"}, {"train"}, {"plan"}, {"cli"}, {"__main__"},
)
MOST_FILES = 14  # of a room
MIXED_ROOMS = {"dualpipe.checkpoint dualpipe.checkpoint.hub"}
MOST_PARAMETERS = 10  # of a public constructor
MIRRORS = {  # classes, or all of a module, with as many fields as what they mirror
    "dualpipe.train.config.schema": "a table of the TOML file",
    "dualpipe.train.metrics.StepMetrics": "a line of metrics.jsonl",
    "dualpipe.models.hub.HubConfig": "a config.json",
    "dualpipe.checkpoint.manifest.Manifest": "a checkpoint's manifest",
    "dualpipe.plan.machines.Machine": "a table of machines.toml",
    "dualpipe.plan.stage_costs.Setting": "what a layer's costs depend on, a key of their cache",
    "dualpipe.train.metrics.Console": "rich's own, with its constructor",
    "dualpipe.pipeline.arguments.StepArguments": "a message between ranks",
    "dualpipe.pipeline.construction.PipelineArguments": "a message between ranks",
}
LEVEL = {name: level for level, names in enumerate(ORDER) for name in names}


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def imports(path: Path) -> Iterator[str]:
    """Yield the modules of ours that a file imports, also inside of functions and for type checkers."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.startswith("dualpipe."))
        elif isinstance(node, ast.ImportFrom) and node.module == "dualpipe":
            names = [alias.name for alias in node.names if not alias.name.startswith("__")]
            yield from (dualpipe._EXPORTS.get(name, f"dualpipe.{name}") for name in names)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("dualpipe."):
            submodules = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (each if each in MODULES else node.module for each in submodules)


def modules() -> dict[str, Path]:
    """The files of the library by module name; kernels and models lie beside dualpipe/ in a checkout."""
    folders = {"dualpipe": ROOT}
    for name in ("kernels", "models"):
        folders[f"dualpipe.{name}"] = ROOT / name if (ROOT / name).is_dir() else ROOT.parent / name
    found = {}
    for package, folder in folders.items():
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder).with_suffix("").parts
            found[".".join((package, *(part for part in parts if part != "__init__")))] = path
    return found


MODULES = modules()
ROOMS = {name: path for name, path in MODULES.items() if path.name == "__init__.py" and name != "dualpipe"}


def room_of(module: str) -> str:
    """Return the package that a module is in; a package is its own."""
    return module if module in ROOMS else module.rpartition(".")[0]


def circles(edges: Mapping[str, set[str]]) -> dict[str, set[str]]:
    """Return what is left of a graph without all that leads to no circle."""
    left = {name: targets - {name} for name, targets in edges.items()}
    while leaves := {name for name, targets in left.items() if not targets & left.keys()}:
        left = {name: targets for name, targets in left.items() if name not in leaves}
    return {name: targets & left.keys() for name, targets in left.items()}


def test_nothing_imports_upwards() -> None:
    wrong = []
    for name, path in MODULES.items():
        if name == "dualpipe":  # loads its names on first use
            continue
        layer = name.split(".")[1]
        for imported in imports(path):
            other = imported.split(".")[1]
            if other != layer and LEVEL[other] >= LEVEL[layer]:
                wrong.append(f"{name} imports {imported}")
    assert not wrong


def test_the_documents_list_the_rooms_in_this_order() -> None:
    text = " ".join((DOCUMENTS / "CONTRIBUTING.md").read_text().split())
    (said,) = re.findall(r"Nothing imports upwards: (.*?), as \[", text)
    levels = [set(names.split(", ")) for names in said.split(" ← ")]
    assert levels == [names - {"utils"} for names in ORDER if not any(name.startswith("_") for name in names)]
    folders = re.findall(r"^    (?:dualpipe/)?(\w+)/  ", (DOCUMENTS / "docs/architecture.md").read_text(), re.M)
    assert set(folders) == set.union(*levels) - {"cli"}
    assert [LEVEL[name] for name in folders] == sorted(LEVEL[name] for name in folders)


def test_no_circles() -> None:
    """Not between files, lazy imports and those for type checkers among them."""
    assert not circles({name: set(imports(path)) for name, path in MODULES.items() if name != "dualpipe"})


def test_no_circles_between_rooms_that_lie_side_by_side() -> None:
    edges: defaultdict[str, set[str]] = defaultdict(set)
    for name, path in MODULES.items():
        for imported in imports(path):
            here, there = room_of(name), room_of(imported)
            if here.rpartition(".")[0] == there.rpartition(".")[0] and here in ROOMS:
                edges[here].add(there)
    assert not circles(edges)


def test_no_circles_between_a_room_and_those_inside() -> None:
    """A package's `__init__` hands names on: what it imports from inside is no circle."""
    edges: defaultdict[str, set[str]] = defaultdict(set)
    for name, path in MODULES.items():
        if name in ROOMS:
            continue
        for imported in imports(path):
            here, there = room_of(name), room_of(imported)
            if f"{here}.".startswith(f"{there}.") or f"{there}.".startswith(f"{here}."):
                edges[here].add(there)
    circular = {f"{outer} {inner}" for outer in list(edges) for inner in edges[outer]
                if inner.startswith(f"{outer}.") and outer in edges.get(inner, ())}
    assert circular <= MIXED_ROOMS


def constructors() -> Iterator[tuple[type, int]]:
    """Yield the public classes of the library with the number of parameters that they are made of."""
    for name in MODULES:
        if name == "dualpipe.__main__":
            continue
        module = import_module(name)
        for title, kind in vars(module).items():
            if inspect.isclass(kind) and kind.__module__ == name and not title.startswith("_"):
                with suppress(ValueError, TypeError):  # of what C or a protocol makes
                    parameters = inspect.signature(kind).parameters.values()
                    yield kind, sum(each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD) for each in parameters)


def test_no_public_constructor_has_many_parameters() -> None:
    def mirrors_a_file(kind: type) -> bool:
        return any(f"{base.__module__}.{base.__qualname__}" in MIRRORS or base.__module__ in MIRRORS
                   for base in kind.__mro__)

    assert not {f"{kind.__module__}.{kind.__qualname__}": count for kind, count in constructors()
                if count > MOST_PARAMETERS and not mirrors_a_file(kind)}


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_has_few_files_and_says_in_three_lines_what_it_is_and_may_import(room: str) -> None:
    files = list(ROOMS[room].parent.glob("*.py"))
    assert len(files) <= MOST_FILES, sorted(file.name for file in files)
    lines = (ast.get_docstring(ast.parse(ROOMS[room].read_text())) or "").splitlines()
    assert lines and len(lines) <= 5 and lines[-1].endswith("."), lines
    _, _, said = " ".join(lines).rpartition("Imports ")
    allowed = [f"dualpipe.{name}" for name in re.findall(r"`([a-z0-9_.]+)`", said)]
    assert allowed or said == "nothing.", said
    used = set()
    for name, path in MODULES.items():
        if room_of(name) != room:
            continue
        for imported in imports(path):
            fits = [other for other in allowed if f"{imported}.".startswith(f"{other}.")]
            used.update(fits)
            assert fits or f"{imported}.".startswith(f"{room}."), f"{name} imports {imported}, which {room} may not"
    assert used == set(allowed), "what it says that it imports, it does"


# Files of the library without a test file of their name, and why; those that have one by now must not stay here.
ELSEWHERE = {
    "dualpipe/_cli_arguments.py": "tests/test_cli.py and tests/test_documented_commands.py",
    "dualpipe/utils.py": "tests/pipeline/test_drop_in.py",
    "dualpipe/checkpoint/hub/documents.py": "tests/checkpoint/hub/test_save.py, test_save_quantized.py and test_mtp.py",
    "dualpipe/checkpoint/optimizer_state.py": "tests/checkpoint/test_state.py",
    "dualpipe/checkpoint/snapshot.py": "tests/checkpoint/test_load.py and test_pending.py",
    "dualpipe/hf/save.py": "tests/hf/test_load.py, which saves what it has loaded",
    "dualpipe/parallel/all_to_all.py": "tests/parallel/experts/test_dispatcher.py and tests/parallel/context",
    "dualpipe/parallel/context/ring.py": "tests/parallel/context/test_context_parallel.py",
    "dualpipe/parallel/context/row_exchange.py": "tests/parallel/context/test_context_parallel.py",
    "dualpipe/parallel/context/ulysses.py": "tests/parallel/context/test_context_parallel.py",
    "dualpipe/parallel/experts/interface.py": "tests/parallel/experts/test_dispatcher.py and test_two_hop.py",
    "dualpipe/parallel/experts/one_hop.py": "tests/parallel/experts/test_dispatcher.py",
    "dualpipe/parallel/fsdp/units.py": "tests/parallel/fsdp/test_driver.py, whose stages consist of them",
    "dualpipe/parallel/precision/contract.py": "tests/parallel/precision/test_resolve.py, whose plans it checks",
    "dualpipe/parallel/precision/plan.py": "tests/parallel/precision/test_resolve.py, which makes them",
    "dualpipe/pipeline/arguments.py": "tests/pipeline/test_messages.py and test_side_inputs.py",
    "dualpipe/pipeline/deepseek_hook.py": "tests/pipeline/test_drop_in.py",
    "dualpipe/pipeline/executor.py": "tests/pipeline/test_engine.py, which is its only caller",
    "dualpipe/pipeline/microbatch.py": "tests/nn/test_segments.py",
    "dualpipe/pipeline/rank_stages.py": "tests/parallel/fsdp/test_forward_hooks.py",
    "dualpipe/pipeline/stage_program.py": "tests/nn/test_segments.py",
    "dualpipe/plan/on_meta/meta_run.py": "tests/plan/test_activations.py and test_operators.py, which count it",
    "dualpipe/plan/stage_memory.py": "tests/plan/test_memory.py",
    "dualpipe/runtime/ranks/process_groups.py": "tests/parallel/test_mesh.py",
    "dualpipe/runtime/ranks/records.py": "tests/runtime/ranks/test_agreement.py",
    "dualpipe/quantized/operators.py": "tests/quantized/test_tensor.py",
    "dualpipe/quantized/quantize_model.py": "tests/quantized/test_tensor.py",
    "dualpipe/quantized/registry.py": "tests/quantized/test_tensor.py",
    "dualpipe/runtime/storage/choose.py": "tests/runtime/storage/test_local.py, for every kind of storage",
    "dualpipe/runtime/storage/protocol.py": "tests/runtime/storage/test_local.py, for every kind of storage",
    "dualpipe/runtime/printing.py": "tests/test_cli.py and tests/train/test_metrics.py, which read what is printed",
    "dualpipe/train/parity_errors.py": "tests/train/test_parity.py and tests/train/model_parity/bf16/test_rounding.py",
    "dualpipe/train/parity_models.py": "tests/train/test_parity.py",
    "dualpipe/train/replay.py": "tests/train/anomaly/test_guard.py",
    "dualpipe/train/run_report.py": "tests/train/test_metrics.py and test_trainer.py",
    "dualpipe/train/anomaly/rank_checks.py": "tests/train/anomaly/test_guard.py",
    "dualpipe/train/anomaly/reruns.py": "tests/train/anomaly/test_guard.py",
    "dualpipe/train/checkpointing/bundle.py": "tests/train/anomaly/test_guard.py, whose replays read them",
    "dualpipe/train/checkpointing/training_state.py": "tests/train/test_resume.py",
    "dualpipe/train/observers/windows.py": "tests/train/observers/test_tracing.py and test_profiler.py",
    "dualpipe/train/optim/from_config.py": "tests/train/optim/test_optimizer.py and tests/train/config/test_load.py",
    "dualpipe/train/optim/groups.py": "tests/train/optim/test_optimizer.py",
    "dualpipe/train/model_parity/bf16/models.py": "tests/train/model_parity/bf16/test_comparison.py",
    "dualpipe/train/model_parity/bf16/search.py": "tests/train/model_parity/bf16/test_comparison.py",
    "dualpipe/train/model_parity/models/hub_model.py": "tests/train/model_parity/test_command.py",
    "dualpipe/train/model_parity/models/origin.py": "tests/train/model_parity/test_compare.py",
    "dualpipe/train/model_parity/models/pipelined.py": "tests/train/model_parity/test_compare.py",
    "dualpipe/train/model_parity/models/unpipelined.py": "tests/train/model_parity/test_compare.py",
    "dualpipe/train/step/dtype_plan.py": "tests/train/test_dtypes.py",
    "dualpipe/train/step/loss.py": "tests/train/test_mtp.py and test_context.py",
    "dualpipe/train/step/routers.py": "tests/train/test_trainer.py",
    "dualpipe/train/step/stages.py": "tests/train/test_trainer.py and tests/parallel/test_layouts.py",
    "dualpipe/train/step/step_runner.py": "tests/train/test_trainer.py and test_parity.py",
    "dualpipe/train/evaluate.py": "tests/train/test_trainer.py and test_cli.py",
    "dualpipe/train/runs/metrics_file.py": "tests/train/test_metrics.py",
    "dualpipe/train/run_description.py": "tests/train/test_metrics.py and test_cli.py",
    "dualpipe/train/anomaly/localize.py": "tests/train/anomaly/test_guard.py",
    "dualpipe/train/anomaly/spikes.py": "tests/train/anomaly/test_guard.py",
    "dualpipe/train/config/command_line.py": "tests/train/config/test_load.py",
    "dualpipe/train/config/schema.py": "tests/train/config/test_load.py",
    "dualpipe/train/config/source.py": "tests/train/config/test_load.py",
    "dualpipe/train/health/peer_store.py": "tests/train/health/test_watchdog.py, whose watchdogs meet there",
    "dualpipe/train/health/signals.py": "tests/train/health/test_watchdog.py and tests/train/launch/test_local.py",
    "dualpipe/train/launch/rank_processes.py": "tests/train/launch/test_local.py",
    "dualpipe/train/launch/settings_check.py": "tests/train/launch/test_distributed.py",
    "dualpipe/train/observers/step_window.py": "tests/train/observers/test_tracing.py and test_profiler.py",
}


def place_of_tests(module: str) -> Path:
    """Return where the tests of a module belong: those of dualpipe/a/b.py in tests/a/test_b.py."""
    *rooms, name = module.split(".")[1:]
    return Path("tests", *rooms, f"test_{name.strip('_')}.py")


@pytest.mark.skipif(not (ROOT.parent / "tests").is_dir(), reason="the library is installed, without its tests")
def test_tests_mirror_the_tree() -> None:
    """Every file has a test file of its name but for those of `ELSEWHERE`, exactly, whose tests are where it says."""
    top = ROOT.parent
    files = {str(path.relative_to(top)): place_of_tests(name)
             for name, path in MODULES.items() if path.name != "__init__.py"}
    without = {file for file, tests in files.items() if not (top / tests).is_file()}
    assert without == ELSEWHERE.keys()


def loaded_by(*modules: str) -> list[set[str]]:
    """Return, for each of the modules, those of ours that a process has after importing it alone."""
    code = ("import importlib, os, sys, torch\n"
            "for module in sys.argv[1:]:\n"
            "    if (child := os.fork()) == 0:\n"
            "        importlib.import_module(module)\n"
            "        print(*(m for m in sys.modules if m.split('.')[0] == 'dualpipe'), flush=True)\n"
            "        os._exit(0)\n"
            "    assert os.waitpid(child, 0)[1] == 0\n")
    done = subprocess.run([sys.executable, "-P", "-c", code, *modules], capture_output=True, text=True, check=True)
    return [set(line.split()) for line in done.stdout.splitlines()]


def test_lower_layers_load_no_upper_ones() -> None:
    by_layers, by_meshes = loaded_by("dualpipe.nn", "dualpipe.parallel.mesh")
    assert not {name for name in by_layers if name.startswith(("dualpipe.p", "dualpipe.m"))}
    rooms = {name.split(".")[1] for name in by_meshes if "." in name}
    assert rooms == {"_moved", "kernels", "parallel", "quantized", "runtime"}, "kernels for what formats are"
