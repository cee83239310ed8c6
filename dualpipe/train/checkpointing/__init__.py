"""Checkpoints of a run: their content, when they are saved, resuming, and rolling back."""
