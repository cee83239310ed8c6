"""Search of `schedule="auto"`: annealing that starts from known schedules, lower bounds, and a cache of results."""
