"""Runs with planted faults: a matrix of faults, each planted into a run of its own.

The matrix says what is seen of each fault: how soon, which rank is named, what is left behind, and that a restarted
run ends with the numbers of an undisturbed one.
"""

import json
import re
import shutil
import time
from pathlib import Path
from threading import Thread
from typing import NamedTuple

import pytest

from dualpipe.runtime.recorder import rank_name
from faults import KINDS, Fault, PlantedFault, parse, planting, recorder_with
from run_files import MODEL, write_files

TIMEOUT = 5.0  # parallel.timeout where it takes that to notice
OPTIONS = ["--train.steps", "3", "--checkpoint.interval", "1", "--export.to_hf", "hf"]
LAYOUTS = {
    "pp1": ({}, ["--parallel.pp", "1"]),
    "pp2": ({"pp": 2}, []),
    "pp4": ({"pp": 4}, ["--parallel.pp", "4"]),
    "pp2 x dp2": ({"pp": 2, "dp": 2}, ["--parallel.dp", "2", "--train.num_chunks", "2"]),
    "pp2 x ep2": ({"pp": 2, "ep": 2}, ["--parallel.ep", "2", "--train.num_chunks", "2"]),
}


class Cell(NamedTuple):
    """A fault in a layout, and the text of the first error; "" if the run continues to its end."""

    layout: str
    faults: str
    says: str = ""
    status: int = 0

    @property
    def fault(self) -> Fault:
        """Return the first fault."""
        return parse(self.faults)[0]

    def __str__(self) -> str:
        return f"{self.layout}: {self.faults}"


MOMENTS = {
    "start": "action=start", "F": "step=2 action=F", "B": "step=2 action=B", "W": "step=2 action=W",
    "segment": "step=2 action=segment", "clip": "step=2 action=clip", "optimizer": "step=2 action=optimizer",
    "evaluate": "action=evaluate", "save": "step=2 action=save", "write": "step=2 action=write",
    "commit": "step=2 action=commit", "export": "action=write what=model.",
}
SOME = {  # the moments tried in a layout, and the rank
    "pp2": (1, tuple(moment for moment in MOMENTS if moment != "segment")),  # its stages have one segment
    "pp4": (2, ("F", "clip", "write")),
    "pp2 x dp2": (3, ("start", "B", "clip", "evaluate", "write", "export")),
    "pp2 x ep2": (1, ("F", "B", "segment", "optimizer", "save")),
}
FAST = (
    "pp2: kill rank=1 step=2 action=B", "pp1: nan rank=0 step=2 action=B",
)


def cells():
    """Yield the cells of the matrix."""
    for kind, says, status in (
        ("kill", "was killed by SIGKILL", 137), ("stop", "is stopped (SIGSTOP)", 1), ("raise", ": planted", 1)
    ):
        for layout, (rank, moments) in SOME.items():
            is_first = layout == "pp2"  # a watchdog notices a rank that is stopped, in any layout alike
            for moment in moments if kind != "stop" or is_first else moments[:1]:
                fault = f"{kind} rank={0 if moment == 'commit' else rank} {MOMENTS[moment]}"
                goes_on = kind == "raise" and moment in ("write", "commit")  # the next checkpoint is saved
                yield Cell(layout, fault) if goes_on else Cell(layout, fault, says, status)
    yield Cell("pp1", "raise rank=0 step=2 action=write")
    for moment in (MOMENTS["B"], MOMENTS["optimizer"], "action=export"):
        yield Cell("pp1", f"raise rank=0 {moment}", ": planted", 1)
    for layout, when in (  # NaN in a result, and in a parameter
        ("pp1", "rank=0 step=2 action=B"), ("pp2", "rank=1 step=2 action=F"), ("pp2", "rank=1 step=2 action=data"),
        ("pp4", "rank=3 step=2 action=I"), ("pp2 x dp2", "rank=3 step=2 action=B"),
        ("pp2 x ep2", "rank=2 step=2 action=F"), ("pp2 x ep2", "rank=0 step=2 action=segment"),
    ):
        says = "first in" if "data" not in when else "parameters before the step that are not finite"
        yield Cell(layout, f"nan {when}", says, 1)
    for layout, rank, moment in (
        ("pp2", 1, "F"), ("pp2", 0, "evaluate"), ("pp2", 1, "write"), ("pp4", 2, "W"), ("pp2 x dp2", 1, "clip"),
        ("pp2 x ep2", 3, "segment"),
    ):
        yield Cell(layout, f"delay rank={rank} {MOMENTS[moment]} seconds=1")
    for layout, rank in (("pp1", 0), ("pp2", 1), ("pp2 x dp2", 2)):
        yield Cell(layout, f"slow_disk rank={rank} seconds=0.3 what=step")
        yield Cell(layout, f"full_disk rank={rank} step=1")  # said, and the next one is saved
    yield Cell("pp2", "full_disk rank=1 what=model.", "No space left on device", 1)  # of the export
    for layout, rank in (("pp2", 0), ("pp4", 1), ("pp2 x dp2", 2)):
        yield Cell(layout, f"lost_message rank={rank} step=2", "wait for each other", 1)


