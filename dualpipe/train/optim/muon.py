"""Muon: momentum whose singular values are all made about 1, matrix by matrix, in place of AdamW's division.

    momentum     M = lerp(M, G, 1 - mu), update = lerp(G, M, mu)                        of each rank's shard
    gather       update, in bf16, to the one rank that makes this matrix orthogonal     all-to-all
    orthogonal   five Newton-Schulz steps in bf16: X <- a X + (b X X^T + c (X X^T)^2) X
    scatter      X to the shards again                                                  all-to-all
    apply        W <- (1 - lr decay) W - lr 0.2 sqrt(max(rows, columns)) X

Jordan et al. (kellerjordan.github.io/posts/muon, 2024), whose coefficients the default are; the factor of the last line
gives an update the root mean square of AdamW's, so that one learning rate serves both (Moonlight, arXiv:2502.16982).
"polar_express" takes those of Amsel et al. (arXiv:2505.16932), the best for each step instead of the same in all.

Of a stack of experts each matrix is made orthogonal by itself; those of other expert-parallel ranks stay there.
Matrices that ranks share go in rounds: the costliest first, one for each rank, so that all compute about as long; small
ones of a stack together, up to the size of the largest matrix. While a rank computes one, the next is on its way to it,
so that one more at most is here; 2 bytes of each parameter go each way, and each matrix is computed once (Moonlight's
and, in its all-to-all, Dion's distributed form; arXiv:2504.05295).

Dimension letters: E matrices of a stack that are here (1 of a plain one), M rows and N columns of the whole matrix, R
rows of it that are here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from dualpipe.nn.deferral import local
from dualpipe.runtime.recorder import Recorder

Coefficients = Literal["jordan", "polar_express"]
# (a, b, c) of each step. Polar Express: with the paper's factors of safety, as its listing has them, first five.
COEFFICIENTS: dict[str, tuple[tuple[float, float, float], ...]] = {
    "jordan": ((3.4445, -4.7750, 2.0315),) * 5,
    "polar_express": tuple((a / 1.01, b / 1.01**3, c / 1.01**5) for a, b, c in (
        (8.28721201814563, -23.595886519098837, 17.300387312530933),
        (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
        (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
        (3.3184196573706015, -2.488488024314874, 0.51004894012372),
        (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    )),
}
_SMALLEST = 1e-7  # norm of a matrix
MOMENTUM = "momentum_buffer"  # as torch calls it


def orthogonal(update: Tensor, coefficients: Coefficients = "jordan") -> Tensor:
    """About U V^T of each matrix U S V^T in (..., M, N): bfloat16, with singular values of 0.7 to 1.2 in place of all
    that are not tiny. The operators are those of `torch.optim.Muon`, of which a matrix gets the same bits."""
    tall = update.shape[-2] > update.shape[-1]
    x = update.bfloat16()
    x = x.mT if tall else x
    add = torch.addmm if x.dim() == 2 else torch.baddbmm
    norm = x.norm() if x.dim() == 2 else torch.linalg.matrix_norm(x, keepdim=True)
    x = x / norm.clamp(min=_SMALLEST)
    for a, b, c in COEFFICIENTS[coefficients]:
        gram = x @ x.mT
        x = add(x, add(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


def operations(shape: Sequence[int]) -> int:
    """Those of `orthogonal`, of a matrix or a stack: five times X X^T, its square, and its product with X."""
    *stack, small, large = *shape[:-2], *sorted(shape[-2:])
    return 10 * math.prod(stack) * small**2 * (2 * large + small)


class _Matrices(NamedTuple):
    """Matrices of a parameter that one rank makes orthogonal at once. number: of them, M x N each."""

    parameter: Tensor
    which: slice  # of the stack that is here
    number: int
    size: tuple[int, int]  # M, N: the dimension that ranks have parts of comes first
    turned: bool  # whether that is the last of the parameter's
    rows: tuple[int, ...]  # of M that each rank of the group has

    @property
    def cost(self) -> int:
        """Operations."""
        return operations((self.number, *self.size))

    def numbers(self, rank: int) -> int:
        """How many numbers of it a rank has."""
        return self.number * self.rows[rank] * self.size[1]

    def part(self, tensor: Tensor) -> Tensor:
        """This rank's rows of it, (E, R, N) or (R, N), of a tensor that is distributed as the parameter is."""
        own = local(tensor)
        own = own[self.which] if own.dim() == 3 else own
        return own.mT if self.turned else own


