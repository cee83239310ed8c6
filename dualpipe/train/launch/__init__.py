"""Start of ranks: on this machine, by torchrun or by SLURM; their rendezvous, and their end.

`environment` reads the rank of a process; `start` starts the ranks of a machine and waits for them; in each rank `join`
meets the others and `watchdog` looks after it. `cause` names the rank at fault; `diagnose` names the one that all wait
for.
"""
