"""Checkpoints: of a run, in any layout (`Checkpoints`, `load`), and in and out of Hugging Face's form (`load_hf`)."""

from dualpipe.checkpoint.hub_load import hub_dtypes, load_hf
from dualpipe.checkpoint.hub_save import save_hf
from dualpipe.checkpoint.native_folder import latest, verify
from dualpipe.checkpoint.native_load import Loaded, load
from dualpipe.checkpoint.native_save import CheckpointError, Checkpoints, save
from dualpipe.checkpoint.native_state import training_state

__all__ = [
    "CheckpointError", "Checkpoints", "Loaded", "hub_dtypes", "latest", "load", "load_hf", "save", "save_hf",
    "training_state", "verify",
]
