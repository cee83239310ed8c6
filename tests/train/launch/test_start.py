"""The process that starts the ranks of one machine: their environment, failures, signals and restarts."""

import json
import os
import signal
import sys
import tempfile
import time
from pathlib import Path

import pytest

from dualpipe import cli
from dualpipe.runtime import files
from dualpipe.runtime.rank_process import STOPPING
from dualpipe.train.config.schema import Config, OutputConfig, ParallelConfig
from dualpipe.train.launch import start
from dualpipe.train.launch.start import start_ranks
from dualpipe.train.metrics import read_metrics
from faults import planting
from sockets import listening

SLOW = """
import os, time
from dualpipe.train import trainer
good = trainer.learning_rate
def slow(step, *settings):
    time.sleep(0.3 * (step > 3 and os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0"))
    return good(step, *settings)
trainer.learning_rate = slow
"""


def losses(folder, output):
    return [(row["step"], row["loss"]) for row in read_metrics(folder / output / "metrics.jsonl")]


def ranks(count, output="out", **layout):
    return Config(parallel=ParallelConfig(pp=count, device="cpu", **layout), output=OutputConfig(str(output)))


def fake_ranks(monkeypatch, tmp_path, program):
    """Make the launcher start `program` instead of the `dualpipe` command."""
    (tmp_path / "dualpipe.py").write_text(program)
    monkeypatch.setattr(sys, "executable", _python_from(tmp_path))


def _python_from(folder):
    script = folder / "python"
    script.write_text(f'#!/bin/sh\nexec {sys.executable} {folder}/dualpipe.py "$@"\n')
    script.chmod(0o755)
    return str(script)


def test_one_failing_rank_stops_the_others(monkeypatch, tmp_path, capsys):
    program = f"""
import os, sys, time
open("{tmp_path}/pid" + os.environ["RANK"], "w").write(str(os.getpid()))
if os.environ["RANK"] == "1":
    while not all(os.path.exists(f"{tmp_path}/pid{{rank}}") for rank in range(3)):
        time.sleep(0.01)
    sys.exit(9)
time.sleep(100)
"""
    fake_ranks(monkeypatch, tmp_path, program)
    assert start_ranks(["train"], ranks(3)) == 9
    assert "rank 1 (pp 1) ended with exit status 9" in capsys.readouterr().err
    for rank in range(3):
        with pytest.raises(ProcessLookupError):
            os.kill(int((tmp_path / f"pid{rank}").read_text()), 0)


# -- which rank is at fault

SAY = """
import json, os, signal, sys, time
rank, folder = int(os.environ["RANK"]), os.path.dirname(os.environ["DUALPIPE_ERROR_FILE"])

def leave(text, status=1, kind="own", wait=None, when=None, **fields):
    report = {"rank": rank, "status": status, "kind": kind, "message": text, "wait": wait and [rank, *wait],
              "time": when or time.time(), **fields}
    with open(f"{folder}/{rank}.new", "w") as file:
        json.dump(report, file)
    os.rename(file.name, os.environ["DUALPIPE_ERROR_FILE"])
    os._exit(status)

def all_ready(count):
    with open(f"{folder}/new{rank}", "w") as file:
        file.write(str(os.getpid()))
    os.rename(file.name, f"{folder}/ready{rank}")
    while not all(os.path.exists(f"{folder}/ready{rank}") for rank in range(count)):
        time.sleep(0.01)

def after(other):
    pid = open(f"{folder}/ready{other}").read()
    try:
        while not (os.path.exists(f"{folder}/rank{other}.json") or ") Z" in open(f"/proc/{pid}/stat").read()):
            time.sleep(0.01)
    except OSError:  # its end has been seen by the launcher
        pass

def kill(other, number):
    os.kill(int(open(f"{folder}/ready{other}").read()), number)
"""
WAITED = "waited 10 s for the activation of stage 2 from rank 2 (pp 1, dp 0) (timed out)"
LOST = f"leave({WAITED!r}, kind='lost', wait=[[2], {WAITED!r}], when=1.0 + rank)"
TOLD = ("leave('rank 2 (pp 1, dp 0): F(stage 2): OSError: waited for a disk', kind='told', when=1.0 + rank, "
        "traces=['t%d' % rank])")