CELLS = [*cells()]


class Run(NamedTuple):
    """A run that has ended."""

    status: int
    out: str
    err: str  # from the line of the planted fault on: on a busy machine the start may seem to hang
    planted: float  # time of that line, 0.0 if there is none
    ended: float


@pytest.fixture(scope="module")
def run(start_dualpipe):
    """Run `dualpipe train` with times; no process of it may survive, nor a file in its folder for temporary files."""

    def start(folder, *arguments, faults=None):
        before = planting(faults) if faults else ""
        temporary = folder / "tmp"
        temporary.mkdir(exist_ok=True)
        began = time.monotonic()
        process = start_dualpipe(folder, "train", *arguments, before=before, environment={"TMPDIR": str(temporary)})
        lines = {"out": [], "err": []}

        def read(name, stream):
            for line in stream:
                lines[name].append((time.monotonic(), line))

        streams = {"out": process.stdout, "err": process.stderr}
        readers = [Thread(target=read, args=stream, daemon=True) for stream in streams.items()]
        for reader in readers:
            reader.start()
        status = process.wait(250)
        ended = time.monotonic()
        for reader in readers:
            reader.join(60)
            assert not reader.is_alive(), "something that the run has started still writes"
        assert processes_in(folder) == []
        assert list(temporary.iterdir()) == []
        written = sorted(lines["out"] + lines["err"])
        planted = next((at for at, line in written if line.startswith("planted: ")), began)
        out = "".join(line for at, line in lines["out"])
        err = "".join(line for at, line in lines["err"] if at >= planted)
        return Run(status, out, err, planted - began, ended - began)

    return start


def processes_in(folder):
    """Return the processes that were started in a folder."""
    found = []
    for each in Path("/proc").glob("[0-9]*/cwd"):
        try:
            if each.readlink() == folder and "\nState:\tZ" not in (each.parent / "status").read_text():
                found.append(each.parent.name)
        except OSError:  # has ended
            continue
    return found


def without_torch(text):
    """Return the text without the lines that torch's own log adds."""
    line = r"^((\[rank\d+\]:)?\[[WE]\d|Exception raised from |frame #|<omitting|$).*\n"
    return re.sub(line, "", text, flags=re.MULTILINE)


def numbers(folder):
    """Return the values that must not differ, by step."""
    rows = map(json.loads, (folder / "out" / "metrics.jsonl").read_text().splitlines())
    return {row["step"]: [row.get(key) for key in ("loss", "eval_loss", "grad_norm", "lr")] for row in rows}


def files_for(layout, folder):
    """Write the files of a run in the layout; four ranks have eight stages together."""
    return write_files(folder, MODEL | {"num_hidden_layers": 6} if layout == "pp4" else MODEL).parent


@pytest.fixture(scope="module")
def undisturbed(run, tmp_path_factory):
    """Return the results of a layout's run without faults: numbers, and the exported files."""
    found = {}

    def of(layout):
        if layout not in found:
            folder = files_for(layout, tmp_path_factory.mktemp("undisturbed"))
            done = run(folder, "run.toml", *LAYOUTS[layout][1], *OPTIONS)
            assert done.status == 0, done.err
            found[layout] = numbers(folder), (folder / "hf" / "model.safetensors").read_bytes()
            shutil.rmtree(folder)
        return found[layout]

    return of


