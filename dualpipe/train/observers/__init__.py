"""Tools that observe some steps of a run: traces of all ranks, torch's own profiler, and memory snapshots.

Imports `train.launch`, `pipeline`, `trace` and `runtime`.
"""
