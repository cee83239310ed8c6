"""Bad steps: losses and gradients that are not finite or that jump; found, localized by running again, and replayed.

Imports `train` but the trainer, `checkpoint`, `models`, `pipeline`, `parallel`, `nn`, `quantized`, `schedule` and
`runtime`.
"""
