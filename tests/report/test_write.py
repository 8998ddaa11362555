"""``graphrot report``: from an output to its page, and what is refused."""

from __future__ import annotations

import json
import shutil
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import graphrot
from graphrot.cli.main import run
from graphrot.errors import EnvironmentProblem, InputRefused, UsageError
from tests.exported import tiny_onnx, write_tokenizer
from tests.report.pages import parse


@pytest.fixture
def copy(converted: Path, tmp_path: Path) -> Path:
    """A copy to break."""
    return Path(shutil.copytree(converted, tmp_path / "copy"))


def _missing(path: Path) -> str:
    page = parse(path.read_text(encoding="utf-8"))
    return " ".join(element.text for element in page.all("p") if element.attributes.get("class") == "missing")


def test_the_command(converted: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "page.html"
    assert run(["report", str(converted), "-o", str(target), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == {"report": str(target), "bytes": target.stat().st_size}
    assert run(["report", str(converted), "-o", str(target)]) == 0
    assert capsys.readouterr().out.startswith(f"written {target} (")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["page.html"]


def test_text_and_source_are_used(converted: Path, tmp_path: Path) -> None:
    """A text changes what is measured; so does the source, whose norms keep their gains."""
    write_tokenizer(tmp_path / "words")
    for name, words in (("a", "It was the best of times. "), ("b", "{0.5, 0.25}; ")):
        (tmp_path / f"{name}.txt").write_text(words * 20, encoding="utf-8")
    options = {"tokenizer": tmp_path / "words", "output": tmp_path / "x.html"}

    def sites(**more: Any) -> list[dict[str, Any]]:
        record = parse(graphrot.report(converted, **options, **more).path.read_text(encoding="utf-8")).record()
        assert record["measured"]["basis"] == ("source" if "source" in more else "model")
        return list(record["measured"]["sites"])

    one = sites(text=tmp_path / "a.txt")
    assert one == sites(text=tmp_path / "a.txt")
    assert one != sites(text=tmp_path / "b.txt")
    exact = sites(text=tmp_path / "a.txt", source=str(tiny_onnx("llama")))
    assert [site["kind"] for site in exact] == [site["kind"] for site in one]
    first = [next(site for site in sites if site["kind"] == "R1")["before"] for sites in (one, exact)]
    assert abs(first[0] - first[1]) > 0.01 * first[1]


def test_a_single_file_has_its_page_beside_it(tmp_path: Path) -> None:
    graphrot.convert(tiny_onnx("llama"), output=tmp_path / "m.onnx", recipe="rotate-only", certificate=None)
    made = graphrot.report(tmp_path / "m.onnx")
    assert made.path == tmp_path / "m.report.html"
    page = parse(made.path.read_text(encoding="utf-8"))
    record = page.record()
    assert record["outliers"] == []
    assert {site["kind"] for site in record["measured"]["sites"]} == {"R1", "R2", "R3", "R4"}
    words = _missing(made.path)
    for part in ("without a certificate", "Nothing is quantized", "has not measured them"):
        assert part in words


def test_a_model_that_was_not_rotated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    graphrot.convert(tiny_onnx("llama"), output=tmp_path / "out", recipe="w4a8", solver="rtn", rotations=None)
    monkeypatch.chdir(tmp_path / "out")
    page = parse(graphrot.report(".").path.read_text(encoding="utf-8"))
    assert "Nothing is rotated" in _missing(tmp_path / "out.report.html")
    assert page.record()["outliers"] == []
    kinds = {site["kind"] for site in page.record()["measured"]["sites"]}
    assert kinds and all(kind.endswith(" channels") for kind in kinds)
    assert all(" after" not in element.text for element in page.all("h4"))


def test_an_early_output(copy: Path) -> None:
    """No plan beside it, and none of the parts that came later: the page is there, and says so."""
    manifest = json.loads((copy / "graphrot.json").read_text(encoding="utf-8"))
    for name in ("half", "calibration", "learning", "choices", "outliers", "evaluations", "tokenizer_files"):
        del manifest[name]
    for entry in manifest["quantized"]:
        del entry["error_without_rotation"]
    (copy / "graphrot.json").write_text(json.dumps(manifest), encoding="utf-8")
    (copy / "plan.json").unlink()
    made = graphrot.report(copy)
    assert made.path == copy.with_name("copy.report.html")
    assert "Activations could not be measured: The plan file cannot be read" in made.notes[0]
    assert made.notes[0] in _missing(made.path)


def test_a_model_that_does_not_run(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (copy / "model.onnx").unlink()
    assert run(["report", str(copy)]) == 0
    assert "note: Activations could not be measured: There is no such model" in capsys.readouterr().err
    with pytest.raises(InputRefused, match="There is no such model"):
        graphrot.report(copy, source=str(tiny_onnx("llama")))


def test_refused_before_anything_is_written(converted: Path, copy: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    bare = Path(shutil.copytree(copy, tmp_path / "bare"))
    (bare / "tokenizer.json").unlink()
    cases: list[tuple[type[Exception], str, list[Any], dict[str, Any]]] = [
        (InputRefused, "There is no conversion here", [tmp_path / "empty"], {}),
        (InputRefused, "There is no conversion here", [tmp_path / "nowhere.onnx"], {}),
        (UsageError, "cannot be the report", [copy], {"output": copy / "model.onnx"}),
        (UsageError, "cannot be the report", [copy], {"output": tmp_path / "no" / "x.html"}),
        (UsageError, "made for another source", [copy], {"source": str(tiny_onnx("gpt2"))}),
        (InputRefused, "There is no tokenizer", [bare], {"text": Path(__file__)}),
    ]
    before = {file.name: file.read_bytes() for file in copy.iterdir()}
    for kind, words, arguments, options in cases:
        with pytest.raises(kind, match=words):
            graphrot.report(*arguments, **options)
    assert {file.name: file.read_bytes() for file in copy.iterdir()} == before
    assert run(["report", str(tmp_path / "empty")]) == 3
    assert run(["report", str(converted), "-o", str(tmp_path / "x.pdf")]) == 2


def test_a_full_disk(converted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, content: bytes) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(import_module("graphrot.report.write"), "write_atomic", full)
    with pytest.raises(EnvironmentProblem, match="cannot be written"):
        graphrot.report(converted, output=tmp_path / "x.html")
