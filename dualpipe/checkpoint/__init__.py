"""Checkpoints: in and out of Hugging Face's form (`load_hf`, `save_hf`)."""

from dualpipe.checkpoint.hf import hub_dtypes, load_hf
from dualpipe.checkpoint.hf_save import save_hf

__all__ = ["hub_dtypes", "load_hf", "save_hf"]
