"""Ctrl-C and SIGTERM while a command runs: heard at every moment, and never lost.

A signal raises an exception wherever the program happens to be, and some places swallow exceptions: the imports of
compiled packages, destructors, callbacks. So that it is also remembered, and raised again at the next step.
Imports nothing heavy: it listens before anything else is loaded.
"""

from __future__ import annotations

import os
import signal

EXIT_INTERRUPTED = 130
EXIT_TERMINATED = 143
WORDS = {EXIT_INTERRUPTED: "interrupted", EXIT_TERMINATED: "terminated"}

_CODES = {signal.SIGINT: EXIT_INTERRUPTED, signal.SIGTERM: EXIT_TERMINATED}


class Stop:
    """Hears the signals of one process that runs one command."""

    def __init__(self) -> None:
        self.code: int | None = None
        """The exit code of the signal that was heard."""
        self._at_work = False
        self._done = False

    def listen(self) -> None:
        """Hear both signals from here on. Until :meth:`work` they end the process at once: nothing is begun."""
        for number in _CODES:
            signal.signal(number, self._hear)

    def work(self) -> None:
        """From here on a signal unwinds the program, so that it clears up."""
        self._at_work = True

    def check(self) -> None:
        """Raise again what was heard: someone swallowed it."""
        if self.code is not None and not self._done:
            raise _exception(self.code)

    def finish(self) -> None:
        """From here on signals come too late: what the command does is done."""
        self._done = True

    def _hear(self, number: int, _frame: object) -> None:
        code = _CODES[signal.Signals(number)]
        if self._done:
            return
        if not self._at_work:
            os.write(2, f"{WORDS[code]}\n".encode())
            os._exit(code)
        self.code = code
        if code == EXIT_TERMINATED:  # sent once more by whoever waits: that does not disturb
            signal.signal(number, signal.SIG_IGN)
        raise _exception(code)


def _exception(code: int) -> BaseException:
    return KeyboardInterrupt() if code == EXIT_INTERRUPTED else SystemExit(code)


STOP = Stop()
"""Of this process; it hears nothing until the command line itself makes it listen."""
