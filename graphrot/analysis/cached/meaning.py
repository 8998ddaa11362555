"""Whether a part of a graph computes what a site says: both are run on the same numbers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from graphrot.analysis.cached.cut import Cut, CutFailed
from graphrot.analysis.cached.reading import NotRead, Reader
from graphrot.analysis.probe_sizes import Run
from graphrot.analysis.types import AttentionSite, MaskTerm

_LONG_RUNS = (Run(1, 50, 250), Run(1, 20, 30))
"""Where the graph takes so many tokens: what depends on their number shows."""
_RUNS = (Run(2, 3, 0), Run(1, 3, 4), Run(2, 1, 5))
"""A prompt, more tokens behind a past (GroupQueryAttention takes a single row then), one token."""

TOLERANCE = 1e-4
"""Of the largest number: float32 sums differ by some 1e-6, and a wrong meaning by a part of the whole."""

Arrays = dict[str, np.ndarray]


def check_meaning(reader: Reader, site: AttentionSite) -> None:
    """Run a site's part of the graph, and compare it with what the site says.

    Raises:
        NotRead: they differ, or the part does not run by itself.
    """
    outputs = [reader.values[name] for name in (site.node, site.present_key, site.present_value)]
    terms = [reader.read(term.place) for term in site.mask]
    cut = cut_out(reader, site, outputs)
    for run in (*_RUNS, *_LONG_RUNS):
        given = _numbers(reader, site, run, terms)
        fed = dict(zip(_given(reader, site), _shaped(site, run, given), strict=True))
        try:
            found = cut.run(run, fed)
        except CutFailed as error:
            if run in _LONG_RUNS:
                continue
            raise NotRead(f"its part of the graph does not run by itself: {error}") from error
        wanted = attend(site, given, [fed[value] for value in terms])
        for mine, theirs in zip(wanted, found, strict=True):
            if mine.shape != theirs.shape or not np.abs(mine - theirs).max() <= TOLERANCE * np.abs(mine).max():
                raise NotRead("it computes something else than softmax(scale * q . k + mask) . v over its cache")


def cut_out(reader: Reader, site: AttentionSite, outputs: Sequence[ir.Value]) -> Cut:
    """The part of the graph between a site's operands and ``outputs``; :func:`feeds` are for it."""
    return Cut(reader.scope, reader.probe, outputs, _given(reader, site))


def feeds(reader: Reader, site: AttentionSite, run: Run) -> dict[ir.Value, np.ndarray]:
    """Random numbers for all operands of a site."""
    numbers = _numbers(reader, site, run, [reader.read(term.place) for term in site.mask])
    return dict(zip(_given(reader, site), _shaped(site, run, numbers), strict=True))


def _given(reader: Reader, site: AttentionSite) -> list[ir.Value]:
    """Queries, keys, values, masks, lengths, past keys and values."""
    places = (site.query, site.key, site.value, *(term.place for term in site.mask))
    names = (*(name for name in (site.seqlens, site.total) if name), site.past_key, site.past_value)
    return [*(reader.read(place) for place in places), *(reader.values[name] for name in names)]


def _numbers(reader: Reader, site: AttentionSite, run: Run, terms: list[ir.Value]) -> Arrays:
    """Random numbers, every tensor with heads on the second axis."""
    rng = np.random.default_rng(len(terms))
    new = (run.batch, site.kv_heads, run.sequence, site.head_size)
    old = (run.batch, site.kv_heads, run.past, site.head_size)
    return {
        "query": rng.standard_normal((run.batch, site.heads, run.sequence, site.head_size), np.float32),
        "key": rng.standard_normal(new, np.float32),
        "value": rng.standard_normal(new, np.float32),
        "past_key": rng.standard_normal(old, np.float32),
        "past_value": rng.standard_normal(old, np.float32),
        **{
            f"mask{n}": _mask(rng, run, term, len(reader.shape(value) or ()))
            for n, (term, value) in enumerate(zip(site.mask, terms, strict=True))
        },
    }


