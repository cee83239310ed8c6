"""Collectives of a step and of an evaluation: as many, by their ranks, as its parameters and layers need.

A collective too many gives no wrong number, and so no other test would see it.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.utils._python_dispatch import TorchDispatchMode

from dualpipe.models.decoder import SparseMLP
from dualpipe.parallel.fsdp.private import groups_of, private
from dualpipe.parallel.fsdp.unit_records import units_of
from dualpipe.parallel.mesh import DENSE
from dualpipe.train.evaluate import evaluate
from dualpipe.train.trainer import Trainer
from ranks import run_ranks
from run_files import MODEL, write_files
from trainers import built_trainer

Counts = Counter[tuple[str, tuple[int, ...]]]  # by name and ranks

NAMES = {
    "_allgather_base_": "all-gather", "_reduce_scatter_base_": "reduce-scatter", "allreduce_": "all-reduce",
    "alltoall_base_": "all-to-all",
}
CHUNKS = 2
HIDDEN = MODEL["hidden_size"]
SIZES = ["--train.num_chunks", f"{CHUNKS}", "--train.eval_batches", "1"]


class Collectives(TorchDispatchMode):
    """Counts the collectives inside of a `with`; all-to-alls of hidden states apart from those of a few bytes a row."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counts = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        if function.namespace == "c10d" and not name.startswith(("send", "recv")):
            group = next(ProcessGroup.unbox(arg) for arg in args if isinstance(arg, torch.ScriptObject))
            kind = NAMES.get(name, name)
            if kind == "all-to-all":
                has_rows = args[0].dtype is torch.uint8 and args[0].shape[1] >= HIDDEN
                kind += " of rows" if has_rows else " of numbers"
            self.counts[kind, tuple(dist.get_process_group_ranks(group))] += 1
        return function(*args, **kwargs or {})


def of_parameters(run: Trainer) -> Counts:
    """Count one all-gather and one reduce-scatter for each FSDP2 unit, and with replicas one all-reduce."""
    counts: Counts = Counter()
    units = [unit for stage in run.runner.model.stages for unit in units_of(stage)]
    for group in (group for unit in units for group in groups_of(unit)):
        mesh = private(group, "mesh_info").mesh
        *replicated, sharded = [tuple(dist.get_process_group_ranks(group)) for group in mesh.get_all_groups()]
        if len(sharded) > 1:
            counts["all-gather", sharded] += 1
            counts["reduce-scatter", sharded] += 1
        for ranks in replicated:
            counts["all-reduce", ranks] += 1
    return counts


def of_experts(run: Trainer, layers: int) -> Counts:
    """Count two dispatches and two combines, forward and backward, for each layer and micro-batch.

    Beside a dispatch are the numbers of rows, and the routing weights with the choices; on the way back the gradients
    of the weights. Rows that are equal within a node take two hops, if there are several nodes.
    """
    config = run.config
    counts: Counts = Counter()
    hops = 2 if config.parallel.ranks_per_node else 1
    dispatches = 2 if "dispatch" in config.memory.recompute else 1
    ranks = ranks_of(run, "ep")
    if len(ranks) > 1:
        dispatch_rows = dispatches * hops + 1
        combine_rows = 1 + hops
        counts["all-to-all of rows", ranks] = layers * CHUNKS * (dispatch_rows + combine_rows)
        counts["all-to-all of numbers", ranks] = layers * CHUNKS * (1 + hops + 1)
    return counts


def of_attention(run: Trainer, layers: int) -> Counts:
    """Count the exchanges of attention for each layer and micro-batch.

    A ring repeats its hops for the backward: forward, again, gradients. With "all_to_all", queries, keys and values go
    and outputs return, and so do the gradients; both are repeated if attention is recomputed.
    """
    config = run.config
    counts: Counts = Counter()
    ranks = ranks_of(run, "cp")
    exchanges = 3 * (len(ranks) - 1)
    if config.parallel.cp_method == "all_to_all":
        exchanges = 6 if {"layer", "attention"} & set(config.memory.recompute) else 4
    if len(ranks) > 1:
        counts["all-to-all of rows", ranks] = layers * CHUNKS * exchanges
    return counts


def of_numbers(run: Trainer) -> Counts:
    """Count the small all-reduces of a step: loss, loads of the experts, gradient norm and reports of the ranks."""
    place = run.job.place
    dense = place.dense
    world = tuple(range(place.world_size))
    replicas = ranks_of(run, *DENSE)
    counts: Counts = Counter()
    counts["all-reduce", world] += 2  # loads and reports
    if run.runner.model.has_last and len(replicas) > 1:
        counts["all-reduce", replicas] += 1  # the loss
    assert dense is not None
    shards = tuple(dist.get_process_group_ranks(dense.get_group(dense.ndim - 1)))
    for ranks in (shards, ranks_of(run, "pp")):  # the norm of a stage, and that of the model
        if len(ranks) > 1:
            counts["all-reduce", ranks] += 1
    return counts


