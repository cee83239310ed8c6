"""The library orders its streams, events and memory correctly, on a pretend device (tests/support).

Three faults fail here: a missing wait, memory given back too early, and a wait of the host that is not listed. Wrong
values do not: they are right whatever the order, as a pretend device runs everything at once. The tests at the end,
and test_planted_faults.py, show that it finds faults.
"""

from __future__ import annotations

import math

import pytest
import torch

from device_steps import (
    LAYERS_WITH_EXPERTS,
    MICRO_BATCHES,
    STEPS,
    as_process,
    as_training,
    by_threads,
    quantized_qwen,
    qwen,
    toys,
    write_run,
)
from hub import FAMILIES
from ranks import run_ranks
from run_files import write_files

# The waits of the host. A step has only one: for the number of rows from other ranks, for each micro-batch in
# the forward of each layer with experts. A recomputed dispatch knows the numbers.
COUNTS = "Event.synchronize in dualpipe/parallel/experts/one_hop.py: PendingDispatch.start_rows"
# Training also waits for the values of a step (tests/train/test_trainer.py), for the mean of an evaluation, and for the
# copy of a checkpoint's tensors.
READ = "Event.synchronize in dualpipe/train/trainer.py: Trainer._read"
EVALUATE = "_local_scalar_dense in dualpipe/train/evaluate.py: evaluate"
SAVE = "synchronize in dualpipe/checkpoint/writer.py: HostMemory.fill"
FINITE = "tolist in dualpipe/checkpoint/state.py: find_non_finite"  # before each save


# The first step loads kernels, so it also waits for each message between ranks, which goes through the host.
BY_HOST = [f"copy in dualpipe/pipeline/p2p.py: P2PMessages.{method}" for method in ("send", "take")]


