"""Sharding a pipeline's stages: dtypes, FSDP2 units, materialising.

`shard` and `materialize` are the functions, which the modules of these names would hide if they were loaded later.
"""

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

__all__ = [
    "ContractError", "DTypePlan", "DTypePolicy", "Rule", "TensorDTypes", "assert_contract", "assert_materialized",
    "build_on_meta", "checkpoint_dtypes", "materialize", "resolve_dtypes", "shard", "shard_stages",
]
