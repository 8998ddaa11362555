"""The command itself: ``graphrot`` and ``python -m graphrot``."""

from __future__ import annotations

import sys


def main() -> None:
    """Load the command line and run it. Ctrl-C is clean from here on, while modules load too."""
    try:
        from graphrot.cli.main import main as run

        run()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
