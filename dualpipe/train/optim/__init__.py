"""Optimizers over sharded parameters: AdamW, Muon or a custom class, groups, learning rates, QK-clip.

Imports `train.config`, `checkpoint`, `models`, `parallel`, `quantized`, `nn` and `runtime`.
"""
