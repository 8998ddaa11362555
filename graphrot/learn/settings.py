"""What a user may say about learning, and what stands for what is not said."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from graphrot.errors import UsageError
from graphrot.recipe import Recipe

Loss = Literal["local", "data-free", "ce", "kl"]

END_TO_END: frozenset[Loss] = frozenset({"ce", "kl"})
"""Losses for which the whole model runs in every step."""


@dataclass(frozen=True)
class Defaults:
    """Of one loss.

    Args:
        steps: at most.
        rate: see :meth:`graphrot.learn.stiefel.CayleySgd.step`.
        sequences: of the calibration text.
    """

    steps: int
    rate: float
    sequences: int


DEFAULTS: dict[Loss, Defaults] = {
    "local": Defaults(200, 0.05, 64),
    "data-free": Defaults(200, 0.05, 0),
    "ce": Defaults(100, 0.01, 256),
    "kl": Defaults(100, 0.01, 256),
}

LENGTH = 256
"""Tokens of a sequence."""

BATCH = 4
"""Sequences of a step, where the whole model runs."""

HELDOUT = 8
"""One sequence of so many is held out."""


@dataclass(frozen=True)
class Settings:
    """All that learning depends on beside the model, the recipe and the text.

    Args:
        loss: what is lowered.
        steps: at most.
        rate: the largest.
        seed: of batches, and of the tokens that are looked at. The start's is the recipe's.
        sequences: of the calibration text.
        length: tokens of each, at most.
        top_k: with kl, compare the likeliest tokens only; None: all.
    """

    loss: Loss
    steps: int
    rate: float
    seed: int
    sequences: int
    length: int = LENGTH
    top_k: int | None = None


def settle(
    recipe: Recipe,
    *,
    loss: str,
    steps: int | None,
    rate: float | None,
    sequences: int | None,
    top_k: int | None,
    calibration: bool,
) -> Settings:
    """Fill in what was not said, and refuse what cannot be.

    Args:
        recipe: what is rotated and rounded.
        loss: a word.
        steps: or None.
        rate: or None.
        sequences: or None.
        top_k: or None.
        calibration: a text was given.

    Raises:
        UsageError: an unknown loss, a number out of range, or options and recipe that contradict each other.
    """
    if loss not in DEFAULTS:
        raise UsageError(f"There is no loss {loss!r}", where="--loss", do=f"use one of {', '.join(get_args(Loss))}")
    kind: Loss = loss
    default = DEFAULTS[kind]
    _check_recipe(recipe, kind)
    for name, value, least in (("steps", steps, 1), ("sequences", sequences, 2), ("top-k", top_k, 1)):
        if value is not None and value < least:
            raise UsageError(f"--{name} {value} is too few", where=f"--{name}", do=f"give {least} or more")
    if rate is not None and not 0 < rate <= 1:
        raise UsageError(f"--rate {rate:g} is out of range", where="--rate", do="give a number above 0, at most 1")
    if kind == "data-free":
        given = [name for name, there in (("--calibration", calibration), ("--sequences", sequences)) if there]
        if given:
            raise UsageError("The data-free loss reads no text", where=given[0], do="leave it out, or use --loss local")
    if top_k is not None and kind != "kl":
        raise UsageError("--top-k is for the loss kl", where="--top-k", do="leave it out, or use --loss kl")
    return Settings(
        kind,
        default.steps if steps is None else steps,
        default.rate if rate is None else rate,
        recipe.seed,
        default.sequences if sequences is None else sequences,
        top_k=top_k,
    )


def _check_recipe(recipe: Recipe, loss: Loss) -> None:
    if recipe.rotations not in ("hadamard", "random", "block-hadamard"):
        raise UsageError(
            f"Learning cannot start from rotations {recipe.rotations or 'none'}",
            where="recipe field 'rotations'",
            do="use hadamard, random or block-hadamard",
        )
    rounded = (recipe.weights, recipe.activations, recipe.kv)
    if loss != "data-free" and all(value is None for value in rounded):
        raise UsageError(
            f"The recipe {recipe.name} rounds no weight, no activation and no cache: there is no error to lower",
            where="--recipe",
            why="learned rotations serve rounding, which is part of the loss",
            do="name a recipe that quantizes, such as w4a4kv4",
        )
