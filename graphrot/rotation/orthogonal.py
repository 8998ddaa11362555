"""Orthogonal matrices by reference: choose one for a size, rebuild it, and rotate arrays by it.

Row convention: ``x' = x @ Q``. A signed Hadamard is ``Q = diag(signs) @ H / sqrt(n)``. Numbers are
float64 throughout; nothing here depends on global state, and equal references give equal matrices.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from graphrot.errors import InputRefused, UsageError
from graphrot.plan.types import MatrixRef
from graphrot.rotation.file import matrix_of
from graphrot.rotation.hadamard import (
    MAX_FACTOR,
    Decomposition,
    Float64Array,
    decomposition,
    factor_matrix,
    hadamard_decomposition,
    transform,
)

RotationKind = Literal["hadamard", "random", "block-hadamard"]

_SMALLEST_BLOCK = 4


class Orthogonal(ABC):
    """An orthogonal matrix ``Q [dim, dim]`` that acts on vectors along an axis of an array."""

    dim: int

    @abstractmethod
    def rotate(self, array: ArrayLike, axis: int) -> Float64Array:
        """Every vector v along ``axis`` (length ``dim``) becomes ``v @ Q``; a new float64 array.

        This is ``W @ Q`` for a producer (axis: its outputs) and ``Q.T @ W`` for a consumer (axis: its inputs).
        """

    @abstractmethod
    def rotate_back(self, array: ArrayLike, axis: int) -> Float64Array:
        """The inverse of :meth:`rotate`: every v becomes ``v @ Q.T``."""

    def dense(self) -> Float64Array:
        """Q written out, ``[dim, dim] float64``."""
        return self.rotate(np.eye(self.dim), 1)

    def _check(self, array: ArrayLike, axis: int) -> NDArray[Any]:
        checked = np.asarray(array)
        if checked.shape[axis] != self.dim:
            raise UsageError(
                f"A rotation of size {self.dim} cannot act on {checked.shape[axis]} channels",
                where=f"axis {axis} of shape {checked.shape}",
            )
        return checked


class SignedHadamard(Orthogonal):
    """``Q = diag(signs) @ blockdiag(H, ..., H)``, H the orthogonal transform of one decomposition."""

    def __init__(self, dim: int, split: Decomposition, signs: Float64Array | None) -> None:
        self.dim = dim
        self.split = split
        self.signs = signs

    def rotate(self, array: ArrayLike, axis: int) -> Float64Array:
        return transform(self._check(array, axis), self.split, axis=axis, signs=self.signs)

    def rotate_back(self, array: ArrayLike, axis: int) -> Float64Array:
        return transform(self._check(array, axis), self.split, axis=axis, transpose=True, signs=self.signs)


class MeanPreservingHadamard(Orthogonal):
    """``Q = G.T @ diag(signs) @ G`` per block, G a Hadamard transform with a constant first row.

    ``G @ 1 = sqrt(n) e_1`` and the first sign is +1, so that ``Q @ 1 = 1``. Q is symmetric.
    """

    def __init__(self, dim: int, split: Decomposition, signs: Float64Array) -> None:
        self.dim = dim
        self.split = split
        first_row = np.kron(np.sign(factor_matrix(split)[0].astype(np.float64)), np.ones(1 << split.levels))
        self._columns: Float64Array = np.tile(first_row, dim // split.size)
        self._signs = signs.copy()
        self._signs[:: split.size] = 1.0

    def rotate(self, array: ArrayLike, axis: int) -> Float64Array:
        # G = H @ diag(columns): v @ G.T multiplies first, v @ G last.
        middle = transform(
            self._times(self._check(array, axis), self._columns, axis), self.split, axis=axis, transpose=True
        )
        return self._times(transform(middle, self.split, axis=axis, signs=self._signs), self._columns, axis)

    def rotate_back(self, array: ArrayLike, axis: int) -> Float64Array:
        return self.rotate(array, axis)

    @staticmethod
    def _times(array: NDArray[Any], vector: Float64Array, axis: int) -> Float64Array:
        shape = [1] * array.ndim
        shape[axis] = len(vector)
        return np.asarray(array * vector.reshape(shape), np.float64)


class DenseOrthogonal(Orthogonal):
    """Q held as numbers, ``[dim, dim] float64``."""

    def __init__(self, matrix: Float64Array) -> None:
        self.dim = len(matrix)
        self._matrix = matrix

    def rotate(self, array: ArrayLike, axis: int) -> Float64Array:
        return self._apply(array, axis, self._matrix)

    def rotate_back(self, array: ArrayLike, axis: int) -> Float64Array:
        return self._apply(array, axis, self._matrix.T)

    def dense(self) -> Float64Array:
        return self._matrix.copy()

    def _apply(self, array: ArrayLike, axis: int, matrix: Float64Array) -> Float64Array:
        rows = np.moveaxis(self._check(array, axis), axis, -1)
        product: Float64Array = rows.astype(np.float64) @ matrix
        return np.moveaxis(product, -1, axis)


def choose_matrix(dim: int, *, rotations: RotationKind, seed: int | None, mean_preserving: bool = False) -> MatrixRef:
    """Pick the matrix for a space of ``dim`` channels.

    Args:
        dim: number of channels.
        rotations: the kind wanted. ``hadamard`` falls back to Hartley's matrix of the odd part (times
            Sylvester), or to a block-diagonal Hadamard, and says so in the note.
        seed: seed of the signs (or of the random matrix); None: no signs.
        mean_preserving: Q must map the all-ones vector to itself.

    Raises:
        UsageError: random without a seed, signs needed but no seed, or a size that the kind cannot serve.
    """
    if dim < 1:
        raise UsageError(f"A rotation needs at least one channel, not {dim}")
    if seed is None and (mean_preserving or rotations == "random"):
        what = "A mean-preserving rotation" if mean_preserving else "A random rotation"
        raise UsageError(f"{what} needs a seed", do="give a seed")
    if rotations == "random":
        return MatrixRef("random", dim, seed=seed, mean_preserving=mean_preserving)
    if rotations == "block-hadamard":
        return _block_reference(dim, seed=seed, mean_preserving=mean_preserving, note="")
    if rotations != "hadamard":
        raise UsageError(f"Unknown kind of rotation {rotations!r}", do="use hadamard, random or block-hadamard")
    if hadamard_decomposition(dim) is not None:
        return MatrixRef("hadamard", dim, seed=seed, mean_preserving=mean_preserving)
    power = dim & -dim
    missing = f"no Hadamard matrix of size {dim} = {dim // power} * {power} can be constructed"
    if dim // power <= MAX_FACTOR:
        note = f"{missing}; Hartley({dim // power}) (x) Sylvester({power}) is used"
        return MatrixRef("hartley", dim, seed=seed, mean_preserving=mean_preserving, note=note)
    return _block_reference(
        dim,
        seed=seed,
        mean_preserving=mean_preserving,
        note=f"{missing}; {dim // power} blocks of Hadamard({power}) are used",
    )


def _block_reference(dim: int, *, seed: int | None, mean_preserving: bool, note: str) -> MatrixRef:
    block = dim & -dim
    if block < _SMALLEST_BLOCK:
        raise UsageError(
            f"A block-diagonal Hadamard matrix of size {dim} has blocks of {block}",
            why="that spreads nothing",
            do="use random rotations for this model",
        )
    return MatrixRef("block-hadamard", dim, block=block, seed=seed, mean_preserving=mean_preserving, note=note)


def reference_split(ref: MatrixRef) -> Decomposition:
    """The decomposition of one block of a structured reference (hadamard, hartley, block-hadamard).

    Raises:
        UsageError: the reference has no such structure, or its size cannot be built that way.
    """
    if ref.construction == "block-hadamard":
        if ref.block is None or ref.block < 1 or ref.dim % ref.block:
            raise UsageError(f"Blocks of {ref.block} do not divide {ref.dim} channels", where="matrix reference")
        split: Decomposition | None = hadamard_decomposition(ref.block)
    elif ref.construction == "hadamard":
        split = hadamard_decomposition(ref.dim)
    elif ref.construction == "hartley":
        split = decomposition(ref.dim)
        if split.is_hadamard:
            raise UsageError(f"Size {ref.dim} has a Hadamard matrix; 'hartley' stands for sizes that have none")
    else:
        raise UsageError(f"A matrix of construction {ref.construction!r} has no fast transform")
    if split is None:
        raise UsageError(
            f"No Hadamard matrix of size {ref.block or ref.dim} can be constructed", where="matrix reference"
        )
    return split


def build_matrix(ref: MatrixRef) -> Orthogonal:
    """Rebuild the matrix that a reference names.

    Raises:
        UsageError: the reference contradicts itself.
        InputRefused: the file is absent, lacks the key, or holds no orthogonal matrix of this size.
    """
    if ref.construction == "file":
        return DenseOrthogonal(_read_matrix(ref))
    if ref.construction == "random":
        if ref.seed is None:
            raise UsageError("A random rotation needs a seed", where="matrix reference")
        return DenseOrthogonal(_random_matrix(ref.dim, ref.seed, mean_preserving=ref.mean_preserving))
    split = reference_split(ref)
    signs = None if ref.seed is None else random_signs(ref.dim, ref.seed)
    if not ref.mean_preserving:
        return SignedHadamard(ref.dim, split, signs)
    if signs is None:
        raise UsageError("A mean-preserving rotation needs a seed", where="matrix reference")
    return MeanPreservingHadamard(ref.dim, split, signs)


def random_signs(count: int, seed: int) -> Float64Array:
    """``[count]`` of +-1 from the raw bits of PCG64, whose stream is the same on every platform and NumPy."""
    words = np.random.PCG64(seed).random_raw(-(-count // 64)).astype("<u8")
    bits = np.unpackbits(words.view(np.uint8), bitorder="little")[:count]
    return 1.0 - 2.0 * bits.astype(np.float64)


def _haar(dim: int, generator: np.random.Generator) -> Float64Array:
    """Uniform over the orthogonal group: QR of a Gaussian matrix, signs fixed by R's diagonal (Mezzadri, 2007)."""
    q, r = np.linalg.qr(generator.standard_normal((dim, dim)))
    return np.asarray(q * np.where(np.diag(r) < 0, -1.0, 1.0), np.float64)


