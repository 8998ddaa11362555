"""Conversions in processes of their own, which can be killed, and what their outputs hold."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

_PRELOAD = ["graphrot.convert", "graphrot.quantize", "graphrot.model.save", "onnxruntime", "graphrot.analysis.analyze"]

HANG = 120
"""Seconds after which a process hangs for sure."""


class Run:
    """A conversion in a process of its own.

    It reports each step, and waits for a word before it goes on: a moment is a step, however busy the machine is.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(_PRELOAD)
        self.ours, theirs = context.Pipe()
        self._process = context.Process(target=_convert, args=(theirs, arguments, options), daemon=True)
        self._process.start()
        theirs.close()
        self.pid: int = self._process.pid or 0
        self._waits = False

    def steps(self) -> list[str]:
        """Let it run to its end; returns the steps that it reported."""
        found: list[str] = []
        while (step := self._next()) is not None:
            found.append(step)
        return found

    def until(self, wanted: Callable[[int, str], bool]) -> str | None:
        """Let it run up to a step that is ``wanted(number, step)``, where it waits; None: it has ended before."""
        number = 0
        while (step := self._next()) is not None:
            if wanted(number, step):
                return step
            number += 1
        return None

    def end(self, number: signal.Signals, delay: float = 0.0) -> int:
        """Let it go on, send it a signal after ``delay`` seconds, and return its exit code."""
        self.ours.send("go")
        time.sleep(delay)
        os.kill(self.pid, number)
        return self.code()

    def code(self) -> int:
        """Its exit code, once it has ended."""
        self._process.join(HANG)
        assert self._process.exitcode is not None, "it hangs"
        return self._process.exitcode

    def _next(self) -> str | None:
        if self._waits:
            self.ours.send("go")
        self._waits = False
        assert self.ours.poll(HANG), "it hangs"
        try:
            step: str = self.ours.recv()
        except EOFError:
            return None
        self._waits = True
        return step


def _convert(pipe: Connection, arguments: Any, options: Any) -> None:
    import graphrot

    def report(step: str, done: int, total: int) -> None:
        try:
            pipe.send(step)
            pipe.recv()
        except (BrokenPipeError, EOFError):
            return

    signal.signal(signal.SIGTERM, _unwind)
    graphrot.convert(*arguments, progress=report, **options)


def _unwind(_number: int, _frame: object) -> None:
    raise SystemExit(143)


def content(folder: Path) -> dict[str, bytes]:
    """Every file below a folder; ``seconds`` of a manifest are left out."""
    found = {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}
    return {name: _timeless(data) if name.endswith("graphrot.json") else data for name, data in found.items()}


def _timeless(data: bytes) -> bytes:
    manifest = json.loads(data)
    del manifest["seconds"]
    return json.dumps(manifest).encode()
