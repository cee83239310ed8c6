"""Train a mixture-of-experts model of your own: experts over ranks, stages over a pipeline, every gradient checked.

    torchrun --nproc-per-node 4 examples/wrap_your_moe.py        (or 2; on CPU, or on GPUs where there are enough)

Two ranks share the experts (ep), and the others are pipeline ranks (pp): 4 ranks are pp 2 x ep 2. With P pipeline ranks
the model is cut into 2P stages in a V: pipeline rank r runs stages r and 2P-1-r. Both ranks of an ep pair run the same
stages, each on its own batch and with half of the experts; tokens travel to their experts and back. While they are in
flight, the pipeline computes on another micro-batch: that is the purpose of `segments()`.

Dimension letters: T tokens, H hidden, K experts per token, M (token, expert) pairs.
"""

import os
import sys
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from dualpipe import Communicate, Compute, DualPipeV
from dualpipe.kernels import SortedTokens
from dualpipe.nn import GroupedLinear, GroupedSwiGLU, defer_weight_grads, run_segments
from dualpipe.parallel import DTypePolicy, ExpertParallel, resolve_dtypes, run_experts, shard_experts, shard_stages
from dualpipe.parallel.mesh import Mesh, build_mesh

HIDDEN, INTERMEDIATE, EXPERTS, TOP_K = 16, 24, 8, 2
LAYERS = 2  # of a stage
BATCH, CHUNKS = 32, 4  # tokens of a batch; micro-batches it is cut into


class TopKRouter(nn.Module):
    """Choose experts: tokens (T, H) -> weights (T, K) and experts (T, K). Any module that returns these will do."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(HIDDEN, EXPERTS, bias=False)

    def forward(self, x_TH: Tensor) -> tuple[Tensor, Tensor]:
        weights_TK, experts_TK = self.proj(x_TH).softmax(-1).topk(TOP_K)
        return weights_TK / weights_TK.sum(-1, keepdim=True), experts_TK


class Experts(nn.Module):
    """SwiGLU experts as stacked weights; `shard_experts` leaves this rank its share."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up = GroupedSwiGLU(EXPERTS, HIDDEN, INTERMEDIATE)
        self.down = GroupedLinear(EXPERTS, INTERMEDIATE, HIDDEN)

    def forward(self, rows: Tensor, tokens: SortedTokens, weights_M: Tensor) -> Tensor:
        """Compute rows (M, H), sorted by expert, times their routing weights."""
        return self.down(self.gate_up(rows, tokens, weights_M), tokens.offs)


class MoELayer(nn.Module):
    """A norm and experts, added to the input. Attention would be one more `Compute` before them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.router = TopKRouter()
        self.experts = Experts()
        self.dispatcher = ExpertParallel(EXPERTS).dispatcher()  # all experts on this rank, until `run` replaces it

    def route(self, x_TH: Tensor) -> tuple:
        normed_TH = self.norm(x_TH)
        weights_TK, experts_TK = self.router(normed_TH)
        return x_TH, *self.dispatcher.plan(normed_TH, weights_TK, experts_TK)

    def finish(self, residual_TH: Tensor, rows: Tensor, plan: object) -> Tensor:
        return residual_TH + self.dispatcher.finish(rows, plan)

    def segments(self) -> list[Compute | Communicate]:
        """Return the layer's work as a list. Names say what each part reads and writes; "x" is input and output."""
        run = partial(run_experts, self.experts)
        route = Compute(self.route, "x", ("residual", "rows", "weights", "plan"))
        finish = Compute(self.finish, ("residual", "rows", "plan"), "x")
        if self.dispatcher.dispatch is None or self.dispatcher.combine is None:  # nothing is sent
            return [route, Compute(run, ("rows", "weights", "plan"), "rows"), finish]
        return [
            route,
            Communicate(self.dispatcher.dispatch, ("rows", "weights", "plan"), ("rows", "weights", "received")),
            Compute(run, ("rows", "weights", "received"), "rows"),
            Communicate(self.dispatcher.combine, ("rows", "received"), "rows"),
            finish,
        ]


class Stage(nn.Module):
    """A stage of some layers. `shard_stages` makes FSDP2 units of the elements of a `ModuleList`."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(MoELayer() for _ in range(LAYERS))

    def segments(self) -> list[Compute | Communicate]:
        return [segment for layer in self.layers for segment in layer.segments()]

    def forward(self, x_TH: Tensor) -> Tensor:  # the same without a pipeline
        return run_segments(self.segments(), {"x": x_TH})["x"]


def build_stages(count: int, device: torch.device) -> list[Stage]:
    """Build all stages, with the same weights on every rank."""
    torch.manual_seed(0)
    return [Stage().double().to(device) for _ in range(count)]


def batch_of(ep_rank: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Make tokens and labels of the pipeline that runs on the ranks `ep_rank` of all pairs."""
    generator = torch.Generator().manual_seed(ep_rank)
    x, y = torch.randn(2, BATCH, HIDDEN, dtype=torch.float64, generator=generator).to(device)
    return x, y


