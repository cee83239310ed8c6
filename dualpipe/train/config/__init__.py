"""The configuration of a run: schema of the TOML file, the command line, loading, and sizes for a number of ranks."""
