"""Blocks of channels that one matrix may act on, by partition refinement.

Channels start in one block per source. Keys split blocks at once; edges carry splits from one source to
the next until nothing changes. Union-find over the edges gives every channel its *coordinate*: channels
of one coordinate take the same row of the same matrix. A block that holds one coordinate twice falls
apart.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from graphrot.analysis.labels import SourceTable, combine
from graphrot.analysis.visit import Record


class Partition:
    """The coarsest partition that all records allow.

    Args:
        table: the sources.
        records: what the nodes say.
        alone: further channels that must stay alone.
    """

    def __init__(self, table: SourceTable, records: Iterable[Record], alone: np.ndarray | None = None) -> None:
        self.total = table.total
        records = list(records)
        self.source_of = table.index_of(np.arange(self.total))
        self.block_of = self._by_keys(records, alone)
        left = [e.left for r in records for e in r.edges]
        right = [e.right for r in records for e in r.edges]
        weights = [e.weights for r in records for e in r.edges]
        empty = np.zeros(0, dtype=np.int64)
        self._left = np.concatenate([*left, empty])
        self._right = np.concatenate([*right, empty])
        self._weights = np.concatenate([*weights, empty.astype(np.uint64)])
        self.coordinate_of = components(self.total, self._left, self._right)
        self._by_edges()
        self.blocks = self._collect()

    def _by_keys(self, records: list[Record], alone: np.ndarray | None) -> np.ndarray:
        signature = np.zeros(self.total, dtype=np.uint64)
        single = np.zeros(self.total, dtype=bool)
        for record in records:
            for key in record.keys:
                signature[key.ids] += key.sums
            for block in record.blocks:
                single[block.ids] = True
        if alone is not None:
            single[alone] = True
        return _classes(self.source_of, signature, np.where(single, np.arange(self.total), -1))

    def _by_edges(self) -> None:
        """Refine along edges until nothing changes, then break blocks with a repeated coordinate, and again."""
        while self._split(broken=False) or self._split(broken=True):
            pass

    def _split(self, *, broken: bool) -> bool:
        """Split blocks of two channels or more once; returns whether there was anything to split.

        Args:
            broken: split the blocks that hold one coordinate twice into single channels; otherwise split
                by the blocks that edges lead to.
        """
        count = int(self.block_of.max(initial=-1)) + 1
        sizes = np.bincount(self.block_of, minlength=count)
        active = np.flatnonzero(sizes[self.block_of] > 1)
        if not active.size:
            return False
        blocks = self.block_of[active]
        if broken:
            coordinates = self.coordinate_of[active]
            order = np.lexsort((coordinates, blocks))
            twice = np.flatnonzero((np.diff(blocks[order]) == 0) & (np.diff(coordinates[order]) == 0))
            refined = _classes(blocks, np.where(np.isin(blocks, blocks[order][twice]), active, -1))
        else:
            signature = np.zeros(self.total, dtype=np.uint64)
            np.add.at(signature, self._left, combine(self._weights, self.block_of[self._right], 1))
            np.add.at(signature, self._right, combine(self._weights, self.block_of[self._left], 2))
            refined = _classes(blocks, signature[active])
        if int(refined.max()) + 1 == np.unique(blocks).size:
            return False
        self.block_of[active] = count + refined
        self.block_of = np.unique(self.block_of, return_inverse=True)[1].reshape(-1)
        return True

    def _collect(self) -> dict[int, np.ndarray]:
        """Ids of every block of two channels or more, in the order of their coordinates."""
        order = np.lexsort((self.coordinate_of, self.block_of))
        starts = np.flatnonzero(np.r_[True, np.diff(self.block_of[order]) != 0]) if order.size else order
        parts = np.split(order, starts[1:]) if order.size else []
        return {int(self.block_of[part[0]]): part for part in parts if part.size > 1}


def _classes(*columns: np.ndarray) -> np.ndarray:
    """Number the distinct rows of some columns from zero."""
    return np.unique(combine(*columns), return_inverse=True)[1].reshape(-1)


def components(total: int, left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """The smallest id that each id is connected with (label propagation with pointer jumping)."""
    root = np.arange(total)
    while left.size:
        low = np.minimum(root[left], root[right])
        np.minimum.at(root, root[left], low)
        np.minimum.at(root, root[right], low)
        while True:
            further = root[root]
            if np.array_equal(further, root):
                break
            root = further
        apart = root[left] != root[right]
        left, right = left[apart], right[apart]
    return root
