"""What a measurement was made on: the machine, the versions, the commit."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

import graphrot.errors
from graphrot.ops import library

_INTERESTING = frozenset(
    {
        *("avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl", "avx512_vnni", "avx512_bf16", "avx512_fp16"),
        *("avx_vnni", "avx_vnni_int8", "amx_tile", "amx_int8", "amx_bf16"),
        *("asimd", "asimddp", "i8mm", "sve", "sme"),
    }
)
"""Flags of a processor, as Linux names them, on which the speed of integer kernels depends."""
_PACKAGES = ("graphrot", "onnxruntime", "onnxruntime-gpu", "onnxruntime-genai", "numpy")


def machine() -> dict[str, Any]:
    """``cpu`` (the model), ``flags`` (those of interest; empty where the system does not tell), ``cores``, ``system``,
    ``load`` (the load average now: 1, 5 and 15 minutes; None where there is none)."""
    model, flags = _processor()
    return {
        "cpu": model or platform.processor() or platform.machine(),
        "flags": sorted(_INTERESTING & flags),
        "cores": _cores(),
        "system": f"{platform.system()} {platform.machine()}",
        "load": load(),
    }


def load() -> list[float] | None:
    """The load average of the last 1, 5 and 15 minutes."""
    return [round(value, 2) for value in os.getloadavg()] if hasattr(os, "getloadavg") else None


def versions() -> dict[str, str | None]:
    """Versions of Python and of the packages that matter; None: not installed."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return found


def isa() -> str | None:
    """The instruction set that the native library's kernels use; None: there is no library."""
    if not library.is_available():
        return None
    return str(library.describe()["selected"])


def commit() -> str | None:
    """The commit of the checkout that graphrot runs from, with ``-dirty`` if files were changed; None: no checkout."""
    root = Path(graphrot.errors.__file__).resolve().parents[1]
    git = shutil.which("git")
    if git is None or not (root / ".git").exists():
        return None
    try:
        head = _git(git, root, "rev-parse", "HEAD")
        changed = _git(git, root, "status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.SubprocessError):
        return None
    return f"{head}-dirty" if changed else head


def record() -> dict[str, Any]:
    """All of it: ``machine``, ``versions``, ``commit``, ``isa``."""
    return {"machine": machine(), "versions": versions(), "commit": commit(), "isa": isa()}


def _git(git: str, root: Path, *words: str) -> str:
    done = subprocess.run([git, "-C", str(root), *words], capture_output=True, text=True, check=True, timeout=30)
    return done.stdout.strip()


def _processor() -> tuple[str, frozenset[str]]:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return "", frozenset()
    facts: dict[str, str] = {}
    for line in lines:
        key, _, value = line.partition(":")
        facts.setdefault(key.strip(), value.strip())
    return facts.get("model name", ""), frozenset(facts.get("flags", facts.get("Features", "")).split())


def _cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
