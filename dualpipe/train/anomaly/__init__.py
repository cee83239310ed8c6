"""Bad steps and faulty ranks: detect non-finite numbers, spikes and wrong bits, find their origin, and react.

Imports `train.step`, `train.checkpointing`, `train.config`, `train.data`, `pipeline`, `parallel`, `nn`,
`quantized`, `schedule` and `runtime`.
"""