@pytest.mark.parametrize("cell", [
    pytest.param(cell, marks=[] if str(cell) in FAST else [pytest.mark.slow, pytest.mark.matrix], id=str(cell))
    for cell in CELLS
])
def test_fault(run, undisturbed, tmp_path, cell):
    folder, (sizes, layout) = files_for(cell.layout, tmp_path), LAYOUTS[cell.layout]
    patience = ["--parallel.timeout", TIMEOUT] if cell.fault.kind in ("stop", "lost_message") else []
    disturbed = run(folder, "run.toml", *layout, *OPTIONS, *patience, faults=cell.faults)
    notice, said = disturbed.ended - disturbed.planted, without_torch(disturbed.err)
    assert f"planted: {cell.fault}" in disturbed.out, said
    if cell.says:
        assert disturbed.status == cell.status, said
        assert notice < TIMEOUT + 5
        names = [rank_name(cell.fault.rank, each) for each in (sizes, {})]  # before the ranks meet, without a place
        # The first line on a bad number names the step, the next one its origin.
        lines = said.splitlines()[cell.fault.kind == "nan" :]
        for line in lines[:1] if cell.fault.kind == "nan" else filter(re.compile("error: |watchdog: ").match, lines):
            named = re.findall(r"rank \d+(?: \(.*?\))?", line)
            if cell.fault.kind == "lost_message":  # its receiver and its sender wait for each other
                named.sort(key=names[0].__ne__)
            assert named[0] in names, said
        assert cell.says in said
        assert "Traceback" in said or cell.fault.kind != "raise", "an unexpected error shows where it comes from"
        assert re.match("error: |watchdog: ", said) or cell.fault.kind in ("raise", "full_disk"), said
        again = run(folder, "run.toml", *layout, *OPTIONS)
        assert again.status == 0, again.err
    else:
        assert disturbed.status == 0, said
    assert (numbers(folder), (folder / "hf" / "model.safetensors").read_bytes()) == undisturbed(cell.layout)
    left = [path for path in folder.rglob("*") if re.search(r"^\.tmp-|\.partial$", path.name)]
    assert left == [], "what a run leaves unfinished, the next one removes"


@pytest.mark.parametrize("layout", ["pp1", pytest.param("pp2 x dp2", marks=pytest.mark.slow)])
def test_ranks_are_started_again(run, undisturbed, tmp_path, layout):
    folder = files_for(layout, tmp_path)
    faults = "kill rank=0 step=2 action=F; raise rank=0 step=3 action=F"  # the second would come after the restart
    done = run(folder, "run.toml", "--max-restarts", "1", *LAYOUTS[layout][1], *OPTIONS, faults=faults)
    assert done.status == 0 and "restart 1 of 1" in done.err and "rank 0" in done.err.splitlines()[0], done.err
    assert (numbers(folder), (folder / "hf" / "model.safetensors").read_bytes()) == undisturbed(layout)


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["gather", "reduce"])
def test_a_failure_in_the_collectives_of_fsdp2_ends_the_run(run, tmp_path, moment):
    """The other rank is in the collective then, and would stay there until the timeout of ten minutes."""
    fault = f"raise rank=1 step=2 action={moment}"
    layout = ["--parallel.pp", "1", "--parallel.dp", "2", "--train.num_chunks", "2"]
    done = run(files_for("pp1", tmp_path), "run.toml", *layout, *OPTIONS, faults=fault)
    assert done.status == 1 and done.ended - done.planted < 20
    # Under load the checkpoint of the step before may still be written: a line after the error says so.
    assert f"PlantedFault: {fault}: planted" in done.err, done.err


def test_the_matrix_has_every_kind_of_fault():
    assert {*FAST} <= {str(cell) for cell in CELLS}
    assert {cell.fault.kind for cell in CELLS} == {*KINDS}


# -- what may be planted


def test_a_fault_happens_once_on_its_rank_and_not_after_a_restart(monkeypatch):
    recorder = recorder_with("raise rank=1 action=clip")
    first = recorder(1)
    with pytest.raises(PlantedFault, match="raise rank=1 action=clip: planted"):
        first.begin("clip")
    first.begin("clip")
    recorder(0).begin("clip")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    recorder(1).begin("clip")
