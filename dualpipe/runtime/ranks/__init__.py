"""Agreement of ranks, and the end of a step on all where one fails: records, summaries, objects, the cause.

Imports the rest of `runtime`.
"""
