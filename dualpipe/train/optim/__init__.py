"""Optimizers over sharded parameters: AdamW, Muon or a custom class, parameter groups, learning rates, QK-clip."""
