"""Which rotations a model gets, by measuring it with and without each of them.

Squared errors of single tensors do not tell: with rounding alone they fall by rotation where the model's answers get
worse. So the kinds of sites are judged by what the whole model answers, rounded by the recipe's own solver.

Numbers that come out of rounding scatter, and the signs of a rotation are random. Therefore a kind must gain a margin
beyond the noise of the text, and what is taken in the end must gain it with other signs, too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from graphrot.analysis.types import Facts
from graphrot.auto.trial import Effect, Trials
from graphrot.plan.types import RotationPlan
from graphrot.prepare import plan_for
from graphrot.progress import Progress, silent
from graphrot.recipe import Recipe
from graphrot.report.parts import ChoicePart

MARGIN = 0.05
"""The part of the divergence that a kind of rotation must take away to be worth it."""

SIGMAS = 2.0
"""Standard errors of the text that it must take away."""

MEASURE = "divergence KL(source || rounded) of the next token on held-out text, nats"

ORDER = ("O", "R4", "R3", "R2", "R1")
"""Kinds in the order in which they are tried without: those that cost a transform at run time first."""


@dataclass(frozen=True)
class Chosen:
    """The plan with the rotations that are worth it, and why these."""

    plan: RotationPlan
    choices: tuple[ChoicePart, ...]


def choose_rotations(
    facts: Facts,
    recipe: Recipe,
    *,
    source_hash: str,
    trials: Trials,
    progress: Progress = silent,
) -> Chosen:
    """Take the kinds of rotations that make the rounded model answer more like its source.

    Args:
        facts: of the source.
        recipe: names the kinds that come into question.
        source_hash: for the plan.
        trials: measures a plan.
        progress: told of each measurement.
    """

    def plan_of(kinds: frozenset[str], seed: int = recipe.seed) -> RotationPlan:
        spaces = tuple(space for space in facts.spaces if space.kind in kinds)
        asked = recipe.model_copy(update={"seed": seed})
        plan = plan_for(replace(facts, spaces=spaces), asked, source_hash=source_hash)
        return replace(plan, recipe=recipe.model_dump())

    everything = plan_of(frozenset(recipe.sites))
    kinds = frozenset(rotation.space.kind for rotation in everything.rotations)
    if not kinds:
        return Chosen(everything, ())
    step = _counted(trials, progress, len(kinds) + 3 if len(kinds) > 1 else 3)
    without = step(plan_of(frozenset()))
    current, taken = step(everything), kinds
    choices: list[ChoicePart] = []
    for kind in [kind for kind in ORDER if kind in kinds]:
        fewer = taken - {kind}
        less = without if not fewer else step(plan_of(fewer))
        keeps = worth(current, less)
        choices.append(_choice(kind, current, less, keeps, taken=", ".join(sorted(fewer))))
        if not keeps:
            current, taken = less, fewer
    if taken:
        again = step(plan_of(taken, recipe.seed + 1))
        keeps = worth(current, without) and worth(again, without)
        choices.append(_total(taken, without, current, again, keeps))
        if not keeps:
            taken = frozenset()
    return Chosen(plan_of(taken), tuple(reversed(choices)))


def worth(with_it: Effect, without: Effect) -> bool:
    """Whether the gain is over the margin and over the noise."""
    gain, error = with_it.gain_over(without)
    return gain > max(MARGIN, SIGMAS * error)


def _counted(trials: Trials, progress: Progress, total: int) -> Callable[[RotationPlan], Effect]:
    done = 0

    def measure(plan: RotationPlan) -> Effect:
        nonlocal done
        progress("measuring rotations", done, total)
        effect = trials.measure(plan)
        done += 1
        progress("measuring rotations", done, total)
        return effect

    return measure


def _choice(kind: str, with_it: Effect, without: Effect, keeps: bool, *, taken: str) -> ChoicePart:
    gain, error = with_it.gain_over(without)
    beside = f"beside {taken}" if taken else "alone"
    verdict = "over" if keeps else "not over"
    return ChoicePart(
        kind="rotation",
        name=kind,
        chosen="rotated" if keeps else "not rotated",
        candidates={"not rotated": without.mean, "rotated": with_it.mean},
        measure=MEASURE,
        gain=gain if keeps else 0.0,
        why=f"{beside} it takes away {gain:.1%} (standard error {error:.1%}), {verdict} the margin",
    )


def _total(kinds: frozenset[str], without: Effect, with_them: Effect, again: Effect, keeps: bool) -> ChoicePart:
    name = ", ".join(sorted(kinds))
    gain, error = with_them.gain_over(without)
    other, _ = again.gain_over(without)
    verdict = "over the margin both times" if keeps else "not over the margin both times: nothing is rotated"
    return ChoicePart(
        kind="recipe",
        name="rotations",
        chosen=name if keeps else "none",
        candidates={"none": without.mean, name: with_them.mean, f"{name}, other signs": again.mean},
        measure=MEASURE,
        gain=gain if keeps else 0.0,
        why=f"together {gain:.1%} (standard error {error:.1%}), with other signs {other:.1%}: {verdict}",
    )
