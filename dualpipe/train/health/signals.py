"""The signals that stop a run. Does not import torch."""

from __future__ import annotations

import signal

# The first one stops a run after its current step, a second one at once.
STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
