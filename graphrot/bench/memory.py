"""Peak memory of a model, measured in a process of its own that loads it and runs it.

``python -m graphrot.bench.memory``, with the job as JSON on stdin, prints one JSON object.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from graphrot.errors import EnvironmentProblem, InputRefused

_STATUS = Path("/proc/self/status")


@dataclass(frozen=True)
class Job:
    """What the process does: ``prefill`` tokens in ``batch`` rows, or a cache of ``context`` random tokens; then one
    token more."""

    model: str
    prefill: int
    batch: int
    threads: int
    libraries: Sequence[str] = ()
    context: int | None = None
    provider: Literal["cpu", "cuda"] = "cpu"


def peak_rss_bytes(job: Job) -> int | None:
    """The largest resident size of a process that does the job: interpreter, runtime, mapped weights and all.

    Returns:
        Bytes; None where the system does not tell.

    Raises:
        InputRefused: the process failed.
        EnvironmentProblem: the system ended it.
    """
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-m", "graphrot.bench.memory"]
    done = subprocess.run(
        command, input=json.dumps(asdict(job)), capture_output=True, text=True, check=False, env=environment
    )
    if done.returncode < 0:
        raise EnvironmentProblem(
            "The process that measures memory was ended by the system",
            where=job.model,
            why=f"signal {-done.returncode}",
            do="close other programs, or measure with a smaller --prefill, --context or --batch",
        )
    if done.returncode:
        raise InputRefused("The model does not run in a process of its own", where=job.model, why=done.stderr[-600:])
    peak = json.loads(done.stdout)["peak_rss_bytes"]
    return None if peak is None else int(peak)


def _own_peak() -> int | None:
    """Of this process. Linux: not ``ru_maxrss``, which begins with the size of the process that started this one."""
    if _STATUS.is_file():
        lines = _STATUS.read_text(encoding="utf-8").splitlines()
        found = [int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")]
        return found[0] if found else None
    if sys.platform == "darwin":
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return None


def main() -> None:
    """Do the job that stands on stdin."""
    import numpy as np

    from graphrot.bench.contender import Contender
    from graphrot.ops.foreign import custom_ops

    job = Job(**json.load(sys.stdin))
    with custom_ops(*job.libraries):
        contender = Contender(Path(job.model), threads=job.threads, batch=job.batch, provider=job.provider)
    if job.context is None:
        bound = contender.decoder.bind(np.zeros((job.batch, job.prefill), dtype=np.int64))
        bound.run()
        cache = bound.cache()
    else:
        cache = contender.fill(job.context, 1)
    contender.decode([0], cache)
    print(json.dumps({"peak_rss_bytes": _own_peak()}))


if __name__ == "__main__":
    main()
