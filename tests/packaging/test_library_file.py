"""What the library file asks of a machine, and what it shows to others (Linux: read with binutils)."""

from __future__ import annotations

import re
import subprocess
import sys

from graphrot.doctor.ranges import numbers
from graphrot.ops.library import describe, library_path

NEWEST = {"GLIBC": "2.34" if describe()["cuda"]["built"] else "2.28", "GLIBCXX": "3.4.25", "CXXABI": "1.3.11"}
"""Those of manylinux_2_28, which ONNX Runtime's own wheels need. CUDA's runtime calls functions of threads and of the
loader, which moved in glibc 2.34: where it was linked with that or a newer one, it asks for it."""


def dynamic_symbols() -> list[str]:
    """The table that the loader reads, a line for each symbol."""
    read = ["objdump", "-T", str(library_path())]
    return subprocess.run(read, capture_output=True, text=True, check=True).stdout.splitlines()


if sys.platform == "linux":

    def test_it_exports_three_functions() -> None:
        defined = {line.split()[-1] for line in dynamic_symbols() if re.search(r"\s\.\w+\s", line)}
        assert defined == {"RegisterCustomOps", "graphrot_describe", "graphrot_isa"}

    def test_it_runs_where_the_runtime_does() -> None:
        found = [
            (name, version) for line in dynamic_symbols() for name, version in re.findall(r"(\w+)_(\d[\d.]*)\)", line)
        ]
        assert {name for name, _ in found} >= {"GLIBC", "GLIBCXX"}
        newer = [f"{name}_{version}" for name, version in found if numbers(version) > numbers(NEWEST.get(name, "999"))]
        assert not newer, newer
