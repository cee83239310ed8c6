"""Errors: their texts, exit statuses, and processes that end with their parent."""

import signal
import subprocess
import sys
import time

import pytest

from dualpipe.runtime.errors import PipelineError, RankLost, error_line, exit_status, first_line, nearest, raise_for
from processes import is_alive


@pytest.mark.parametrize(("error", "status"), [
    (ValueError("bad"), 2), (UnicodeDecodeError("utf-8", b"", 0, 1, ""), 2), (RankLost("gone"), 1), (OSError(), 1),
    (PipelineError("failed"), 1), (KeyboardInterrupt(), 1),
])
def test_errors_of_the_user_have_exit_status_2(error, status):
    assert exit_status(error) == status


def test_notes_are_separate_lines():
    error = ValueError("bad")
    error.add_note("look here")
    assert error_line(error) == "error: bad\nlook here"


def test_the_first_line_of_an_error():
    assert first_line(ValueError("  one\ntwo")) == "one"
    assert first_line(ValueError()) == first_line(ValueError("\n")) == "ValueError"


def test_nearest_names():
    known = ["steps", "sequence_length", "seed"]
    assert nearest("stepz", known) == ["steps"]
    assert nearest("optimizer", known) == []
    assert len(nearest("optimizer", known, 2, cutoff=0)) == 2


def test_problems_are_lines_of_one_error():
    raise_for("nothing is wrong", [])
    with pytest.raises(ValueError) as raised:
        raise_for("two are wrong", iter(["a is 1", "b is 2"]))
    assert str(raised.value) == "two are wrong\n  a is 1\n  b is 2"
    with pytest.raises(ValueError) as raised:
        raise_for("many are wrong", map(str, range(250)))
    lines = str(raised.value).splitlines()
    assert lines[200].strip() == "199" and lines[201:] == ["  ... and 50 more"]


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a process outlives the one that started it")
def test_a_process_dies_with_its_parent():
    """The parent ends once its child has printed "ready"; the pipe of the child closes with it."""
    child = ("import sys, time\n"
             "from dualpipe.runtime.errors import die_with\n"
             "die_with(int(sys.argv[1]))\n"
             "print('ready', flush=True)\n"
             "time.sleep(600)\n")
    parent = ("import os, subprocess, sys\n"
              "child = subprocess.Popen([sys.executable, '-P', '-c', sys.argv[1], str(os.getpid())],\n"
              "                         stdout=subprocess.PIPE)\n"
              "print(child.pid, child.stdout.readline().decode(), flush=True)\n")
    done = subprocess.run([sys.executable, "-P", "-c", parent, child], stdout=subprocess.PIPE, text=True, timeout=240)
    pid, said = done.stdout.split()
    assert said == "ready"
    begun = time.monotonic()
    while is_alive(pid):
        assert time.monotonic() - begun < 60, "the child outlives its parent"
        time.sleep(0.01)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a process outlives the one that started it")
def test_a_process_whose_parent_is_gone_ends_at_once():
    code = "from dualpipe.runtime.errors import die_with; die_with(1); print('still here')"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=240)
    assert (done.returncode, done.stdout) == (128 + signal.SIGKILL, "")