@pytest.mark.parametrize(
    ("who", "status", "said"),
    [
        ("after(0) or leave('the second', 4, when=2.0) if rank else leave('the first', 3, when=1.0)", 3,
         ["error: the first"]),
        ("after(3) or leave('the second', 4, when=2.0) if rank < 3 else leave('the first', 3, when=1.0)", 3,
         ["error: the first"]),
        ("rank and time.sleep(60) or kill(1, 9) or leave('closed')", 137,
         ["error: rank 1 (pp 0, dp 1) was killed by SIGKILL"]),
        (f"rank and time.sleep(60) or kill(2, 9) or kill(1, 6) or {LOST}", 137,
         ["error: rank 2 (pp 1, dp 0) was killed by SIGKILL", "  rank 0 (pp 0, dp 0): waited 10 s for the activation "
          "of stage 2 from rank 2 (pp 1, dp 0) (timed out)"]),
        pytest.param("rank and time.sleep(60) or kill(2, 11) or kill(1, 6) or time.sleep(60)", 139,
                     ["error: rank 2 (pp 1, dp 0) was killed by SIGSEGV"], marks=pytest.mark.slow),
        (f"leave('mine', 5) if rank == 3 else after(3) or {LOST}", 5,
         ["error: mine"]),
        (f"os._exit(7) if rank == 3 else after(3) or {LOST}", 7,
         ["error: rank 3 (pp 1, dp 1) ended with exit status 7 and no error message"]),
        (f"os._exit(0) if rank == 3 else after(3) or {LOST}", 1,
         ["error: rank 3 (pp 1, dp 1) ended with exit status 0 and no error message"]),
        (f"rank and time.sleep(60) or kill(2, signal.SIGSTOP) or {LOST}", 1,
         ["error: rank 2 (pp 1, dp 0) is stopped (SIGSTOP)", "  rank 0 (pp 0, dp 0): waited"]),
        (f"os._exit(1) if rank == 2 else after(2) or {TOLD}", 1,
         ["error: rank 2 (pp 1, dp 0): F(stage 2): OSError: waited for a disk", *["trace until the error: t"] * 2]),
        (f"leave('', kind='watchdog') if rank == 3 else after(3) or {LOST}", 1,
         ["error: rank 0 (pp 0, dp 0) waited 10 s for the activation of stage 2"]),
        (f"rank and after(0) or {LOST}", 1, ["error: rank 0 (pp 0, dp 0) waited 10 s for the activation of stage 2"]),
    ],
)
def test_the_rank_at_fault_is_named_first(monkeypatch, tmp_path, capsys, who, status, said):
    fake_ranks(monkeypatch, tmp_path, f"{SAY}\nall_ready(4)\n{who}\n")
    began = time.monotonic()
    assert start_ranks(["train"], ranks(2, dp=2)) == status
    assert time.monotonic() - began < 40, "not by their own end after 60 s: a rank that is stopped gets SIGKILL"
    lines = capsys.readouterr().err.splitlines()
    assert len(said) <= len(lines) <= max(2, len(said)), lines
    for line, expected in zip(lines, said):
        assert line.startswith(expected)


def test_what_ended_ranks_left_of_a_checkpoint_is_removed_unless_another_job_saves_there(tmp_path):
    left, whole = tmp_path / ".tmp-step-00000002-1f", tmp_path / "step-00000001"
    for folder in (left, whole):
        folder.mkdir()
        (folder / "rank-00000.safetensors").write_text("half")
    other = files.lock(tmp_path / ".lock", 0)
    start.remove_unfinished(tmp_path)
    assert left.exists()
    other.release()
    start.remove_unfinished(tmp_path)
    assert whole.exists() and not left.exists()
    start.remove_unfinished(tmp_path / "none")


