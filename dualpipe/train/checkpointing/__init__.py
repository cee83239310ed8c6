"""Checkpoints of a run: what is in one, when one is saved, and going on or back to one.

Imports `train.step`, `train.config`, `train.data`, `train.launch`, `train.optim`, `checkpoint`, `models`, `nn`,
`parallel.mesh` and `runtime`.
"""
