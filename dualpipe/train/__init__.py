"""Training: the loop of one rank (trainer.py), its step, loss, metrics, guard and checkpoints; and rooms beside it."""
