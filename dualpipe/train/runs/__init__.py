"""The files that a run leaves, its metrics and settings, and the comparison of two runs.

Imports `runtime` and `schedule`.
"""