_Round = list[_Matrices]  # by the ranks that make them orthogonal, the last of which may have none


class Muon(torch.optim.Optimizer):
    """Muon over matrices and stacks of matrices, which may be DTensors: cut over one dimension of their mesh through
    each matrix, and over others between matrices.

    Groups may have an "lr" and a "weight_decay" of their own. A parameter's state is "momentum_buffer", distributed as
    it is, in its dtype or in `moments`. Raises ValueError for what is no matrix, or cut through twice.
    """

    def __init__(
        self, params: Any, *, lr: float = 1e-3, weight_decay: float = 0.1, momentum: float = 0.95,
        nesterov: bool = True, coefficients: Coefficients = "jordan", moments: torch.dtype | None = None,
    ) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum, "nesterov": nesterov})
        self._coefficients: Coefficients = coefficients
        self.found_inf: Tensor | None = None  # as of torch's fused optimizers: where it is 1, nothing changes
        self._group_of = {parameter: group for group in self.param_groups for parameter in group["params"]}
        for parameter in self._group_of:
            self.state[parameter][MOMENTUM] = torch.zeros_like(parameter, dtype=moments, requires_grad=False)
        self._device = next(iter(self._group_of)).device
        self._alone, self._rounds = _planned(list(self._group_of))

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update the parameters from their gradients. Collective over the ranks that share matrices: of those, a
        gradient that is missing counts as zero; others without one stay as they are."""
        assert closure is None, "nothing is evaluated again"
        for each in self._alone:
            if each.parameter.grad is not None:
                self._apply(each, orthogonal(self._update(each), self._coefficients))
        for group, rounds in self._rounds.items():
            self._step_shared(group, rounds)

    def _step_shared(self, group: dist.ProcessGroup, rounds: Sequence[_Round]) -> None:
        rank, gathered = dist.get_rank(group), self._gather(group, rounds[0])
        scattered: tuple[_Exchange, _Round] | None = None
        for number, matrices in enumerate(rounds):
            pieces = gathered.wait()
            if number + 1 < len(rounds):
                gathered = self._gather(group, rounds[number + 1])
            made: list[Tensor] = []
            if rank < len(matrices):
                own = matrices[rank]
                columns = own.size[1]
                whole = torch.cat([piece.view(own.number, rows, columns) for piece, rows in zip(pieces, own.rows)], 1)
                whole = whole if own.parameter.dim() == 3 else whole.squeeze(0)
                made = [*orthogonal(whole, self._coefficients).view(own.number, *own.size).split(own.rows, 1)]
            back = _Exchange(group, self._device, made, [each.numbers(rank) for each in matrices])
            if scattered is not None:
                self._apply_all(*scattered)
            scattered = back, matrices
        assert scattered is not None, "a group without rounds is not planned"
        self._apply_all(*scattered)

    def _gather(self, group: dist.ProcessGroup, matrices: _Round) -> _Exchange:
        rank = dist.get_rank(group)
        received = [matrices[rank].numbers(other) for other in range(group.size())] if rank < len(matrices) else []
        return _Exchange(group, self._device, [self._update(each) for each in matrices], received)

    def _apply_all(self, scattered: _Exchange, matrices: _Round) -> None:
        for each, made in zip(matrices, scattered.wait()):
            self._apply(each, made)

    def _update(self, matrices: _Matrices) -> Tensor:
        """What is to be made orthogonal, of this rank's rows; their momentum moves on."""
        parameter = matrices.parameter
        group, kept = self._group_of[parameter], matrices.part(self.state[parameter][MOMENTUM])
        moved = kept.to(parameter.dtype)
        grad = torch.zeros_like(moved) if parameter.grad is None else matrices.part(parameter.grad)
        if self.found_inf is not None:
            grad = torch.where(self.found_inf > 0, moved, grad)  # so that nothing moves
        moved.lerp_(grad, 1 - group["momentum"])
        if moved is not kept:
            kept.copy_(moved)
        return grad.lerp(moved, group["momentum"]) if group["nesterov"] else moved

    def _apply(self, matrices: _Matrices, made: Tensor) -> None:
        """Update this rank's rows by what has been made of theirs."""
        group, values = self._group_of[matrices.parameter], matrices.part(matrices.parameter.detach())
        new = values if self.found_inf is None else values.clone()
        new.mul_(1 - group["lr"] * group["weight_decay"])
        new.add_(made.view(new.shape), alpha=-group["lr"] * (0.2 * math.sqrt(max(matrices.size))))
        if self.found_inf is not None:
            values.copy_(torch.where(self.found_inf > 0, values, new))


