"""Schedules by name, including "auto", which searches for one, and the command that shows them.

Imports `schedule` and `runtime`.
"""
