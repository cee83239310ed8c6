"""Training data: packing text into tokens, an index of documents, and the loader, a pure function of the step.

Imports `train.config`, `parallel.mesh`, `nn.attention.sequence_split` and `runtime`.
"""
