"""Checkpoints of a vector that is stored wider than it computes, as a bfloat16 dt_bias beside a float32 A_log is."""

import torch
from torch import nn

from dualpipe.checkpoint import Checkpoints, load, training_state
from dualpipe.parallel import DTypePolicy, Rule, resolve_dtypes, shard
from dualpipe.parallel.mesh import Mesh, build_mesh
from ranks import run_ranks

BF16, FP32 = torch.bfloat16, torch.float32
WIDTH, RANKS = 8, 2
STORED = {"in_proj.weight": BF16, "dt_bias": FP32, "A_log": FP32}  # dt_bias widened, in_proj by its own unit


class Mixer(nn.Module):
    """A state-space layer in one line, which casts as those of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.in_proj = nn.Linear(WIDTH, WIDTH, bias=False)
        self.dt_bias = nn.Parameter(torch.zeros(WIDTH))
        self.A_log = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x):
        return (self.in_proj(x) + self.dt_bias).float() * self.A_log.exp()


def make_sharded(mesh):
    stage = Mixer().to(BF16)
    plan = resolve_dtypes(stage, DTypePolicy(BF16, FP32, BF16, [Rule("A_log", FP32)]))
    shard(stage, Mesh.of(mesh).dense, plan)
    return stage, plan


def whole(stage):
    """The dtype of each parameter, and its bits as integers; collective."""
    full = {name: param.full_tensor().detach() for name, param in stage.named_parameters()}
    bits = {BF16: torch.int16, FP32: torch.int32}
    return {name: (tensor.dtype, tensor.view(bits[tensor.dtype]).tolist()) for name, tensor in full.items()}


def save_and_load(rank, folder):
    mesh = build_mesh(1, RANKS, 1, torch.device("cpu"))
    stage, plan = make_sharded(mesh)
    torch.manual_seed(1 + rank)
    for param in stage.parameters():
        shard_of_param = param.detach().to_local()
        shard_of_param.copy_(torch.randn(shard_of_param.shape))  # float32 values that bfloat16 does not have
    saved = whole(stage)
    with Checkpoints(folder, mesh) as checkpoints:
        checkpoints.save(training_state([stage]), step=1, plan=plan)
    other, _ = make_sharded(mesh)
    assert whole(other) != saved
    loaded = load(folder, training_state([other]), mesh=mesh)
    return saved, whole(other), loaded.manifest.dtypes


def test_a_widened_vector_keeps_its_dtype_and_every_bit(tmp_path):
    for saved, loaded, recorded in run_ranks(save_and_load, RANKS, tmp_path):
        assert {name: dtype for name, (dtype, _) in saved.items()} == STORED
        assert saved == loaded
        assert any(bits % 2**16 for bits in saved["dt_bias"][1]), "more than bfloat16 could hold"
        assert {name: of["save"] for name, of in recorded.items()} == {
            "in_proj.weight": "bf16", "dt_bias": "bf16", "A_log": "fp32"}
