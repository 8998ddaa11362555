"""Run graphrot's command line on request, in a process that may be killed or may crash.

One JSON object a line comes in on stdin, ``{"folder": ..., "arguments": [[...], ...], "output": ...}``; one goes
out per request: exit codes, what was said, and whether the output that a command claims to have written runs.
"""

from __future__ import annotations

import contextlib
import faulthandler
import io
import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Run the request's commands one after the other."""
    from graphrot.cli.main import run

    results = []
    for arguments in request["arguments"]:
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = run(arguments)
        results.append({"code": code, "out": out.getvalue()[-2000:], "err": err.getvalue()[-4000:]})
    return {"results": results, "runs": _runs(Path(request["output"])) if request.get("output") else None}


def _runs(output: Path) -> str | None:
    """None where there is no output; ``ok``, or what is wrong with it."""
    from graphrot.errors import InputRefused
    from graphrot.evaluate.session import Unrunnable, open_decoder

    if not output.exists():
        return None
    try:
        decoder = open_decoder(output)
    except Unrunnable:
        raise
    except InputRefused:
        return "ok"  # it loads, but the mutation took an input or output of a decoder away
    logits, cache = decoder.run(np.ones((decoder.batch or 1, 3), np.int64))
    decoder.run(np.ones((decoder.batch or 1, 1), np.int64), cache)
    return "ok" if logits.ndim == 3 else f"logits of shape {logits.shape}"


def main() -> None:
    """Serve until stdin closes. Nothing but answers goes to stdout, whoever writes there."""
    faulthandler.enable()
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.environ["GRAPHROT_DEBUG"] = "1"
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    main()
