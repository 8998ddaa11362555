"""kill -9, Ctrl-C and SIGTERM at random moments: what stands is whole, and what was stopped can be resumed."""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path
from typing import Any

import pytest

import graphrot
from graphrot.errors import UsageError
from tests.resume.runs import Run, content

pytestmark = pytest.mark.skipif(os.name == "nt", reason="signals of POSIX")

SIGKILL, SIGINT, SIGTERM = (getattr(signal, name, signal.SIGTERM) for name in ("SIGKILL", "SIGINT", "SIGTERM"))
KILLS = 10

Whole = dict[str, dict[str, bytes]]


@pytest.fixture(scope="module")
def options(text: Path) -> dict[str, Any]:
    """gptq, without the certificate: that only reads."""
    return {"calibration": str(text), "certificate": None}


@pytest.fixture(scope="module")
def whole(
    source: Path, options: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, bytes]]:
    """What uninterrupted runs write, in both forms, and before that by another recipe."""
    found = {}
    for form in ("out", "m.onnx"):
        folder = tmp_path_factory.mktemp("whole")
        graphrot.convert(source, output=folder / form, recipe="rotate-only", certificate=None)
        found[f"old {form}"] = content(folder)
        graphrot.convert(source, output=folder / form, force=True, **options)
        found[form] = content(folder)
    return found


@pytest.fixture(scope="module")
def steps(source: Path, options: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> int:
    """How many steps a run reports."""
    run = Run(str(source), output=str(tmp_path_factory.mktemp("steps") / "out"), **options)
    found = run.steps()
    assert run.code() == 0 and len(found) > 30
    return len(found)


def _models(files: dict[str, bytes]) -> dict[str, bytes]:
    return {name: data for name, data in files.items() if name.endswith((".onnx", ".onnx.data")) and name[0] != "."}


@pytest.mark.parametrize("number", range(KILLS))
def test_killed_at_a_random_moment(
    source: Path, options: dict[str, Any], whole: Whole, steps: int, tmp_path: Path, number: int
) -> None:
    chance = random.Random(number)
    form = ("out", "m.onnx")[number % 2]
    output = tmp_path / form
    old: dict[str, bytes] = {}
    if number % 4 > 1:  # over an earlier output
        graphrot.convert(source, output=output, recipe="rotate-only", certificate=None)
        old = content(tmp_path)
        options = {**options, "force": True}
    for _ in range(chance.choice((1, 2))):  # killed once, or once more while it resumes
        moment = chance.randrange(steps) if chance.random() < 0.8 else steps - 1
        run = Run(str(source), output=str(output), resume=True, **options)
        if run.until(lambda n, _, moment=moment: n == moment) is None:
            continue  # resuming takes fewer steps
        assert run.end(SIGKILL, chance.choice((0.0, chance.random() * 0.1))) in (-SIGKILL, 0)
        models = _models(content(tmp_path))
        if any(name.endswith(".onnx") for name in models):
            assert models in (_models(old), _models(whole[form]))
    run = Run(str(source), output=str(output), resume=True, **options)
    run.steps()
    if run.code() != 0:  # killed when everything was done
        with pytest.raises(UsageError, match="already exists"):
            graphrot.convert(source, output=output, resume=True, **options)
    assert content(tmp_path) == whole[form]


@pytest.mark.parametrize("number", [SIGINT, SIGTERM])
@pytest.mark.parametrize(
    ("where", "resume"),
    [
        ("reading", False),
        ("rotating the weights", True),
        ("quantize weights", False),
        ("quantize weights", True),
        ("writing the model", False),
        ("writing the model", True),
    ],
)
def test_stopped(
    source: Path, options: dict[str, Any], tmp_path: Path, where: str, number: signal.Signals, resume: bool
) -> None:
    """Nothing is left; with ``resume``, the solved groups are, and nothing else."""
    run = Run(str(source), output=str(tmp_path / "out"), resume=resume, **options)
    assert run.until(lambda n, step: n == 0 if where == "reading" else step == where) is not None
    assert run.end(number) != 0
    left = {path.relative_to(tmp_path).parts[1] for path in tmp_path.rglob("*/*") if path.is_file()}
    solved = where in ("quantize weights", "writing the model")
    assert left == ({"lock", "groups"} if resume and solved else set())
    assert [path.name for path in tmp_path.iterdir()] == ([".out.graphrot-work"] if left else [])
