"""Names that no file can have, wherever one is given."""

from __future__ import annotations

from pathlib import Path

import pytest

import graphrot
from graphrot.errors import InputRefused
from graphrot.model.hub import is_hub_id
from graphrot.model.inputs import Inputs
from graphrot.model.load import load_source
from tests.bad_input.conftest import Refuse

LONG = "x" * 300
PATHS = (LONG, f"{LONG}.onnx", f"{LONG}.gguf", f"./{LONG}", f"/{LONG}/y", f"demo:{LONG}", "x/" * 3000)
NAMES = (*PATHS, "a\0b", "a\0b.onnx")


@pytest.mark.parametrize("name", NAMES, ids=range(len(NAMES)))
def test_sources(name: str, tmp_path: Path) -> None:
    for look in (
        lambda: Inputs.of(name),
        lambda: load_source(name, workdir=tmp_path / "work"),
        lambda: graphrot.convert(name, output=tmp_path / "out.onnx"),
    ):
        with pytest.raises(InputRefused, match="No file can have this name"):
            look()
    assert not list(tmp_path.iterdir())


def test_a_hub_id_in_a_folder_that_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a").mkdir()
    with pytest.raises(InputRefused, match="it is too long: 302 bytes"):
        is_hub_id(f"a/{LONG}")


def test_further_files(tmp_path: Path) -> None:
    for name in (LONG, "a\0b"):
        with pytest.raises(InputRefused, match="No file can have this name"):
            Inputs.of("demo", (tmp_path, name))


@pytest.mark.parametrize(
    "line",
    [
        ("convert", LONG),
        ("convert", "~no-such-user-here/model"),
        ("convert", "{model}", "--tokenizer", LONG),
        ("inspect", f"{LONG}.onnx"),
        ("verify", "{model}", f"{LONG}.onnx"),
    ],
    ids=" ".join,
)
def test_command_lines(line: tuple[str, ...], model: Path, refuse: Refuse) -> None:
    refuse(3, [part.format(model=model) for part in line], "No file can have this name")
