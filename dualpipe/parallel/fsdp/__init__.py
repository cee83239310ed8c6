"""FSDP2: sharding and initializing a stage's parameters, gathering them for a step, reducing their gradients.

Private attributes of FSDP2 are used in this package alone.
"""
