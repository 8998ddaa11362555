"""Pictures of activations: heat maps of channels by layers, surfaces of tokens by channels."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from graphrot.report.measured import Measured, Site, Surface
from graphrot.report.png import LEVELS, data_uri, png, ramp
from graphrot.report.svg import Drawing, Scale, label

LIGHT = ("#f4f2ec", "#fbe0b0", "#f2a14f", "#d3541f", "#84152b", "#2a0613")
DARK = ("#1b1e25", "#3b2150", "#8d2c61", "#de5d45", "#f8ab4d", "#fdf3c4")
"""Colours from the median to the largest number, for pages on light and on dark ground."""

_PALETTES = tuple(ramp(stops) for stops in (LIGHT, DARK))
_WIDTH, _HEIGHT = 1040, 560
_DEPTH, _SLANT, _RISE = 250, 150, 270


@dataclass(frozen=True)
class HeatMap:
    """Two pictures on one scale, each as data for light and for dark ground."""

    kind: str
    rows: int
    figures: dict[str, object]
    """What the page says about it in numbers."""
    before: tuple[str, str]
    after: tuple[str, str]
    ticks: tuple[tuple[float, str], ...]
    """Where on the scale, as a share of it, and which number."""
    words: tuple[str, str]
    """What the two pictures show, for people who do not see them."""


def heat_maps(measured: Measured) -> list[HeatMap]:
    """One for each kind that has sites of one width (of several, the most frequent one)."""
    made: list[HeatMap] = []
    for kind in measured.surfaces:
        sites = [site for site in measured.sites if site.kind == kind]
        widths = [site.channels for site in sites]
        usual = max(set(widths), key=widths.count)
        made.append(_heat_map(kind, [site for site in sites if site.channels == usual]))
    return made


def _heat_map(kind: str, sites: list[Site]) -> HeatMap:
    sides = [np.stack([site.profiles[side] for site in sites]) for side in (0, 1)]
    high = max(float(sides[0].max()), float(sides[1].max()), 10.0)
    before, after = (tuple(data_uri(png(_levels(side, high), palette)) for palette in _PALETTES) for side in sides)
    ticks = Scale(1, high, 0, 1, log=True).ticks()
    scale = Scale(1, high, 0, 1000, log=True)
    figures, channels = _figures(kind, sites), sites[0].channels
    what = f"largest magnitude of each channel ({channels} across) in {len(sites)} tensors of kind {kind} (down)"
    streak = f"Channel {figures['channel']} holds the largest number in {figures['times']} of them."
    flat = f"The largest is {figures['after']:.3g} medians."
    return HeatMap(
        kind,
        len(sites),
        figures,
        (before[0], before[1]),
        (after[0], after[1]),
        tuple((scale.at(tick) / 10, label(tick)) for tick in ticks),
        (f"Heat map before rotation: {what}. {streak}", f"Heat map after rotation, on the same scale: {what}. {flat}"),
    )


def _figures(kind: str, sites: list[Site]) -> dict[str, object]:
    """What people see: how far it goes, and the channel that stands out in most tensors."""
    channels = [site.channel for site in sites]
    most = max(sorted(set(channels)), key=channels.count)
    return {
        "kind": kind,
        "rows": len(sites),
        "channels": sites[0].channels,
        "before": max(site.before for site in sites),
        "after": max(site.after for site in sites),
        "channel": most,
        "times": channels.count(most),
    }


def _levels(side: np.ndarray, high: float) -> np.ndarray:
    share = np.log(np.maximum(side, 1.0)) / np.log(high)
    return np.asarray(np.clip(share * (LEVELS - 1), 0, LEVELS - 1).round(), np.uint8)


def surface(found: Surface, *, rotated: bool) -> str:
    """One surface as an SVG: tokens from the back to the front, channels across, magnitude upward.

    Both surfaces of a tensor have the scale of the one before rotation.
    """
    values = found.after if rotated else found.before
    high = max(float(found.before.max()), float(found.after.max()), 1e-9)
    tokens, columns = values.shape
    peak = float(values.max())
    state = "after" if rotated else "before"
    words = (
        f"Surface of the magnitudes {state} rotation, {tokens} tokens by {found.site.channels} channels; "
        f"its highest point is {peak:.3g} medians"
    )
    drawing = Drawing(_WIDTH, _HEIGHT, words)
    left, width = 20, _WIDTH - 40 - _SLANT
    for row in range(tokens):
        share = row / max(tokens - 1, 1)
        x0, y0 = left + _SLANT * (1 - share), _HEIGHT - 30 - _DEPTH * (1 - share)
        drawing.add(_ridge(values[row] / high * _RISE, x0, y0, width / max(columns - 1, 1), state))
    drawing.text(left, _HEIGHT - 4, "channels", style="tick large")
    drawing.text(left + width + _SLANT / 4 + 18, _HEIGHT - 30 - _DEPTH / 4, "tokens", style="tick large")
    return drawing.markup()


def _ridge(heights: np.ndarray, x0: float, y0: float, step: float, style: str) -> str:
    """One token's line, closed along its foot; equal neighbours are one step, so flat ones stay short."""
    xs = np.round(x0 + step * np.arange(len(heights))).astype(int)
    ys = np.round(y0 - heights).astype(int)
    kept = [0]
    for place in range(1, len(ys) - 1):
        if not ys[place - 1] == ys[place] == ys[place + 1]:
            kept.append(place)
    kept.append(len(ys) - 1)
    steps = [f"M{xs[0]} {round(y0)}V{ys[0]}"]
    for last, place in pairwise(kept):
        steps.append(f"l{xs[place] - xs[last]} {ys[place] - ys[last]}")
    steps.append(f"V{round(y0)}z")
    return f'<path class="ridge {style}" d="{"".join(steps)}"/>'
