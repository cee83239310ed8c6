"""Start of ranks: on this machine, by torchrun or by SLURM; their rendezvous, and their end."""
