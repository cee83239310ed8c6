"""The models that are compared: the uncut model, its stages in sequence, and the pipeline; and positions in them.

Imports `train.anomaly.localize`, `train.launch`, `train.parity_errors`, `hf`, `pipeline`, `parallel`, `nn`,
`schedule` and `runtime`.
"""
