"""Traces: what all ranks did in some steps, on one clock, as a file; and where the time went by it.

Imports `schedule` and `runtime`.
"""
