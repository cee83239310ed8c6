"""Starting ranks: on this machine, by torchrun or by SLURM; how they find each other, and how they exit.

Imports `train.config`, `train.health`, `parallel.mesh`, `trace.file` and `runtime`.
"""
