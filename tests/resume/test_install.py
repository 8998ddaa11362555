"""Killed between any two renames: never half a model, and the next run mends the rest."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from graphrot.model import install as module
from graphrot.model.install import install, repair

NEW = {"m.onnx.data": "new", "m.json": "new", "m.onnx": "new"}
OLD = {"m.onnx": "old", "m.onnx.data": "old", "m.json": "old", "m.old": "old"}


class Killed(BaseException):
    """Stands for kill -9: nothing that follows it runs."""


def _prepare(folder: Path, old: dict[str, str]) -> tuple[Path, list[tuple[Path, Path]], list[Path]]:
    area, place = folder / ".work", folder / "place"
    (area / "made").mkdir(parents=True)
    place.mkdir()
    for name, words in NEW.items():
        (area / "made" / name).write_text(words)
    for name, words in old.items():
        (place / name).write_text(words)
    return area, [(area / "made" / name, place / name) for name in NEW], [place / name for name in old]


def _read(place: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in place.iterdir()}


def _whole(place: Path, old: dict[str, str]) -> bool:
    """What a reader of the model finds: nothing, or a model and weights that belong together."""
    found = _read(place)
    return "m.onnx" not in found or all(found[name] == found["m.onnx"] for name in ("m.onnx.data", "m.json"))


@pytest.mark.parametrize("old", [{}, OLD], ids=["new", "over an old one"])
def test_killed_at_every_rename(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, old: dict[str, str]) -> None:
    """Installing, and then mending, are both killed at every point in turn."""
    rename = os.rename
    moves = len(old) + len(NEW) + 1  # and the journal
    for stop in range(moves + 1):
        for again in range(moves + 1):
            area, places, remove = _prepare(tmp_path / f"{stop}-{again}", old)
            place = places[0][1].parent
            left = stop

            def counted(source: str, target: str, place: Path = place) -> None:
                nonlocal left
                if left == 0:
                    raise Killed
                left -= 1
                rename(source, target)
                assert _whole(place, old)

            monkeypatch.setattr(os, "rename", counted)
            monkeypatch.setattr(os, "replace", counted)
            monkeypatch.setattr(module, "repair", lambda _: None)
            done = False
            try:
                install(places, area, remove=remove)
                done = True
            except Killed:
                pass
            assert done == (stop == moves)
            left = again
            try:
                installed = repair(area)
            except Killed:
                left = 1000
                installed = repair(area)
            assert installed == done
            assert _read(place) == (NEW if done else old)
            monkeypatch.undo()


def test_a_failing_rename_puts_everything_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    area, places, remove = _prepare(tmp_path, OLD)
    rename = os.rename

    def full(source: str, target: str) -> None:
        if Path(source).parent.name == "made" and Path(source).name == "m.onnx":
            raise OSError(28, "No space left on device")
        rename(source, target)

    monkeypatch.setattr(os, "rename", full)
    with pytest.raises(OSError, match="No space"):
        install(places, area, remove=remove)
    assert _read(tmp_path / "place") == OLD


def test_the_folder_may_be_moved_in_between(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").mkdir()
    area, places, remove = _prepare(tmp_path / "a", OLD)
    monkeypatch.setattr(module, "repair", lambda _: None)
    monkeypatch.setattr(module, "sync", lambda _: (_ for _ in ()).throw(Killed))
    with pytest.raises(Killed):
        install(places, area, remove=remove)
    (tmp_path / "a").rename(tmp_path / "b")
    assert not repair(tmp_path / "b" / ".work")
    assert _read(tmp_path / "b" / "place") == OLD
