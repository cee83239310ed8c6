"""Routing tokens to experts: the router, losses and counts of its loads, and all routers of a model in a step.

Imports `nn`, `kernels` and `runtime`.
"""
