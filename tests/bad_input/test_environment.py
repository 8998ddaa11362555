"""The machine is to blame: no room, no permission, something in the way, a runtime that is too old."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import onnxruntime
import pytest

from graphrot.cli.main import run
from tests.bad_input.conftest import QUICK, Refuse, entries
from tests.bad_input.test_files import COMMANDS, line

_LIMITED = """
import resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, ({size}, {size}))
from graphrot.cli.main import run
sys.exit(run())
"""


@pytest.mark.parametrize("size", [0, 5_000, 30_000])
def test_a_disk_without_room(size: int, split: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """No file may get larger than this: writing breaks off at the first, or a later, weight."""
    before = entries(tmp_path)
    elsewhere = str(tmp_path_factory.mktemp("elsewhere"))
    arguments = ["convert", str(split), "-o", str(tmp_path / "out"), "--solver", "rtn", "--allow-partial"]
    code = _LIMITED.format(size=size)
    root = str(Path(__file__).resolve().parents[2])
    # -B: Python would leave a module's bytecode cut short at the limit, and later processes would load it.
    done = subprocess.run(
        [sys.executable, "-B", "-c", code, *arguments],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([*filter(None, sys.path), root]), "TMPDIR": elsewhere},
    )
    assert done.returncode == 4, done.stderr
    assert done.stderr.startswith("environment: ")
    assert "Traceback" not in done.stderr and "do:" in done.stderr
    assert entries(tmp_path) == before


@pytest.mark.parametrize("form", ["out", "out.onnx"])
def test_a_place_without_permission(
    form: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refuse: Refuse
) -> None:
    """Written so that it holds for root too, who may write anywhere."""
    locked = tmp_path / "locked"
    locked.mkdir()
    make, open_ = os.mkdir, os.open

    def denied(path: Any) -> bool:
        return isinstance(path, str | os.PathLike) and os.fspath(path).startswith(str(locked))

    def mkdir(path: Any, *rest: Any, **named: Any) -> None:
        if denied(path):
            raise PermissionError(13, "Permission denied", os.fspath(path))
        make(path, *rest, **named)

    def opened(path: Any, flags: int, *rest: Any, **named: Any) -> int:
        if denied(path) and flags & (os.O_CREAT | os.O_WRONLY | os.O_RDWR):
            raise PermissionError(13, "Permission denied", os.fspath(path))
        return open_(path, flags, *rest, **named)

    monkeypatch.setattr(os, "mkdir", mkdir)
    monkeypatch.setattr(os, "open", opened)
    refuse(4, ["convert", model, "-o", locked / form], "Permission denied", str(locked), "permission")


def test_below_something_that_is_no_folder(model: Path, refuse: Refuse) -> None:
    for place in (model / "out", Path(os.devnull) / "out.onnx"):
        refuse(2, ["convert", model, "-o", place], "The folder for the output does not exist", str(place.parent))


@pytest.mark.parametrize("form", ["out", "out.onnx"])
def test_the_output_exists(form: str, model: Path, tmp_path: Path, refuse: Refuse) -> None:
    convert = ["convert", str(model), "-o", str(tmp_path / form), *QUICK]
    assert run(convert) == 0
    refuse(2, convert, "The output already exists", "nothing is replaced unasked", "--force")
    assert run([*convert, "--force"]) == 0


def test_the_output_is_somebody_elses(model: Path, tmp_path: Path, refuse: Refuse) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "precious.txt").write_text("keep me", encoding="utf-8")
    refuse(2, ["convert", model, "--force"], "was not written by graphrot", "remove it yourself")


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("version", ["1.19.2", "1.7", "0.5.0"])
def test_a_runtime_that_is_too_old(
    command: str, version: str, model: Path, monkeypatch: pytest.MonkeyPatch, refuse: Refuse
) -> None:
    monkeypatch.setattr(onnxruntime, "__version__", version)
    words = (f"ONNX Runtime {version} is not supported", "is 1.20", "pip install -U onnxruntime")
    refuse(4, line(command, model), *words)


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    "said",
    [
        "Unsupported model IR version: 12, max supported IR version: 10",
        "Opset 24 is under development and support for this is limited. Current official support is till opset 21.",
    ],
)
def test_a_model_that_is_too_new_for_the_runtime(
    command: str, said: str, model: Path, monkeypatch: pytest.MonkeyPatch, refuse: Refuse
) -> None:
    def refused(*_: object, **__: object) -> None:
        raise RuntimeError(f"[ONNXRuntimeError] : 1 : FAIL : {said}")

    monkeypatch.setattr(onnxruntime, "InferenceSession", refused)
    refuse(4, line(command, model), "The model is too new for ONNX Runtime", said[:30], "older opset")


@pytest.mark.parametrize("version", ["1.20.0", "1.20.1", "1.32.0", "2.0", "1.24.0.dev2"])
def test_versions_that_are_supported(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from graphrot.ops.runtime import runtime

    monkeypatch.setattr(onnxruntime, "__version__", version)
    assert runtime() is onnxruntime


def test_an_empty_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refuse: Refuse) -> None:
    monkeypatch.chdir(tmp_path)
    refuse(2, ["convert", "", "-o", "x"], "The source's name is empty", "SOURCE")
    assert list(tmp_path.iterdir()) == []