def test_a_rank_that_stays_stopped_is_noticed_though_nobody_waits_for_it(monkeypatch, tmp_path, capsys):
    fake_ranks(monkeypatch, tmp_path, f"{SAY}\nrank or os.kill(os.getpid(), signal.SIGSTOP)\ntime.sleep(60)\n")
    assert start_ranks(["train"], ranks(2, timeout=2)) == 1
    assert capsys.readouterr().err == "error: rank 0 (pp 0) is stopped (SIGSTOP)\n"


def test_a_rank_without_memory(monkeypatch, tmp_path, capsys):
    kills = iter([[5, 1], [6, 1]])
    monkeypatch.setattr(start, "count_oom_kills", lambda: next(kills))
    fake_ranks(monkeypatch, tmp_path, f"{SAY}\nos.kill(os.getpid(), 9) if rank else time.sleep(60)\n")
    assert start_ranks(["train"], ranks(2)) == 137
    assert capsys.readouterr().err == "error: rank 1 (pp 1) was killed: out of memory\n"


def test_ranks_are_asked_for_their_states(monkeypatch, tmp_path, capsys):
    """Ranks answer SIGUSR2 like a watchdog; the launcher does not wait longer for a rank that does not answer."""
    (tmp_path / "out" / "why").mkdir(parents=True)
    (tmp_path / "out" / "why" / "rank-00002.json").write_text("old")
    answer = f"""
def answer(*_):
    open("{tmp_path}/out/why/rank-00001.json", "w").write('{{"step": 8, "lost": null}}')
signal.signal(signal.SIGUSR2, answer if rank == 1 else signal.SIG_IGN)
"""
    fake_ranks(monkeypatch, tmp_path, f"{SAY}{answer}\nall_ready(3)\nrank or leave('mine', 6)\ntime.sleep(60)\n")
    began = time.monotonic()
    assert start_ranks(["train"], ranks(3, output=tmp_path / "out"), watched=True) == 6
    assert time.monotonic() - began < 40, "not by the ranks' own end after 60 s"
    assert capsys.readouterr().err == "error: mine\n", "which needs no report"
    assert start._completed_steps(tmp_path / "out") == 7, "one more is under way"


def test_a_disk_that_hangs_does_not_keep_the_launcher(monkeypatch, tmp_path, capsys):
    (tmp_path / "out" / "why").mkdir(parents=True)
    os.mkfifo(tmp_path / "out" / "why" / "rank-00000.json")  # to read it waits without end
    fake_ranks(monkeypatch, tmp_path, f"{SAY}\nrank or leave('mine', 6)\ntime.sleep(60)\n")
    began = time.monotonic()
    assert start_ranks(["train"], ranks(2, output=tmp_path / "out"), watched=True) == 6
    assert time.monotonic() - began < 40, "not by the ranks' own end after 60 s"
    assert capsys.readouterr().err == "error: mine\n"


# -- signals to the launcher

GENTLE = f"""{SAY}
def stop(number, frame):
    open("TMP/asked%d" % rank, "a").write("%d " % number)
    if WILLING:
        time.sleep(0.3)
        os._exit(130 if number == signal.SIGRTMIN else 128 + number)  # which stands for Ctrl-C
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGRTMIN):
    signal.signal(number, stop)
open("TMP/pid%d" % rank, "w").write("%d" % os.getpid())
all_ready(2)
if rank == 0:
    for number in SIGNALS:
        time.sleep(0.2)
        os.kill(os.getppid(), number)
while True:
    time.sleep(1)
"""


