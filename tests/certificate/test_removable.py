"""What a control can leave out: every consumer in its turn, so that a harmless one does not make it blind."""

from __future__ import annotations

from graphrot.analysis.types import OnlineUse, RotationSpace, WeightUse
from graphrot.evaluate.certificate import removable
from graphrot.plan.types import MatrixRef, Rotation, RotationPlan

_RUNS = ((0, 1, 4),)


def _use(node: str) -> WeightUse:
    return WeightUse(node, "MatMul", 1, f"{node}.weight", 0, (_RUNS,))


def test_one_of_each_rotation_comes_first_and_the_others_after() -> None:
    matrix = MatrixRef("hadamard", 4)
    merged = RotationSpace("R1.0", "R1", "merged", 4, consumers=(_use("a"), _use("b"), _use("c")))
    online = RotationSpace("R3.0", "R3", "online", 4, online=tuple(OnlineUse(t, "Add", (_RUNS,), 4) for t in "qk"))
    rotations = tuple(Rotation(space, matrix, space.placement) for space in (merged, online))
    found = removable(RotationPlan("0", {}, (), rotations, ()))
    names = [use.node if isinstance(use, WeightUse) else use.tensor for _, use in found]
    assert names == ["a", "q", "b", "c", "k"]
