"""``eval`` on written models: what it prints, refuses and keeps."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

import graphrot
from graphrot import quantize
from graphrot.calibration.fingerprint import WINDOW
from graphrot.cli.main import run
from graphrot.model.files import sha256_of
from graphrot.report import record
from graphrot.report.manifest import Manifest
from tests.exported import with_tokenizer

SEEN = "".join(f"Sentence number {n} says that {n * n} is a square. " for n in range(40))
UNSEEN = "".join(f"What {n} may be in words is for others to tell, or {n + 5}. " for n in range(40))
SIZE = ["--window", "64", "--windows", "4"]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, what was calibrated on ``seen.txt`` as a folder and as a file, and texts."""
    folder = tmp_path_factory.mktemp("measure")
    with_tokenizer("llama", folder)
    (folder / "seen.txt").write_text(SEEN, encoding="utf-8")
    (folder / "unseen.txt").write_text(UNSEEN, encoding="utf-8")
    (folder / "mixed.txt").write_text(UNSEEN[:80] + SEEN[300:500] + UNSEEN[80:], encoding="utf-8")
    (folder / "later.txt").write_text(UNSEEN + SEEN, encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quantize, "CALIBRATION_TOKENS", 1024)
        options = {"recipe": "w4a8", "certificate": None, "calibration": folder / "seen.txt"}
        graphrot.convert(folder / "model.onnx", output=folder / "out", **options)
    (folder / "form").mkdir()
    for name, other in (("model.onnx", "file.onnx"), ("model.onnx.data",) * 2, ("graphrot.json", "file.graphrot.json")):
        shutil.copyfile(folder / "out" / name, folder / "form" / other)
    return folder


@pytest.fixture
def out(place: Path, tmp_path: Path) -> Path:
    """A private copy of the folder that was written."""
    shutil.copytree(place / "out", tmp_path / "out")
    return tmp_path / "out"


def manifest(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "graphrot.json").read_text(encoding="utf-8"))
    return found


