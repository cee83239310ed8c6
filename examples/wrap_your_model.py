"""Train a model of your own on DualPipeV, in one file: cut it into stages, wrap them, check every gradient.

The second part gives a block `segments()`, so that the pipeline hides its communication behind the computation of
another micro-batch. With DeepSeek's DualPipe that takes an `overlapped_forward_backward`.

    torchrun --nproc-per-node 2 examples/wrap_your_model.py        (or 4; on CPU, or on GPUs where there are enough)

With P ranks the model is cut into 2P stages, placed in a V: rank r runs stages r and 2P-1-r. So rank 0 has both ends,
and it alone needs inputs and labels.
"""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from dualpipe import Communicate, Compute, DualPipeV
from dualpipe.nn import defer_weight_grads

WIDTH, BATCH, CHUNKS = 64, 32, 8  # features; rows of a batch; micro-batches it is cut into


class Block(nn.Module):
    """A stage: any module that takes and returns a tensor, or a tuple of tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:  # (rows, WIDTH) -> (rows, WIDTH)
        return x + self.down(F.gelu(self.up(self.norm(x))))


def loss_fn(output: Tensor, label: Tensor) -> Tensor:
    """Return a micro-batch's share of the mean over the batch: the pipeline sums over micro-batches."""
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
    """Build all stages, with the same weights on every rank."""
    torch.manual_seed(0)
    return [Block().double().to(device) for _ in range(count)]


def unpipelined_gradients(stages: list[nn.Module], x: Tensor, y: Tensor) -> Tensor:
    """Run the whole batch through the whole model, the reference; return the loss."""
    loss = F.mse_loss(nn.Sequential(*stages)(x), y)
    loss.backward()
    return loss.detach()


# -- the second part: a block that communicates


class Exchange:
    """All-to-all: rank i gets the i-th part of the rows of every rank. It is its own backward."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.group = group  # a failure on one of its ranks raises on all
        self.zeros = torch.zeros(BATCH // CHUNKS, WIDTH, dtype=torch.float64, device=device)

    def forward(self, inputs: tuple[Tensor]) -> "Flight":
        """Start the exchange."""
        return Flight(inputs[0].contiguous(), self.group)

    def backward(self, context: None, gradients: tuple[Tensor | None]) -> "Flight":
        """Start the exchange of gradients. None is a gradient of zero, which the other ranks still receive."""
        gradient = gradients[0]
        return self.forward((self.zeros if gradient is None else gradient,))


class Flight:
    """An exchange in flight; the pipeline computes something else before it waits."""

    def __init__(self, rows: Tensor, group: dist.ProcessGroup) -> None:
        self.rows, self.received = rows, torch.empty_like(rows)  # kept until the exchange is done
        self.work = dist.all_to_all_single(self.received, rows, group=group, async_op=True)

    def advance(self) -> None:
        """Do nothing: no size had to be exchanged first."""

    def wait(self) -> tuple[tuple[Tensor], None]:
        self.work.wait()
        return (self.received,), None


class MixingBlock(Block):
    """A block whose second half works on rows from all ranks of a group, and sends them back."""

    def __init__(self, exchange: Exchange) -> None:
        super().__init__()
        self.exchange = exchange

    def widen(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, self.norm(x)

    def mix(self, rows: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(rows)))

    def segments(self) -> list[Compute | Communicate]:
        """Return the block's work as a list. Names say what each part reads and writes; "x" is input and output."""
        return [
            Compute(self.widen, "x", ("residual", "rows")),
            Communicate(self.exchange, "rows", "rows"),
            Compute(self.mix, "rows", "rows"),
            Communicate(self.exchange, "rows", "rows"),
            Compute(torch.add, ("residual", "rows"), "x"),
        ]


def overlapped(device: torch.device) -> float:
    """Return the largest relative error of a gradient when two pipelines exchange rows within every stage."""
    rank, world = dist.get_rank(), dist.get_world_size()
    width = 2 if world % 2 == 0 else 1
    mesh = init_device_mesh(device.type, (world // width, width), mesh_dim_names=("pp", "mix"))
    stage_rank, ranks = mesh["pp"].get_local_rank(), mesh["pp"].size()
    torch.manual_seed(0)
    exchange = Exchange(mesh["mix"].get_group(), device)
    blocks = [MixingBlock(exchange).double().to(device) for _ in range(2 * ranks)]
    mine = [blocks[stage_rank], blocks[2 * ranks - 1 - stage_rank]]
    torch.manual_seed(rank % width)
    x, y = (torch.randn(BATCH, WIDTH, dtype=torch.float64, device=device) for _ in range(2))

    pipe = DualPipeV([defer_weight_grads(block) for block in mine], process_group=mesh["pp"].get_group())
    pipe.step(*([x] if stage_rank == 0 else []), num_chunks=CHUNKS, criterion=loss_fn, labels=(y,))

    # Without a pipeline the exchanges cancel out: rows go to another rank with the same weights, and come back. So the
    # sums of gradients over the ranks of the group are equal.
    expected = [Block().double().to(device) for _ in blocks]
    for a, b in zip(expected, blocks):
        a.load_state_dict(b.state_dict())
    unpipelined_gradients(expected, x, y)
    pairs = []
    for block, reference in zip(mine, (expected[stage_rank], expected[2 * ranks - 1 - stage_rank])):
        for p, q in zip(block.parameters(), reference.parameters()):
            for grad in (p.grad, q.grad):
                dist.all_reduce(grad, group=mesh["mix"].get_group())
            pairs.append((p.grad, q.grad))
    return max(((p - q).norm() / q.norm()).item() for p, q in pairs)


def run(device: torch.device) -> float:
    """Check the gradients of two steps of the whole job; return the largest relative error."""
    rank, world = dist.get_rank(), dist.get_world_size()
    mine = (rank, 2 * world - 1 - rank)
    stages, reference = build_stages(2 * world, device), build_stages(2 * world, device)
    x = torch.randn(BATCH, WIDTH, dtype=torch.float64, device=device)
    y = torch.randn(BATCH, WIDTH, dtype=torch.float64, device=device)

    # These three statements are the whole use of the library.
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
    worst_overlapped = overlapped(device)
    print(f"rank {rank}: overlapped with communication, largest relative error {worst_overlapped:.1e}", flush=True)
    return max(worst, worst_overlapped)


def main() -> int:
    if "LOCAL_RANK" not in os.environ:
        raise SystemExit("run me with: torchrun --nproc-per-node 2 examples/wrap_your_model.py")
    worst = run(connect())
    dist.destroy_process_group()
    return 0 if worst < 1e-10 else 1


if __name__ == "__main__":
    sys.exit(main())
