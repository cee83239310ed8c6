"""The training step: its schedule, dtypes, stages, routers, optimizer and loss, and the runner that executes it.

Imports `train.config`, `train.data`, `train.launch`, `train.optim`, `checkpoint`, `hf`, `models`, `pipeline`,
`parallel`, `nn`, `kernels`, `quantized`, `schedule` and `runtime`.
"""
