"""The search of `schedule="auto"`: annealing from known schedules, lower bounds, a cache of what was found.

Pure Python, like all of `dualpipe.schedule`, whose types, messages and simulator it imports.
"""
