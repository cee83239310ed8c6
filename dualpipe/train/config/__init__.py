"""The configuration of a run: its schema, its reader, the model it names, and the sizes for a number of ranks."""
