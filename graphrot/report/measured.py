"""What a report measures when it is made: how activations are spread over channels and tokens, in both bases."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from graphrot.evaluate.outliers import Seen, crest

COLUMNS = 576
"""Columns of a heat map; wider tensors show the largest of neighbouring channels."""
_SURFACE = (40, 128)
"""Tokens and columns of a surface."""


@dataclass(frozen=True)
class Site:
    """One tensor: its outliers, and the largest magnitude of each column as a multiple of the tensor's median."""

    space: str
    kind: str
    tensor: str
    channels: int
    before: float
    after: float
    channel: int
    """The channel with the largest number, in the source's basis."""
    profiles: tuple[np.ndarray, np.ndarray]
    """Before and after, ``[columns]`` float32 each."""


@dataclass(frozen=True)
class Surface:
    """Magnitudes of one tensor, ``[tokens, columns]`` float32, before and after; both as multiples of one median."""

    site: Site
    before: np.ndarray
    after: np.ndarray


@dataclass
class Measured:
    """Everything that the pictures of activations are drawn from."""

    text: str
    tokens: int
    basis: str
    """``source`` or ``model``: see :mod:`graphrot.report.seen`."""
    rotated: bool
    sites: list[Site] = field(default_factory=list)
    surfaces: dict[str, Surface] = field(default_factory=dict)
    """By kind: the tensor that stands out most before rotation."""

    def record(self) -> dict[str, Any]:
        """The figures, as the page carries them."""
        return {
            "text": self.text,
            "tokens": self.tokens,
            "basis": self.basis,
            "sites": [
                {
                    "space": site.space,
                    "kind": site.kind,
                    "tensor": site.tensor,
                    "channels": site.channels,
                    "before": site.before,
                    "after": site.after,
                    "channel": site.channel,
                }
                for site in self.sites
            ],
        }


def gather(seen: Iterable[Seen], measured: Measured) -> Measured:
    """Go through tensors one at a time, and keep what the pictures need."""
    for tensor in seen:
        site = _site(tensor)
        measured.sites.append(site)
        known = measured.surfaces.get(site.kind)
        if known is None or known.site.before < site.before:
            scale = _median(tensor.before)
            rows = min(_SURFACE[0], measured.tokens)  # where heads stand in front of tokens: of the first head
            pair = (np.abs(side[:rows]) / scale for side in (tensor.before, tensor.after))
            before, after = (_columns(side, _SURFACE[1]) for side in pair)
            measured.surfaces[site.kind] = Surface(site, before, after)
    order = {kind: number for number, kind in enumerate(("R1", "R2", "R3", "R4", "O"))}
    measured.surfaces = dict(sorted(measured.surfaces.items(), key=lambda item: (order.get(item[0], 9), item[0])))
    return measured


def _site(tensor: Seen) -> Site:
    sides = tensor.before, tensor.after
    profiles = [_columns((np.abs(side).max(axis=0) / _median(side))[None], COLUMNS)[0] for side in sides]
    channel = int(np.abs(tensor.before).max(axis=0).argmax())
    return Site(
        tensor.space,
        tensor.kind,
        tensor.tensor,
        tensor.before.shape[-1],
        crest(tensor.before),
        crest(tensor.after),
        channel,
        (profiles[0], profiles[1]),
    )


def _median(array: np.ndarray) -> float:
    sizes = np.abs(array[array != 0])
    return float(np.median(sizes)) if sizes.size else 1.0


def _columns(array: np.ndarray, most: int) -> np.ndarray:
    """``[T, W]`` with at most ``most`` columns, the largest of neighbours each."""
    width = array.shape[1]
    if width <= most:
        return array.astype(np.float32)
    cuts = np.linspace(0, width, most, endpoint=False).astype(int)
    return np.maximum.reduceat(array, cuts, axis=1).astype(np.float32)
