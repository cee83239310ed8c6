"""Ground floor: devices and streams, what ranks agree on, records of what they do, errors, files, dtypes.

Knows nothing of models, schedules or training. Imports nothing.
"""
