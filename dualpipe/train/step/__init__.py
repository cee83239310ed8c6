"""The training step: its schedule, dtypes, stages, routers, optimizer and loss, and the runner that executes it."""

from dualpipe.train.step.model import build_model

__all__ = ["build_model"]