def messages(pp: int, ranks: int) -> dict[str, int]:
    """Return the waits for messages of `ranks` ranks, in pipelines of `pp`: two each way between neighbours."""
    return dict.fromkeys(BY_HOST, 4 * (pp - 1) * MICRO_BATCHES * ranks // pp) if pp > 1 else {}


@pytest.mark.parametrize("overlap", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_toy_stages(overlap):
    device = by_threads(toys, 2, 2, overlap)
    assert device.report(waits=messages(2, ranks=4)) == []
    assert device.launches > 1000


@pytest.mark.slow
@pytest.mark.parametrize("overlap, recompute", [
    (True, ()), (True, ("layer",)), (False, ()), (True, ("layer", "dispatch")),
])
def test_qwen3_moe(overlap, recompute):
    device = by_threads(qwen, 2, 2, overlap, recompute)
    counts = 2 * LAYERS_WITH_EXPERTS * MICRO_BATCHES * STEPS
    assert device.report(waits={COUNTS: counts} | messages(2, ranks=4)) == []


@pytest.mark.slow
@pytest.mark.parametrize("recompute", [(), ("layer", "dispatch")], ids=str)
def test_quantized_weights(recompute):
    device = by_threads(quantized_qwen, 2, 2, recompute=recompute)
    counts = 2 * LAYERS_WITH_EXPERTS * MICRO_BATCHES * STEPS
    assert device.report(waits={COUNTS: counts} | messages(2, ranks=4)) == []


@pytest.mark.slow
@pytest.mark.parametrize("make, overlap, recompute", [
    (qwen, True, ("layer", "dispatch")),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in (
        (qwen, True, ()), (qwen, False, ()), (quantized_qwen, True, ()),
        (quantized_qwen, True, ("layer", "dispatch")))),
])
def test_two_hops_between_nodes(make, overlap, recompute):
    """The host waits no more often than with one hop."""
    device = by_threads(make, 1, 4, overlap, recompute, per_node=2)
    assert device.report(waits={COUNTS: 4 * LAYERS_WITH_EXPERTS * MICRO_BATCHES * STEPS}) == []


def trained(rank, shape, dtype, fails):
    device, layers = as_process(rank, shape, dtype, fails)
    assert device.launches > (500 if fails else 1000)
    waits = {COUNTS: layers * MICRO_BATCHES * STEPS} | messages(shape[0], ranks=1)
    if fails:  # as far as the ranks got
        waits = {wait: device.waits[wait] for wait in waits}
    return device.report(waits=waits)


@pytest.mark.slow
@pytest.mark.parametrize("shape, dtype", [
    *(pytest.param(shape, torch.float32, marks=pytest.mark.slow) for shape in ((2, 1, 1), (1, 1, 2), (2, 2, 1))),
    ((1, 2, 1), torch.float32), pytest.param((2, 1, 2), torch.bfloat16, marks=pytest.mark.slow),
], ids=str)
def test_ranks_as_processes(shape, dtype):
    assert run_ranks(trained, math.prod(shape), shape, dtype, False) == [[]] * math.prod(shape)


@pytest.mark.parametrize("shape", [
    (2, 1, 1), *(pytest.param(shape, marks=pytest.mark.slow) for shape in ((1, 2, 1), (2, 1, 2))),
], ids=str)
def test_a_step_that_fails(shape):
    assert run_ranks(trained, math.prod(shape), shape, torch.float32, True, fresh=True) == [[]] * math.prod(shape)


def trained_tied(rank, shape, name):
    device, layers = as_process(rank, shape, torch.bfloat16, tied=True, name=name)
    by_host = {wait: device.waits[wait] for wait in BY_HOST} if name == "1f1b" else messages(shape[0], ranks=1)
    return device.report(waits={COUNTS: layers * MICRO_BATCHES * STEPS} | by_host)


@pytest.mark.slow
@pytest.mark.parametrize("shape, name", [
    ((2, 2, 1), "dualpipev"),
    *(pytest.param(*each, marks=pytest.mark.slow) for each in (((2, 2, 1), "1f1b"), ((2, 1, 2), "dualpipev"))),
], ids=str)
def test_tied_embeddings_gathered_for_two_stages_or_summed_over_two_ranks(shape, name):
    assert run_ranks(trained_tied, math.prod(shape), shape, name) == [[]] * math.prod(shape)


def trained_narrow(rank):
    device, layers = as_process(rank, (1, 1, 2), torch.bfloat16, narrow=True)
    return device.report(waits={COUNTS: layers * MICRO_BATCHES * STEPS})


@pytest.mark.slow
def test_gradients_that_are_divided_and_stored_in_less_than_they_are_reduced_in():
    assert run_ranks(trained_narrow, 2) == [[]] * 2


def training(rank, folder, steps, waits, *options):
    device = as_training(rank, folder, "--train.steps", steps, *options)
    assert device.launches > 1000
    return device.report(waits)


@pytest.mark.slow
def test_training_with_checkpoints(tmp_path):
    write_run(tmp_path)
    for steps, waits in [
        ("2", {READ: 2, EVALUATE: 1, FINITE: 1, SAVE: 1}),
        ("3", {READ: 1, EVALUATE: 1, FINITE: 1, SAVE: 1}),  # from the checkpoint
    ]:
        assert run_ranks(training, 1, str(tmp_path), steps, waits, fresh=True) == [[]]


@pytest.mark.slow
def test_training_with_multi_token_prediction_waits_in_its_evaluation_alone(tmp_path):
    write_files(tmp_path, FAMILIES["deepseek_v3"] | {"model_type": "deepseek_v3", "vocab_size": 257})
    waits = {READ: 3, EVALUATE: 2, EVALUATE.replace("_local_scalar_dense", "tolist"): 1, FINITE: 1, SAVE: 1}
    options = ["--mtp.weight", "0.3", "--mtp.last_steps", "1", "--data.separate_documents", "True",
               "--train.num_chunks", "2", "--checkpoint.interval", "3"]
    assert run_ranks(training, 1, str(tmp_path), "3", waits, *options, fresh=True) == [[]]
