"""Training: the loop of one rank (trainer.py), its step, loss, metrics, guard and checkpoints; and the rooms beside it."""
