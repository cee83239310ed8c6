"""The models that are compared: the uncut one, its stages in a sequence, and the pipeline; and places in them.

Imports `train.anomaly.localize`, `train.launch`, `train.parity`, `hf`, `pipeline`, `parallel`, `nn`, `schedule` and
`runtime`.
"""
