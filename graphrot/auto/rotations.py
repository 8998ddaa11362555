"""Which rotations a model gets, by measuring it with and without each of them.

Squared errors of single tensors do not tell: with rounding alone they fall by rotation where the model's answers get
worse. So the kinds of sites are judged by what the whole model answers, rounded by the recipe's own solver.

Numbers that come out of rounding scatter: with other signs, or with gptq on another text, they differ by some percent
though nothing is better. So rotation as a whole must gain a wide margin, twice: with other signs and another text, too.
Within that, a kind that is merged into the weights stays unless the model is better without it; one that runs as a
transform must be worth that.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, replace
from typing import Literal, Protocol

from graphrot.analysis.types import Facts
from graphrot.auto.trial import Effect
from graphrot.plan.types import RotationPlan
from graphrot.prepare import plan_for
from graphrot.progress import Progress, silent
from graphrot.recipe import Recipe
from graphrot.report.parts import ChoicePart

MARGIN = 0.15
"""The part of the divergence that rotation as a whole must take away."""

ONLINE_MARGIN = 0.05
"""The part that a kind must take away which runs as a transform for every token."""

SIGMAS = 2.0
"""Standard errors of the text that it must take away."""

MEASURE = "divergence KL(source || rounded) of the next token on held-out text, nats"

SITE_MEASURE = "squared error of what the linears behind the site make, relative to its square"

ORDER = ("O", "R4", "R3", "R2", "R1")
"""Kinds in the order in which they are tried without: those that cost a transform at run time first."""


class Measures(Protocol):
    """What :class:`graphrot.auto.trial.Trials` measures."""

    def measure(self, plan: RotationPlan, *, draw: Literal[0, 1] = 0) -> Effect: ...

    def site_errors(self, plan: RotationPlan) -> dict[str, tuple[float, float]]: ...


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
    trials: Measures,
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

    dropped: set[str] = set()

    def plan_of(kinds: frozenset[str], seed: int = recipe.seed) -> RotationPlan:
        spaces = tuple(space for space in facts.spaces if space.kind in kinds and space.id not in dropped)
        asked = recipe.model_copy(update={"seed": seed})
        plan = plan_for(replace(facts, spaces=spaces), asked, source_hash=source_hash)
        return replace(plan, recipe=recipe.model_dump())

    everything = plan_of(frozenset(recipe.sites))
    kinds = frozenset(rotation.space.kind for rotation in everything.rotations)
    if not kinds:
        return Chosen(everything, ())
    online = {rotation.space.kind for rotation in everything.rotations if rotation.placement == "online"}
    step = _counted(trials, progress, len(kinds) + 5 if len(kinds) > 1 else 5)
    nothing = plan_of(frozenset())
    without, current, taken = step(nothing, 0), step(everything, 0), kinds
    choices: list[ChoicePart] = []
    for kind in [kind for kind in ORDER if kind in kinds and len(kinds) > 1]:
        fewer = taken - {kind}
        less = step(plan_of(fewer), 0) if fewer else without
        keeps = worth(current, less, ONLINE_MARGIN if kind in online else 0.0)
        choices.append(_choice(kind, current, less, keeps, beside=fewer))
        if not keeps:
            current, taken = less, fewer
    if taken:
        local = trials.site_errors(plan_of(taken))
        losing = _losing(local, online)
        if losing:
            dropped |= losing
            less = step(plan_of(taken), 0)
            if worth(current, less, 0.0):
                dropped.clear()
            else:
                current = less
        choices.extend(_site(space, errors, losing, dropped) for space, errors in local.items())
        other = step(nothing, 1), step(plan_of(taken, recipe.seed + 1), 1)
        keeps = worth(current, without, MARGIN) and worth(other[1], other[0], MARGIN)
        choices.append(_total(taken, (without, current), other, keeps))
        if not keeps:
            taken = frozenset()
    return Chosen(plan_of(taken), tuple(reversed(choices)))


def worth(with_it: Effect, without: Effect, margin: float) -> bool:
    """Whether the gain is over a margin and, where there is one, over the noise of the text."""
    gain, error = with_it.gain_over(without)
    return gain > (max(margin, SIGMAS * error) if margin else 0.0)


def _counted(trials: Measures, progress: Progress, total: int) -> Callable[[RotationPlan, Literal[0, 1]], Effect]:
    done = 0

    def measure(plan: RotationPlan, draw: Literal[0, 1]) -> Effect:
        nonlocal done
        progress("measuring rotations", done, total)
        effect = trials.measure(plan, draw=draw)
        done += 1
        progress("measuring rotations", done, total)
        return effect

    return measure


def _choice(kind: str, with_it: Effect, without: Effect, keeps: bool, *, beside: frozenset[str]) -> ChoicePart:
    gain, error = with_it.gain_over(without)
    place = f"beside {', '.join(sorted(beside))}" if beside else "alone"
    return ChoicePart(
        kind="rotation",
        name=kind,
        chosen="rotated" if keeps else "not rotated",
        candidates={"not rotated": without.mean, "rotated": with_it.mean},
        measure=MEASURE,
        gain=gain if keeps else 0.0,
        why=f"{place} it takes away {gain:.1%} (standard error {error:.1%}): {'worth' if keeps else 'not worth'} it",
    )


def _losing(errors: Mapping[str, tuple[float, float]], online: Container[str]) -> set[str]:
    """The sites whose rotation makes the linears behind them no better."""

    def loses(space: str, without: float, with_it: float) -> bool:
        margin = ONLINE_MARGIN if space.partition(".")[0] in online else 0.0
        return with_it > (1 - margin) * without

    return {space for space, pair in errors.items() if loses(space, *pair)}


def _site(space: str, errors: tuple[float, float], losing: Container[str], dropped: Container[str]) -> ChoicePart:
    without, with_it = errors
    if space in dropped:
        why = "its linears are no better by it, and neither is the model"
    elif space in losing:
        why = "its linears are no better by it, but the model is by all such sites together"
    else:
        why = "its linears are better by it"
    return ChoicePart(
        kind="rotation",
        name=space,
        chosen="not rotated" if space in dropped else "rotated",
        candidates={"not rotated": without, "rotated": with_it},
        measure=SITE_MEASURE,
        gain=0.0 if space in dropped or not without else 1 - with_it / without,
        why=why,
    )


def _total(
    kinds: frozenset[str], first: tuple[Effect, Effect], second: tuple[Effect, Effect], keeps: bool
) -> ChoicePart:
    name = ", ".join(sorted(kinds))
    gain, error = first[1].gain_over(first[0])
    again, _ = second[1].gain_over(second[0])
    verdict = f"over {MARGIN:.0%} both times" if keeps else f"not over {MARGIN:.0%} both times: nothing is rotated"
    return ChoicePart(
        kind="recipe",
        name="rotations",
        chosen=name if keeps else "none",
        candidates={
            "none": first[0].mean,
            name: first[1].mean,
            "none, again": second[0].mean,
            f"{name}, again": second[1].mean,
        },
        measure=MEASURE,
        gain=gain if keeps else 0.0,
        why=f"it takes away {gain:.1%} (standard error {error:.1%}), with other signs and on other text {again:.1%}: "
        + verdict,
    )
