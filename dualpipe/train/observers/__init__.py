"""Tools that observe steps of a run: their health, traces of all ranks, torch.profiler, and memory snapshots."""
