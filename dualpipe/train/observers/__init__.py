"""Tools that observe some steps of a run: traces of all ranks, torch.profiler, and memory snapshots.

Imports `train.launch`, `pipeline`, `trace` and `runtime`.
"""
