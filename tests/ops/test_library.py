"""Where the native library is looked for, and what is said when it is not there."""

from __future__ import annotations

from pathlib import Path

import onnxruntime as ort
import pytest

from graphrot.errors import EnvironmentProblem
from graphrot.ops import library


def test_the_library_is_found() -> None:
    path = library.library_path()
    assert path.name == library.file_name()
    assert library.is_available()
    library.register(ort.SessionOptions())


def test_registering_twice_is_harmless() -> None:
    for _ in range(2):
        options = ort.SessionOptions()
        library.register(options)


def test_an_override_wins(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    copy = tmp_path / library.file_name()
    copy.write_bytes(library.library_path().read_bytes())
    monkeypatch.setenv(library.OVERRIDE, str(copy))
    assert library.library_path() == copy.resolve()


def test_an_override_that_does_not_exist_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(library.OVERRIDE, str(tmp_path / "none.so"))
    assert not library.is_available()
    with pytest.raises(EnvironmentProblem, match="GRAPHROT_LIBRARY names a file that does not exist") as caught:
        library.register(ort.SessionOptions())
    assert "none.so" in str(caught.value)
    assert caught.value.exit_code == 4


def test_no_library_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(library.OVERRIDE, raising=False)
    monkeypatch.setattr(library, "_places", lambda: iter(()))
    assert not library.is_available()
    with pytest.raises(EnvironmentProblem, match="not installed") as caught:
        library.library_path()
    assert "pip install" in str(caught.value)


def test_a_file_that_is_no_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "bad.so").write_bytes(b"not a library")
    monkeypatch.setenv(library.OVERRIDE, str(tmp_path / "bad.so"))
    with pytest.raises(EnvironmentProblem, match="refused graphrot's native library"):
        library.register(ort.SessionOptions())


def test_an_unknown_instruction_set_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAPHROT_ISA", "mmx")
    with pytest.raises(EnvironmentProblem, match="refused") as caught:
        library.register(ort.SessionOptions())
    assert "GRAPHROT_ISA=mmx is unknown; use one of amx, avx512vnni, avx512, avx2, scalar" in str(caught.value)
