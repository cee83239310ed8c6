"""Stages without memory, of this library's models and of transformers', run as in a pipeline to count what they take.

Imports `train.config`, `hf`, `models`, `pipeline`, `parallel` and `nn`.
"""
