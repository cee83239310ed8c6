"""Muon: update each matrix by its momentum with all singular values set to about 1.

    momentum       M = lerp(M, G, 1 - mu), update = lerp(G, M, mu)                        on the shards of each rank
    gather         update, in bf16, to the one rank that orthogonalizes this matrix       all-to-all
    orthogonalize  five Newton-Schulz steps in bf16: X <- a X + (b X X^T + c (X X^T)^2) X
    scatter        X back to the shards                                                   all-to-all
    apply          W <- (1 - lr decay) W - lr 0.2 sqrt(max(rows, columns)) X

The default coefficients are those of Jordan et al. (kellerjordan.github.io/posts/muon, 2024). The factor in the last
line makes the root mean square of the updates about equal to AdamW's, so that one learning rate serves both (Moonlight,
arXiv:2502.16982). "polar_express" selects the coefficients of Amsel et al. (arXiv:2505.16932), which are optimal for
each step instead of equal in all steps.

Every matrix in a stack of experts is orthogonalized by itself. Expert-parallel ranks exchange no experts: each handles
its own. Matrices that are sharded over ranks are processed in rounds of one batch of matrices per rank, the costliest
first, so that all ranks compute about equally long. A batch holds as many small matrices of a stack as fit the size of
the largest matrix. While a rank computes one batch, the next one is on its way, so a rank holds one more batch at most.
2 bytes per parameter are sent each way, and every matrix is computed once (the distributed form of Moonlight, with the
all-to-all of Dion; arXiv:2504.05295).

Dimension letters: E matrices of a stack on this rank (1 for a plain matrix), M rows and N columns of the unsharded
matrix, R rows of it on this rank.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from dualpipe.nn.accumulators import local
from dualpipe.runtime.ranks.process_groups import connect_all
from dualpipe.runtime.recorder import Recorder

Coefficients = Literal["jordan", "polar_express"]
# (a, b, c) of each step. Polar Express: the first five of the paper's listing, with its safety factors.
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
_MIN_NORM = 1e-7  # lower bound of the norm that a matrix is divided by
MOMENTUM = "momentum_buffer"  # torch's name


def orthogonalize(update: Tensor, coefficients: Coefficients = "jordan") -> Tensor:
    """Return about U V^T for each matrix U S V^T in (..., M, N), in bfloat16.

    Singular values that are not tiny become 0.7 to 1.2. A matrix gets the same bits as from `torch.optim.Muon`, by the
    same operators.
    """
    is_tall = update.shape[-2] > update.shape[-1]
    x = update.bfloat16()
    x = x.mT if is_tall else x
    addmm = torch.addmm if x.dim() == 2 else torch.baddbmm
    norm = x.norm() if x.dim() == 2 else torch.linalg.matrix_norm(x, keepdim=True)
    x = x / norm.clamp(min=_MIN_NORM)
    for a, b, c in COEFFICIENTS[coefficients]:
        gram = x @ x.mT
        x = addmm(x, addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if is_tall else x


def count_flops(shape: Sequence[int]) -> int:
    """Return the FLOPs of `orthogonalize` for a matrix or a stack: five times X X^T, its square, and its GEMM with X.

    Example: (2, 3) is 10 * 2^2 * (2 * 3 + 2) = 320.
    """
    small, large = sorted(shape[-2:])
    return 10 * math.prod(shape[:-2]) * small**2 * (2 * large + small)


class _MatrixBatch(NamedTuple):
    """Matrices of a parameter that one rank orthogonalizes at once.

    parameter: may be a DTensor.
    selection: slice of the stack on this rank.
    num_matrices: number of matrices.
    size: M, N. M is the sharded dimension.
    is_transposed: M is the last dimension of the parameter.
    rows_by_rank: rows of M on every rank of the group.
    """

    parameter: Tensor
    selection: slice
    num_matrices: int
    size: tuple[int, int]
    is_transposed: bool
    rows_by_rank: tuple[int, ...]

    @property
    def flops(self) -> int:
        """FLOPs of `orthogonalize`."""
        return count_flops((self.num_matrices, *self.size))

    def numel_on(self, rank: int) -> int:
        """Return the number of elements on a rank of the group."""
        return self.num_matrices * self.rows_by_rank[rank] * self.size[1]

    def local_rows(self, tensor: Tensor) -> Tensor:
        """Return this rank's rows, (E, R, N) or (R, N), as a view of a tensor sharded like the parameter."""
        rows = local(tensor)
        rows = rows[self.selection] if rows.dim() == 3 else rows
        return rows.mT if self.is_transposed else rows


_Round = list[_MatrixBatch]  # by the rank that orthogonalizes them; the last ranks may have none


