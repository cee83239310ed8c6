"""Traces: the work of all ranks in some steps of training on one clock, as a file, and reports on where time went.

Imports `schedule` and `runtime`.
"""
