"""Expert parallelism: experts sharded over ranks, with dispatch and combine of their tokens.

Imports `parallel.all_to_all`, `parallel.mesh`, `nn`, `kernels` and `runtime`.
"""