class Muon(torch.optim.Optimizer):
    """Muon over matrices and stacks of matrices. Collective over the ranks that share matrices.

    A parameter may be a DTensor that is sharded through its matrices over one dimension of the mesh, and between
    matrices over others. The state of a parameter is "momentum_buffer", sharded like the parameter.

    Args:
        params: parameters or groups of them, which may set "lr" and "weight_decay".
        lr: learning rate.
        weight_decay: decoupled weight decay.
        momentum: decay of the running mean of the gradient.
        nesterov: use Nesterov momentum.
        coefficients: of the Newton-Schulz steps.
        moments: dtype of the state. None: that of the parameter.

    Raises:
        ValueError: a parameter is neither a matrix nor a stack, or is sharded through its matrices twice.
    """

    def __init__(
        self, params: Any, *, lr: float = 1e-3, weight_decay: float = 0.1, momentum: float = 0.95,
        nesterov: bool = True, coefficients: Coefficients = "jordan", moments: torch.dtype | None = None,
    ) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum, "nesterov": nesterov})
        self._coefficients: Coefficients = coefficients
        self.found_inf: Tensor | None = None  # as in torch's fused optimizers: a step with 1 changes nothing
        self._group_of = {parameter: group for group in self.param_groups for parameter in group["params"]}
        for parameter in self._group_of:
            self.state[parameter][MOMENTUM] = torch.zeros_like(parameter, dtype=moments, requires_grad=False)
        self._device = next(iter(self._group_of)).device
        self._unsharded, self._rounds = _plan_rounds(list(self._group_of))
        for group in self._rounds:  # before the first step, in which a rank could wait for one that has ended
            connect_all(group, self._device)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update the parameters from their gradients. Collective over the ranks that share matrices.

        Parameters without a gradient do not change: all ranks that share a matrix have one, or none has.
        """
        assert closure is None, "closures are not supported"
        for batch in self._unsharded:
            if batch.parameter.grad is not None:
                self._apply(batch, orthogonalize(self._advance_momentum(batch), self._coefficients))
        for group, rounds in self._rounds.items():
            self._step_shared(group, rounds)

    def _step_shared(self, group: dist.ProcessGroup, rounds: Sequence[_Round]) -> None:
        """Update the matrices that are sharded over a group. The gather of a round overlaps the round before it."""
        rank = dist.get_rank(group)
        gathering = self._gather(group, rounds[0])
        scattering: tuple[_Exchange, _Round] | None = None
        for number, batches in enumerate(rounds):
            pieces = gathering.wait()
            if number + 1 < len(rounds):
                gathering = self._gather(group, rounds[number + 1])
            results = self._orthogonalize_pieces(batches[rank], pieces) if rank < len(batches) else []
            exchange = _Exchange(group, self._device, results, [batch.numel_on(rank) for batch in batches])
            if scattering is not None:
                self._apply_all(*scattering)
            scattering = exchange, batches
        assert scattering is not None, "a group without rounds is not planned"
        self._apply_all(*scattering)

    def _gather(self, group: dist.ProcessGroup, batches: _Round) -> _Exchange:
        """Start to send this rank's rows of every batch to the rank that orthogonalizes it."""
        rank = dist.get_rank(group)
        sizes: list[int] = []
        if rank < len(batches):
            sizes = [batches[rank].numel_on(source) for source in range(group.size())]
        return _Exchange(group, self._device, [self._advance_momentum(batch) for batch in batches], sizes)

    def _orthogonalize_pieces(self, batch: _MatrixBatch, pieces: Sequence[Tensor]) -> list[Tensor]:
        """Return the orthogonalized rows for every rank, (E, R, N) each, from the rows of every rank."""
        columns = batch.size[1]
        rows = [piece.view(batch.num_matrices, num_rows, columns)
                for piece, num_rows in zip(pieces, batch.rows_by_rank)]
        whole = torch.cat(rows, 1)
        whole = whole if batch.parameter.dim() == 3 else whole.squeeze(0)
        result = orthogonalize(whole, self._coefficients).view(batch.num_matrices, *batch.size)
        return [*result.split(batch.rows_by_rank, 1)]

    def _apply_all(self, exchange: _Exchange, batches: _Round) -> None:
        """Wait for the results of a round and update the parameters."""
        for batch, orthogonalized in zip(batches, exchange.wait()):
            if batch.parameter.grad is not None:
                self._apply(batch, orthogonalized)

    def _advance_momentum(self, batch: _MatrixBatch) -> Tensor:
        """Update the momentum of this rank's rows, and return the rows to orthogonalize."""
        parameter = batch.parameter
        group = self._group_of[parameter]
        stored = batch.local_rows(self.state[parameter][MOMENTUM])
        momentum = stored.to(parameter.dtype)
        if parameter.grad is None:
            return torch.zeros_like(momentum)  # of a shared matrix: the ranks exchange it, and do not apply the result
        grad = batch.local_rows(parameter.grad)
        if self.found_inf is not None:
            grad = torch.where(self.found_inf > 0, momentum, grad)  # the momentum then stays as it is
        momentum.lerp_(grad, 1 - group["momentum"])
        if momentum is not stored:
            stored.copy_(momentum)
        return grad.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum

    def _apply(self, batch: _MatrixBatch, orthogonalized: Tensor) -> None:
        """Update this rank's rows of the parameter by its orthogonalized rows."""
        group = self._group_of[batch.parameter]
        values = batch.local_rows(batch.parameter.detach())
        updated = values if self.found_inf is None else values.clone()
        updated.mul_(1 - group["lr"] * group["weight_decay"])
        updated.add_(orthogonalized.view(updated.shape), alpha=-group["lr"] * (0.2 * math.sqrt(max(batch.size))))
        if self.found_inf is not None:
            values.copy_(torch.where(self.found_inf > 0, values, updated))