@pytest.mark.parametrize(
    ("watched", "willing", "signals", "status"),
    [(True, True, [signal.SIGTERM], 143), (True, True, [signal.SIGINT], 130),
     pytest.param(True, True, [signal.SIGHUP], 129, marks=pytest.mark.slow),
     pytest.param(True, True, [signal.SIGUSR1], 138, marks=pytest.mark.slow),
     (True, False, [signal.SIGINT, signal.SIGINT], 130),
     (True, False, [signal.SIGTERM, signal.SIGHUP, signal.SIGHUP], 143), (False, True, [signal.SIGHUP], 129)],
)
def test_a_signal_is_passed_on_and_a_second_one_ends_all(
    monkeypatch, tmp_path, capsys, watched, willing, signals, status
):
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    program = GENTLE.replace("TMP", str(tmp_path)).replace("WILLING", f"{willing}")
    fake_ranks(monkeypatch, tmp_path, program.replace("SIGNALS", f"{list(map(int, signals))}"))
    # A shell's background jobs ignore SIGINT, and so would what they start.
    before = [signal.signal(number, signal.default_int_handler) for number in STOPPING]
    try:
        assert start_ranks(["train"], ranks(2), watched=watched, restarts=5) == status
        assert {signal.getsignal(number) for number in STOPPING} == {signal.default_int_handler}
    finally:
        for number, handler in zip(STOPPING, before):
            signal.signal(number, handler)
    asked = [(tmp_path / f"asked{rank}").read_text() for rank in range(2) if watched]
    passed_on = signal.SIGRTMIN if signals[0] == signal.SIGINT else signals[0]
    assert asked == [f"{int(passed_on)} "] * len(asked), "once"
    at_once = len(signals) > 1 or not watched
    assert capsys.readouterr().err == ("\ninterrupted: all ranks are stopped\n" if at_once else "")
    assert not list(temporary.iterdir())
    for rank in range(2):
        with pytest.raises(ProcessLookupError):
            os.kill(int((tmp_path / f"pid{rank}").read_text()), 0)


def test_a_signal_before_ranks_take_any_ends_all(monkeypatch, tmp_path, capsys):
    program = f"{SAY}\nall_ready(2)\nrank or os.kill(os.getppid(), signal.SIGTERM)\ntime.sleep(60)\n"
    fake_ranks(monkeypatch, tmp_path, program)
    assert start_ranks(["train"], ranks(2), watched=True) == 143
    assert capsys.readouterr().err == "\ninterrupted: all ranks are stopped\n"


@pytest.mark.parametrize("status", [os.EX_TEMPFAIL, 143])
def test_ranks_that_stop_together_have_not_failed(monkeypatch, tmp_path, capsys, status):
    """At the time limit, or after a signal to one of them."""
    fake_ranks(monkeypatch, tmp_path, f"{SAY}\ntime.sleep(0.3 * rank)\nsys.exit({status})\n")
    assert start_ranks(["train"], ranks(2), restarts=5) == status
    assert capsys.readouterr().err == ""


# -- starting again


@pytest.fixture
def starts(monkeypatch, tmp_path):
    """Start ranks whose start number N does `code`, with `step(n)` to say that a step is done; the numbers, and the
    exit status."""

    def run(code, restarts):
        metrics = f"def step(n):\n    os.makedirs('{tmp_path}/out', exist_ok=True)\n" \
                  f"    new = '{tmp_path}/out/new%d' % rank\n" \
                  f"    open(new, 'w').write('{{\"step\": %d}}\\n' % n)\n" \
                  f"    os.replace(new, '{tmp_path}/out/metrics.jsonl')  # all ranks write it, and one may be ended\n"
        number = f"N = int(os.environ['TORCHELASTIC_RESTART_COUNT'])\nrank or open('{tmp_path}/N', 'a').write(str(N))\n"
        fake_ranks(monkeypatch, tmp_path, f"{SAY}\n{metrics}\n{number}\nall_ready(2)\n{code}\n")
        status = start_ranks(["train"], ranks(2, output=tmp_path / "out"), restarts=restarts)
        return (tmp_path / "N").read_text(), status

    return run


