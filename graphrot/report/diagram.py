"""One layer of a decoder, with the places of its rotations as this model has them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from graphrot.report.svg import Drawing

_STREAM = 44
"""Height of the residual stream."""


class LayerDiagram:
    """Draws the layer.

    Args:
        record: the content of ``graphrot.json``.
    """

    def __init__(self, record: Mapping[str, Any]) -> None:
        plan = record.get("plan") or {}
        self._rotations: Sequence[Mapping[str, Any]] = plan.get("rotations") or ()
        self._refused = {refusal["kind"] for refusal in plan.get("refused") or ()}
        self._recipe = record.get("recipe") or {}
        self._cache = record.get("cache") or {}
        taken = [kind for kind in ("R1", "R2", "R3", "R4", "O") if self._state(kind) in ("merged", "online")]
        words = f"A decoder layer with its rotations: {', '.join(taken) or 'none'} taken"
        self._draw = Drawing(1000, 372, words)

    def markup(self) -> str:
        """The finished ``svg`` element."""
        self._stream()
        self._attention()
        self._feed_forward()
        return self._draw.markup()

    def _state(self, kind: str) -> str:
        """``merged``, ``online``, ``refused`` or ``off``."""
        placements = {rotation["placement"] for rotation in self._rotations if rotation["kind"] == kind}
        if placements:
            return "online" if "online" in placements else "merged"
        return "refused" if kind in self._refused else "off"

    def _stream(self) -> None:
        style = f"stream {self._state('R1')}"
        self._draw.line(112, _STREAM, 888, _STREAM, style)
        self._box(12, _STREAM - 22, 100, "embedding", "recipe.embedding", touched=("R1",))
        self._box(888, _STREAM - 22, 100, "head", "recipe.head", touched=("R1",))
        self._tag(322, _STREAM, "R1")
        self._draw.text(352, _STREAM - 14, "residual stream", style="tick")

    def _attention(self) -> None:
        self._arrow((160, _STREAM), (160, 214), (176, 214))
        self._box(176, 194, 52, "norm", height=40)
        for y, name in ((134, "queries"), (194, "keys"), (254, "values")):
            self._arrow((228, 214), (240, 214), (240, y + 20), (254, y + 20))
            kinds = ("R1", "R2") if name == "values" else ("R1",)
            self._box(254, y, 78, name, "recipe.weights", height=40, touched=kinds)
        for y in (154, 214):
            self._arrow((332, y), (346, y))
            self._box(346, y - 15, 54, "rotary", height=30)
            self._arrow((400, y), (452, y))
            self._tag(425, y, "R3")
        self._arrow((332, 274), (452, 274))
        self._tag(392, 274, "R2")
        self._draw.add('<rect x="452" y="134" width="76" height="160" rx="8" class="box"/>')
        self._draw.text(490, 218, "attention", anchor="middle", style="name")
        if self._cache.get("layout") not in (None, "none"):
            self._draw.add('<rect x="452" y="318" width="76" height="38" rx="8" class="box cache"/>')
            self._draw.text(490, 334, "cache", anchor="middle", style="name")
            self._bits(490, 348, "cache.bits", f"{self._cache['bits']} bits")
            self._draw.line(490, 294, 490, 318, "wire")
        self._arrow((528, 214), (556, 214))
        if self._state("O") in ("merged", "online"):
            self._tag(542, 190, "O")
        self._box(556, 194, 66, "output", "recipe.weights", height=40, touched=("R1", "R2", "O"))
        self._arrow((622, 214), (636, 214), (636, _STREAM + 10))
        self._plus(636)

    def _feed_forward(self) -> None:
        self._arrow((664, _STREAM), (664, 214), (676, 214))
        self._box(676, 194, 48, "norm", height=40)
        for y, name in ((154, "gate"), (234, "up")):
            self._arrow((724, 214), (734, 214), (734, y + 20), (744, y + 20))
            self._box(744, y, 54, name, "recipe.weights", height=40, touched=("R1",))
            self._arrow((798, y + 20), (812, y + 20), (812, 214 + (-11 if name == "gate" else 11)))
        self._draw.add('<circle cx="812" cy="214" r="11" class="box"/>')
        self._draw.text(812, 218.5, "\u00d7", anchor="middle", style="name")
        self._arrow((823, 214), (872, 214))
        self._tag(846, 214, "R4")
        self._box(872, 194, 62, "down", "recipe.weights", height=40, touched=("R1", "R4"))
        self._arrow((934, 214), (952, 214), (952, 130), (858, 130), (858, _STREAM + 10))
        self._plus(858)

    def _box(
        self, x: float, y: float, width: float, name: str, path: str = "", *, height: float = 44,
        touched: Sequence[str] = (),
    ) -> None:  # fmt: skip
        changed = any(self._state(kind) in ("merged", "online") for kind in touched)
        style = "box weight touched" if changed else ("box weight" if path else "box")
        self._draw.add(f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="7" class="{style}"/>')
        middle = x + width / 2
        self._draw.text(middle, y + height / 2 + (-2 if path else 4), name, anchor="middle", style="name")
        if path:
            self._bits(middle, y + height / 2 + 12, path, self._recipe.get(path.partition(".")[2]) or "float")

    def _bits(self, x: float, y: float, path: str, words: str) -> None:
        self._draw.add(
            f'<text x="{x:g}" y="{y:g}" text-anchor="middle" class="tick" data-from="{path}">{escape(words)}</text>'
        )

    def _tag(self, x: float, y: float, kind: str) -> None:
        """The name of a kind on a wire: a plate where it is folded, a disc where it runs, dashed where it is absent."""
        state = self._state(kind)
        if state == "online":
            self._draw.add(f'<circle cx="{x:g}" cy="{y:g}" r="15" class="tag online"/>')
        else:
            self._draw.add(f'<rect x="{x - 17:g}" y="{y - 12:g}" width="34" height="24" rx="6" class="tag {state}"/>')
        self._draw.text(x, y + 4.5, kind, anchor="middle", style=f"kind {state}")

    def _plus(self, x: float) -> None:
        self._draw.add(f'<circle cx="{x:g}" cy="{_STREAM}" r="10" class="box"/>')
        self._draw.text(x, _STREAM + 5, "+", anchor="middle", style="name")

    def _arrow(self, *points: tuple[float, float]) -> None:
        self._draw.path(list(points), "wire")
