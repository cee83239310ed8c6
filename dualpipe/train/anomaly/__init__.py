"""Bad steps and wrong ranks: losses and gradients that are not finite or that jump, copies that differ; run again.

Imports `train.step`, `train.checkpointing`, `train.config`, `train.data`, `pipeline`, `parallel`, `nn`,
`quantized`, `schedule` and `runtime`.
"""
