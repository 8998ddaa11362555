"""Libraries of empty functions in the place of CUDA's: with them ONNX Runtime's CUDA provider loads without CUDA."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping
from pathlib import Path

_DRIVER = "libcuda.so.1"
_NO_DEVICE = 100
"""What all functions return: CUDA's error for a machine without a GPU."""


def write_stand_ins(provider: Path, folder: Path) -> list[Path]:
    """Compile a library for each library of CUDA that a provider needs.

    Args:
        provider: ``libonnxruntime_providers_cuda.so``.
        folder: where they go.

    Returns:
        Their paths, named as the loader looks for them.
    """
    made = []
    for name, (version, symbols) in _needed(provider).items():
        source, script, library = folder / f"{name}.c", folder / f"{name}.map", folder / name
        source.write_text("".join(map(_function, symbols)), encoding="ascii")
        script.write_text(f"{version} {{ global: *; }};\n" if version else "{ global: *; };\n", encoding="ascii")
        flags = ["-shared", "-fPIC", "-w", "-fno-builtin", f"-Wl,-soname,{name}", f"-Wl,--version-script={script}"]
        subprocess.run(["cc", *flags, "-o", str(library), str(source)], check=True)
        made.append(library)
    return made


def _function(symbol: str) -> str:
    if re.search(r"String|Name", symbol):  # of an error
        return f'const char* {symbol}(void) {{ return "no CUDA"; }}\n'
    return f"int {symbol}(void) {{ return {_NO_DEVICE}; }}\n"


def _needed(provider: Path) -> Mapping[str, tuple[str, list[str]]]:
    """Library -> its symbol version and the functions that are called, for those of CUDA."""
    dynamic = _run("readelf", "-d", str(provider))
    libraries = re.findall(r"\(NEEDED\).*\[(libcu[^\]]*|libnv[^\]]*)\]", dynamic)
    found: dict[str, tuple[str, list[str]]] = {name: ("", []) for name in libraries}
    for line in _run("nm", "-D", "--undefined-only", str(provider)).splitlines():
        symbol, _, version = line.split()[-1].partition("@")
        if version in found:
            found[version] = (version, [*found[version][1], symbol])
        elif not version and _DRIVER in found and re.match(r"cu[A-Z]", symbol):
            found[_DRIVER][1].append(symbol)
    return found


def _run(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
