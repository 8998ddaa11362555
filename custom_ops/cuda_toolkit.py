"""Find NVIDIA's compiler and tools: ``python cuda_toolkit.py nvcc`` prints a path, or nothing where there is none.

Looked into, in this order: ``CUDACXX`` (for nvcc), ``CUDA_PATH`` and ``CUDA_HOME``, ``PATH``, ``/usr/local/cuda``, and
the wheels ``nvidia-cuda-*`` in the site-packages of the Python that runs this.
"""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

WHEELS = "nvidia/*/bin"
"""Where the wheels put programs, below site-packages: ``nvidia/cu13/bin``, ``nvidia/cuda_nvcc/bin``."""


def _folders() -> Iterator[Path]:
    """Folders with programs, best first."""
    for variable in ("CUDA_PATH", "CUDA_HOME"):
        if os.environ.get(variable):
            yield Path(os.environ[variable]) / "bin"
    yield from map(Path, os.environ.get("PATH", os.defpath).split(os.pathsep))
    yield Path("/usr/local/cuda/bin")
    for key in ("purelib", "platlib"):
        yield from sorted(Path(sysconfig.get_paths()[key]).glob(WHEELS), reverse=True)
    for entry in sys.path:
        yield from sorted(Path(entry).glob(WHEELS), reverse=True)


def find_tool(name: str) -> Path | None:
    """The path of ``nvcc``, ``cuobjdump`` and the like, or None.

    Raises:
        FileNotFoundError: ``CUDACXX`` names a compiler that does not exist.
    """
    named = os.environ.get("CUDACXX")
    if name == "nvcc" and named:
        found = shutil.which(named)
        if found is None:
            raise FileNotFoundError(f"CUDACXX names a compiler that does not exist: {named}")
        return Path(found)
    for folder in _folders():
        path = folder / name
        if path.is_file() and os.access(path, os.X_OK):
            return path
    return None


if __name__ == "__main__":
    print(find_tool(sys.argv[1]) or "")
