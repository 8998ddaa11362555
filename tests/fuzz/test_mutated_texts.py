"""Broken tokenizers, recipes and plans: an exit code and words, like broken models."""

from __future__ import annotations

import copy
import json
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from graphrot.cli.main import run
from tests.exported import write_tokenizer
from tests.fuzz.bases import write_base
from tests.fuzz.client import Worker
from tests.fuzz.test_mutated_models import content

COUNT = 25
"""Files per kind and way."""

_RECIPE = "recipe: w4a8\ngroup: 64\nhead: none\nonly: [R1, R2]\nsolver: rtn\nsymmetric: true\nseed: 3\n"
_ODD: tuple[Any, ...] = (
    None, True, -1, 0, 1, 7, 2**31, 2**63, 2**70, 1.5, float("nan"), float("inf"), "", "x", "none", "\u0000", [], [[]],
    {}, ["R1", 3], {"a": None}, "\ud7ff" * 40,
)  # fmt: skip


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    worker = Worker()
    yield worker
    worker.close()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, its tokenizer, a recipe and a plan."""
    folder = tmp_path_factory.mktemp("whole")
    write_base("embedded", folder / "model.onnx")
    write_tokenizer(folder)
    (folder / "chat_template.jinja").write_text("{{ bos_token[:0] }}{{ messages[0]['content'] }}", encoding="utf-8")
    made = tmp_path_factory.mktemp("made") / "out"
    quick = ["--recipe", "rotate-only", "--certificate", "off"]
    assert run(["convert", str(folder / "model.onnx"), "-o", str(made), *quick]) == 0
    shutil.copyfile(made / "plan.json", folder / "plan.json")
    (folder / "recipe.yaml").write_text(_RECIPE, encoding="utf-8")
    (folder / "text.txt").write_text("0123456789" * 20, encoding="utf-8")
    return folder


def _places(node: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in a document: paths of keys and indices."""
    if path:
        yield path
    children = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, child in children:
        yield from _places(child, (*path, key))


def _change(document: Any, rng: random.Random) -> Any:
    """Replace, drop, double or exchange something."""
    document = copy.deepcopy(document)
    for _ in range(rng.choice((1, 1, 2, 4))):
        places = list(_places(document))
        if not places:
            return rng.choice(_ODD)
        place = rng.choice(places)
        parent = document
        for key in place[:-1]:
            parent = parent[key]
        action = rng.randrange(5)
        if action == 0:
            del parent[place[-1]]
        elif action == 1 and isinstance(parent, dict):
            parent[rng.choice(("new", "", place[-1] + "s" if isinstance(place[-1], str) else "y"))] = rng.choice(_ODD)
        elif action == 2 and isinstance(parent[place[-1]], int):
            parent[place[-1]] += rng.choice((-1, 1, 1000))
        elif action == 3:
            other = rng.choice(places)
            donor = document
            try:
                for key in other:
                    donor = donor[key]
            except (KeyError, IndexError, TypeError):
                continue
            parent[place[-1]] = copy.deepcopy(donor)
        else:
            parent[place[-1]] = rng.choice(_ODD)
    return document


def _flip(raw: bytes, rng: random.Random) -> bytes:
    changed = bytearray(raw)
    for _ in range(rng.choice((1, 2, 8))):
        changed[rng.randrange(len(changed))] = rng.choice((rng.randrange(256), ord('"'), ord("{"), ord("0")))
    return bytes(changed[: rng.randrange(len(changed))] if rng.random() < 0.2 else changed)


def _commands(kind: str, folder: Path, output: Path) -> list[list[str]]:
    model, text = str(folder / "model.onnx"), str(folder / "text.txt")
    convert = ["convert", model, "-o", str(output)]
    return {
        "recipe.yaml": [[*convert, "--recipe", str(folder / "recipe.yaml"), "--certificate", "off"]],
        "plan.json": [
            [*convert, "--recipe", "rotate-only", "--plan", str(folder / "plan.json"), "--calibration", text]
        ],
        "tokenizer.json": [
            [*convert, "--recipe", "rotate-only", "--calibration", text],
            ["eval", model, "--text", text, "--window", "16"],
            ["generate", model, "--prompt", "123", "--max-new-tokens", "3"],
        ],
        "tokenizer_config.json": [["generate", model, "--prompt", "123", "--max-new-tokens", "3", "--chat"]],
    }[kind]


def attempt(worker: Worker, whole: Path, kind: str, way: Callable[[bytes], bytes]) -> list[int]:
    """Run every command that reads the file ``kind`` after ``way`` has changed it; returns the exit codes."""
    with tempfile.TemporaryDirectory() as name:
        folder, output = Path(name) / "folder", Path(name) / "out"
        shutil.copytree(whole, folder)
        (folder / kind).write_bytes(way((folder / kind).read_bytes()))
        before = content(folder)
        answer = worker.ask(_commands(kind, folder, output), output)
        for result in answer["results"]:
            assert result["code"] in range(5), result["err"]
            assert "Traceback" not in result["err"], result["err"]
            assert len(result["err"]) < 4000
        assert (answer["runs"] or "ok") == "ok"
        assert content(folder) == before
        expected = ["folder", "out"] if answer["runs"] else ["folder"]
        assert sorted(path.name for path in Path(name).iterdir()) == expected
        return [result["code"] for result in answer["results"]]


KINDS = ("recipe.yaml", "plan.json", "tokenizer.json", "tokenizer_config.json")


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_whole_is_taken(worker: Worker, whole: Path, kind: str) -> None:
    codes = attempt(worker, whole, kind, lambda raw: raw)
    assert set(codes) == {0}


@pytest.mark.parametrize("way", ["bytes", "values"])
@pytest.mark.parametrize("kind", KINDS)
def test_mutants(worker: Worker, whole: Path, kind: str, way: str) -> None:
    def changed(raw: bytes, seed: int) -> bytes:
        rng = random.Random(seed)
        if way == "bytes":
            return _flip(raw, rng)
        if kind.endswith(".yaml"):
            return yaml.safe_dump(_change(yaml.safe_load(raw), rng)).encode()
        return json.dumps(_change(json.loads(raw), rng)).encode("utf-8", "surrogatepass")

    @settings(max_examples=COUNT, deadline=None, derandomize=True, suppress_health_check=[*HealthCheck], database=None)
    @given(seed=st.integers(0, 2**32))
    def check(seed: int) -> None:
        attempt(worker, whole, kind, lambda raw: changed(raw, seed))

    check()
