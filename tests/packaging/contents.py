"""What wheel and sdist hold: ``python -m tests.packaging.contents X.whl X.tar.gz``."""

from __future__ import annotations

import re
import stat
import sys
import tarfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def wheel(path: Path) -> None:
    """One wheel for every Python 3, with the library and every module, and without tests."""
    assert re.fullmatch(r"graphrot-[\d.]+-py3-none-\w+\.whl", path.name), path.name
    assert not path.name.endswith("-any.whl"), "the library is for one platform"
    with zipfile.ZipFile(path) as archive:
        names = set(archive.namelist())
        links = [info.filename for info in archive.infolist() if stat.S_ISLNK(info.external_attr >> 16)]
    assert not links, links
    modules = {file.relative_to(ROOT).as_posix() for file in (ROOT / "graphrot").glob("**/*.py")}
    modules |= {f"graphrot/passes/{file.name}" for file in (ROOT / "passes").glob("*.py")}
    modules |= {"graphrot/report/page.html.j2", "graphrot/report/style.css"}
    assert modules <= names, sorted(modules - names)
    natives = [name for name in names if re.search(r"\.(so|dylib|dll|lib|a)$", name)]
    assert len(natives) == 1, natives
    assert natives[0].startswith("graphrot/ops/"), natives
    assert any(name.endswith("licenses/LICENSE") for name in names)
    strangers = [name for name in names if not re.match(r"graphrot(-[\d.]+\.dist-info)?/", name)]
    assert not strangers, strangers


def sdist(path: Path) -> None:
    """Everything that a build and a user need."""
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    for name in (
        "custom_ops/CMakeLists.txt",
        "custom_ops/cuda.cmake",
        "custom_ops/cuda_toolkit.py",
        "custom_ops/hadamard/cuda.cu",
        "passes/base.py",
        "README.md",
        "LICENSE",
        "pyproject.toml",
        "samples/cpp/generate.cc",
    ):
        assert name in names, name
    assert not any(name.startswith((".ci", "build", ".git/")) for name in names)


if __name__ == "__main__":
    wheel(Path(sys.argv[1]))
    sdist(Path(sys.argv[2]))
    print(f"{Path(sys.argv[1]).name}: {Path(sys.argv[1]).stat().st_size / 1e6:.2f} MB")
