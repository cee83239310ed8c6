"""Work on threads that nobody waits for: results, errors, limits of time, and the end of a process."""

import subprocess
import sys
import threading

import pytest

from dualpipe.runtime.background import in_background, limited


def test_the_result_and_the_error_of_work_come_with_its_future():
    assert in_background(lambda: 3).result(60) == 3
    failed = in_background(lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        failed.result(60)


def test_the_thread_is_named_and_a_daemon():
    thread = in_background(threading.current_thread, "looker").result(60)
    assert thread.name == "looker" and thread.daemon and thread is not threading.main_thread()


def test_work_that_hangs_is_given_up():
    released = threading.Event()
    assert limited(released.wait, 0.01) is None
    released.set()
    assert limited(lambda: "done", 60) == "done"
    with pytest.raises(KeyError):
        limited(lambda: {}["nothing"], 60)


def test_a_process_ends_while_its_work_hangs():
    code = ("import threading\n"
            "from dualpipe.runtime.background import in_background\n"
            "in_background(threading.Event().wait)\n")
    subprocess.run([sys.executable, "-P", "-c", code], check=True, timeout=240)
