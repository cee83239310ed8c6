"""Your own model on DualPipeV, in one file: cut it into stages, wrap them, train, and check every gradient.

    torchrun --nproc-per-node 2 examples/wrap_your_model.py        (or 4; on CPU, or on GPUs where there are enough)

With P ranks the model is cut into 2P stages. They lie on the ranks in a V: rank r runs stages r and 2P-1-r, so rank 0
has both ends and is the only one that needs inputs and labels.
"""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from dualpipe import DualPipeV
from dualpipe.nn import defer_weight_grads

WIDTH, BATCH, CHUNKS = 64, 32, 8  # features; rows of a batch; micro-batches it is cut into


class Block(nn.Module):
    """A stage: any module that takes and returns a tensor, or a tuple of tensors, will do."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:  # (rows, WIDTH) -> (rows, WIDTH)
        return x + self.down(F.gelu(self.up(self.norm(x))))


def loss_fn(output: Tensor, label: Tensor) -> Tensor:
    """A micro-batch's share of the mean over the batch: the pipeline adds the micro-batches' gradients."""
    return F.mse_loss(output, label) / CHUNKS


def connect() -> torch.device:
    """Join the process group that torchrun describes: NCCL if every rank can have a GPU, else gloo on CPU."""
    local_rank, local_world = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    if torch.cuda.device_count() >= local_world:
        torch.cuda.set_device(local_rank)
        dist.init_process_group("cpu:gloo,cuda:nccl")
        return torch.device("cuda", local_rank)
    dist.init_process_group("gloo")
    return torch.device("cpu")


def build_stages(count: int, device: torch.device) -> list[nn.Module]:
    """All stages, with the same weights on every rank."""
    torch.manual_seed(0)
    return [Block().double().to(device) for _ in range(count)]


def unpipelined_gradients(stages: list[nn.Module], x: Tensor, y: Tensor) -> Tensor:
    """The reference: the whole batch through the whole model at once. Returns the loss."""
    loss = F.mse_loss(nn.Sequential(*stages)(x), y)
    loss.backward()
    return loss.detach()


def main() -> int:
    if "LOCAL_RANK" not in os.environ:
        raise SystemExit("run me with: torchrun --nproc-per-node 2 examples/wrap_your_model.py")
    device = connect()
    rank, world = dist.get_rank(), dist.get_world_size()
    mine = (rank, 2 * world - 1 - rank)
    stages, reference = build_stages(2 * world, device), build_stages(2 * world, device)
    x = torch.randn(BATCH, WIDTH, dtype=torch.float64, device=device)
    y = torch.randn(BATCH, WIDTH, dtype=torch.float64, device=device)

    # These three statements are all that it takes.
    pipe = DualPipeV([defer_weight_grads(stages[s]) for s in mine])
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    loss, _ = pipe.step(*([x] if rank == 0 else []), num_chunks=CHUNKS, criterion=loss_fn, labels=(y,))

    expected = unpipelined_gradients(reference, x, y)
    pairs = [(p.grad, q.grad) for s in mine for p, q in zip(stages[s].parameters(), reference[s].parameters())]
    worst = max(((p - q).norm() / q.norm()).item() for p, q in pairs)
    print(f"rank {rank}: stages {mine}, {len(pairs)} gradients, largest relative error {worst:.1e}", flush=True)
    if rank == 0:
        print(f"loss {loss.sum().item():.6f}, unpipelined {expected.item():.6f}", flush=True)

    optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():  # forward only
        after, outputs = pipe.step(
            *([x] if rank == 0 else []), num_chunks=CHUNKS, criterion=loss_fn, labels=(y,), return_outputs=True
        )
    if rank == 0:
        print(f"after one step of SGD the loss is {after.sum().item():.6f}; outputs {tuple(outputs.shape)}", flush=True)
    dist.destroy_process_group()
    return 0 if worst < 1e-10 else 1


if __name__ == "__main__":
    sys.exit(main())
