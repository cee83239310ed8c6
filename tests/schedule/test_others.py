"""Schedules against other tools: torch's lowering and its simulator, Megatron-Core's order, Colossal-AI's times."""

from __future__ import annotations

import ast
import csv
import runpy
from importlib import metadata
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dualpipe.schedule import Action, Costs, Schedule, build, simulate, validate
from dualpipe.schedule.messages import StepMessages, all_messages
from dualpipe.schedule.types import Kind, Step, v_placement
from schedules import SCHEDULES

MISSING = "{} is not installed; make test installs it, or pip install --no-deps -r tests/schedule-requirements.txt"
MEGATRON_FUNCTIONS = {
    "pipeline_parallel/schedules.py": ["get_schedule_table", "get_pp_rank_microbatches"],
    "transformer/cuda_graphs.py": ["convert_schedule_table_to_order"],
}


def installed_source(package: str, path: str) -> Path:
    """Return the path of a source file of an installed package without importing it; skip the test if there is none."""
    try:
        return Path(str(metadata.distribution(package).locate_file(path)))
    except metadata.PackageNotFoundError:
        pytest.skip(MISSING.format(package))


def torch_sends(steps: list[StepMessages]) -> list[str]:
    """Return the messages that a rank sends in torch's form, which names the sending stage, not the receiving one."""
    sends = []
    for message in chain.from_iterable(step.outgoing for step in steps):
        sender = message.stage - 1 if message.kind == "F" else message.stage + 1
        sends.append(f"{sender}SEND_{message.kind}{message.microbatch}")
    return sends


def torch_receives(steps: list[StepMessages]) -> list[str]:
    """Return the messages that a rank receives in torch's form."""
    messages = chain.from_iterable(step.incoming for step in steps)
    return [f"{message.stage}RECV_{message.kind}{message.microbatch}" for message in messages]


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
@pytest.mark.parametrize("name", SCHEDULES)
def test_torch_adds_our_messages_and_finds_no_deadlock(name, num_ranks):
    from torch.distributed.pipelining.schedules import _Action, _add_send_recv, _simulate_comms_compute

    for num_microbatches in (num_ranks, 2 * num_ranks, 2 * num_ranks + 2):
        schedule = build(name, num_ranks, num_microbatches)
        rows = list(csv.reader(schedule.to_torch_csv().splitlines()))
        orders = {rank: [_Action.from_str(cell) for cell in cells] for rank, cells in enumerate(rows)}
        lowered = _add_send_recv(orders, schedule.stage_rank, schedule.num_stages)
        for rank, steps in enumerate(all_messages(schedule)):
            texts = [str(action) for action in lowered[rank]]
            assert [text for text in texts if "SEND" not in text and "RECV" not in text] == rows[rank]
            assert [text for text in texts if "SEND" in text] == torch_sends(steps)
            # torch posts a receive when the message is sent, so in another order than the steps that need it.
            assert sorted(text for text in texts if "RECV" in text) == sorted(torch_receives(steps))

        single_actions = {  # torch's simulator knows no pairs
            rank: list(chain.from_iterable(action.sub_actions or (action,) for action in actions))
            for rank, actions in lowered.items()
        }
        played = _simulate_comms_compute(single_actions, schedule.stage_rank, schedule.num_stages)
        assert {rank: [action for action in row if action] for rank, row in played.items()} == single_actions


@pytest.fixture(scope="module")
def megatron():
    """Load three functions of Megatron-Core from its sources, because importing the package takes about 7 seconds."""
    functions: dict[str, Any] = {}
    for path, names in MEGATRON_FUNCTIONS.items():
        file = installed_source("megatron-core", f"megatron/core/{path}")
        module = ast.parse(file.read_text())
        module.body = [node for node in module.body if isinstance(node, ast.FunctionDef) and node.name in names]
        # As in this file, annotations are not evaluated. They name classes of modules that are not imported.
        exec(compile(module, str(file), "exec"), functions)
    return SimpleNamespace(**functions)


