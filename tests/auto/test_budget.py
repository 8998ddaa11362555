"""Spending a budget: against every possible choice, and what it must refuse."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from graphrot.auto.budget import Candidate, spend


def cases(seed: int) -> tuple[list[list[Candidate]], int]:
    rng = np.random.default_rng(seed)
    weights = []
    for _ in range(5):
        bits = np.sort(rng.choice(np.arange(10, 60), 4, replace=False))
        effects = rng.uniform(0, 1, 4)
        weights.append([Candidate(int(b), float(e)) for b, e in zip(bits, effects, strict=True)])
    return weights, int(rng.integers(sum(w[0].bits for w in weights), 250))


def total(weights: list[list[Candidate]], picked: tuple[int, ...] | list[int]) -> tuple[int, float]:
    chosen = [table[index] for table, index in zip(weights, picked, strict=True)]
    return sum(c.bits for c in chosen), sum(c.effect for c in chosen)


@pytest.mark.parametrize("seed", range(20))
def test_within_the_budget_and_near_the_best(seed: int) -> None:
    weights, budget = cases(seed)
    picked = spend(weights, budget)
    assert picked is not None
    bits, effect = total(weights, picked)
    assert bits <= budget
    every = [total(weights, choice) for choice in itertools.product(range(4), repeat=5)]
    best = min(effect for bits, effect in every if bits <= budget)
    # Greedy steps along convex hulls: off by less than the largest step that the best may still take.
    largest = max(a.effect - b.effect for table in weights for a, b in itertools.permutations(table, 2))
    assert best <= effect < best + largest


def test_with_room_for_everything_each_gets_its_best() -> None:
    weights, _ = cases(0)
    picked = spend(weights, 10_000)
    assert picked is not None
    assert total(weights, picked)[1] == sum(min(c.effect for c in table) for table in weights)


def test_bits_go_where_they_gain_most() -> None:
    cheap, dear = [Candidate(4, 1.0), Candidate(8, 0.9)], [Candidate(4, 9.0), Candidate(8, 0.1)]
    assert spend([cheap, dear], 12) == [0, 1]
    assert spend([dear, cheap], 12) == [1, 0]


def test_a_step_that_does_not_fit_leaves_room_for_smaller_ones() -> None:
    large, small = [Candidate(100, 9.0), Candidate(200, 0.0)], [Candidate(4, 1.0), Candidate(8, 0.9)]
    assert spend([large, small], 110) == [0, 1]


def test_what_does_not_help_is_not_taken() -> None:
    assert spend([[Candidate(4, 0.5), Candidate(8, 0.5), Candidate(9, 0.6)]], 100) == [0]


def test_too_small_a_budget() -> None:
    assert spend([[Candidate(4, 1.0)], [Candidate(4, 1.0)]], 7) is None
