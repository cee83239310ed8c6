"""What is left of a run: its settings in `run.json`, and the comparison of two runs.

Imports `runtime`, `schedule` and `train`.
"""
