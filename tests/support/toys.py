"""Small stages and the unpipelined reference that every pipeline test compares with."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from dualpipe.nn import defer_weight_grads
from dualpipe.pipeline.p2p import P2PGroups
from dualpipe.schedule import build


class Stage(nn.Module):
    """(B, width) -> (B, width); two linears, a norm and a residual."""

    def __init__(self, width: int = 8, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, dtype=dtype)
        self.up = nn.Linear(width, 2 * width, dtype=dtype)
        self.down = nn.Linear(2 * width, width, bias=False, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Handed:
    """A communication without ranks that hands on what it is given."""

    group = None

    def __init__(self, values: tuple[Any, ...] = ()) -> None:
        self._values = values

    def forward(self, inputs: tuple[Any, ...]) -> Handed:
        return Handed(inputs)

    def backward(self, context: Any, gradients: tuple[Any, ...]) -> Handed:
        return Handed(gradients)

    def advance(self) -> None:
        pass

    def wait(self) -> tuple[tuple[Any, ...], Any]:
        return self._values, None


class Rolled:
    """A communication within one rank: tensors come back rolled by one. Calls are noted in `log`."""

    group = None

    class Pending:
        def __init__(self, value: Any, log: list[str]) -> None:
            self.value = value
            self.log = log

        def advance(self) -> None:
            self.log.append("advance")

        def wait(self) -> Any:
            self.log.append("wait")
            return self.value

    def __init__(self, log: list[str] | None = None, dim: int = 0) -> None:
        self.log = [] if log is None else log
        self.dim = dim

    def _start(self, what: str, tensors: Sequence[Tensor | None], shift: int) -> Pending:
        self.log.append(what)
        rolled = tuple(None if tensor is None else tensor.roll(shift, self.dim) for tensor in tensors)
        return self.Pending((rolled, None), self.log)

    def forward(self, inputs: Sequence[Tensor | None]) -> Pending:
        return self._start("forward", inputs, 1)

    def recompute(self, context: Any, inputs: Sequence[Tensor | None]) -> Pending:
        return self._start("recompute", inputs, 1)

    def backward(self, context: Any, gradients: Sequence[Tensor | None]) -> Pending:
        return self._start("backward", gradients, -1)


class Hooked:
    """Has DeepSeek's method, which runs its two actions one after the other; notes the numbers of inputs in `pairs`."""

    pairs: list[int] = []  # noqa: RUF012 (the method belongs to the type)

    @classmethod
    def overlapped_forward_backward(cls, ahead, inputs, criterion, labels, behind, loss, outputs, gradients):
        cls.pairs.append(len(inputs))
        results = ahead(*inputs)
        new_loss = None if criterion is None else criterion(results, *labels)
        torch.autograd.backward(outputs if loss is None else loss, gradients or None)
        return results, new_loss


def make_stages(num_stages: int, make: Callable[[], nn.Module] = Stage, defer: bool = True) -> list[nn.Module]:
    """The same stages on every rank and in the reference; without `defer`, of plain modules."""
    torch.manual_seed(0)
    return [defer_weight_grads(make()) if defer else make() for _ in range(num_stages)]


def stages_of_rank(name: str, num_ranks: int, rank: int) -> tuple[int, ...]:
    return build(name, num_ranks, 1).rank_stages(rank)


def num_stages(name: str, num_ranks: int) -> int:
    return build(name, num_ranks, 1).num_stages


def reference(
    stages: Sequence[nn.Module], x: Tensor, y: Tensor, num_chunks: int, criterion: Callable = F.mse_loss, dim: int = 0
) -> tuple[Tensor, Tensor]:
    """Losses by micro-batch and joined outputs of the unpipelined model; gradients accumulate in `.grad`."""
    losses, outputs = [], []
    for xs, ys in zip(x.tensor_split(num_chunks, dim), y.tensor_split(num_chunks, dim)):
        for stage in stages:
            xs = stage(xs)
        loss = criterion(xs, ys)
        if torch.is_grad_enabled():
            loss.backward()
        losses.append(loss.detach())
        outputs.append(xs.detach())
    return torch.stack(losses), torch.cat(outputs, dim)


def caught(call: Callable[[], Any]) -> tuple[str, str, float]:
    """Return the type and the text of the error of a call, and its seconds."""
    start = time.monotonic()
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - start
    return "nothing", "", 0.0


def use_own_groups() -> None:
    """Give every link a process group and send bytes, as with NCCL. For the process that calls it."""
    connect = P2PGroups.connect
    P2PGroups.connect = lambda self, placement, device: connect(self, placement, device, own_groups=True)


def param_groups(unit: FSDPModule) -> list:
    """FSDP2's own parameter groups of a unit; torch 2.11 has one or none."""
    state = unit._get_fsdp_state()
    return getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]


def relative_error(actual: Tensor | None, expected: Tensor | None) -> float:
    """||actual - expected|| / ||expected||; infinite where only one of them exists or shapes or dtypes differ."""
    if actual is None or expected is None:
        return 0.0 if actual is expected else float("inf")
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return float("inf")
    scale = expected.norm().item()
    return (actual - expected).norm().item() / (scale or 1.0)


def gradient_error(actual: nn.Module, expected: nn.Module) -> float:
    """The largest relative error of any parameter's gradient."""
    return max(
        (relative_error(a.grad, b.grad) for a, b in zip(actual.parameters(), expected.parameters(), strict=True)),
        default=0.0,
    )
