"""The graph-rewrite passes, one a file, in the order in which they run.

1. :class:`~graphrot.passes.tie_table.TieTable`
2. :class:`~graphrot.passes.split_gains.SplitGains`
3. :class:`~graphrot.passes.fold_gains.FoldGains`
4. :class:`~graphrot.passes.fold_means.FoldMeans`
5. :class:`~graphrot.passes.fold_rotations.FoldRotations`
6. :class:`~graphrot.passes.insert_online.InsertOnline`
7. :class:`~graphrot.passes.share_table.ShareTable`
8. :class:`~graphrot.passes.share_shapes.ShareShapes`

Up to here every pass keeps the model's outputs. The quantizing passes follow.
"""

from __future__ import annotations

from graphrot.passes.base import GraphPass, PassReport
from graphrot.passes.fold_gains import FoldGains
from graphrot.passes.fold_means import FoldMeans
from graphrot.passes.fold_rotations import FoldRotations
from graphrot.passes.insert_online import InsertOnline
from graphrot.passes.share_shapes import ShareShapes
from graphrot.passes.share_table import ShareTable
from graphrot.passes.split_gains import SplitGains
from graphrot.passes.tie_table import TieTable

ROTATION_PASSES: tuple[type[GraphPass], ...] = (
    TieTable,
    SplitGains,
    FoldGains,
    FoldMeans,
    FoldRotations,
    InsertOnline,
    ShareTable,
    ShareShapes,
)

__all__ = [
    "ROTATION_PASSES",
    "FoldGains",
    "FoldMeans",
    "FoldRotations",
    "GraphPass",
    "InsertOnline",
    "PassReport",
    "ShareShapes",
    "ShareTable",
    "SplitGains",
    "TieTable",
]