def test_ranks_are_started_again(starts, capsys):
    code = "if N == 2: sys.exit(0)\nif rank == 1:\n    step(N + 3)\n    os.kill(os.getpid(), 9)\ntime.sleep(60)"
    assert starts(code, 5) == ("012", 0)
    killed = "error: rank 1 (pp 1) was killed by SIGKILL\n"
    assert capsys.readouterr().err == (f"{killed}restart 1 of 5, after step 3\n"
                                       f"{killed}restart 2 of 5, after step 4\n")


def test_restarts_are_counted(starts, capsys):
    assert starts("step(N + 1)\nleave(f'number {N}', 3, when=1)", 1) == ("01", 3)
    assert capsys.readouterr().err == "error: number 0\nrestart 1 of 1, after step 1\nerror: number 1\n"


@pytest.mark.parametrize(("code", "numbers", "step"), [
    ("leave(f'as it was', 3)", "012", 0),
    ("step(5) if N == 0 else step(3)\nleave('as it was', 3)", "012", 5),  # what is done again is no progress
    ("step(N if N < 3 else 2)\nleave('as it was', 3)", "01234", 2),
])
def test_a_crash_loop_stops(starts, capsys, code, numbers, step):
    assert starts(code, 50) == (numbers, 3)
    assert capsys.readouterr().err.endswith(
        f"error: 3 starts in a row have ended without a step more than the {step} that were done: starting again does "
        "not help; they ended by\n  error: as it was\n")


def test_an_error_of_the_users_is_no_reason_to_start_again(starts):
    assert starts("leave('no such file', 2)", 5) == ("0", 2)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds the ranks in /proc")
def test_a_run_whose_rank_is_killed_goes_on_to_the_same_losses(run_folder, start_dualpipe, dualpipe):
    """Its store is reachable from this machine only."""
    options = ["--train.steps", "6", "--train.eval_batches", "0", "--checkpoint.interval", "2"]
    assert dualpipe(run_folder, "train", "run.toml", *options, "--output.dir", "straight").returncode == 0
    run = start_dualpipe(run_folder, "train", "run.toml", "--max-restarts", "2", *options, "--output.dir", "killed",
                         before=SLOW)
    for line in run.stdout:
        if line.startswith("step 4/"):
            break
    ranks = [int(pid) for pid in Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split()]
    found = [listening(pid=pid) for pid in ranks]
    os.kill(ranks[1], signal.SIGKILL)
    out, err = run.communicate(250)
    assert run.returncode == 0, err
    assert "error: rank 1 (pp 1) was killed by SIGKILL\n" in err and "restart 1 of 2, after step " in err
    assert "resuming from" in out
    assert losses(run_folder, "killed") == losses(run_folder, "straight")
    assert len(found) == 2 and all(found) and {address for each in found for address in each} == {"127.0.0.1"}


FOUND_BEFORE = """
import os
from dualpipe.schedule.search import driver
os.environ["XDG_CACHE_HOME"] = "cache"
if os.environ.get("TORCHELASTIC_RESTART_COUNT") == "1":
    del driver._search_schedules
"""


@pytest.mark.slow
def test_a_restart_goes_on_with_the_schedule_that_was_found(run_folder, dualpipe):
    done = dualpipe(run_folder, "train", "run.toml", "--max-restarts", "1", "--parallel.schedule", "auto",
                    "--train.steps", "3", "--train.eval_batches", "0", "--checkpoint.interval", "1",
                    "--output.dir", "found", before=FOUND_BEFORE + planting("kill rank=1 step=3 action=F"))
    assert done.returncode == 0, done.stderr
    assert "restart 1 of 1, after step 2" in done.stderr
    assert [step for step, _ in losses(run_folder, "found")] == [1, 2, 3]
    assert len([*(run_folder / "cache").rglob("*.json")]) == 1