class _Exchange:
    """An all-to-all in progress, in bfloat16.

    Args:
        group: the ranks.
        device: of the tensors.
        tensors: to send, by rank. The last ranks may be missing.
        sizes: number of elements to receive, by rank. The last ranks may be missing.
    """

    def __init__(
        self, group: dist.ProcessGroup, device: torch.device, tensors: Sequence[Tensor], sizes: Sequence[int]
    ) -> None:
        self._group = group
        padding = [0] * group.size()
        self._received_sizes = [*sizes, *padding][: group.size()]
        sent_sizes = [*(tensor.numel() for tensor in tensors), *padding][: group.size()]
        flat = [tensor.reshape(-1).bfloat16() for tensor in tensors]
        self._sent = torch.cat(flat) if flat else torch.empty(0, dtype=torch.bfloat16, device=device)
        self._received = self._sent.new_empty(sum(sizes))
        self._work = dist.all_to_all_single(
            self._received, self._sent, self._received_sizes, sent_sizes, group=group, async_op=True)

    def wait(self) -> tuple[Tensor, ...]:
        """Return the elements from every rank. On a device the current stream waits for them, not the host."""
        recorder = Recorder.current()
        with recorder.collective("muon", "matrices to orthogonalize", recorder.members(self._group),
                                 self._sent.nbytes):
            self._work.wait()
        return self._received.split(self._received_sizes)


def _plan_rounds(
    parameters: Sequence[Tensor]
) -> tuple[list[_MatrixBatch], dict[dist.ProcessGroup, list[_Round]]]:
    """Return the batches of matrices that are on this rank alone, and the rounds of every group.

    All ranks of a group plan the same rounds.
    """
    largest = max((parameter.shape[-2:].numel() for parameter in parameters), default=0)
    unsharded: list[_MatrixBatch] = []
    sharded: dict[dist.ProcessGroup, list[_MatrixBatch]] = {}
    for parameter in parameters:
        group, is_transposed = _find_sharding(parameter)
        batches = _split_stack(parameter, group, is_transposed, largest)
        if group is None:
            unsharded += batches
        else:
            sharded.setdefault(group, []).extend(batches)
    rounds = {}
    for group, batches in sharded.items():
        costliest_first = sorted(batches, key=lambda batch: -batch.flops)
        rounds[group] = [costliest_first[start : start + group.size()]
                         for start in range(0, len(costliest_first), group.size())]
    return unsharded, rounds


def _split_stack(
    parameter: Tensor, group: dist.ProcessGroup | None, is_transposed: bool, largest: int
) -> list[_MatrixBatch]:
    """Return the batches of a parameter's matrices, of up to `largest` elements or one matrix each.

    Args:
        parameter: a matrix or a stack.
        group: the ranks that its matrices are sharded over.
        is_transposed: they are sharded over the last dimension.
        largest: elements of the largest matrix of all parameters.
    """
    rows, columns = reversed(parameter.shape[-2:]) if is_transposed else parameter.shape[-2:]
    num_ranks = 1 if group is None else group.size()
    rows_per_rank = -(-rows // num_ranks)  # torch.chunk splits in the same way
    rows_by_rank = tuple(len(range(rows)[rank * rows_per_rank :][:rows_per_rank]) for rank in range(num_ranks))
    stack_size = local(parameter).shape[0] if parameter.dim() == 3 else 1
    batch_size = max(1, largest // (rows * columns))
    batches = []
    for first in range(0, stack_size, batch_size):
        selection = slice(first, min(first + batch_size, stack_size))
        num_matrices = selection.stop - first
        batches.append(_MatrixBatch(parameter, selection, num_matrices, (rows, columns), is_transposed, rows_by_rank))
    return batches


def _find_sharding(parameter: Tensor) -> tuple[dist.ProcessGroup | None, bool]:
    """Return the group that the matrices of a parameter are sharded over, and True if by their last dimension."""
    if parameter.dim() not in (2, 3):
        raise ValueError(f"got a parameter of shape {tuple(parameter.shape)}; Muon is for matrices and stacks of them, "
                         "give it to AdamW")
    shardings = []
    if isinstance(parameter, DTensor):
        for mesh_dim, placement in enumerate(parameter.placements):
            dim = placement.dim - parameter.dim() if isinstance(placement, Shard) else -3
            if dim >= -2 and parameter.device_mesh.size(mesh_dim) > 1:
                shardings.append((parameter.device_mesh.get_group(mesh_dim), dim == -1))
    if len(shardings) > 1:
        raise ValueError(f"a matrix of shape {tuple(parameter.shape)} is sharded over {len(shardings)} dimensions of "
                         "the mesh; Muon gathers over one, give it to AdamW by a group of optimizer.groups")
    return shardings[0] if shardings else (None, False)
