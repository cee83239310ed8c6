"""Parts of `make gpu` and `make gpu-node`, with the session that runs them and the report of their results.

session.py runs each part in its own process; report.py writes the JSON and the summary; the other files are parts.
Every part is a function that takes an `Output` and sends it rows, failures, skips and verdicts as they occur.
"""
