"""Hangs and lost ranks: a watchdog on each rank, the messages between watchdogs, and the diagnosis of waits."""
