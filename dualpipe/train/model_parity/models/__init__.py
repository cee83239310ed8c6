"""The models that are compared: the unpipelined one, its stages in sequence, and the pipeline."""
