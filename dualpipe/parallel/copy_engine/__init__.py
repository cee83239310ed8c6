"""All-to-all by copies into peers' memory: copy engines, not kernels, move the bytes between GPUs.

`exchange` has the protocol, for any `peer_memory`: torch's symmetric memory on CUDA, shared memory on the CPU.
Imports `runtime`.
"""
