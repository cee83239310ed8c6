"""Hugging Face checkpoints: import, export and `dualpipe hf check`.

Imports `dualpipe.checkpoint`'s tensors and manifests, `models`, `parallel` and `runtime`.
"""
