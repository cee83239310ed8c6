"""Agreement of ranks, and the end of a step on all ranks when one fails: records, summaries, objects, causes.

Imports the rest of `runtime`.
"""
