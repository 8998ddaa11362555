"""What a recipe and a plan must have to do with each other before any work is done."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from graphrot.analysis.types import Refusal
from graphrot.errors import InputRefused, UsageError
from graphrot.plan.types import RotationPlan
from graphrot.recipe import Recipe, resolve_recipe


def follow(plan: RotationPlan, recipe: Recipe, overrides: Mapping[str, Any]) -> Recipe:
    """The recipe with the rotations of a replayed plan.

    Raises:
        UsageError: an option asks for other rotations than the plan has.
    """
    fields = ("rotations", "only", "seed", "online_r1", *(("bits",) if plan.grids else ()))
    for name in fields:
        if name in overrides:
            raise UsageError(
                f"--{name.replace('_', '-')} and --plan contradict each other",
                where="--plan",
                why="a plan names its rotations, and the grids of weights, one by one",
                do="leave one of the two out",
            )
    same = {name: plan.recipe[name] for name in fields if name in plan.recipe}
    if same.get("rotations", "") is None:
        same = {"rotations": None}
    followed = resolve_recipe(recipe, name=recipe.name, **same)
    if plan.tie is not None and followed.embedding != followed.head:
        raise UsageError(
            "The plan keeps one table for embedding and head, and the recipe quantizes them differently",
            where=f"embedding {followed.embedding or 'none'}, head {followed.head or 'none'}",
            do="give both the same, or make a new plan",
        )
    return followed


def same_source(plan: RotationPlan, sha256: str) -> RotationPlan:
    """The plan, if it was made for the source of this hash.

    Raises:
        UsageError: it was not.
    """
    if plan.source_hash != sha256:
        raise UsageError(
            "The plan was made for another source",
            where=f"plan: {plan.source_hash[:12]}, source: {sha256[:12]} (sha256)",
            do="make a new plan by converting without --plan",
        )
    return plan


def refuse_less(plan: RotationPlan, recipe: Recipe, *, allow_partial: bool) -> None:
    """Rotating less than was asked for needs the user's word.

    Raises:
        InputRefused: nothing can be rotated, or a site of the asked kinds is refused.
    """
    refused = _grouped(plan.refusals)
    changes = dict.fromkeys(r.change for r in plan.refusals if r.change)
    why = "; ".join(f"what would change it: {change}" for change in changes) or None
    found = {rotation.space.kind for rotation in plan.rotations}
    named = {refusal.kind for refusal in plan.refusals}
    missing = [kind for kind in recipe.only or () if kind not in found | named]
    if not plan.rotations:
        raise InputRefused(
            "Nothing in this model can be rotated",
            where=refused or f"no site of {', '.join(recipe.sites)}",
            why=why,
            do="see graphrot inspect; --rotations none quantizes without rotation",
        )
    if (plan.refusals or missing) and not allow_partial:
        raise InputRefused(
            "Not everything that was asked for can be rotated",
            where="; ".join([*([refused] if refused else []), *(f"no site of {kind}" for kind in missing)]),
            why=why,
            do="--allow-partial goes on with the rest; --only names what to rotate",
        )


def _grouped(refusals: Sequence[Refusal]) -> str:
    """Refusals of one kind, operator and reason in one phrase, by the first node."""
    groups: dict[tuple[str, str, str], list[str]] = {}
    for refusal in refusals:
        groups.setdefault((refusal.kind, refusal.op, refusal.reason), []).append(refusal.node)
    return "; ".join(
        f"{kind} at {nodes[0]} ({op}{f', and {len(nodes) - 1} more' if len(nodes) > 1 else ''}): {reason}"
        for (kind, op, reason), nodes in groups.items()
    )
