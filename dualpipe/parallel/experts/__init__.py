"""Expert parallelism: experts sharded over ranks, tokens dispatched to them and combined.

Imports `parallel.all_to_all`, `parallel.mesh`, `nn`, `kernels` and `runtime`.
"""
