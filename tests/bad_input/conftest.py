"""A small decoder to spoil, and one way to look at a refusal."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import onnx
import pytest

from graphrot.cli.main import run
from tests.exported import write_tokenizer
from tests.fuzz.bases import write_base

QUICK = ("--recipe", "rotate-only", "--certificate", "off")


class Refuse(Protocol):
    """Runs a command line that must be refused."""

    def __call__(self, code: int, arguments: Sequence[str | Path], *words: str) -> str: ...


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with ``model.onnx``, which holds its weights, ``split.onnx``, whose weights lie beside it, and words."""
    folder = tmp_path_factory.mktemp("whole")
    write_base("embedded", folder / "model.onnx")
    proto = onnx.load(folder / "model.onnx")
    onnx.save(proto, folder / "split.onnx", save_as_external_data=True, location="split.onnx.data", size_threshold=1024)
    return folder


@pytest.fixture
def place(whole: Path, tmp_path: Path) -> Path:
    """A private copy of :func:`whole`."""
    folder = tmp_path / "place"
    shutil.copytree(whole, folder)
    return folder


@pytest.fixture
def model(place: Path) -> Path:
    return place / "model.onnx"


@pytest.fixture
def split(place: Path) -> Path:
    return place / "split.onnx"


@pytest.fixture
def words(tmp_path: Path) -> Path:
    """A tokenizer of 102 tokens; the model has 37."""
    write_tokenizer(tmp_path / "words")
    return tmp_path / "words"


@pytest.fixture
def edit(model: Path) -> Callable[[Callable[[onnx.ModelProto], object]], Path]:
    """Change ``model.onnx`` by a function of its protobuf."""

    def apply(change: Callable[[onnx.ModelProto], object]) -> Path:
        proto = onnx.load(model)
        change(proto)
        model.write_bytes(proto.SerializeToString())
        return model

    return apply


def entries(folder: Path) -> dict[str, str | bytes]:
    """Everything in a folder: what files hold, where links lead."""
    found: dict[str, str | bytes] = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_symlink():
            found[name] = str(path.readlink())
        elif path.is_file():
            found[name] = path.read_bytes() if path.stat().st_size < 2**24 else str(path.stat())
        else:
            found[name] = "folder"
    return found


@pytest.fixture
def refuse(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Refuse:
    """Check exit code and words, and that nothing in ``tmp_path`` was touched. The output is ``tmp_path/out``."""
    monkeypatch.setenv("GRAPHROT_DEBUG", "1")

    def check(code: int, arguments: Sequence[str | Path], *words: str) -> str:
        line = [str(part) for part in arguments]
        if line[0] == "convert" and "-o" not in line:
            line += ["-o", str(tmp_path / "out")]
        if line[0] == "convert" and not {"--recipe", "--certificate", "--solver"} & set(line):
            line += QUICK
        before = entries(tmp_path)
        capsys.readouterr()
        found = run(line)
        out, err = capsys.readouterr()
        assert found == code, err
        assert out == ""
        assert "Traceback" not in err
        label = {1: "check failed", 2: "usage", 3: "input refused", 4: "environment"}[code]
        assert err.startswith(f"{label}: "), err
        assert "do:" in err, err
        for word in words:
            assert word in err, err
        assert entries(tmp_path) == before
        return err

    return check
