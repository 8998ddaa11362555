"""Charts of what stands in ``graphrot.json``; every mark carries the path of its number."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from graphrot.report.svg import Drawing, Scale, decades

_WIDTH = 1000
_LEFT, _RIGHT = 62, 988


def error_chart(entries: Sequence[Mapping[str, Any]]) -> str:
    """The error of every quantized tensor in the order of the graph, and what it would be without rotation."""
    pairs = [(entry["error"], entry.get("error_without_rotation")) for entry in entries]
    known = [value for pair in pairs for value in pair if value is not None]
    compared = any(without is not None for _, without in pairs)
    title = f"Relative error of {len(pairs)} quantized tensors" + (", with and without rotation" if compared else "")
    drawing = Drawing(_WIDTH, 300, title)
    least = min((value for value in known if value > 0), default=1.0)
    low, high = decades(known)
    spread = max(known) > 10 * least
    upright = Scale(low, high, 262, 14, log=True) if spread else Scale(0, max(known) * 1.06 or 1.0, 262, 14)
    drawing.rows(upright, _LEFT, _RIGHT)
    across = Scale(0, max(len(pairs) - 1, 1), _LEFT + 10, _RIGHT - 8)
    radius = 3.2 if len(pairs) < 150 else 2.4
    for number, (error, without) in enumerate(pairs):
        x, name = across.at(number), entries[number]["tensor"]
        if without is not None:
            worse = " worse" if error > without else ""
            drawing.line(x, upright.at(without), x, upright.at(error), f"link{worse}")
            words = f"{name}: {without:.4g} without rotation"
            drawing.point(x, upright.at(without), "dot before", radius=radius, words=words,
                          source=f"quantized[{number}].error_without_rotation")  # fmt: skip
        words = f"{name}: {error:.4g}"
        drawing.point(
            x, upright.at(error), "dot after", radius=radius, words=words, source=f"quantized[{number}].error"
        )
    drawing.text(_LEFT + 4, 288, "first tensor of the graph")
    drawing.text(_RIGHT, 288, "last", anchor="end")
    return drawing.markup()


def outlier_chart(entries: Sequence[Mapping[str, Any]]) -> str:
    """Largest over median magnitude of every tensor that a rotation changes, kind by kind."""
    kinds = list(dict.fromkeys(sorted((entry["kind"] for entry in entries), key=_order)))
    drawing = Drawing(_WIDTH, 300, f"Outliers of {len(entries)} tensors before and after rotation, by kind of site")
    low, high = decades([value for entry in entries for value in (entry["before"], entry["after"])])
    upright = Scale(low, high, 262, 14, log=True)
    drawing.rows(upright, _LEFT, _RIGHT)
    panel = (_RIGHT - _LEFT) / len(kinds)
    for place, kind in enumerate(kinds):
        start = _LEFT + place * panel
        if place:
            drawing.line(start, 14, start, 262, "grid")
        drawing.text(start + panel / 2, 288, kind, anchor="middle", style="name")
        members = [(number, entry) for number, entry in enumerate(entries) if entry["kind"] == kind]
        across = Scale(0, max(len(members) - 1, 1), start + 12, start + panel - 12)
        for position, (number, entry) in enumerate(members):
            x = across.at(position)
            ends = entry["before"], entry["after"]
            drawing.line(x, upright.at(ends[0]), x, upright.at(ends[1]), f"link{' worse' if ends[1] > ends[0] else ''}")
            for side, value in zip(("before", "after"), ends, strict=True):
                words = f"{entry['tensor']}: {value:.4g} {side} rotation"
                drawing.point(x, upright.at(value), f"dot {side}", radius=2.6, words=words,
                              source=f"outliers[{number}].{side}")  # fmt: skip
    return drawing.markup()


def _order(kind: str) -> tuple[int, str]:
    return (kind == "O", kind)


def certificate_chart(part: Mapping[str, Any]) -> str:
    """The measured difference, the bound, and the control that must be over it, on one axis."""
    marks = [
        ("measured", "relative", "after"),
        ("bound", "tolerance", "bound"),
        ("control", "control_relative", "before"),
    ]
    known = [(words, name, style, part[name]) for words, name, style in marks if part.get(name)]
    drawing = Drawing(_WIDTH, 118, "The measured difference, its bound, and the control, as parts of the largest logit")
    low, high = decades([value for *_, value in known])
    across = Scale(low, high, 40, 960, log=True)
    bound = across.at(part["tolerance"])
    drawing.add(f'<rect x="40" y="46" width="{bound - 40:g}" height="22" class="good"/>')
    drawing.add(f'<rect x="{bound:g}" y="46" width="{960 - bound:g}" height="22" class="bad"/>')
    for tick in across.ticks():
        drawing.line(across.at(tick), 68, across.at(tick), 74, "axis")
        drawing.text(across.at(tick), 90, f"{tick:.0e}".replace("e-0", "e-").replace("e+00", ""), anchor="middle")
    for words, name, style, value in known:
        x = across.at(value)
        drawing.line(x, 38, x, 68, f"mark {style}")
        drawing.text(x, 28, words, anchor="middle" if 80 < x < 920 else ("start" if x <= 80 else "end"), style="name")
        drawing.point(x, 57, f"dot {style}", radius=5, words=f"{words}: {value:.3g}", source=f"certificate.{name}")
    return drawing.markup()


def loss_chart(part: Mapping[str, Any]) -> str:
    """The loss of the learning steps, and that on held-out text."""
    curve, heldout = part["curve"], part["heldout"]
    drawing = Drawing(_WIDTH, 320, f"Loss over {part['steps']} steps of learning, on batches and held-out text")
    values = [value for _, value in (*curve, *heldout)]
    spread = (max(values) - min(values)) or abs(values[0]) or 1.0
    upright = Scale(min(values) - 0.06 * spread, max(values) + 0.06 * spread, 270, 14)
    drawing.rows(upright, _LEFT, _RIGHT)
    across = Scale(0, max([step for step, _ in (*curve, *heldout)] or [1]), _LEFT + 8, _RIGHT - 8)
    for tick in across.ticks():
        drawing.text(across.at(tick), 292, f"{tick:g}", anchor="middle")
    drawing.path([(across.at(step), upright.at(value)) for step, value in curve], "curve faint")
    drawing.path([(across.at(step), upright.at(value)) for step, value in heldout], "curve strong")
    for number, (step, value) in enumerate(heldout):
        words = f"step {step}: {value:.5g} on held-out text"
        drawing.point(across.at(step), upright.at(value), "dot after", words=words, radius=3.4,
                      source=f"learning.heldout[{number}][1]")  # fmt: skip
    drawing.text((_LEFT + _RIGHT) / 2, 314, "step", anchor="middle")
    return drawing.markup()


def size_bars(source: int, model: int) -> str:
    """Two bars: the weights before, the file after."""
    drawing = Drawing(_WIDTH, 76, "Sizes of the source's weights and of the written model")
    across = Scale(0, max(source, model, 1), 0, 1000)
    for y, value, style, path in (
        (4, source, "before", "sizes.source_bytes"),
        (42, model, "after", "sizes.model_bytes"),
    ):
        drawing.add(
            f'<rect x="0" y="{y}" width="{max(across.at(value), 3):g}" height="28" rx="3" class="bar {style}" '
            f'data-from="{path}"/>'
        )
    return drawing.markup()
