"""Expert parallelism: each rank of a group holds some of the experts; tokens are dispatched to them and combined.

    route     x_TH, weights_TK, experts_TK -> rows, weights, plan     Dispatcher.plan: rows by rank, on the device
    dispatch  rows, weights, plan -> rows, weights, received          all-to-all: a rank gets the rows for its experts
    experts   rows_RH, weights_RK, received -> rows_RH                run_experts: sort, grouped GEMMs, sum
    combine   rows, received -> rows                                  all-to-all back
    finish    rows, plan -> y_TH                                      Dispatcher.finish: sum over the ranks

No token is dropped. A token with several experts on one rank is sent there once, with its weights and its K choices as
local expert ids of that rank (-1 for experts on other ranks). The rank sums the outputs of its experts, in float32 or
wider, before it returns the sum. With 8 choices over 8 ranks a token goes to 5.3 ranks on average, not to 8.

Example: 4 experts on 2 ranks, K = 2. A token with experts 2 and 3 is sent to rank 1 only, with ids [0, 1]. A token with
experts 3 and 0 is sent to rank 0 with ids [-1, 0] and to rank 1 with ids [1, -1]; its output is that of rank 0 plus
that of rank 1, in this order.

The numbers of rows for each rank are computed on the device. A small all-to-all sends them to the receivers, then they
are copied to the host; the host waits for this copy alone, and only in the forward. Dispatch and combine are
`Communication`s between the compute segments of a stage (`dualpipe.nn.segments`), overlapped with compute. Rows can be
dispatched in FP8 (`fp8_rows`), with half of the bytes.

Dimension letters: T tokens, K experts per token, E experts, G ranks of the group, D = min(K, G) copies of a token at
most, S rows that a rank sends, R rows that it receives, M received (row, expert) pairs, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Literal, cast, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from dualpipe.kernels import combine_tokens, dispatch_tokens, sort_tokens
from dualpipe.nn.grouped_linear import GroupedLinear, refuse_transforms
from dualpipe.parallel.all_to_all import AllToAll, CommStream
from dualpipe.parallel.experts.interface import Dispatcher, LocalDispatcher, Received
from dualpipe.parallel.experts.one_hop import SCALES, AllToAllDispatcher, DispatchPlan
from dualpipe.parallel.experts.two_hop import TwoHopDispatcher
from dualpipe.parallel.mesh import divisors, launched_ranks_per_node
from dualpipe.parallel.tied import mark_sharded, original_number

__all__ = [
    "AllToAllDispatcher",
    "DispatchPlan",
    "Dispatcher",
    "ExpertParallel",
    "LocalDispatcher",
    "Received",
    "is_interface_experts",
    "parameter_sizes",
    "run_experts",
    "shard_experts",
    "stacked_parameters",
]

Dispatch = Literal["auto", "all_to_all", "two_hop"]


class ExpertParallel:
    """Distribution of a model's experts over the ranks of a group; creates a dispatcher for each layer.

    ranks: the mesh's "ep" dimension, or an `AllToAll`; None or one rank: all experts are local, nothing is sent.
    fp8_rows: the number of elements that share a scale if rows are dispatched in FP8: 128 for weights in blocks of FP8,
    32 for mxfp8. The experts must accept the keyword `quantized`; outputs and gradients keep their dtype. None: rows
    are dispatched in their own dtype.
    dispatch: the way of a row: "all_to_all" to each rank with experts of its token, "two_hop" to each node with experts
    of it, then within the node (`dualpipe.parallel.experts.two_hop`). Both give the same bits. "auto": two hops if the
    ranks are on several nodes, each with the same number of them, more than one; otherwise "all_to_all".
    ranks_per_node: the number of successive ranks that share a node: ranks of the job, or of an `AllToAll` without
    a process group. None: LOCAL_WORLD_SIZE, which torchrun sets; if it is not set, or there is no process group, all
    ranks.

    Raises ValueError for experts that cannot be divided evenly, for another block size, and for "two_hop" on ranks that
    are not divided evenly among several nodes.
    """

    def __init__(
        self, num_experts: int, ranks: DeviceMesh | AllToAll | None = None, *, fp8_rows: int | None = None,
        dispatch: Dispatch = "auto", ranks_per_node: int | None = None,
    ) -> None:
        if fp8_rows not in (None, *SCALES):
            raise ValueError(f"fp8_rows must be {', '.join(map(str, SCALES))}, elements under a scale, or None; got "
                             f"{fp8_rows!r}")
        if isinstance(ranks, DeviceMesh):
            ranks = AllToAll(ranks) if ranks.size() > 1 else None
        _check_name(dispatch)
        self.size = 1 if ranks is None else ranks.size
        self.num_experts = num_experts
        self.local_experts = experts_per_rank("the model", num_experts, self.size)
        self._fp8_rows = fp8_rows
        self._dispatch = dispatch
        self._stream: CommStream | None = None
        if ranks is None or self.size == 1:
            return
        nodes = _ranks_by_node(ranks, ranks_per_node)
        self._stream = CommStream(ranks, node=next(node for node in nodes if ranks.rank in node))
        self._dispatch = _resolved_dispatch(dispatch, nodes)

    @property
    def sent_between_nodes(self) -> int:
        """Number of bytes sent to ranks of other nodes, without the row counts."""
        return 0 if self._stream is None else self._stream.sent_between_nodes

    @property
    def sent_bytes(self) -> int:
        """Number of bytes sent to other ranks, without the row counts.

        A forward also sends three numbers of 8 bytes to each rank; with two hops, one more, and one for each rank of a
        node.
        """
        return 0 if self._stream is None else self._stream.sent_bytes

    def dispatcher(self) -> Dispatcher:
        """Create the dispatcher of one layer."""
        if self._stream is None:
            return Dispatcher(self.num_experts)
        kind = TwoHopDispatcher if self._dispatch == "two_hop" else AllToAllDispatcher
        return kind(self.num_experts, self._stream, self._fp8_rows)


def run_experts(
    experts: Callable[..., Tensor], rows: Tensor, weights_RK: Tensor, received: Received
) -> Tensor:
    """Return the weighted sum of the outputs of each row's local experts: (R, H), in the dtype of `rows`.

    experts: called as `experts(rows_RH, tokens, weights_M)`; returns (M, H), multiplied by the weights of the sorted
    rows. For rows that were dispatched in FP8, it also gets the quantized rows as the keyword `quantized`. rows: (R, H)
    or (B, S, H).
    """
    refuse_transforms("run_experts", rows, weights_RK)
    rows_RH = rows.flatten(0, -2)
    # M rows, sorted by expert; unassigned choices come after the last end and are not computed.
    tokens = sort_tokens(received.ids, received.num_experts).cut(received.pairs)
    weights_M = dispatch_tokens(weights_RK.reshape(-1, 1), tokens, 1).squeeze(1)  # one row for each choice
    quantized = {} if received.quantized is None else {"quantized": received.quantized}
    y_MH = experts(rows_RH, tokens, weights_M, **quantized)
    y_RH = combine_tokens(y_MH, None, tokens, top_k=weights_RK.shape[1])
    return y_RH.to(rows_RH.dtype)  # autocast may have changed the dtype


def shard_experts(module: nn.Module, mesh: DeviceMesh, *, are_local: bool = False) -> nn.Module:
    """Make the stacked parameters of all experts DTensors, Shard(0) over `mesh` ("ep"), in place; returns the module.

    Every `GroupedLinear` counts as experts, and so does a module that transformers calls through its experts interface.
    A rank keeps its slice, also on meta; with one rank nothing changes.

    are_local: the parameters contain this rank's experts only. A module without experts stays as it is. Raises
    ValueError for experts that cannot be divided evenly, for parameters that are sharded already, and for a module with
    experts in another form only, such as an `nn.ModuleList`: docs/your-model.md shows how to stack their weights.
    """
    places: list[tuple[nn.Module, str, nn.Parameter, int]] = []
    for path, layer in module.named_modules() if mesh.size() > 1 else ():
        for name, param in stacked_parameters(layer).items():
            full = f"{path}.{name}".lstrip(".")
            if isinstance(param, DTensor):
                raise ValueError(f"{full} is sharded already ({param.placements}); shard experts once, before FSDP2")
            if original_number(param) is not None:
                raise ValueError(f"{full} is tied to experts that are sharded already, and would become a weight of "
                                 "its own; give all stages of the rank to one call, in an nn.ModuleList")
            num_experts = param.shape[0] * mesh.size() if are_local else param.shape[0]
            places.append((layer, name, param, experts_per_rank(f"the experts of {full}", num_experts, mesh.size())))
    other = None if places or mesh.size() == 1 else _other_experts(module)
    if other is not None:
        raise ValueError(f"{other} is no GroupedLinear, so its experts cannot be divided among {mesh.size()} ranks; "
                         "stack their weights in GroupedSwiGLU and GroupedLinear as docs/your-model.md shows (weight = "
                         "torch.stack([e.down.weight for e in experts])), or leave out a stage without experts")
    sharded: dict[nn.Parameter, nn.Parameter] = {}  # tied ones stay tied
    for layer, name, param, num_local in places:
        if param not in sharded:
            local = param.detach()
            if not are_local:
                local = local[mesh.get_local_rank() * num_local :][:num_local].clone()
            shape = torch.Size((num_local * mesh.size(), *param.shape[1:]))
            stride = param.detach().contiguous().stride()
            whole = DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=shape, stride=stride)
            sharded[param] = nn.Parameter(whole, requires_grad=param.requires_grad)
            if param.grad_dtype is not param.dtype:
                sharded[param].grad_dtype = param.grad_dtype
            mark_sharded(param)
        setattr(layer, name, sharded[param])
    return module


def _other_experts(module: nn.Module) -> str | None:
    """Describe what may be experts in a module without `GroupedLinear`; None for a module without experts.

    These are lists of modules of one form, except lists of layers by their names; modules that are called experts; and
    modules with stacked matrices, except convolutions.
    """
    for path, inner in module.named_modules():
        name = path.rpartition(".")[2].lower()
        forms = {(type(child), *(param.shape for param in child.parameters())) for child in inner.children()}
        is_list = isinstance(inner, nn.ModuleList | nn.ModuleDict) and len(inner) > 1 and len(forms) == 1
        is_layers = name == "h" or any(word in name for word in ("layer", "block", "stage"))
        own = () if isinstance(inner, nn.modules.conv._ConvNd) else inner.parameters(recurse=False)
        is_stack = any(param.dim() > 2 for param in own)
        has_parameters = any(True for _ in inner.parameters())
        if has_parameters and ((is_list and not is_layers) or "expert" in name or is_stack):
            return f"{path or 'the module'} ({type(inner).__name__})"
    return None


def stacked_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters of a module that stack experts along their first dimension; {} for other modules.

    See `is_interface_experts` for modules of transformers.
    """
    parameters = dict(module.named_parameters(recurse=False))
    if isinstance(module, GroupedLinear):
        return parameters
    if not is_interface_experts(module):
        return {}
    weights = ("gate_up_proj", "up_proj", "down_proj")
    return {name: param for name, param in parameters.items() if name.removesuffix("_bias") in weights}


