"""Expert parallelism: every rank of a group holds some of the experts, and tokens travel to those that they chose.

    route     x_TH, weights_TK, experts_TK -> rows, weights, plan     Dispatcher.plan: what goes where, on the device
    dispatch  rows, weights, plan -> rows, weights, received          all-to-all: a rank gets the rows for its experts
    experts   rows_RH, weights_RK, received -> rows_RH                run_experts: sort, grouped products, sum
    combine   rows, received -> rows                                  all-to-all back
    finish    rows, plan -> y_TH                                      Dispatcher.finish: sum over the ranks

No token is dropped. A token with several experts on one rank is sent there once, with its K choices as that rank
numbers them (-1 for those that are elsewhere) and their weights; the rank's grouped products read the row for each of
its experts, and what they make of it is summed there, in float32 at least, before it is sent back. With 8 choices over
8 ranks a token goes to 5.3 ranks on average instead of 8.

Example: 4 experts on 2 ranks, K = 2. A token that chose experts 2 and 3 is sent to rank 1 only, with ids [0, 1]; one
that chose 3 and 0 to rank 0 with ids [-1, 0] and to rank 1 with ids [1, -1]. Its result is that of rank 0 plus that of
rank 1, in this order.

How many rows go to each rank is known on the device. One small all-to-all tells the receivers, and copies everything
that the host must know; that copy is the only thing that the host waits for, in the forward alone. On CUDA all of it
runs on a stream of its own. Dispatch and combine are `Communication`s: they go in between a stage's compute segments
(`dualpipe.nn.segments`), which a pipeline overlaps and `run_segments` runs as a plain forward.

`Dispatcher` is what a model and the engine see; another way of moving tokens implements it.

Dimension letters: T tokens, K experts per token, E experts, G ranks of the group, D = min(K, G) copies of a token at
most, S rows that a rank sends, R rows that it receives, M received (row, expert) pairs, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from dualpipe.kernels import SortedTokens, combine_tokens, dispatch_tokens
from dualpipe.nn.grouped import GroupedLinear
from dualpipe.parallel.all_to_all import AsyncAllToAll, CommStream, GroupAllToAll
from dualpipe.parallel.dispatch import AllToAllDispatcher, Dispatcher, LocalDispatcher, Received
from dualpipe.parallel.mesh import divisors


class ExpertParallel:
    """The experts of a model over the ranks of a group; layers take a dispatcher each.

    ranks: the mesh's "ep" dimension, or an `AsyncAllToAll`; None or one rank: all experts are here, nothing is sent.
    Raises ValueError for experts that cannot be divided evenly.

    `sent_bytes` counts what this rank has sent to others: rows, weights, choices and gradients, but not their numbers
    (40 bytes to each rank in a forward).
    """

    def __init__(self, num_experts: int, ranks: DeviceMesh | AsyncAllToAll | None = None) -> None:
        size = 1 if ranks is None else ranks.size() if isinstance(ranks, DeviceMesh) else ranks.size
        self.num_experts, self.local_experts, self.size = num_experts, _share("the model", num_experts, size), size
        self._stream: CommStream | None = None
        if ranks is not None and size > 1:
            self._stream = CommStream(GroupAllToAll(ranks) if isinstance(ranks, DeviceMesh) else ranks)

    @property
    def sent_bytes(self) -> int:
        return 0 if self._stream is None else self._stream.sent_bytes

    def dispatcher(self) -> Dispatcher:
        """A new one, for one layer."""
        if self._stream is None:
            return LocalDispatcher(self.num_experts)
        return AllToAllDispatcher(self.num_experts, self._stream)


def run_experts(
    experts: Callable[[Tensor, SortedTokens, Tensor], Tensor], rows: Tensor, weights_RK: Tensor, received: Received
) -> Tensor:
    """The weighted sum of each received row's local experts (R, H), in the dtype of the rows, (R, H) or (B, S, H).

    `experts(rows_RH, tokens, weights_M)` returns (M, H), multiplied with the weights of the sorted rows.
    """
    rows_RH, tokens = rows.flatten(0, -2), received.sort()
    weights_M = dispatch_tokens(weights_RK.reshape(-1, 1), tokens, 1).squeeze(1)  # one row for each choice
    y_MH = experts(rows_RH, tokens, weights_M)
    return combine_tokens(y_MH, None, tokens, top_k=weights_RK.shape[1]).to(rows_RH.dtype)  # may differ under autocast


def shard_experts(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Make the stacked parameters of every `GroupedLinear` DTensors, Shard(0) over `mesh` ("ep"), in place; returns it.

    A rank keeps its part; nothing is sent, and meta tensors stay on meta. One rank: nothing is changed. Raises
    ValueError for experts that cannot be divided evenly, and for parameters that are sharded already.
    """
    if mesh.size() == 1:
        return module
    sharded: dict[nn.Parameter, nn.Parameter] = {}  # tied ones stay tied
    layers = {name: layer for name, layer in module.named_modules() if isinstance(layer, GroupedLinear)}
    for path, layer in layers.items():
        for name, param in layer.named_parameters(recurse=False):
            full = f"{path}.{name}".lstrip(".")
            if isinstance(param, DTensor):
                raise ValueError(f"{full} is sharded already ({param.placements}); shard experts once, before FSDP2")
            _share(f"the experts of {full}", param.shape[0], mesh.size())
    for layer in layers.values():
        for name, param in list(layer.named_parameters(recurse=False)):
            if param not in sharded:
                each = param.shape[0] // mesh.size()
                local = param.detach()[mesh.get_local_rank() * each :][:each].clone()
                stride = param.detach().contiguous().stride()
                whole = DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=param.shape, stride=stride)
                new = sharded[param] = nn.Parameter(whole, requires_grad=param.requires_grad)
                if param.grad_dtype is not param.dtype:
                    new.grad_dtype = param.grad_dtype
            setattr(layer, name, sharded[param])
    return module


def _share(what: str, experts: int, ranks: int) -> int:
    """Experts of each rank."""
    if experts < 1 or experts % ranks:
        possible = ", ".join(map(str, divisors(experts)))
        raise ValueError(f"{what}: {experts} experts cannot be divided evenly among {ranks} expert-parallel ranks; "
                         f"possible numbers of ranks: {possible}")
    return experts // ranks