def _mask(rng: np.random.Generator, run: Run, term: MaskTerm, rank: int) -> np.ndarray:
    """A mask that hides some tokens, never all: the first one stays."""
    total = run.past + run.sequence
    shapes = {2: (run.sequence, total), 3: (1, run.sequence, total), 4: (run.batch, 1, run.sequence, total)}
    if term.kind == "padding":
        keep = rng.random((run.batch, total)) < 0.6
    elif term.place.form == "stacked":
        keep = rng.random((1, run.sequence, total)) < 0.6
    else:
        keep = rng.random(shapes[max(rank, 2)]) < 0.6
    keep[..., 0] = True
    if term.kind == "bias":
        return np.where(keep, rng.standard_normal(keep.shape), -3e4 / abs(term.factor)).astype(np.float32)
    if term.kind == "padding":
        return keep.astype(np.int32)
    return keep if term.kind == "keep" else ~keep


def _shaped(site: AttentionSite, run: Run, given: Arrays) -> list[np.ndarray]:
    """The numbers in the forms that the graph takes them in."""
    found = [
        _as(given["query"], site.query.form),
        _as(given["key"], site.key.form),
        _as(given["value"], site.value.form),
    ]
    found += [given[f"mask{n}"] for n in range(len(site.mask))]
    total = run.past + run.sequence
    if site.seqlens:
        found += [np.full(run.batch, total - 1, np.int32), np.array(total, np.int32)]
    return [*found, given["past_key"], given["past_value"]]


def _as(array: np.ndarray, form: str) -> np.ndarray:
    batch, heads, length, width = array.shape
    if form == "rows":
        return np.ascontiguousarray(array.transpose(0, 2, 1, 3)).reshape(batch, length, heads * width)
    return array.reshape(batch * heads, length, width) if form == "stacked" else array


def attend(site: AttentionSite, given: Arrays, masks: list[np.ndarray]) -> list[np.ndarray]:
    """What a site says, in float64: weighted values in its output's form, present keys and values."""
    keys, values = (
        np.concatenate([given[f"past_{name}"], given[name]], axis=2).astype(np.float64) for name in ("key", "value")
    )
    group = site.heads // site.kv_heads
    query = given["query"].astype(np.float64)
    scores = site.score_scale * query @ np.repeat(keys, group, axis=1).swapaxes(2, 3)
    if site.softcap:
        scores = site.softcap * np.tanh(scores / site.softcap)
    for term, mask in zip(site.mask, masks, strict=True):
        scores = apply_mask(scores, term, mask)
    length, total = scores.shape[2:]
    hidden = ~visible(length, total, site.causal, site.window)
    scores = np.where(hidden, -np.inf, scores)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    result = weights @ np.repeat(values, group, axis=1)
    return [_as(result, site.output), keys, values]


def visible(length: int, total: int, causal: bool, window: int) -> np.ndarray:
    """``[length, total]``: what the newest ``length`` tokens see."""
    queries, slots = np.arange(total - length, total)[:, None], np.arange(total)[None, :]
    seen = np.ones((length, total), bool)
    if causal:
        seen &= slots <= queries
    return seen & (slots > queries - window) if window >= 0 else seen


def apply_mask(scores: np.ndarray, term: MaskTerm, mask: np.ndarray) -> np.ndarray:
    """Scores ``[B, H, S, T]`` behind one term."""
    if term.kind == "padding":
        mask = mask[:, None, None, :]
    elif term.place.form == "stacked":
        batch, heads = scores.shape[:2]
        mask = mask.reshape(batch, heads, *mask.shape[1:]) if mask.shape[0] == batch * heads else mask[None]
    if term.kind == "bias":
        return np.asarray(scores + term.factor * mask)
    shown = np.asarray(~mask) if term.kind == "hide" else np.asarray(mask != 0)
    return np.where(shown, scores, term.number)
