"""Training: the trainer, the steps that it runs, evaluation, metrics, checkpoints of a run, and parity.

Imports `checkpoint`, `models`, `pipeline`, `parallel`, `nn`, `quantized`, `kernels`, `schedule` and `runtime`.
"""