@pytest.mark.parametrize("model", ["out", "out/model.onnx", "form/file.onnx"])
@pytest.mark.parametrize("text", ["seen.txt", "mixed.txt"])
def test_a_text_that_the_model_has_seen(model: str, text: str, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = ["eval", str(place / model), "--text", str(place / text), "--tokenizer", str(place), *SIZE]
    assert run(line) == 3
    out, err = capsys.readouterr()
    assert out == "" and "The model has seen this text" in err
    assert "calibrated on seen.txt" in err and "--allow-overlap" in err
    found = re.search(r"one at its token (\d+)", err)
    start = 0 if text == "seen.txt" else 80
    assert found and start <= int(found[1]) < start + WINDOW
    assert run([*line, "--allow-overlap", "--json"]) == 0
    out, err = capsys.readouterr()
    assert set(json.loads(out)) == {"perplexity", "tokens", "window", "windows"}
    assert "note: the model was calibrated on seen.txt" in err and "look better than they are" in err


def test_what_is_not_evaluated_does_not_count(place: Path) -> None:
    found = graphrot.evaluate(place / "out", text=place / "later.txt", window=64, windows=4)
    assert found.perplexity is not None and not found.notes
    with pytest.raises(graphrot.errors.InputRefused, match="has seen this text"):
        graphrot.evaluate(place / "out", text=place / "later.txt", window=64, windows=40)


def test_learned_on_the_text(place: Path, out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content = manifest(out)
    content["learning"] = {"calibration": content.pop("calibration")}
    (out / "graphrot.json").write_text(json.dumps(content), encoding="utf-8")
    assert run(["eval", str(out), "--text", str(place / "seen.txt"), *SIZE]) == 3
    assert "the model was learned on seen.txt" in capsys.readouterr().err


def test_manifests_without_or_with_a_broken_fingerprint(
    place: Path, out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = ["eval", str(out), "--text", str(place / "seen.txt"), *SIZE]
    content = manifest(out)
    content["calibration"]["fingerprint"] = "x"
    (out / "graphrot.json").write_text(json.dumps(content), encoding="utf-8")
    assert run(line) == 3 and "a fingerprint that is none" in capsys.readouterr().err
    del content["calibration"]
    (out / "graphrot.json").write_text(json.dumps(content), encoding="utf-8")
    assert run(line) == 0


def test_beside_a_reference(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = ["eval", str(place / "out"), "--text", str(place / "unseen.txt"), *SIZE]
    source = ["--reference", str(place / "model.onnx")]
    assert run([*line, *source, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found) == {"perplexity", "tokens", "window", "windows", "reference_perplexity", "kl", "top1"}
    assert found["tokens"] == 252 and 0 < found["kl"] < 1 and 0 < found["top1"] < 1
    alone = graphrot.evaluate(place / "model.onnx", text=place / "unseen.txt", window=64, windows=4)
    assert found["reference_perplexity"] == alone.perplexity
    assert run([*line, *source]) == 0
    out = capsys.readouterr().out
    assert f"perplexity {found['perplexity']:.3f}" in out and f"KL {found['kl']:.4f} nats a token" in out
    itself = graphrot.evaluate(place / "out", text=place / "unseen.txt", window=64, windows=4, reference=place / "out")
    assert itself.kl is not None and abs(itself.kl) < 1e-9 and itself.top1 == 1.0


def test_what_is_kept(place: Path, out: Path) -> None:
    before = manifest(out)
    options: dict[str, Any] = {"text": place / "unseen.txt", "window": 64, "record": True}
    first = graphrot.evaluate(out, windows=4, reference=place / "model.onnx", **options)
    second = graphrot.evaluate(out, windows=3, **options)
    third = graphrot.evaluate(out, windows=4, text=place / "seen.txt", window=64, record=True, allow_overlap=True)
    kept = Manifest.read(out / "graphrot.json").evaluations
    assert [entry.perplexity for entry in kept] == [first.perplexity, second.perplexity, third.perplexity]
    assert (kept[0].kl, kept[0].top1, kept[0].reference) == (first.kl, first.top1, "model.onnx")
    assert kept[0].text == "unseen.txt" and kept[0].sha256 == sha256_of([place / "unseen.txt"])
    assert [entry.overlaps for entry in kept] == [False, False, True]
    graphrot.evaluate(out, windows=4, reference=place / "model.onnx", **options)
    again = Manifest.read(out / "graphrot.json").evaluations
    assert again == [kept[1], kept[2], kept[0]], "the same measurement replaces the earlier one"
    assert {**manifest(out), "evaluations": []} == before, "nothing else changes"
    assert not [file.name for file in out.iterdir() if file.name.endswith(".part")]


def test_nowhere_to_keep_it(place: Path, out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = ["--text", str(place / "unseen.txt"), "--record", *SIZE]
    assert run(["eval", str(place / "model.onnx"), *line]) == 3
    assert "There is no graphrot.json to record in" in capsys.readouterr().err
    content = manifest(out)
    content["evaluations"] = [{"perplexity": "good"}]
    text = json.dumps(content)
    (out / "graphrot.json").write_text(text, encoding="utf-8")
    assert run(["eval", str(out), *line]) == 3
    assert "evaluations in graphrot.json do not parse" in capsys.readouterr().err
    assert (out / "graphrot.json").read_text(encoding="utf-8") == text


def test_a_full_disk(place: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = (out / "graphrot.json").read_bytes()

    def full(path: Path, content: bytes) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(record, "write_atomic", full)
    with pytest.raises(graphrot.errors.EnvironmentProblem, match="could not be recorded") as caught:
        graphrot.evaluate(out, text=place / "unseen.txt", window=64, windows=1, record=True)
    assert "No space left" in str(caught.value) and (out / "graphrot.json").read_bytes() == before


@pytest.mark.parametrize(
    ("line", "code", "words"),
    [
        ([], 2, "There is nothing to measure"),
        (["--reference", "x"], 2, "There is nothing to measure"),
        (["--tasks", "t.yaml", "--reference", "x"], 2, "A reference is compared on a text"),
        (["--text", "unseen.txt", "--limit", "3"], 2, "The limit counts items of tasks"),
        (["--text", "unseen.txt", "--tasks", ""], 2, "A task has no name"),
        (["--tasks", "nowhere.yaml"], 3, "There is no such task file"),
        (["--text", "unseen.txt", "--reference", "nowhere.onnx", *SIZE], 3, "nowhere.onnx"),
    ],
)
def test_lines_that_mean_nothing(
    line: list[str], code: int, words: str, place: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(place)
    assert run(["eval", "model.onnx", *line]) == code
    assert words in capsys.readouterr().err
