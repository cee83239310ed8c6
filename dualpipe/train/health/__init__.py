"""Hangs: a watchdog in each rank, a store through which ranks see each other stop, and a diagnosis of who waits.

Imports `runtime`.
"""
