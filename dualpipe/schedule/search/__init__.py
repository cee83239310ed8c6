"""The search of `schedule="auto"`: annealing from known schedules, lower bounds, a cache of what was found.

Imports `schedule` and `runtime`.
"""
