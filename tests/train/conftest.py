"""A training run small enough for a test."""

import os
import resource
import subprocess

import pytest

from command import Command
from default_signals import set_default_signals
from ports import free_ports
from run_files import write_files


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    """A folder with run.toml, shared by the tests of a module."""
    return write_files(tmp_path_factory.mktemp("run")).parent


@pytest.fixture(scope="module")
def without_evaluation(run_folder):
    """For a module whose tests look at no evaluation: their runs do without, which takes a fifth less."""
    toml = run_folder / "run.toml"
    toml.write_text(toml.read_text().replace("eval_batches = 2", "eval_batches = 0"))


@pytest.fixture
def free_port():
    return free_ports(1)[0]


@pytest.fixture
def lowered_limit():
    """Lower this process's limit of open files for a test; return the limit to which it can be raised again."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (900, hard))
    yield hard
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.fixture(scope="session")
def dualpipe(start_dualpipe):
    """Run `dualpipe *arguments` in `folder` and return the finished process. The rest as for `start_dualpipe`."""

    def run(folder, *arguments, timeout=280, **how):
        process = start_dualpipe(folder, *arguments, **how)
        out, err = process.communicate(timeout)
        return subprocess.CompletedProcess(arguments, process.returncode, out, err)

    return run


def clean_environment(extra=None):
    """This process's environment without what a launcher around the tests may have left in it."""
    started = ("RANK", "WORLD_SIZE", "LOCAL_", "SLURM_", "MASTER_", "TORCHELASTIC_", "DUALPIPE_")
    return {k: v for k, v in os.environ.items() if not k.startswith(started)} | (extra or {})


@pytest.fixture(scope="session")
def start_dualpipe():
    """Start `dualpipe *arguments` in `folder` and return the running process; it is killed after the tests.

    before: Python for the launcher and each rank to run first.
    command: what to start in new interpreters instead of forking (see command.py), such as `COMMAND`.
    """
    started = []

    def start(folder, *arguments, before="", command=None, environment=None):
        env = clean_environment(environment)
        if command is None:
            started.append(Command(folder, arguments, env, before))
        else:
            started.append(subprocess.Popen(
                [*command, *arguments], cwd=folder, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                preexec_fn=set_default_signals,
            ))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()