def parameter_sizes(module: nn.Module, ep: int, *, trained: bool = False) -> tuple[int, int]:
    """Return the number of dense parameters, and the number of expert parameters on one of `ep` ranks.

    trained: count the parameters that are trained alone.
    """
    stacked = (stacked_parameters(inner).values() for inner in module.modules())
    experts = sum(param.numel() for params in stacked for param in params if param.requires_grad or not trained)
    total = sum(param.numel() for param in module.parameters() if param.requires_grad or not trained)
    return total - experts, experts // ep


def is_interface_experts(module: nn.Module) -> bool:
    """Return True for a module that transformers calls through its experts interface.

    It is recognized by the attributes that the interface sets, without an import of transformers.
    """
    return all(hasattr(module, name) for name in ("has_gate", "is_transposed", "num_experts", "_apply_gate"))


def check_dispatch(dispatch: str, ranks: Sequence[int], ranks_per_node: int) -> None:
    """Raise ValueError for a dispatch that `ExpertParallel` refuses for these ranks. Needs no device.

    ranks: the ranks of the job in one group, ascending. ranks_per_node: successive ranks of the job that share a node.
    """
    _check_name(dispatch)
    if len(ranks) > 1:
        _resolved_dispatch(cast(Dispatch, dispatch), _group_by_node(ranks, ranks_per_node))