def _random_matrix(dim: int, seed: int, *, mean_preserving: bool) -> Float64Array:
    generator = np.random.default_rng(seed)
    if not mean_preserving or dim == 1:
        return _haar(dim, generator) if not mean_preserving else np.ones((1, 1))
    # The reflection P swaps e_1 and 1/sqrt(n); P blockdiag(1, O) P keeps the all-ones vector.
    middle = np.eye(dim)
    middle[1:, 1:] = _haar(dim - 1, generator)
    direction = np.full(dim, dim**-0.5)
    direction[0] -= 1.0
    reflection = np.eye(dim) - 2.0 * np.outer(direction, direction) / (direction @ direction)
    return np.asarray(reflection @ middle @ reflection, np.float64)


def _read_matrix(ref: MatrixRef) -> Float64Array:
    """A learned matrix from a safetensors file, moved to the nearest orthogonal one in float64."""
    if ref.file is None or ref.key is None:
        raise UsageError("A matrix from a file needs the file and the key", where="matrix reference")
    matrix = matrix_of(ref.file, ref.key, ref.sha256)
    where = f"{ref.file} key {ref.key!r}"
    if matrix.shape != (ref.dim, ref.dim):
        raise InputRefused(
            f"The matrix has shape {matrix.shape}, and the model needs {(ref.dim, ref.dim)}", where=where
        )
    if ref.mean_preserving and np.abs(matrix @ np.ones(ref.dim) - 1.0).max() > 1e-10:
        raise InputRefused(
            "The matrix does not keep the all-ones vector",
            where=where,
            why="a LayerNorm reads the channels it would rotate",
        )
    return matrix
