"""What the tests read out of a page, by a way of their own."""

from __future__ import annotations

import base64
import json
import re
import struct
import zlib
from dataclasses import dataclass, field
from html.parser import HTMLParser
from statistics import median
from typing import Any

import numpy as np

_VOID = {"meta", "img", "source", "br", "link", "input"}
_QUIET = {"code", "style", "script", "title", "svg"}


@dataclass
class Element:
    """A tag with its attributes, and the text in it."""

    tag: str
    attributes: dict[str, str]
    text: str = ""


@dataclass
class Page(HTMLParser):
    """The elements of a page in order, and the text that stands in no ``data``, ``code`` or picture."""

    elements: list[Element] = field(default_factory=list)
    prose: str = ""
    _open: list[Element] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        element = Element(tag, {name: value or "" for name, value in attrs})
        self.elements.append(element)
        if tag not in _VOID:
            self._open.append(element)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append(Element(tag, {name: value or "" for name, value in attrs}))

    def handle_endtag(self, tag: str) -> None:
        closed = self._open.pop()
        assert closed.tag == tag, f"{closed.tag} is closed by {tag}"

    def handle_data(self, data: str) -> None:
        for element in self._open:
            element.text += data
        tags = {element.tag for element in self._open}
        marked = any("data-from" in element.attributes or "stops" in element.attributes.get("class", "").split()
                     for element in self._open)  # fmt: skip
        if not marked and not tags & _QUIET:
            self.prose += data

    def all(self, *tags: str) -> list[Element]:
        return [element for element in self.elements if element.tag in tags]

    def record(self) -> dict[str, Any]:
        (found,) = [element for element in self.all("script") if element.attributes.get("id") == "record"]
        return json.loads(found.text)


def parse(text: str) -> Page:
    page = Page()
    page.feed(text)
    page.close()
    assert not page._open, [element.tag for element in page._open]
    return page


def look_up(record: Any, path: str) -> Any:
    """One path, by splitting: ``a.b[3]["c d"][k=v][*].e``."""
    found, many = record, False
    for step in re.findall(r'\["[^"]*"\]|\[[^\]]*\]|[^.\[]+', path):
        if step == "[*]":
            found, many = list(found.values()) if isinstance(found, dict) else found, True
        elif step.startswith('["'):
            found = found[step[2:-2]]
        elif re.fullmatch(r"\[\d+\]", step):
            place = int(step[1:-1])
            found = [entry[place] for entry in found] if many else found[place]
        elif step.startswith("["):
            name, wanted = step[1:-1].split("=", 1)
            found = [entry for entry in found if str(entry[name]) == wanted]
        else:
            found = [entry[step] for entry in found if entry[step] is not None] if many else found[step]
    return found


def expected(record: Any, path: str, how: str) -> Any:
    """The number that a figure must show."""
    if how == "ratio":
        upper, lower = path.split(" / ")
        return look_up(record, upper) / look_up(record, lower)
    found = look_up(record, path)
    if how in ("", None):
        return found
    smaller = [e for e in found if isinstance(e, dict) and e.get("error_without_rotation") is not None]
    return {
        "count": lambda: len(found),
        "sum": lambda: sum(found),
        "median": lambda: median(found),
        "largest": lambda: max(found),
        "smallest": lambda: min(found),
        "lengths": lambda: sum(len(entry) for entry in found),
        "compared": lambda: len(smaller),
        "smaller": lambda: len([e for e in smaller if e["error"] < e["error_without_rotation"]]),
        "relieved": lambda: len([e for e in found if e["after"] < e["before"]]),
    }[how]()


_UNITS = {"": 1, "B": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9, "%": 0.01, "s": 1, "\u00d7": 1}


def shows(text: str, value: Any) -> bool:
    """Whether the shown words are this value, rounded to the digits that are shown."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return text == str(value)
    match = re.fullmatch(r"([+-]?[\d,]+(?:\.(\d+))?(?:e([+-]\d+))?) ?(B|kB|MB|GB|%|s|\u00d7|)", text.strip())
    if match is None:
        return False
    unit = _UNITS[match[4]]
    step = 10.0 ** (int(match[3] or 0) - len(match[2] or "")) * unit
    return abs(float(match[1].replace(",", "")) * unit - value) <= 0.5000001 * step


def pixels(uri: str) -> tuple[np.ndarray, np.ndarray]:
    """Levels ``[H, W]`` and palette ``[256, 3]`` of a PNG in a page."""
    data = base64.b64decode(uri.removeprefix("data:image/png;base64,"))
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    chunks: dict[bytes, bytes] = {}
    place = 8
    while place < len(data):
        (length,) = struct.unpack(">I", data[place : place + 4])
        name, content = data[place + 4 : place + 8], data[place + 8 : place + 8 + length]
        assert struct.unpack(">I", data[place + 8 + length : place + 12 + length])[0] == zlib.crc32(name + content)
        chunks[name] = content
        place += 12 + length
    width, height, depth, colour = struct.unpack(">IIBB", chunks[b"IHDR"][:10])
    assert (depth, colour) == (8, 3)
    rows = np.frombuffer(zlib.decompress(chunks[b"IDAT"]), np.uint8).reshape(height, width + 1)
    assert not rows[:, 0].any()
    return rows[:, 1:], np.frombuffer(chunks[b"PLTE"], np.uint8).reshape(-1, 3)
