"""Processes that anneal: they end when the search does, and load little."""

import signal
import subprocess
import sys
import time

import pytest

from default_signals import set_default_signals
from dualpipe.schedule.search import driver
from dualpipe.schedule.search.driver import WORKER_PROGRAM
from processes import is_alive


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere they end after their round")
def test_an_interrupted_search_ends_at_once_with_its_processes():
    """An interrupt is that of Ctrl-C, of which the processes would print tracebacks of their own."""
    program = ("from dualpipe.schedule import Costs, build\nfrom dualpipe.schedule.search import driver\n"
               "def start_worker(job, start=driver.start_worker):\n"
               "    worker = start(job)\n"
               "    print(worker.pid, flush=True)\n"
               "    return worker\n"
               "driver.start_worker = start_worker\n"
               "driver.MAX_CHANGES = 10**12  # a round that takes hours\n"
               "build('auto', 4, 8, costs=Costs(FB=2.5, p2p=0.2), effort=10**12)\n")
    for how in (signal.SIGINT, signal.SIGKILL):
        searching = subprocess.Popen([sys.executable, "-P", "-c", program], stdout=subprocess.PIPE,
                                     stderr=subprocess.PIPE, text=True, preexec_fn=set_default_signals)
        with searching:
            pids = [int(searching.stdout.readline()) for _ in range(driver.CHAINS)]
            searching.send_signal(how)
            begun = time.monotonic()
            _, said = searching.communicate()
        assert time.monotonic() - begun < 30, "a chain's round takes hours"
        assert said.count("Traceback") == (how == signal.SIGINT)
        while any(map(is_alive, pids)):
            assert time.monotonic() - begun < 30, "a process still searches"
            time.sleep(0.05)


def test_a_process_that_searches_loads_no_torch():
    program = WORKER_PROGRAM.split(";")[0] + "; import sys; assert not {'torch', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)
