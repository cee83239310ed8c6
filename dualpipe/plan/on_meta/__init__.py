"""Stages on the meta device, run as in a pipeline to count their memory and operators: native and transformers models.

Imports `train.config`, `hf`, `models`, `pipeline`, `parallel`, `nn` and `runtime`.
"""
