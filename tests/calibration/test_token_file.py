"""Files that hold tokens, and others."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from graphrot.calibration.token_file import read_tokens
from graphrot.errors import InputRefused

IDS = [[3, 1, 2], [7, 0, 5]]


@pytest.mark.parametrize("dtype", ["uint8", "int32", "int64", "uint64", ">u2"])
@pytest.mark.parametrize("rows", [False, True])
def test_numpy(dtype: str, rows: bool, tmp_path: Path) -> None:
    array = np.asarray(IDS, dtype=dtype).reshape((2, 3) if rows else -1)
    np.save(tmp_path / "ids.npy", array)
    np.savez(tmp_path / "one.npz", anything=array)
    np.savez(tmp_path / "named.npz", other=np.zeros(3), tokens=array)
    for name in ("ids.npy", "one.npz", "named.npz"):
        found = read_tokens(tmp_path / name)
        assert found.dtype == np.int64 and found.tolist() == [3, 1, 2, 7, 0, 5]


@pytest.mark.parametrize("content", [[3, 1, 2, 7, 0, 5], IDS, {"tokens": IDS, "model": "x"}])
def test_json(content: Any, tmp_path: Path) -> None:
    file = tmp_path / "ids.tokens.json"
    file.write_text(json.dumps(content), encoding="utf-8")
    assert read_tokens(file).tolist() == [3, 1, 2, 7, 0, 5]


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ([], "it is empty"),
        ([1, -1], "it has -1 to 1"),
        ([1.5, 2], "not every entry is a whole number"),
        ([True, 2], "not every entry is a whole number"),
        ([[1], 2], "not every entry is a whole number"),
        (["a"], "not every entry is a whole number"),
        ({"ids": [1]}, "neither a list nor an object with a list called tokens"),
        ([2**70], "does not parse"),
    ],
)
def test_json_of_something_else(content: Any, why: str, tmp_path: Path) -> None:
    file = tmp_path / "ids.tokens.json"
    file.write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(InputRefused, match=why) as caught:
        read_tokens(file)
    assert str(file) in str(caught.value)


@pytest.mark.parametrize(
    ("array", "why"),
    [
        (np.zeros(3), "it holds float64"),
        (np.zeros((1, 2, 3), np.int64), r"it holds int64 \[1, 2, 3\]"),
        (np.zeros(0, np.int64), "it is empty"),
        (np.asarray([-5, 4]), "it has -5 to 4"),
        (np.asarray([2**63], np.uint64), "it has 9223372036854775808"),
        (np.asarray([True]), "it holds bool"),
    ],
)
def test_arrays_of_something_else(array: np.ndarray, why: str, tmp_path: Path) -> None:
    np.save(tmp_path / "ids.npy", array)
    with pytest.raises(InputRefused, match=why):
        read_tokens(tmp_path / "ids.npy")


def test_several_arrays_without_one_called_tokens(tmp_path: Path) -> None:
    np.savez(tmp_path / "ids.npz", a=np.zeros(2, int), b=np.zeros(2, int))
    with pytest.raises(InputRefused, match="it has the arrays a, b, and none is called tokens"):
        read_tokens(tmp_path / "ids.npz")


class _Trap:
    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (Path("trapped"),)


def test_nothing_is_unpickled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    np.save(tmp_path / "ids.npy", np.asarray([_Trap()], dtype=object), allow_pickle=True)
    (tmp_path / "raw.npy").write_bytes(pickle.dumps(_Trap()))
    for name in ("ids.npy", "raw.npy"):
        with pytest.raises(InputRefused, match="does not parse"):
            read_tokens(tmp_path / name)
    assert not (tmp_path / "trapped").exists()


@pytest.mark.parametrize("content", [b"", b"\x93NUMPY", b"PK\x03\x04 not really", b"\xff\xfe"])
@pytest.mark.parametrize("name", ["ids.npy", "ids.npz", "ids.tokens.json"])
def test_broken_files(content: bytes, name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputRefused, match="does not parse"):
        read_tokens(tmp_path / name)


def test_files_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(InputRefused, match="There is no such token file"):
        read_tokens(tmp_path / "ids.npy")
    with pytest.raises(InputRefused, match="The token file is a folder"):
        read_tokens(tmp_path)
