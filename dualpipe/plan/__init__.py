"""Estimates from a configuration alone: memory, activations, time, and what a mesh will cost: `dualpipe plan`.

Imports `train`, `models`, `pipeline`, `parallel`, `nn`, `kernels`, `schedule` and `runtime`.
"""
