"""All-to-all by copies into peers' memory, without multiprocessors of a GPU for the bytes.

`exchange` has the protocol, for any `peer_memory`: torch's symmetric memory on CUDA, shared memory on the CPU.
Imports `runtime`.
"""
