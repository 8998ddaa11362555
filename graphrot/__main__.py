"""``python -m graphrot``."""

from __future__ import annotations

from graphrot.cli.main import main

main()
