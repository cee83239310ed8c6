"""Checkpoints of a run in any layout (`Checkpoints`, `load`), and of Hugging Face (`load_hf`, `save_hf`)."""

from dualpipe.checkpoint.directory import latest
from dualpipe.checkpoint.hub.load import hub_dtypes, load_hf
from dualpipe.checkpoint.hub.save import save_hf
from dualpipe.checkpoint.load import Loaded, load
from dualpipe.checkpoint.manifest import verify
from dualpipe.checkpoint.save import CheckpointError, Checkpoints, save
from dualpipe.checkpoint.state import training_state

__all__ = [
    "CheckpointError", "Checkpoints", "Loaded", "hub_dtypes", "latest", "load", "load_hf", "save", "save_hf",
    "training_state", "verify",
]
