"""The command itself: ``graphrot`` and ``python -m graphrot``."""

from __future__ import annotations

import sys

from graphrot.cli.stop import STOP


def main() -> None:
    """Load the command line and run it. Ctrl-C is clean from here on, while modules load too."""
    STOP.listen()
    from graphrot.cli.main import run

    STOP.work()
    code = run()
    STOP.finish()
    sys.exit(code)


if __name__ == "__main__":
    main()