def check_dispatch_over(dispatch: str, mesh: DeviceMesh, ranks_per_node: int | None) -> None:
    """Raise ValueError for a dispatch that `ExpertParallel` refuses over this "ep" mesh, before a model is built."""
    numbers = dist.get_process_group_ranks(mesh.get_group())
    check_dispatch(dispatch, numbers, ranks_per_node or launched_ranks_per_node() or max(numbers) + 1)


def _check_name(dispatch: str) -> None:
    """Raise ValueError for a dispatch that is none of `Dispatch`."""
    if dispatch not in get_args(Dispatch):
        raise ValueError(f"dispatch must be {', '.join(get_args(Dispatch))}; got {dispatch!r}")


def _ranks_by_node(ranks: AllToAll, ranks_per_node: int | None) -> list[range]:
    """Return the ranks of a group by node. ranks_per_node: see `ExpertParallel`."""
    numbers = list(range(ranks.size))  # in the job
    if ranks.group is not None:
        numbers = dist.get_process_group_ranks(ranks.group)
        ranks_per_node = ranks_per_node or launched_ranks_per_node()
    return _group_by_node(numbers, ranks_per_node or max(numbers) + 1)


def _group_by_node(numbers: Sequence[int], per_node: int) -> list[range]:
    """Return the positions in `numbers`, ranks of the job, by node."""
    by_node = [list(group) for _, group in groupby(range(len(numbers)), lambda rank: numbers[rank] // per_node)]
    return [range(group[0], group[-1] + 1) for group in by_node]


def _resolved_dispatch(dispatch: Dispatch, nodes: list[range]) -> Dispatch:
    """Return `dispatch`, with "auto" resolved; raise ValueError for "two_hop" on ranks that do not fit it."""
    sizes = [len(node) for node in nodes]
    fits = len(nodes) > 1 and len(set(sizes)) == 1
    if dispatch == "two_hop" and not fits:
        raise ValueError(f"dispatch = 'two_hop' between {sum(sizes)} expert-parallel ranks with {sizes} on a node, but "
                         "it needs several nodes with the same number; give 'auto', or another ranks_per_node")
    if dispatch == "auto":
        return "two_hop" if fits and sizes[0] > 1 else "all_to_all"
    return dispatch


def experts_per_rank(owner: str, experts: int, ranks: int) -> int:
    """Return the number of experts of each rank; `owner` names the model or parameter in the error message."""
    if experts < 1 or experts % ranks:
        possible = ", ".join(map(str, divisors(experts)))
        raise ValueError(f"{owner}: {experts} experts cannot be divided evenly among {ranks} expert-parallel ranks; "
                         f"possible numbers of ranks: {possible}")
    return experts // ranks