def loss_fn(output: Tensor, label: Tensor) -> Tensor:
    """Return a micro-batch's share of the mean over the batch: the pipeline sums over micro-batches."""
    return F.mse_loss(output, label) / CHUNKS


def connect() -> torch.device:
    """Join the process group that torchrun describes: NCCL if every rank can have a GPU, else gloo on CPU."""
    local_rank, local_world = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    if torch.cuda.device_count() >= local_world:
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
        dist.init_process_group("cpu:gloo,cuda:nccl")
        return device
    dist.init_process_group("gloo")
    return torch.device("cpu")


def worst_error(stages: list[Stage], expected: list[Stage]) -> float:
    """Return the largest relative error of a gradient. Collective: gathers gradients from the ranks that share them."""
    errors = [0.0]
    for stage, reference in zip(stages, expected):
        for p, q in zip(stage.parameters(), reference.parameters()):
            grad = p.grad.full_tensor()
            errors.append(((grad - q.grad).norm() / q.grad.norm()).item())
    return max(errors)


def run(device: torch.device) -> float:
    """Run a training step of the whole job and check its gradients; return the largest relative error."""
    world = dist.get_world_size()
    ep = 2
    mesh = build_mesh(world // ep, 1, ep, device)  # ("pp", "dp", "ep")
    place = Mesh.of(mesh)
    pp, pp_rank = place.size("pp"), place.rank("pp")
    numbers = (pp_rank, 2 * pp - 1 - pp_rank)

    all_stages = build_stages(2 * pp, device)
    mine = [all_stages[number] for number in numbers]
    experts = ExpertParallel(EXPERTS, mesh["ep"])
    policy = DTypePolicy(torch.float64, torch.float64, torch.float64)
    plan = resolve_dtypes(mine, policy, group=place.group("pp"))  # a rule may match on any rank of the pipeline
    for stage in mine:
        defer_weight_grads(stage)
        for layer in stage.layers:
            layer.dispatcher = experts.dispatcher()  # one for each layer
        shard_experts(stage, mesh["ep"])  # before `shard_stages`, which tells experts from the rest by it
    shard_stages(mine, place.dense, plan, expert_mesh=place.experts)
    pipe = DualPipeV(mine, process_group=place.group("pp"))
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1, foreach=False)  # experts are on a mesh of their own

    x, y = batch_of(place.rank("ep"), device)
    losses, _ = pipe.step(*([x] if pp_rank == 0 else []), num_chunks=CHUNKS, criterion=loss_fn, labels=(y,))

    # The reference: no pipeline, all experts on one rank. Gradients are the mean over the ranks with different batches.
    reference = build_stages(2 * pp, device)
    for ep_rank in range(ep):
        inputs, labels = batch_of(ep_rank, device)
        (F.mse_loss(nn.Sequential(*reference)(inputs), labels) / ep).backward()
    error = worst_error(mine, [reference[number] for number in numbers])
    first = place.rank("ep") * experts.local_experts
    print(f"rank {dist.get_rank()}: stages {numbers}, experts {first} to {first + experts.local_experts - 1}, "
          f"{experts.sent_bytes} bytes sent, largest relative error {error:.1e}", flush=True)

    pipe.clip_grad_norm_(1.0)  # by the norm of the whole model
    optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():  # forward only
        after, _ = pipe.step(*([x] if pp_rank == 0 else []), num_chunks=CHUNKS, criterion=loss_fn, labels=(y,))
    if pp_rank == 0:
        print(f"loss {losses.sum().item():.6f}, after one step of SGD {after.sum().item():.6f}", flush=True)
    return error


def main() -> int:
    if "LOCAL_RANK" not in os.environ:
        raise SystemExit("run me with: torchrun --nproc-per-node 4 examples/wrap_your_moe.py")
    device = connect()
    if dist.get_world_size() % 2:
        raise SystemExit(f"{dist.get_world_size()} ranks cannot be pairs that share experts; give an even number")
    error = run(device)
    dist.destroy_process_group()
    return 0 if error < 1e-10 else 1


if __name__ == "__main__":
    sys.exit(main())
