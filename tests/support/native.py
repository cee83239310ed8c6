"""A small sharded model with its optimizer; every tensor has values that depend on its name alone."""

from __future__ import annotations

import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard, distribute_tensor

from dualpipe.checkpoint import Checkpoints, load, training_state, writer
from dualpipe.checkpoint.directory import scan
from dualpipe.checkpoint.state import parts_of
from dualpipe.models import config_from_dict
from dualpipe.nn.init import seeded_normal_
from dualpipe.parallel.mesh import Mesh, build_mesh
from dualpipe.schedule import build
from dualpipe.train.optim.optimizer import Optimizer
from dualpipe.train.step import build_model, resolve_model_dtypes

# Five layers of two kinds over two or four stages; 6 experts, which do not divide over four ranks; buffers in float32.
CONFIG = {
    "model_type": "deepseek_v3", "vocab_size": 61, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 5,
    "num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 12, "kv_lora_rank": 10, "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 8, "v_head_dim": 5, "n_routed_experts": 6, "n_shared_experts": 2, "num_experts_per_tok": 3,
    "moe_intermediate_size": 24, "first_k_dense_replace": 1, "n_group": 2, "topk_group": 1,
    "num_nextn_predict_layers": 0,
}


class Trainee:
    """This rank's stages in a layout (pp, dp, ep), their optimizer and their checkpoint state.

    rules: of the dtype plan. mtp: with the layers for multi-token prediction.
    """

    def __init__(self, shape, *, dtype=torch.bfloat16, moments=torch.float32, rules=(), schedule="dualpipev", mtp=False,
                 dp_replicate=1, **changes):
        cpu = torch.device("cpu")
        self.mesh = None if shape == (1, 1, 1) else build_mesh(*shape, cpu, dp_replicate=dp_replicate)
        rank = 0 if self.mesh is None else self.mesh["pp"].get_local_rank()
        config = config_from_dict(CONFIG | changes)
        config = config.with_mtp() if mtp else config
        self.model = build_model(
            config, build(schedule, shape[0], 2 * shape[0]), rank, device=torch.device("cpu"), mesh=self.mesh,
            dtypes=resolve_model_dtypes(config, dtype, replicas=shape[1] * shape[2], rules=rules, mesh=self.mesh),
        )
        terms = {"lr": 0.1, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
        self.optimizer, self.moments = Optimizer(self.model.stages, **terms, moments=moments), moments
        self.plan = self.model.plan
        self.state = training_state(self.model.stages, self.optimizer)

    def fill(self, seed):
        """Fill all tensors with values by name; no two are alike."""
        for name, tensor in self.state.items():
            seeded_normal_(tensor, std=1.0, seed=seed, name=name)
        self.optimizer.round_parameters()

    def wreck(self):
        """Fill all tensors with values that a load must replace."""
        for part in parts_of(self.state).values():
            part.tensor.fill_(float("nan"))
        for parameter in self.optimizer.parameters:
            parameter.detach().fill_(float("nan"))

    def wrong(self, seed):
        """Return the names of tensors that differ in any bit from those of `fill(seed)`."""
        names = {id(t): name for stage in self.model.stages for name, t in stage.state_dict(keep_vars=True).items()}
        found = {name: part.tensor.clone() for name, part in parts_of(self.state).items()}
        parameters = {names[id(p)]: p for p in self.optimizer.parameters}
        held = {name: part.tensor.clone() for name, part in parts_of(parameters).items()}
        dtypes = {name: tensor.dtype for name, tensor in self.state.items()}
        self.fill(seed)
        expected = {name: part.tensor for name, part in parts_of(self.state).items()}
        rounded = {name: part.tensor for name, part in parts_of(parameters).items()}
        wrong = [name for name in expected if not _same(found[name], expected[name])]
        wrong += [f"parameter {name}" for name in rounded if not _same(held[name], rounded[name])]
        return wrong + [name for name, dtype in dtypes.items()
                        if dtype is not (self.moments if "/exp_avg" in name else torch.float32)]


def save_trainee(rank, folder, shape, options):
    """Save a trainee with other options; run by every rank of its layout. Return the names in its state."""
    trainee = Trainee(tuple(shape), **options)
    trainee.fill(7)
    with Checkpoints(folder, trainee.mesh) as checkpoints:
        checkpoints.save_async(trainee.state, step=3, plan=trainee.plan)
    return list(trainee.state)


def load_trainee(rank, folders, shape, options):
    """Load what `save_trainee` has saved to each folder; return the names of wrong tensors."""
    trainee = Trainee(tuple(shape), **options)
    wrong = []
    for folder in folders:
        trainee.wreck()
        load(folder, trainee.state, mesh=trainee.mesh)
        trainee.optimizer.round_parameters()
        wrong += trainee.wrong(7)
    return wrong


def _same(actual, expected):
    return actual.dtype is expected.dtype and torch.equal(actual, expected)


# Files of a checkpoint of one process.
FILES = ["rank-00000.safetensors", "tensors.json", "manifest.json"]


def state_of(step):
    """Return tensors full of `step`, in several dtypes and shapes; one is a view of a larger one."""
    wide = torch.full((4, 6), float(step))
    return {"a.weight": wide[:, 1:3], "b.weight": torch.full((7,), step, dtype=torch.bfloat16),
            "count": torch.tensor(step), "scalar": torch.tensor(float(step))}


def steps_in(directory):
    return sorted(checkpoint.manifest.step for checkpoint in scan(directory).committed)


def is_step(state, step):
    expected = state_of(step)
    return all(torch.equal(state[name], expected[name]) and state[name].dtype is expected[name].dtype
               for name in expected)


ROWS = 200_000  # 2.4 MB on each of two ranks, so that a save that is killed is so in each of its phases


def state_on(mesh):
    """Return a state of two ranks: a sharded tensor, one that both have, and one of this rank alone."""
    sharded = distribute_tensor(torch.zeros(ROWS, 4), Mesh.of(mesh).dense, [Shard(0)])
    return {"sharded": sharded, "same": torch.zeros(ROWS), f"own.{dist.get_rank()}": torch.zeros(ROWS)}


def whole_state():
    """Return the tensors of `state_on` of both ranks."""
    return {"sharded": torch.zeros(ROWS, 4), "same": torch.zeros(ROWS), "own.0": torch.zeros(ROWS),
            "own.1": torch.zeros(ROWS)}


def of_step(state, step):
    """Fill all tensors of a state with `step`, and return it."""
    for tensor in state.values():
        tensor.fill_(float(step))
    return state


def is_of_step(state, step):
    return all(torch.equal(tensor, torch.full_like(tensor, float(step))) for tensor in state.values())


def writers_of(rank):
    """Return the live processes that write for the process `rank`."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            command = (path / "cmdline").read_bytes().split(b"\0")
            if writer.__file__.encode() in command and str(rank).encode() in command and not is_gone(path.name):
                found.append(int(path.name))
        except OSError:  # it ends
            continue
    return found


def writer_of(rank):
    """Return the process that writes for the process `rank`, once there is one."""
    deadline = time.monotonic() + 120  # a loaded machine takes long to import torch
    while not (found := writers_of(rank)):
        assert time.monotonic() < deadline, "no process writes"
        time.sleep(0.001)
    return found[0]


def is_gone(process):
    """Return True if the process has ended, also if its parent has not waited for it."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True
