"""Training: the trainer, evaluation, metrics, reports, the export at the end, replay and parity. Steps are in step/."""
