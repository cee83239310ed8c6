"""Hugging Face checkpoints: import, export and `dualpipe hf check`."""
