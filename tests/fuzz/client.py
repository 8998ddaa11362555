"""The other end of :mod:`tests.fuzz.worker`: starts it, asks it, and notices when it hangs or dies."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

LIMIT = 60
"""Seconds that one request may take."""


class Broken(AssertionError):
    """The process crashed or hung."""


class Worker:
    """One process that answers request after request; a new one is started after a crash."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._lines: queue.Queue[str] = queue.Queue()
        self._said: tempfile.TemporaryDirectory[str] | None = None

    def ask(self, arguments: Sequence[Sequence[str]], output: Path | None = None) -> dict[str, Any]:
        """Run command lines.

        Raises:
            Broken: no answer within :data:`LIMIT` seconds, or the process died.
        """
        if self._process is None:
            self._start()
        assert self._process is not None and self._process.stdin is not None
        request = {"arguments": [list(line) for line in arguments], "output": None if output is None else str(output)}
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return self._read(LIMIT)

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            for pipe in (self._process.stdin, self._process.stdout):
                if pipe is not None:
                    pipe.close()
            self._process = None
        if self._said is not None:
            self._said.cleanup()
            self._said = None

    def _start(self) -> None:
        root = str(Path(__file__).resolve().parents[2])
        paths = [path for path in sys.path if path and path != root] + [root]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
        self._said = tempfile.TemporaryDirectory()
        with Path(self._said.name, "stderr").open("w", encoding="utf-8") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.fuzz.worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=environment,
            )
        self._lines = queue.Queue()
        threading.Thread(target=_pump, args=(self._process.stdout, self._lines), daemon=True).start()
        self._read(4 * LIMIT)

    def _read(self, limit: float) -> dict[str, Any]:
        try:
            line = self._lines.get(timeout=limit)
        except queue.Empty:
            self.close()
            raise Broken(f"no answer within {limit} seconds") from None
        if line:
            content: dict[str, Any] = json.loads(line)
            return content
        assert self._process is not None
        code = self._process.wait()
        assert self._said is not None
        said = Path(self._said.name, "stderr").read_text(encoding="utf-8", errors="replace")[-3000:]
        self.close()
        raise Broken(f"the process died with code {code}:\n{said}")


def _pump(stream: Any, lines: queue.Queue[str]) -> None:
    """Pass lines on; an empty one says that the stream has ended."""
    try:
        for line in stream:
            lines.put(line)
    except ValueError:
        pass  # closed by Worker.close
    lines.put("")
