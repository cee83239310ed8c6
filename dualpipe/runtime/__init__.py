"""Ground floor: devices and streams, agreement of ranks, the recorder, errors, files and dtypes.

Knows nothing of models, schedules or training.
"""