def megatron_order(megatron, rank: int, num_ranks: int, num_microbatches: int, num_chunks: int) -> list[Action]:
    """Return Megatron-Core's order of a rank with `num_chunks` stages.

    Micro-batches pass through the stages in groups of `num_ranks`, or all at once if there are not enough for two.
    """
    group_size = num_microbatches if num_ranks < num_microbatches < 2 * num_ranks else num_ranks
    communicator = SimpleNamespace(
        pp_group=SimpleNamespace(size=lambda: num_ranks, rank=lambda: rank),
        virtual_pipeline_model_parallel_size=num_chunks if num_chunks > 1 else None,
    )
    sizes = num_microbatches, num_chunks, group_size
    _, _, num_warmup, _ = megatron.get_pp_rank_microbatches(*sizes, p2p_communicator=communicator)
    visits = megatron.get_schedule_table(*sizes)  # micro-batch, chunk
    forwards = [Action("F", chunk * num_ranks + rank, mb) for mb, chunk in visits]
    backwards = [Action("B", (num_chunks - 1 - chunk) * num_ranks + rank, mb) for mb, chunk in visits]
    next_forward = iter(forwards)
    next_backward = iter(backwards)
    actions = []
    for signed_chunk in megatron.convert_schedule_table_to_order(num_warmup, num_chunks, visits):
        action = next(next_forward if signed_chunk > 0 else next_backward)
        assert action.stage == (abs(signed_chunk) - 1) * num_ranks + rank
        actions.append(action)
    return actions


@pytest.mark.parametrize("stages_per_rank", [1, 2, 3])
@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_interleaved_1f1b_is_the_order_of_megatron(megatron, num_ranks, stages_per_rank):
    """For multiples of the ranks, and for what is one group: from P + 1 to 2P - 1 micro-batches."""
    for num_microbatches in (*range(num_ranks, 2 * num_ranks), 2 * num_ranks, 3 * num_ranks, 8 * num_ranks):
        ours = build("interleaved_1f1b", num_ranks, num_microbatches, stages_per_rank=stages_per_rank)
        for rank, steps in enumerate(ours.ranks):
            theirs = megatron_order(megatron, rank, num_ranks, num_microbatches, stages_per_rank)
            assert list(chain.from_iterable(steps)) == theirs


@pytest.fixture(scope="module")
def pipeline_graph():
    """Load Colossal-AI's search for schedules on a V from its file, because the package imports others."""
    file = installed_source("colossalai", "colossalai/pipeline/schedule/v_schedule.py")
    return runpy.run_path(str(file))["PipelineGraph"]


def schedule_of_nodes(rows: list[list[Any]], num_ranks: int, num_microbatches: int) -> Schedule:
    """Return the schedule of Colossal-AI's nodes: its "B" is our "I", its chunk 0 is the way down the V."""
    kinds: dict[str, Kind] = {"F": "F", "B": "I", "W": "W"}
    ranks = []
    for rank, nodes in enumerate(rows):
        stages = rank, 2 * num_ranks - 1 - rank
        ranks.append(tuple((Action(kinds[node.type], stages[node.chunk], node.minibatch),) for node in nodes))
    return Schedule("v", num_ranks, 2 * num_ranks, num_microbatches, tuple(ranks), v_placement(num_ranks))


def steps_without_weights(schedule: Schedule) -> list[list[Step]]:
    return [[step for step in steps if step[0].kind != "W"] for steps in schedule.ranks]


@pytest.mark.parametrize("costs", [
    Costs(), Costs(F=2, B=4, W=2, p2p=1), Costs(F=10, B=20, W=8, p2p=1), Costs(F=7, B=27, W=20),
    Costs(F=100, B=200, W=70, p2p=5),
])
@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_v_schedules_of_colossalai_take_the_time_that_it_says(pipeline_graph, num_ranks, costs):
    for num_microbatches in (1, num_ranks, 2 * num_ranks - 1, 2 * num_ranks + 2, 4 * num_ranks):
        graph = pipeline_graph(
            num_ranks, num_microbatches, costs.F, costs.B - costs.W, costs.W, costs.p2p, f_mem=2, b_mem=-1, w_mem=-1
        )
        rows = [[node for node in nodes if node.type in ("F", "B", "W")] for nodes in graph.get_v_schedule()]
        theirs = schedule_of_nodes(rows, num_ranks, num_microbatches)
        validate(theirs)
        timeline = simulate(theirs, costs)
        times = [[(span.start, span.end) for span in spans] for spans in timeline.spans]
        assert times == [[(node.start_time, node.completion_time) for node in nodes] for nodes in rows]
        assert timeline.peak_memory <= 2 * num_ranks, "its default limit, the memory of ZB-V"
        if costs == Costs() and num_microbatches >= 2 * num_ranks - 1:
            # With F = I = W, for which ZB-V is made, the search finds ZB-V up to where its weight gradients are.
            ours = build("zbv", num_ranks, num_microbatches)
            assert steps_without_weights(ours) == steps_without_weights(theirs)
            assert simulate(ours).makespan == timeline.makespan
