"""Training data: pack text into tokens, index the documents, and load batches as a pure function of the step.

Imports `train.config`, `parallel.mesh`, `nn.attention.sequence_split` and `runtime`.
"""
