"""Traces: files with the work of all ranks during some training steps, on one clock, and reports on where time went."""
