"""Estimates from a configuration alone: memory, activations, step time, and the best meshes (`dualpipe plan`)."""
