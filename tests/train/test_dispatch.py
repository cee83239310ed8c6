"""Runs whose tokens take two hops between pretended nodes: the numbers of runs with one hop, to the bit."""

import pytest

from dualpipe.train.metrics import read_metrics

RUN = ("--parallel.pp", "1", "--parallel.ep", "4", "--train.num_chunks", "2", "--train.steps", "2")
NODES = ("--parallel.ranks_per_node", "2")


def trained(dualpipe, folder, *options):
    """The losses and gradient norms of a run."""
    name = "-".join(options).replace("--parallel.", "")
    done = dualpipe(folder, "train", "run.toml", *RUN, "--output.dir", name, *options)
    assert done.returncode == 0, done.stderr
    return [(row["loss"], row["grad_norm"]) for row in read_metrics(folder / name / "metrics.jsonl")]


@pytest.mark.slow
@pytest.mark.parametrize("more", [(), pytest.param(("--memory.recompute", "dispatch"), marks=pytest.mark.slow)])
def test_a_run_in_two_hops_has_the_numbers_of_one_hop(run_folder, dualpipe, more):
    one = trained(dualpipe, run_folder, *NODES, "--parallel.dispatch", "all_to_all", *more)
    two = trained(dualpipe, run_folder, *NODES, "--parallel.dispatch", "two_hop", *more)
    assert len(one) == 2
    assert one == two


def test_a_way_that_the_ranks_do_not_have_is_refused(run_folder, dualpipe):
    done = dualpipe(run_folder, "train", "run.toml", *RUN, "--parallel.dispatch", "two_hop")
    assert done.returncode == 2 and "'two_hop' between 4 expert-parallel ranks with [4] on a node" in done.stderr


PLANTED = """
from dualpipe.parallel.experts.two_hop import TwoHopDispatcher

def plan(self, *inputs):
    raise RuntimeError("a plan for two hops")

TwoHopDispatcher.plan = plan
"""


@pytest.mark.parametrize("nodes, fails", [(NODES, True), pytest.param((), False, marks=pytest.mark.slow)])
def test_the_nodes_choose_the_way(run_folder, dualpipe, nodes, fails):
    options = ("--output.dir", f"chosen {fails}", "--train.steps", "1")
    done = dualpipe(run_folder, "train", "run.toml", *RUN, *nodes, *options, before=PLANTED)
    assert (done.returncode != 0) is fails
    assert ("a plan for two hops" in done.stderr) is fails
