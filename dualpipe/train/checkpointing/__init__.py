"""Checkpoints of a run: their content, when they are saved, resuming, and rolling back.

Imports `train.step`, `train.config`, `train.data`, `train.launch`, `train.optim`, `checkpoint`, `models`, `nn`,
`parallel.mesh` and `runtime`.
"""
