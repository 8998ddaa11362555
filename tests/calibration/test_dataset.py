"""Data sets of the package ``datasets``: local folders, and what is wrong with others. Nothing is fetched."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import datasets
import pytest

from graphrot.calibration import dataset
from graphrot.calibration.choice import choose
from graphrot.calibration.dataset import read_dataset
from graphrot.errors import EnvironmentProblem, InputRefused
from graphrot.texts import Texts


@pytest.fixture(autouse=True)
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


def write(folder: Path, rows: Sequence[dict[str, Any]], split: str = "train") -> Path:
    folder.mkdir(exist_ok=True)
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / f"{split}.jsonl").write_text(lines, encoding="utf-8")
    return folder


def read(spec: str) -> str:
    choice = choose(spec)
    assert choice.dataset is not None
    return read_dataset(choice.dataset, choice.name)


def test_the_text_column_of_the_training_split(tmp_path: Path) -> None:
    folder = write(tmp_path / "set", [{"title": "t", "text": f" line {n}\n", "n": n} for n in range(3)])
    write(folder, [{"title": "t", "text": "another", "n": 0}], "validation")
    assert read(f"datasets:{folder}") == "line 0\n\nline 1\n\nline 2\n"
    assert read(f"datasets:{folder}:validation") == "another\n"
    assert read(f"datasets:{folder}:train[1:]:text") == "line 1\n\nline 2\n"
    assert read(f"datasets:{folder}:train:title") == "t\n\nt\n\nt\n"


def test_the_only_column_of_texts(tmp_path: Path) -> None:
    folder = write(tmp_path / "set", [{"story": "once", "n": 1}, {"story": "  ", "n": 2}, {"story": "upon", "n": 3}])
    assert read(f"datasets:{folder}") == "once\n\nupon\n"


def test_no_more_than_the_first_millions_of_characters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write(tmp_path / "set", [{"text": "x" * 30} for _ in range(9)])
    monkeypatch.setattr(dataset, "LARGEST", 70)
    assert len(read(f"datasets:{folder}")) == 70


@pytest.mark.parametrize(
    ("row", "spec", "why"),
    [
        ({"a": "x", "b": "y"}, "", "2 of its columns hold text, and none is called text; there are a, b"),
        ({"n": 1}, "", "none of its columns hold text"),
        ({"text": "x"}, ":train:story", "column 'story' of the first row is NoneType; there are text"),
        ({"text": 5, "a": "x"}, ":train:text", "column 'text' of the first row is int"),
    ],
)
def test_which_column(row: dict[str, Any], spec: str, why: str, tmp_path: Path) -> None:
    folder = write(tmp_path / "set", [row])
    with pytest.raises(InputRefused, match="not plain which column") as caught:
        read(f"datasets:{folder}{spec}")
    assert why in str(caught.value)


def test_what_is_not_there(tmp_path: Path) -> None:
    folder = write(tmp_path / "set", [{"text": "x"}, {"text": ""}])
    with pytest.raises(InputRefused, match="cannot be read") as caught:
        read(f"datasets:{folder}:validation")
    assert "validation" in str(caught.value) and "split" in str(caught.value)
    with pytest.raises(InputRefused, match="cannot be read"):
        read(f"datasets:{folder}/nowhere")
    with pytest.raises(InputRefused, match="The data set has no text"):
        read(f"datasets:{write(tmp_path / 'empty', [{'text': ' '}])}")


def test_one_of_the_hub_without_a_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(*_: object, **__: object) -> None:
        raise ConnectionError("no way to the hub")

    monkeypatch.setattr(datasets, "load_dataset", offline)
    with pytest.raises(EnvironmentProblem, match="cannot be reached") as caught:
        read("datasets:owner/name")
    assert "no way to the hub" in str(caught.value)


def test_without_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dataset, "find_spec", lambda name: None)
    with pytest.raises(EnvironmentProblem, match="needs the package 'datasets'") as caught:
        Texts(None, f"datasets:{tmp_path}")
    assert 'pip install "graphrot[data]"' in str(caught.value)
