"""The training step: its schedule, dtypes, stages, routers, optimizer and loss, and the runner that executes it."""
