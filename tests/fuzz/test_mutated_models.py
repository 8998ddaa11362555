"""Broken models never break graphrot: an exit code, words, and nothing left behind; never a crash or a hang."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fuzz.bases import BASES, write_base
from tests.fuzz.client import Worker
from tests.fuzz.mutate import KINDS, mutate

PER_CHUNK = 16
"""Models per base and kind of mutation: 3 x 11 x 16 are 528."""

OPTIONS = (
    ("--solver", "rtn", "--certificate", "off"),
    ("--solver", "clip", "--certificate", "off"),
    ("--solver", "rtn", "--certificate", "full", "--allow-partial"),
    ("--recipe", "rotate-only", "--certificate", "full"),
    ("--recipe", "rotate-only", "--certificate", "off", "--allow-partial"),
    ("--solver", "clip", "--target", "portable", "--certificate", "off"),
)


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    worker = Worker()
    yield worker
    worker.close()


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folders = {}
    for name in BASES:
        folders[name] = tmp_path_factory.mktemp(name)
        write_base(name, folders[name] / "model.onnx")
    return folders


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def attempt(worker: Worker, base: Path, kind: str | None, seed: int, options: tuple[str, ...]) -> int:
    """Convert and inspect one mutant; returns the exit code of convert."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        source, output = folder / "source", folder / "out"
        shutil.copytree(base, source)
        if kind is not None:
            mutate(source, kind, seed)
        before = content(folder)
        model = str(source / "model.onnx")
        answer = worker.ask([["convert", model, "-o", str(output), *options], ["inspect", model, "--json"]], output)
        converted, inspected = answer["results"]
        for result, codes in ((converted, range(5)), (inspected, (0, 3, 4))):
            assert result["code"] in codes, result["err"]
            assert "Traceback" not in result["err"]
            assert bool(result["out"]) == (result["code"] == 0)
        assert (answer["runs"] or "ok") == "ok"
        if converted["code"] == 0:
            assert answer["runs"] == "ok"
            shutil.rmtree(output)
        assert content(folder) == before
        assert [path.name for path in folder.iterdir()] == ["source"]
        code: int = converted["code"]
        return code


@pytest.mark.parametrize("options", OPTIONS, ids=" ".join)
@pytest.mark.parametrize("base", BASES)
def test_what_is_whole_converts(worker: Worker, bases: dict[str, Path], base: str, options: tuple[str, ...]) -> None:
    """Otherwise every mutant would be refused for a reason that has nothing to do with its mutation."""
    assert attempt(worker, bases[base], None, 0, options) == 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("base", BASES)
def test_mutants(worker: Worker, bases: dict[str, Path], base: str, kind: str) -> None:
    @settings(
        max_examples=PER_CHUNK, deadline=None, derandomize=True, suppress_health_check=[*HealthCheck], database=None
    )
    @given(seed=st.integers(0, 2**32), options=st.sampled_from(OPTIONS))
    def check(seed: int, options: tuple[str, ...]) -> None:
        attempt(worker, bases[base], kind, seed, options)

    check()
