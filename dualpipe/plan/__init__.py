"""Estimates from a configuration alone: memory, activations, step time, and the best meshes (`dualpipe plan`).

Imports `train`, `models`, `pipeline`, `parallel`, `nn`, `kernels`, `schedule` and `runtime`.
"""
