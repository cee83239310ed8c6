"""Training: the trainer, evaluation, metrics and reports, the export at the end, replay and parity. Steps are in step/.

Imports `checkpoint`, `models`, `pipeline`, `parallel`, `nn`, `kernels`, `schedule` and `runtime`.
"""
