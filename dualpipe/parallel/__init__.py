"""Sharding a pipeline's stages: dtypes, FSDP2 units, materialising."""

from dualpipe.parallel.materialize import assert_materialized, build_on_meta, materialize
from dualpipe.parallel.precision import (
    ContractError,
    DTypePlan,
    DTypePolicy,
    Rule,
    TensorDTypes,
    assert_contract,
    boundary_dtype,
    checkpoint_dtypes,
    resolve_dtypes,
    shard,
)

__all__ = [
    "ContractError",
    "DTypePlan",
    "DTypePolicy",
    "Rule",
    "TensorDTypes",
    "assert_contract",
    "assert_materialized",
    "boundary_dtype",
    "build_on_meta",
    "checkpoint_dtypes",
    "materialize",
    "resolve_dtypes",
    "shard",
]
