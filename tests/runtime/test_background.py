"""Work on daemon threads: results, errors, timeouts, and the end of the process."""

import subprocess
import sys
import threading

import pytest

from dualpipe.runtime.background import run_in_background, run_with_timeout


def test_the_result_and_the_error_of_work_come_with_its_future():
    assert run_in_background(lambda: 3).result(60) == 3
    failed = run_in_background(lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        failed.result(60)


def test_work_that_hangs_is_given_up():
    released = threading.Event()
    assert run_with_timeout(released.wait, 0.01) is None
    released.set()
    assert run_with_timeout(lambda: "done", 60) == "done"
    with pytest.raises(KeyError):
        run_with_timeout(lambda: {}["nothing"], 60)


def test_a_process_ends_while_its_work_hangs():
    code = ("import threading\n"
            "from dualpipe.runtime.background import run_in_background\n"
            "run_in_background(threading.Event().wait)\n")
    subprocess.run([sys.executable, "-P", "-c", code], check=True, timeout=240)
