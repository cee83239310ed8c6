"""A run's configuration: the schema of the TOML file and the command line, loading, and fitting it to a world of ranks.

Imports `checkpoint`, `hf.model`, `models`, `parallel`, `kernels.formats` and `runtime`.
"""
