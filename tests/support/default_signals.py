"""Signal handlers of processes that tests start, whoever started the tests.

`nohup` ignores SIGHUP, and a shell's background jobs ignore SIGINT. Both are inherited by all that is started below,
where a test that sends one of them would wait for an end that does not come.
"""

from __future__ import annotations

import signal

_IGNORED_BY_SHELLS = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


def set_default_signals() -> None:
    """Give this process the handlers that it has when started from a terminal: a `preexec_fn` of `subprocess.Popen`."""
    for number in _IGNORED_BY_SHELLS:
        signal.signal(number, signal.SIG_DFL)