def ranks_of(run: Trainer, *dimensions: str) -> tuple[int, ...]:
    group = run.job.place.group(*dimensions)
    return () if group is None else tuple(dist.get_process_group_ranks(group))


def of_evaluation(run: Trainer, layers: int) -> Counts:
    """Count one all-gather for each unit, a dispatch and a combine, the rows of other ranks' tokens, and the loss."""
    config = run.config
    counts: Counts = Counter({key: count for key, count in of_parameters(run).items() if key[0] == "all-gather"})
    hops = 2 if config.parallel.ranks_per_node else 1
    ep_ranks = ranks_of(run, "ep")
    if len(ep_ranks) > 1:
        counts["all-to-all of rows", ep_ranks] = layers * CHUNKS * (hops + 1)
        counts["all-to-all of numbers", ep_ranks] = layers * CHUNKS * (1 + hops)
    cp_ranks = ranks_of(run, "cp")
    if len(cp_ranks) > 1:
        exchanges = 2 if config.parallel.cp_method == "all_to_all" else len(cp_ranks) - 1
        counts["all-to-all of rows", cp_ranks] = layers * CHUNKS * exchanges
    replicas = ranks_of(run, *DENSE)
    if run.runner.model.has_last and len(replicas) > 1:
        counts["all-reduce", replicas] += 1
    return counts


def counted(rank: int, toml: str, options: list[str]) -> list[tuple[Any, Any]]:
    """Return the collectives of two steps and of an evaluation with one batch, each with those expected."""
    found = []
    with built_trainer(toml, [*SIZES, *options]) as run, run.data.training_batches(2) as batches:
        layers = sum(isinstance(module, SparseMLP) for stage in run.runner.model.stages for module in stage.modules())
        expected = of_parameters(run) + of_experts(run, layers) + of_attention(run, layers) + of_numbers(run)
        for step in (1, 2):
            with Collectives() as collectives:
                run._step(step, batches)
            found.append((dict(collectives.counts), dict(expected)))
        with Collectives() as collectives:
            evaluate(run.runner, run.data, step)
        found.append((dict(collectives.counts), dict(of_evaluation(run, layers))))
    return found


def layout(sizes: str, schedule: str, *recompute: str, ranks: int = 4, more: str = "") -> Any:
    """A case: sizes such as "pp 2 ep 2", and further options."""
    words = sizes.split()
    options = ["--parallel.schedule", schedule, "--memory.recompute", *(recompute or ("none",)), *more.split()]
    for name, size in zip(words[::2], words[1::2]):
        options += [f"--parallel.{name}", size]
    return pytest.param(ranks, options, id=" ".join([sizes, schedule, *recompute, more]), marks=pytest.mark.slow)


FAST = layout("pp 2 ep 2", "dualpipev", "layer")


@pytest.mark.parametrize("ranks, options", [
    pytest.param(*FAST.values, id=FAST.id),
    layout("pp 2 dp 2", "zbv"),
    layout("pp 2 dp 2", "dualpipev", "layer", more="--train.dtype bf16 --dtypes.rules *.mlp.gate,compute=fp32"),
    layout("pp 2 cp 2 cp_method ring", "1f1b", "attention"),
    layout("pp 2 cp 2 cp_method all_to_all", "dualpipev_full", "layer"),
    layout("pp 2 ep 2", "interleaved_1f1b", "dispatch"),
    layout("pp 2 ep 2 overlap false", "v_half", "experts", "norms"),
    layout("pp 4", "1f1b", "layer"),
    layout("pp 1 dp 2 ep 2", "dualpipev", "dispatch", "attention"),
    layout("pp 1 dp 4 dp_replicate 2", "dualpipev", "layer"),
    layout("pp 1 dp 2 dp_replicate 2 ep 2", "zbv", "experts"),
    layout("pp 1 cp 4 cp_method ring", "dualpipev", "layer"),
    layout("pp 1 cp 2 cp_method all_to_all ep 2", "dualpipev", "layer"),
    layout("pp 1 ep 4 ranks_per_node 2", "1f1b"),
    layout("pp 1 ep 4 ranks_per_node 2", "dualpipev", "dispatch", "layer"),
    layout("pp 1 ep 2", "dualpipev", "layer", ranks=2, more="--train.dtype bf16"),
    layout("pp 1 dp 2", "1f1b", "norms", ranks=2),
    layout("pp 1 cp 2 cp_method all_to_all", "zbv", ranks=2),
])
def test_a_step_has_no_collective_too_many(tmp_path, ranks, options):
    toml = str(write_files(tmp_path, {**MODEL, "num_key_value_heads": 2}))
    for steps in run_ranks(counted, ranks, toml, options):
        for found, expected in steps:
            assert found == expected
