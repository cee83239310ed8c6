"""Hugging Face checkpoints: import, export and `dualpipe hf check`.

Imports `checkpoint`, `models`, `schedule`, `parallel`, `nn`, `quantized`, `kernels` and `runtime`.
"""
