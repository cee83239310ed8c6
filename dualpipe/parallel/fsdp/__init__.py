"""FSDP2: sharding a stage's parameters, filling them, gathering before a step and reducing gradients after it.

Private attributes of FSDP2 are used in this room alone.
Imports `parallel.precision`, `quantized`, `nn`, `kernels` and `runtime`.
"""
