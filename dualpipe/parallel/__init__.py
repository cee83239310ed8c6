"""Sharding a pipeline's stages: dtypes, FSDP2 units, materialising; experts over ranks.

`shard` and `materialize` are the functions, which the modules of these names would hide if they were loaded later. The
names of `expert` are loaded on first use: it brings the layers and kernels of experts.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from dualpipe.parallel.dtype_plan import (
    ContractError,
    DTypePlan,
    DTypePolicy,
    Rule,
    TensorDTypes,
    assert_contract,
    checkpoint_dtypes,
)
from dualpipe.parallel.materialize import assert_materialized, build_on_meta, materialize
from dualpipe.parallel.resolve import resolve_dtypes
from dualpipe.parallel.shard import shard, shard_stages

if TYPE_CHECKING:  # what `__getattr__` below finds, for type checkers and editors
    from dualpipe.parallel.expert import Dispatcher, ExpertParallel, run_experts, shard_experts

_OF_EXPERT = ("Dispatcher", "ExpertParallel", "run_experts", "shard_experts")
__all__ = [
    "ContractError", "DTypePlan", "DTypePolicy", "Dispatcher", "ExpertParallel", "Rule", "TensorDTypes",
    "assert_contract", "assert_materialized", "build_on_meta", "checkpoint_dtypes", "materialize", "resolve_dtypes",
    "run_experts", "shard", "shard_experts", "shard_stages",
]


def __getattr__(name: str) -> object:
    if name not in _OF_EXPERT:
        raise AttributeError(f"module 'dualpipe.parallel' has no attribute {name!r}")
    return getattr(import_module("dualpipe.parallel.expert"), name)
