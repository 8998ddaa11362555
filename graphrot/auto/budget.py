"""Which candidate each weight gets, so that the sum of effects is small within a budget of stored bits."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Candidate:
    """One possibility for one weight: what it stores, and what it costs in accuracy."""

    bits: int
    effect: float


def spend(weights: Sequence[Sequence[Candidate]], budget: int) -> list[int] | None:
    """Choose one candidate for every weight.

    Each weight starts with its smallest candidate; steps along the lower convex hull of ``(bits, effect)`` follow, the
    one with the largest gain per bit first, as long as they fit. This is the optimum of the problem in which weights
    may be split, short of the last step.

    Args:
        weights: the candidates of every weight.
        budget: bits for all of them.

    Returns:
        The position of the chosen candidate, per weight; None if even the smallest are over the budget.
    """
    hulls = [_hull(candidates) for candidates in weights]
    spent = sum(candidates[hull[0]].bits for candidates, hull in zip(weights, hulls, strict=True))
    if spent > budget:
        return None
    place = [0] * len(weights)
    queue: list[tuple[float, int]] = []

    def push(index: int) -> None:
        if place[index] + 1 < len(hulls[index]):
            here, there = (weights[index][hulls[index][place[index] + step]] for step in (0, 1))
            heapq.heappush(queue, ((there.effect - here.effect) / (there.bits - here.bits), index))

    for index in range(len(weights)):
        push(index)
    while queue:
        _, index = heapq.heappop(queue)
        here, there = (weights[index][hulls[index][place[index] + step]] for step in (0, 1))
        if spent + there.bits - here.bits <= budget:
            spent += there.bits - here.bits
            place[index] += 1
            push(index)
    return [hull[position] for hull, position in zip(hulls, place, strict=True)]


def _hull(candidates: Sequence[Candidate]) -> list[int]:
    """Positions on the lower convex hull, from the smallest candidate to the one with the least effect."""
    order = sorted(range(len(candidates)), key=lambda i: (candidates[i].bits, candidates[i].effect, i))
    hull: list[int] = []
    for index in order:
        point = candidates[index]
        if hull and point.effect >= candidates[hull[-1]].effect:
            continue
        while len(hull) > 1 and _slope(candidates[hull[-2]], candidates[hull[-1]]) >= _slope(
            candidates[hull[-1]], point
        ):
            hull.pop()
        hull.append(index)
    return hull


def _slope(here: Candidate, there: Candidate) -> float:
    return (there.effect - here.effect) / (there.bits - here.bits)
