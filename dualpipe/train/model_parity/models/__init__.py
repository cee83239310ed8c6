"""The models that are compared: the unpipelined one, its stages in sequence, and the pipeline.

Imports `train.anomaly.localize`, `train.launch`, `train.parity_errors`, `hf`, `pipeline`, `parallel`, `nn`,
`schedule` and `runtime`.
"""
