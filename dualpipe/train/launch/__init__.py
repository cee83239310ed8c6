"""Start of ranks: on this machine, by torchrun or by SLURM; their rendezvous, and their end.

Imports `train.config`, `train.health`, `parallel.mesh`, `trace.file` and `runtime`.
"""
