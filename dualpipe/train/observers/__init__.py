"""Tools that observe some steps of a run: traces of all ranks, torch's own profiler, and memory snapshots.

Imports `train.launch`, `train.metrics`, `pipeline`, `trace` and `runtime`.
"""
