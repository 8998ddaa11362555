"""The page: every figure is where it says it is from, nothing is loaded, nothing is canned."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import graphrot
from graphrot.evaluate.outliers import Seen
from graphrot.report.manifest import Manifest
from graphrot.report.measured import Measured, gather
from graphrot.report.page import build_page
from graphrot.report.trace import Trace, resolve
from tests.report.pages import Page, expected, parse, pixels, shows

CALIBRATION = {"kind": "text", "name": "valid.txt", "tokens": 4096, "sha256": "0" * 64, "fingerprint": "QUJD" * 9}
EXTRA: dict[str, Any] = {
    "calibration": CALIBRATION,
    "learning": {
        "file": "rotations.safetensors", "sha256": "1" * 64, "loss": "local", "steps": 20, "seed": 3,
        "curve": [(step, 2.0 - 0.031 * step) for step in range(21)], "heldout": [(0, 2.1), (10, 1.8), (20, 1.6543)],
        "distance": {"R1.0": 1.2345, "R2.0": 0.5}, "orthogonality": 3.25e-15, "calibration": CALIBRATION,
    },
    "choices": [
        {"kind": "weight", "name": "up <b>", "chosen": "int8", "candidates": {"int4": 0.25, "int8 group 32": 0.0125},
         "measure": "KL", "gain": 0.95, "why": "4.25 bits per weight, within the budget"},
        {"kind": "rotation", "name": "R1", "chosen": "not rotated", "candidates": {"not rotated": 0.5, "rotated": 0.75},
         "measure": "nats a token", "gain": 0.0, "why": "it takes away -50.0% (standard error 1.0%): not worth it"},
    ],
    "evaluations": [
        {"text": "a.txt", "sha256": "2" * 64, "window": 64, "windows": 2, "tokens": 126, "perplexity": 21.70449,
         "reference": "source", "reference_perplexity": 18.4261, "kl": 0.12345, "top1": 0.8125},
        {"tasks": {"last_word": {"acc,none": 0.415, "perplexity,none": 7.125}}},
    ],
}  # fmt: skip


@pytest.fixture(scope="module")
def plain(converted: Path, tmp_path_factory: pytest.TempPathFactory) -> Page:
    """The page of a conversion as it is."""
    made = graphrot.report(converted, output=tmp_path_factory.mktemp("page") / "page.html")
    assert not made.notes
    return parse(made.path.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def full(converted: Path) -> tuple[Page, str]:
    """The page of a manifest with all parts that there are."""
    manifest = json.loads((converted / "graphrot.json").read_text(encoding="utf-8"))
    refused = {"kind": "O", "node": "/a/<node>", "op": "Reshape", "reason": "heads & groups"}
    manifest["plan"]["refused"] = [refused]
    record = json.loads(Manifest.model_validate({**manifest, **EXTRA}).to_json())
    text = build_page(record, _noise(), folder="OUT", without="")
    return parse(text), text


def _noise(seed: int = 0) -> Measured:
    rng = np.random.default_rng(seed)
    arrays = rng.standard_normal((6, 50, 24)).astype(np.float32)
    seen = (Seen("R1.0", "R1", f"x{number}", array, array[:, ::-1]) for number, array in enumerate(arrays))
    return gather(seen, Measured("a.txt", 50, "model", rotated=True))


@pytest.mark.parametrize("which", ["plain", "full"])
def test_every_figure_is_what_stands_at_its_path(which: str, request: pytest.FixtureRequest) -> None:
    page = request.getfixturevalue("plain") if which == "plain" else request.getfixturevalue("full")[0]
    record = page.record()
    figures = page.all("data")
    assert len(figures) > 100
    for figure in figures:
        path, how = figure.attributes["data-from"], figure.attributes.get("data-how", "")
        value = expected(record, path, how)
        assert figure.attributes["value"] == (repr(value) if isinstance(value, float) else str(value)), path
        assert shows(figure.text, value), (path, figure.text, value)


@pytest.mark.parametrize("which", ["plain", "full"])
def test_marks_of_charts_have_paths_too(which: str, request: pytest.FixtureRequest) -> None:
    page = request.getfixturevalue("plain") if which == "plain" else request.getfixturevalue("full")[0]
    record = page.record()
    marks = [element for element in page.all("circle", "rect", "text") if "data-from" in element.attributes]
    assert len(marks) > 40
    for mark in marks:
        assert expected(record, mark.attributes["data-from"], "") is not None or mark.text == "float"


def test_no_number_stands_alone(plain: Page, full: tuple[Page, str]) -> None:
    """Prose has no digits but those in names: R1 to R4, int4, w4a8, versions of types."""
    for page in (plain, full[0]):
        left = re.sub(r"[A-Za-z_][\w.+-]*", " ", page.prose.replace("\u00a0", " "))
        allowed = {"32"}
        assert not set(re.findall(r"\d[\d.,]*", left)) - allowed, left.split()


def test_the_record_is_the_manifest(converted: Path, plain: Page) -> None:
    manifest = json.loads((converted / "graphrot.json").read_text(encoding="utf-8"))
    record = plain.record()
    measured = record.pop("measured")
    assert record == manifest
    assert measured["sites"]
    assert measured["tokens"] == 256


def test_nothing_is_loaded_and_nothing_breaks_out(full: tuple[Page, str]) -> None:
    page, text = full
    assert not page.all("link", "iframe", "object", "embed")
    assert len(page.all("script")) == 1
    for element in page.elements:
        for name in ("src", "srcset", "href"):
            address = element.attributes.get(name)
            assert address is None or address.startswith(("#", "data:image/png;base64,")), address
    style = "".join(element.text for element in page.all("style"))
    assert "url(" not in style and "@import" not in style
    assert set(re.findall(r"https?://[^\"' ]+", text)) == {"http://www.w3.org/2000/svg"}
    assert "up <b>" in page.record()["choices"][0]["name"]
    assert not page.all("b", "node")
    assert "QUJD" not in text, "fingerprints are for machines"


def test_it_is_told_to_people_who_do_not_see_it(full: tuple[Page, str]) -> None:
    page, _ = full
    assert page.all("html")[0].attributes["lang"] == "en"
    assert len(page.all("h1")) == 1
    pictures = page.all("img")
    assert pictures and all(len(picture.attributes["alt"]) > 40 for picture in pictures)
    drawings = page.all("svg")
    assert len(drawings) >= 7
    assert all(d.attributes["role"] == "img" and len(d.attributes["aria-label"]) > 20 for d in drawings)
    targets = {element.attributes["id"] for element in page.elements if "id" in element.attributes}
    links = [element.attributes["href"].removeprefix("#") for element in page.all("a")]
    assert set(links) == targets - {"record"} and len(links) == 8


@pytest.mark.parametrize("theme", [0, 1])
def test_words_stand_out_from_their_ground(full: tuple[Page, str], theme: int) -> None:
    """Contrast of at least 4.5, in light and in dark (WCAG 2, level AA)."""
    style = full[0].all("style")[0].text
    colours = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", style.split(":root {")[1 + theme].split("}")[0]))
    for words in ("ink", "soft", "after", "before", "ok", "tick"):
        for ground in ("paper", "card"):
            assert _contrast(colours[words], colours[ground]) >= 4.5, (words, ground)
    assert _contrast(colours["ink"], colours["after-wash"]) >= 4.5
    assert _contrast(colours["tick"], colours["after-wash"]) >= 4.5


def _contrast(one: str, other: str) -> float:
    bright, dark = sorted((_luminance(one), _luminance(other)), reverse=True)
    return (bright + 0.05) / (dark + 0.05)


def _luminance(colour: str) -> float:
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_heat_maps_show_the_channels_that_stand_out() -> None:
    rng = np.random.default_rng(1)
    arrays = rng.standard_normal((5, 40, 16)).astype(np.float32)
    arrays[:, 7, 11] = 300.0
    flat = rng.standard_normal((5, 40, 16)).astype(np.float32)
    seen = (Seen("R4.0", "R4", "x", a, b) for a, b in zip(arrays, flat, strict=True))
    measured = gather(seen, Measured("", 40, "model", rotated=True))
    page = parse(build_page(_bare(), measured, folder="", without=""))
    light = [pixels(element.attributes["src"]) for element in page.all("img")]
    dark = [pixels(element.attributes["srcset"]) for element in page.all("source")]
    (before, _), (after, _) = light
    assert before.shape == (5, 16)
    assert (before[:, 11] > 240).all() and (np.delete(before, 11, axis=1) < 100).all()
    assert (after < 100).all()
    for (levels, palette), (same, other) in zip(light, dark, strict=True):
        assert np.array_equal(levels, same)
        assert palette.sum(axis=1)[0] > 600 > 200 > other.sum(axis=1)[0], "light ground, dark ground"
    assert "Channel 11" in page.all("img")[0].attributes["alt"]


def test_pictures_follow_the_numbers(full: tuple[Page, str]) -> None:
    other = parse(build_page(_bare(), _noise(seed=5), folder="", without=""))
    one = [element.attributes["src"] for element in full[0].all("img")]
    assert one and not set(one) & {element.attributes["src"] for element in other.all("img")}
    ridges = [[e.attributes["d"] for e in page.all("path")] for page in (full[0], other)]
    assert len(ridges[0]) == len(ridges[1]) == 2 * 40
    assert ridges[0] != ridges[1]


def test_wide_tensors_show_the_largest_of_neighbours() -> None:
    array = np.ones((4, 3000), np.float32)
    array[2, 1230] = 50
    measured = gather([Seen("R4.0", "R4", "x", array, array)], Measured("", 4, "model", rotated=True))
    (profile, _) = measured.sites[0].profiles
    assert profile.shape == (576,) and profile.max() == 50 and profile.argmax() == 236


def _bare() -> dict[str, Any]:
    """What an early version wrote, and what every later one has to read."""
    return {
        "graphrot_version": "0.0.1",
        "source": {"kind": "onnx", "name": "m.onnx", "sha256": "ab"},
        "recipe": {"name": "early", "weights": None, "rotations": "hadamard"},
        "plan": {"rotations": [], "refused": []},
        "certificate": None,
        "sizes": {"source_bytes": 100, "model_bytes": 50, "bits_per_weight": 32.0},
        "quantized": [],
    }


def test_what_is_missing_is_said() -> None:
    page = parse(build_page(_bare(), None, folder="OUT", without="Nothing ran."))
    said = [element.text for element in page.all("p") if element.attributes.get("class") == "missing"]
    words = " ".join(said)
    for part in ("has not been evaluated", "without a certificate", "Nothing is rotated", "Nothing ran.", "float"):
        assert part in words
    assert len(said) == 5
    assert "graphrot eval OUT --text FILE --record" in words


def test_learning_without_losses() -> None:
    learned = {**EXTRA["learning"], "curve": [], "heldout": []}
    page = parse(build_page({**_bare(), "learning": learned}, None, folder="OUT", without=""))
    assert any("has no losses" in element.text for element in page.all("p"))
    assert "held-out" not in page.prose


def test_paths() -> None:
    record = {"a": [{"k": "R1", "v": 2}, {"k": "R2", "v": None}], "b": {"x.y": 3}}
    assert resolve(record, "a[*].v") == [2]
    assert resolve(record, 'b["x.y"]') == 3
    assert resolve(record, "a[7].v") is None and resolve(record, "no.where") is None
    assert "none" in Trace(record).figure("no.where")
    with pytest.raises(ValueError, match="is no path"):
        resolve(record, "a[")
