"""The dtype contract: rules for each tensor's dtypes, resolved for a whole model into a `DTypePlan`.

Imports `quantized`, `kernels` and `runtime`.
"""
