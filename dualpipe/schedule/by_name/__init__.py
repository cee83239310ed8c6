"""Schedules by name, those that are searched for among them, and the command that shows them.

Imports `schedule` and `runtime`.
"""
