"""Imports go one way. A lower layer never imports a higher one."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import graphrot

PACKAGE = Path(graphrot.__file__).parent

LAYERS: tuple[tuple[str, ...], ...] = (
    ("errors", "progress", "threads", "words", "report.parts"),
    ("work",),
    ("analysis.types", "plan.types"),
    ("graph",),
    ("rotation",),
    ("ops", "folded"),
    ("doctor",),
    ("model",),
    ("analysis",),
    ("recipe",),
    ("plan",),
    ("quant", "passes", "emit"),
    ("torch_graph",),
    ("evaluate",),
    ("bench",),
    ("calibration", "texts"),
    ("quantize", "half", "cache"),
    ("prepare",),
    ("learn", "auto"),
    ("report",),
    ("measure",),
    ("converted",),
    ("job",),
    ("convert",),
    ("api",),
    ("__init__",),
    ("cli",),
    ("__main__",),
)
"""From the lowest to the highest; names in one tuple may import each other."""


def layer_of(module: str) -> int:
    """The layer of ``graphrot.<module>``; the longest matching name wins."""
    matches = [
        (len(name), level)
        for level, names in enumerate(LAYERS)
        for name in names
        if module == name or module.startswith(name + ".")
    ]
    assert matches, f"graphrot.{module} is in no layer: add it to LAYERS"
    return max(matches)[1]


def module_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if len(parts) > 1 and parts[-1] == "__init__" else parts)


def imported(tree: ast.AST) -> set[str]:
    """Modules of graphrot that a file imports, also inside functions and under TYPE_CHECKING."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[2] for alias in node.names if alias.name.startswith("graphrot.")}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide the layer"
            if node.module == "graphrot":
                found |= {alias.name for alias in node.names}
            elif node.module and node.module.startswith("graphrot."):
                found.add(node.module.partition(".")[2])
    return found


FILES = sorted(p for p in PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=[module_of(p) for p in FILES])
def test_imports_point_downwards(path: Path) -> None:
    own = layer_of(module_of(path))
    tree = ast.parse(path.read_text(encoding="utf-8"))
    above = sorted(name for name in imported(tree) if layer_of(name) > own)
    assert not above, f"{module_of(path)} imports {above}, which is above it"


def test_passes_are_imported_as_part_of_the_package() -> None:
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            module = node.module or "" if isinstance(node, ast.ImportFrom) else ""
            assert not any(n == "passes" or n.startswith("passes.") for n in [*names, module]), path


@pytest.mark.parametrize("heavy", ["torch", "transformers", "onnxruntime", "onnx_ir", "typer"])
def test_importing_the_package_is_light(heavy: str) -> None:
    code = f"import sys, graphrot; sys.exit({heavy!r} in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_functions_keep_their_names_after_their_modules_were_imported() -> None:
    code = (
        "import graphrot, graphrot.convert, graphrot.evaluate.compare\n"
        "assert callable(graphrot.convert) and callable(graphrot.evaluate)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
