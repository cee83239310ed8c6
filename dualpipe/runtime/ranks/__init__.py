"""How ranks agree, and how a failure on one ends a step on all: records, summaries, objects, the cause of a failure.

Imports the rest of `runtime`.
"""