class _Exchange:
    """Numbers on their way between all ranks of a group, in bfloat16. sent: to each rank; received: how many from each;
    the last ranks may be left out of both."""

    def __init__(
        self, group: dist.ProcessGroup, device: torch.device, sent: Sequence[Tensor], received: Sequence[int]
    ) -> None:
        none = [0] * group.size()
        self._received = [*received, *none][: group.size()]
        sizes = [*(each.numel() for each in sent), *none][: group.size()]
        flat = [each.reshape(-1).bfloat16() for each in sent]
        self._sent = torch.cat(flat) if flat else torch.empty(0, dtype=torch.bfloat16, device=device)
        self._arrived, self._group = self._sent.new_empty(sum(received)), group
        self._work = dist.all_to_all_single(
            self._arrived, self._sent, self._received, sizes, group=group, async_op=True)

    def wait(self) -> tuple[Tensor, ...]:
        """What has arrived from each rank; on a device the current stream waits for it, not the host."""
        recorder = Recorder.current()
        with recorder.collective("muon", "matrices to be made orthogonal", recorder.members(self._group),
                                 self._sent.nbytes):
            self._work.wait()
        return self._arrived.split(self._received)


def _planned(parameters: Sequence[Tensor]) -> tuple[list[_Matrices], dict[dist.ProcessGroup, list[_Round]]]:
    """Those that no rank has a part of but this one, and the rounds of each group, the same on all of its ranks."""
    limit = max((parameter.shape[-2:].numel() for parameter in parameters), default=0)
    alone: list[_Matrices] = []
    shared: dict[dist.ProcessGroup, list[_Matrices]] = {}
    for parameter in parameters:
        group, turned = _cut(parameter)
        rows, columns = reversed(parameter.shape[-2:]) if turned else parameter.shape[-2:]
        ranks = 1 if group is None else group.size()
        most = -(-rows // ranks)  # as torch.chunk cuts
        parts = tuple(len(range(rows)[rank * most :][:most]) for rank in range(ranks))
        stack = local(parameter).shape[0] if parameter.dim() == 3 else 1
        together = max(1, limit // (rows * columns))
        for first in range(0, stack, together):
            which = slice(first, min(first + together, stack))
            found = _Matrices(parameter, which, which.stop - first, (rows, columns), turned, parts)
            (alone if group is None else shared.setdefault(group, [])).append(found)
    rounds = {}
    for group, each_of in shared.items():
        ordered = sorted(each_of, key=lambda one: -one.cost)
        rounds[group] = [ordered[i : i + group.size()] for i in range(0, len(ordered), group.size())]
    return alone, rounds


def _cut(parameter: Tensor) -> tuple[dist.ProcessGroup | None, bool]:
    """The group over which the matrices of a parameter are cut through, and whether by their last dimension."""
    if parameter.dim() not in (2, 3):
        raise ValueError(f"Muon is for matrices and stacks of them; got a parameter of shape {tuple(parameter.shape)}, "
                         "which AdamW is for")
    found = []
    if isinstance(parameter, DTensor):
        for i, placement in enumerate(parameter.placements):
            dim = placement.dim - parameter.dim() if isinstance(placement, Shard) else -3
            if dim >= -2 and parameter.device_mesh.size(i) > 1:
                found.append((parameter.device_mesh.get_group(i), dim == -1))
    if len(found) > 1:
        raise ValueError("Muon gathers a matrix over one dimension of a mesh; give what is cut through twice, of shape "
                         f"{tuple(parameter.shape)}, to AdamW by a group of optimizer.groups")
    return found[0] if found else (None, False)
