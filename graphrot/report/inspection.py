"""What ``graphrot inspect`` says about a graph."""

from __future__ import annotations

from dataclasses import asdict

from pydantic import BaseModel, ConfigDict, Field

from graphrot.analysis.types import Facts, OnlineUse, RotationSpace, WeightUse, places
from graphrot.plan.means import mean_note, mean_refusal


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Site(_Part):
    """A place for a rotation.

    ``blocks`` counts how often the matrix of size ``dim`` stands on the widest tensor it touches (heads,
    for R2 and R3). Producers and consumers are tensor names; the producers of an online site are the
    run-time tensors that the transform follows. ``mean`` (not in the JSON form) says what becomes of the mean that a
    LayerNorm takes away: ``folded`` (into the producers, and any matrix is allowed), or why the matrix must keep it;
    empty without one.
    """

    kind: str
    placement: str
    dim: int
    blocks: int
    producers: list[str]
    consumers: list[str]
    mean: str = Field(default="", exclude=True)


class RefusedSite(_Part):
    """A place where a rotation is not possible, and what would change that."""

    kind: str
    node: str
    op: str
    reason: str
    change: str


class Inspection(_Part):
    """Sites and refusals of one graph.

    R1 that is an option is refused, with the option in ``change``. Sites of kind O, which stand beside the others and
    are taken only where ``only`` names them, are the ``options`` (not in the JSON form).
    """

    sites: list[Site]
    options: list[Site] = Field(default=[], exclude=True)
    refused: list[RefusedSite]
    nodes: int
    opset: int


def inspection(facts: Facts) -> Inspection:
    """Facts in the form that is printed."""
    found = ((space, mean_refusal(space)) for space in facts.spaces if space.kind != "other")
    refused = {space.id: (space, refusal) for space, refusal in found if refusal is not None}
    # What an option cannot free either is refused for its mean alone.
    instead = {(space.kind, place) for space, _ in refused.values() if space.optional for place in places(space)}
    refusals = [refusal for refusal in facts.refused if (refusal.kind, refusal.node) not in instead]
    refusals += [refusal for _, refusal in refused.values()]
    taken = [space for space in facts.spaces if not space.optional and space.id not in refused]
    return Inspection(
        sites=[_site(space) for space in taken if space.kind != "O"],
        options=[_site(space) for space in taken if space.kind == "O"],
        refused=[RefusedSite(**asdict(refusal)) for refusal in refusals],
        nodes=facts.nodes,
        opset=facts.opset,
    )


def _site(space: RotationSpace) -> Site:
    uses: list[WeightUse | OnlineUse] = [*space.producers, *space.online, *space.consumers]
    return Site(
        kind=space.kind,
        placement=space.placement,
        dim=space.dim,
        blocks=max((len(use.groups) for use in uses), default=1),
        producers=[u.tensor for u in space.producers] + [u.tensor for u in space.online],
        consumers=[u.tensor for u in space.consumers],
        mean="folded" if space.mean_folds else mean_note(space),
    )