@pytest.mark.slow
def test_one_rank_is_started_again_too(run_folder, dualpipe):
    done = dualpipe(run_folder, "train", "--max-restarts", "1", "run.toml", "--parallel.pp", "1", "--train.steps", "3",
                    "--train.eval_batches", "0", "--output.dir", "one",
                    before=planting("kill rank=0 step=2 action=optimizer"))
    assert done.returncode == 0, done.stderr
    assert done.stderr.endswith("error: rank 0 was killed by SIGKILL\nrestart 1 of 1, after step 1\n")
    assert [step for step, _ in losses(run_folder, "one")] == [1, 2, 3]


def test_restarts_by_others_are_theirs(run_toml, monkeypatch, capsys):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert cli.main(["train", str(run_toml), "--max-restarts", "3"]) == 2
    assert "--max-restarts 3 is for ranks that this command starts itself; give it to" in capsys.readouterr().err
    with pytest.raises(ValueError, match="--max-restarts -1 must be at least 0"):
        start_ranks(["train"], ranks(2), restarts=-1)


@pytest.mark.parametrize(("options", "name"), [
    (["--data.path", "nowhere"], "data.path"), (["--data.sources", "stdlib", "nowhere"], "data.sources"),
    (["--data.validation_path", "nowhere"], "data.validation_path"),
])
@pytest.mark.parametrize("ranks", [1, 2])
def test_data_that_does_not_exist_is_found_before_ranks_start(run_toml, monkeypatch, capsys, options, name, ranks):
    """A single rank is this process, which finds it as the ranks of torchrun do."""
    monkeypatch.setattr(start, "_launch", None)
    run_toml.write_text(run_toml.read_text().replace('path = "text"\n', ""))
    run = ["train", str(run_toml), "--parallel.pp", str(ranks), "--output.dir", str(run_toml.with_name("out"))]
    assert cli.main([*run, *options]) == 2
    error = f"error: {name}: there is no file or directory nowhere; give a packed directory, or a file or folder of"
    assert capsys.readouterr().err.startswith(error)


def test_the_cursor_is_shown_again_when_ranks_were_stopped(monkeypatch, tmp_path, capsys):
    fake_ranks(monkeypatch, tmp_path, "import os, sys\nsys.exit(int(os.environ['RANK']))\n")
    start_ranks(["train"], ranks(2))
    assert "\x1b" not in capsys.readouterr().out, "not a terminal"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    start_ranks(["train"], ranks(2))
    assert capsys.readouterr().out == "\x1b[?25h"


def test_ranks_get_their_place_and_arguments(monkeypatch, tmp_path):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    program = f"""
import json, os, sys
keys = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS", "MASTER_ADDR")
with open("{tmp_path}/rank" + os.environ["RANK"], "w") as file:
    json.dump([sys.argv[1:], [os.environ[k] for k in keys]], file)
"""
    fake_ranks(monkeypatch, tmp_path, program)
    assert start_ranks(["train", "a b"], ranks(2)) == 0
    for rank in range(2):
        arguments, environment = json.loads((tmp_path / f"rank{rank}").read_text())
        assert arguments == ["-P", "-m", "dualpipe", "train", "a b"]
        assert environment == [str(rank), str(rank), "2", "2", "1", "127.0.0.1"]


def test_ranks_may_open_as_many_files_as_the_machine_allows(monkeypatch, tmp_path, lowered_limit):
    program = f"""
import os, resource
with open("{tmp_path}/limit" + os.environ["RANK"], "w") as file:
    file.write(str(resource.getrlimit(resource.RLIMIT_NOFILE)[0]))
"""
    fake_ranks(monkeypatch, tmp_path, program)
    assert start_ranks(["train"], ranks(2)) == 0
    assert {(tmp_path / f"limit{rank}").read_text() for rank in range(2)} == {f"{lowered_limit}"}
