"""The parts of `make gpu` and `make gpu-node`: what each of them measures, and what runs them and keeps their results.

session.py runs parts, each in a process of its own; report.py is the JSON and the summary; the other files are parts.
Every part is a function of an `Output`, to which it gives rows, failures, skips and verdicts as they come.
"""
