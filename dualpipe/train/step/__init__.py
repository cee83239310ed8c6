"""The step of a run: what it is made of (schedule, dtypes, stages, routers, optimizer, loss), and how it runs.

Imports `train.config`, `train.data`, `train.launch`, `train.optim`, `checkpoint`, `hf`, `models`, `pipeline`,
`parallel`, `nn`, `kernels`, `quantized`, `schedule` and `runtime`.
"""
