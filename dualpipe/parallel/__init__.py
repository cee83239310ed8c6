"""Parallelism: the device mesh, FSDP2 sharding, the dtype contract, expert and context parallelism.

Names from `experts`, `context` and `mesh` load on first use, since they import layers, kernels and `torch.distributed`.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from dualpipe.parallel.fsdp.materialize import assert_materialized, build_on_meta, materialize
from dualpipe.parallel.fsdp.shard import shard, shard_stages
from dualpipe.parallel.precision.check_contract import ContractError, assert_contract
from dualpipe.parallel.precision.dtype_plan import DTypePlan, DTypePolicy, Rule, TensorDTypes, checkpoint_dtypes
from dualpipe.parallel.precision.resolve import resolve_dtypes

if TYPE_CHECKING:  # the names that `__getattr__` loads, for type checkers and editors
    from dualpipe.parallel.context.context_parallel import ContextParallel
    from dualpipe.parallel.experts.dispatcher import Dispatcher, ExpertParallel, run_experts, shard_experts
    from dualpipe.parallel.mesh import build_mesh

_DISPATCHER = "dualpipe.parallel.experts.dispatcher"
_LAZY_NAMES = {
    "ContextParallel": "dualpipe.parallel.context.context_parallel",
    "Dispatcher": _DISPATCHER,
    "ExpertParallel": _DISPATCHER,
    "build_mesh": "dualpipe.parallel.mesh",
    "run_experts": _DISPATCHER,
    "shard_experts": _DISPATCHER,
}
__all__ = [
    "ContextParallel", "ContractError", "DTypePlan", "DTypePolicy", "Dispatcher", "ExpertParallel", "Rule",
    "TensorDTypes", "assert_contract", "assert_materialized", "build_mesh", "build_on_meta", "checkpoint_dtypes",
    "materialize", "resolve_dtypes", "run_experts", "shard", "shard_experts", "shard_stages",
]


def __getattr__(name: str) -> object:
    if name not in _LAZY_NAMES:
        raise AttributeError(f"module 'dualpipe.parallel' has no attribute {name!r}")
    return getattr(import_module(_LAZY_NAMES[name]), name)
