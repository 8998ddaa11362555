"""Weights as functions of rotations: a :class:`~graphrot.folded.FoldedTensor` in torch."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence

import numpy as np
import onnx_ir as ir
import torch

from graphrot.analysis.types import Runs, decode_runs
from graphrot.errors import UsageError
from graphrot.folded import Center, Edit, FoldedTensor, Rotate, Scale, Shift
from graphrot.graph import read_constant
from graphrot.plan.types import MatrixRef
from graphrot.rotation.orthogonal import build_matrix


class Matrices:
    """The rotations of one run, by the key of their :class:`~graphrot.plan.types.MatrixRef`.

    Args:
        given: ``[dim, dim]`` each; converted to ``dtype`` once.
        dtype: of the run.
        plain: every learnable rotation is the identity, and is left out.
    """

    def __init__(self, given: Mapping[str, torch.Tensor], dtype: torch.dtype, *, plain: bool = False) -> None:
        self.plain = plain
        self._given = given
        self._dtype = dtype
        self._made: dict[MatrixRef, torch.Tensor] = {}

    def of(self, rotate: Rotate) -> torch.Tensor:
        """The matrix ``[dim, dim]`` that an edit names; one that is not learned is built.

        Raises:
            UsageError: it was not given, or has another size.
        """
        key = rotate.matrix
        if key not in self._made:
            self._made[key] = self._find(rotate).to(self._dtype)
        return self._made[key]

    def _find(self, rotate: Rotate) -> torch.Tensor:
        if not is_learnable(rotate):
            return torch.from_numpy(build_matrix(rotate.matrix).dense())
        key, dim = rotate.matrix.key or "", rotate.matrix.dim
        if key not in self._given:
            raise UsageError("A rotation has no matrix", where=f"key {key!r}", do="give one for every key")
        if tuple(self._given[key].shape) != (dim, dim):
            raise UsageError(
                f"A matrix has shape {list(self._given[key].shape)}, and its space {dim} channels",
                where=f"key {key!r}",
            )
        return self._given[key]


def is_learnable(edit: Edit) -> bool:
    """Whether an edit takes a matrix that a run gives."""
    return isinstance(edit, Rotate) and edit.matrix.construction == "file" and edit.matrix.key is not None


class TorchWeight:
    """A constant operand: numbers, and what is still done to them.

    Edits in front of the first learnable one are made once, in float64, and so are those behind it that act along
    other axes than all learnable ones before them: linear maps along different axes commute.

    Args:
        value: an initializer (pending edits or not), or what is computed from constants.
        dtype: of the numbers.
    """

    def __init__(self, value: ir.Value, dtype: torch.dtype) -> None:
        content = value.const_value
        done: tuple[Edit, ...] = ()
        self.tail: tuple[Edit, ...] = ()
        if isinstance(content, FoldedTensor):
            done, self.tail = _parted(content.edits)
            base = content.base
            numbers = FoldedTensor(base, done, content.name or "").exact() if done else base.numpy()
            made = torch_copy(numbers, dtype)
            if isinstance(base, ir.ExternalTensor):
                del numbers
                with contextlib.suppress(BufferError):
                    base.release()
        else:
            made = torch_copy(read_constant(value), dtype)
        self.base = made

    def numbers(self, matrices: Matrices) -> torch.Tensor:
        """The operand, differentiable in the matrices."""
        return self.edited(self.base, self.tail, matrices)

    def rows(self, index: torch.Tensor, matrices: Matrices) -> torch.Tensor | None:
        """Rows of a table, edited after they were picked; None where edits act across rows."""
        if self.base.ndim != 2 or any(edit.axis != 1 for edit in self.tail):
            return None
        return self.edited(self.base[index], self.tail, matrices, axis=-1)

    def times(self, x: torch.Tensor, matrices: Matrices) -> torch.Tensor | None:
        """``x @ W`` with the rotations made on ``x`` and on the product, where that is cheaper; else None."""
        if self.base.ndim != 2 or matrices.plain or not self.tail:
            return None
        k, n = self.base.shape
        tokens = x.numel() // max(k, 1)
        before = [edit for edit in self.tail if isinstance(edit, Rotate) and edit.axis == 0]
        after = [edit for edit in self.tail if isinstance(edit, Rotate) and edit.axis == 1]
        if len(before) + len(after) != len(self.tail) or tokens * (len(before) * k + len(after) * n) >= k * n * len(
            self.tail
        ):
            return None
        for edit in reversed(before):
            x = _rotated(x, edit.groups, matrices.of(edit), inverse=not edit.inverse, axis=-1)
        return self.edited(x @ self.base, after, matrices, axis=-1)

    def edited(
        self, numbers: torch.Tensor, edits: Sequence[Edit], matrices: Matrices, axis: int | None = None
    ) -> torch.Tensor:
        """Make edits, along ``axis`` instead of their own if it is given."""
        for edit in edits:
            along = edit.axis if axis is None else axis
            if isinstance(edit, Rotate):
                if not (matrices.plain and is_learnable(edit)):
                    numbers = _rotated(numbers, edit.groups, matrices.of(edit), inverse=edit.inverse, axis=along)
            elif isinstance(edit, Scale):
                numbers = numbers * _along(edit.factors, numbers, along)
            elif isinstance(edit, Shift):
                numbers = numbers + _along(edit.values, numbers, along)
            else:
                assert isinstance(edit, Center), edit
                numbers = _centred(numbers, edit, along)
        return numbers


def torch_copy(array: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    """A tensor of its own; floats become ``dtype``, other types stay."""
    kind = array.dtype
    if kind.kind == "f" or kind.name in ("bfloat16", "float16"):
        wide = np.float64 if dtype == torch.float64 else np.float32
        return torch.from_numpy(np.array(array, dtype=wide, order="C"))
    if kind.kind == "u" and kind.itemsize > 1:
        return torch.from_numpy(np.array(array, dtype=np.int64, order="C"))
    return torch.from_numpy(np.array(array, order="C"))


def _parted(edits: Sequence[Edit]) -> tuple[tuple[Edit, ...], tuple[Edit, ...]]:
    """Edits that can be made at once, and those that wait for matrices."""
    now: list[Edit] = []
    later: list[Edit] = []
    for edit in edits:
        waits = is_learnable(edit) or not all(_commute(edit, other) for other in later)
        (later if waits else now).append(edit)
    return tuple(now), tuple(later)


def _commute(one: Edit, other: Edit) -> bool:
    """Whether two edits may be made in either order: along different axes, or at different positions of one."""
    if isinstance(one, Shift) or isinstance(other, Shift):
        return False
    if one.axis != other.axis:
        return True
    if isinstance(one, Scale) or isinstance(other, Scale):
        return False
    first, second = (_positions(edit.groups).reshape(-1) for edit in (one, other) if isinstance(edit, Rotate | Center))
    return not bool(torch.isin(first, second).any())


def _rotated(
    x: torch.Tensor, groups: Sequence[Runs], matrix: torch.Tensor, *, inverse: bool, axis: int
) -> torch.Tensor:
    """``v @ Q`` (or ``v @ Q.T``) for every group of positions along ``axis``."""
    index = _positions(groups)
    q = matrix.T if inverse else matrix
    count, dim = index.shape
    axis %= x.ndim
    size = x.shape[axis]
    whole = index.numel() == size and bool((index.reshape(-1) == torch.arange(size)).all())
    if whole and axis == x.ndim - 1:
        return (x.reshape(*x.shape[:-1], count, dim) @ q).reshape(x.shape)
    if whole and axis == 0:
        return (q.T @ x.reshape(count, dim, -1)).reshape(x.shape)
    moved = x.movedim(axis, -1)
    if whole:
        result = (moved.reshape(*moved.shape[:-1], count, dim) @ q).reshape(moved.shape)
    else:
        result = moved.index_copy(-1, index.reshape(-1), (moved[..., index] @ q).flatten(-2))
    return result.movedim(-1, axis)


def _positions(groups: Sequence[Runs]) -> torch.Tensor:
    return torch.tensor(np.asarray([decode_runs(group) for group in groups], dtype=np.int64))


def _along(numbers: Sequence[float], like: torch.Tensor, axis: int) -> torch.Tensor:
    shape = [1] * like.ndim
    shape[axis] = len(numbers)
    return torch.tensor(numbers, dtype=like.dtype).reshape(shape)


def _centred(x: torch.Tensor, edit: Center, axis: int) -> torch.Tensor:
    moved = x.movedim(axis, -1)
    for group in edit.groups:
        index = torch.tensor(decode_runs(group), dtype=torch.int64)
        part = moved[..., index]
        moved = moved.index_copy(-1, index, part - part.mean(-1, keepdim=True))
    return moved.movedim(-1, axis)
