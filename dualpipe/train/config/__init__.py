"""The configuration of a run: schema of the TOML file and the command line, loading, and sizes for a number of ranks.

Imports `checkpoint`, `hf.model`, `models`, `parallel`, `kernels.formats` and `runtime`.
"""
