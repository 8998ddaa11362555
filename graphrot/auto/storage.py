"""What a linear's weight takes in the written file on a grid: codes, scales, zero points, padding.

The same count as ``sizes.bits_per_weight`` of ``graphrot.json``, known before anything is written. Constants that all
linears of one shape share (the ones that MatMulNBits takes for scales) are a cost of the shape, not of a linear; and
where it depends on the graph whether a scale is float16, it counts as float32. So the count is never too low.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from graphrot.analysis.types import LinearRef
from graphrot.emit.nbits import BlockLayout
from graphrot.ops.rotated_matmul import GROUPS
from graphrot.passes.quantize_nodes import channel_block
from graphrot.quant.grid import WeightGrid
from graphrot.recipe import Recipe


@dataclass(frozen=True)
class Storage:
    """How the recipe's target stores weights."""

    portable: bool
    ours: bool
    """Inputs are rounded and multiplied by graphrot's own operator."""
    float16: bool
    rounds: bool
    """Activations are rounded to 8 bits."""

    @classmethod
    def of(cls, recipe: Recipe) -> Storage:
        """The storage of a recipe whose dtype is settled."""
        portable = recipe.target == "portable"
        ours = not portable and recipe.kernels == "graphrot" and recipe.activation_bits is not None
        return cls(portable, ours, recipe.dtype == "float16", recipe.activation_bits == 8)

    def bits(self, linear: LinearRef, grid: WeightGrid) -> int:
        """Stored bits of one weight."""
        n, k = linear.out_features, linear.in_features
        one = grid.group is None or grid.group >= k
        block = channel_block(k) if one or grid.group is None else grid.group
        layout = BlockLayout(block, -(-k // block))
        single = self._scale_bits(grid, one=one)
        if self.portable:
            per_block = grid.bits == 4 and grid.group is None
            zeros = 0 if grid.symmetric else (layout.blocks if per_block else grid.groups(k)) * grid.bits
            return n * (k * grid.bits + grid.groups(k) * single + zeros)
        repeated = not self.ours and grid.bits == 8
        scales = layout.blocks if not one or repeated else 1
        zeros = 0 if grid.symmetric else 8 * -(-layout.blocks * grid.bits // 8)
        return n * (layout.padded * grid.bits + scales * single + zeros)

    def shared_bits(self, linears: Iterable[LinearRef], grids: Iterable[WeightGrid]) -> int:
        """Bits of the constants that linears share, should any of them have one scale per channel."""
        groups = [grid.group for grid in grids if grid.bits == 4]
        if self.portable or self.ours or not groups:
            return 0
        shapes = {
            (linear.out_features, -(-linear.in_features // channel_block(linear.in_features)))
            for linear in linears
            if any(group is None or group >= linear.in_features for group in groups)
        }
        return sum(32 * n * blocks for n, blocks in shapes)

    def _scale_bits(self, grid: WeightGrid, *, one: bool) -> int:
        if not self.float16 or (self.ours and one) or (not self.portable and not self.ours and self._level4(grid)):
            return 32
        return 16

    def _level4(self, grid: WeightGrid) -> bool:
        """Whether MatMulNBits rounds its input: then its scales may have to stay float32."""
        return self.rounds or grid.bits == 8


def candidates(recipe: Recipe) -> tuple[WeightGrid, ...]:
    """The grids that a weight may get, the recipe's own first: finer groups, zero points, and 8 bits.

    Those of 8 bits have one scale per channel, which is fine enough, and no zero points.
    """
    own = WeightGrid(4, recipe.group_size, symmetric=recipe.symmetric is not False)
    groups = [group for group in (None, *reversed(GROUPS)) if _finer(group, own.group)]
    found = [WeightGrid(4, group, symmetric=symmetric) for group in groups for symmetric in (True, False)]
    return tuple(dict.fromkeys((own, *found, WeightGrid(8))))


def _finer(group: int | None, than: int | None) -> bool:
    return than is None or (group is not None and group <= than)


def grid_name(grid: WeightGrid) -> str:
    """A grid in a word, such as ``int4/channel``, ``int4/64`` or ``int4/64/asymmetric``."""
    return f"int{grid.bits}/{grid.group or 'channel'}" + ("" if grid.symmetric else "/asymmetric")
