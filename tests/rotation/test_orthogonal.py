"""Orthogonal matrices by reference: properties in float64, and determinism."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

from graphrot.errors import InputRefused, UsageError
from graphrot.plan.types import MatrixRef
from graphrot.rotation.orthogonal import RotationKind, build_matrix, choose_matrix, random_signs

KINDS: list[tuple[RotationKind, int]] = [
    ("hadamard", 12), ("hadamard", 16), ("hadamard", 92), ("hadamard", 576), ("hadamard", 428), ("hadamard", 13),
    ("random", 1), ("random", 2), ("random", 12), ("random", 97), ("block-hadamard", 12), ("block-hadamard", 80),
]  # fmt: skip


@pytest.mark.parametrize("mean_preserving", [False, True])
@pytest.mark.parametrize(("kind", "dim"), KINDS)
def test_orthogonal_inverse_and_dense(kind: RotationKind, dim: int, mean_preserving: bool) -> None:
    ref = choose_matrix(dim, rotations=kind, seed=7, mean_preserving=mean_preserving)
    rotation = build_matrix(ref)
    matrix = rotation.dense()
    assert rotation.dim == dim
    assert matrix.shape == (dim, dim)
    assert np.abs(matrix @ matrix.T - np.eye(dim)).max() <= 1e-12
    x = np.random.default_rng(0).standard_normal((2, dim, 3))
    y = rotation.rotate(x, 1)
    assert np.abs(y - np.einsum("adb,de->aeb", x, matrix)).max() <= 1e-12
    assert np.abs(rotation.rotate_back(y, 1) - x).max() <= 1e-12
    if mean_preserving:
        assert np.abs(matrix @ np.ones(dim) - 1.0).max() <= 1e-12
        assert np.abs(matrix.T @ np.ones(dim) - 1.0).max() <= 1e-12
    assert np.array_equal(build_matrix(ref).dense(), matrix)


@pytest.mark.parametrize(("kind", "dim"), [("hadamard", 96), ("random", 12), ("block-hadamard", 80)])
def test_seeds_matter(kind: RotationKind, dim: int) -> None:
    matrices = [build_matrix(choose_matrix(dim, rotations=kind, seed=seed)).dense() for seed in (0, 1)]
    assert np.abs(matrices[0] - matrices[1]).max() > 0.1


def test_a_producer_and_its_consumer_cancel() -> None:
    rng = np.random.default_rng(3)
    producer, consumer = rng.standard_normal((5, 576)), rng.standard_normal((576, 4))
    rotation = build_matrix(choose_matrix(576, rotations="hadamard", seed=0))
    product = rotation.rotate(producer, 1) @ rotation.rotate(consumer, 0)
    assert np.abs(product - producer @ consumer).max() <= 1e-11
    wrong = rotation.rotate(producer, 1) @ rotation.rotate_back(consumer, 0)
    assert np.abs(wrong - producer @ consumer).max() > 1.0


def test_a_table_needs_no_dense_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    rotation = build_matrix(choose_matrix(576, rotations="hadamard", seed=0))

    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("a dense matrix was formed")

    monkeypatch.setattr("graphrot.rotation.hadamard.dense", refuse)
    monkeypatch.setattr(type(rotation), "dense", refuse)
    table = np.random.default_rng(0).standard_normal((1000, 576)).astype(np.float32)
    rotated = rotation.rotate(table, 1)
    assert rotated.dtype == np.float64
    assert np.allclose(np.linalg.norm(rotated, axis=1), np.linalg.norm(table.astype(np.float64), axis=1), rtol=1e-12)


def test_hadamard_spreads_an_outlier_evenly() -> None:
    spike = np.zeros((1, 1536))
    spike[0, 100] = 1.0
    rotated = build_matrix(choose_matrix(1536, rotations="hadamard", seed=0)).rotate(spike, 1)
    assert np.allclose(np.abs(rotated), 1536**-0.5, rtol=1e-12)


@given(seed=st.integers(0, 2**32), count=st.integers(1, 200))
def test_signs_are_a_prefix_of_one_stream(seed: int, count: int) -> None:
    signs = random_signs(count, seed)
    assert set(np.unique(signs)) <= {-1.0, 1.0}
    assert np.array_equal(signs, random_signs(count + 77, seed)[:count])


def test_signs_are_the_same_everywhere() -> None:
    assert "".join("+" if s > 0 else "-" for s in random_signs(20, 0)) == SIGNS_OF_SEED_0


SIGNS_OF_SEED_0 = "-----+-++-+++++-+-++"


def test_the_block_of_a_block_hadamard() -> None:
    ref = choose_matrix(80, rotations="block-hadamard", seed=None)
    assert (ref.construction, ref.block, ref.note) == ("block-hadamard", 16, "")
    matrix = build_matrix(ref).dense()
    assert not matrix[:16, 16:].any()
    assert np.allclose(np.abs(matrix[:16, :16]), 0.25)


def test_fallbacks_say_so() -> None:
    glm = choose_matrix(13696, rotations="hadamard", seed=None)
    assert glm.construction == "hartley"
    assert glm.note == (
        "no Hadamard matrix of size 13696 = 107 * 128 can be constructed; Hartley(107) (x) Sylvester(128) is used"
    )
    blocks = choose_matrix(2051 * 8, rotations="hadamard", seed=0)
    assert (blocks.construction, blocks.block) == ("block-hadamard", 8)
    assert "2051 blocks of Hadamard(8) are used" in blocks.note
    assert choose_matrix(576, rotations="hadamard", seed=0).note == ""


def test_choices_that_make_no_sense_are_refused() -> None:
    with pytest.raises(UsageError, match="random rotation needs a seed"):
        choose_matrix(12, rotations="random", seed=None)
    with pytest.raises(UsageError, match="mean-preserving rotation needs a seed"):
        choose_matrix(12, rotations="hadamard", seed=None, mean_preserving=True)
    with pytest.raises(UsageError, match="blocks of 2"):
        choose_matrix(10, rotations="block-hadamard", seed=0)
    with pytest.raises(UsageError, match="Unknown kind of rotation 'fourier'"):
        choose_matrix(12, rotations="fourier", seed=0)
    with pytest.raises(UsageError, match="at least one channel"):
        choose_matrix(0, rotations="hadamard", seed=0)


@pytest.mark.parametrize(
    ("ref", "words"),
    [
        (MatrixRef("hadamard", 13696), "No Hadamard matrix of size 13696"),
        (MatrixRef("hartley", 576), "'hartley' stands for sizes that have none"),
        (MatrixRef("block-hadamard", 80, block=24), "Blocks of 24 do not divide 80"),
        (MatrixRef("block-hadamard", 80), "Blocks of None"),
        (MatrixRef("random", 8), "needs a seed"),
        (MatrixRef("hadamard", 8, mean_preserving=True), "needs a seed"),
        (MatrixRef("file", 8), "needs the file and the key"),
    ],
)
def test_references_that_contradict_themselves(ref: MatrixRef, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        build_matrix(ref)


def test_a_rotation_acts_on_its_own_size_only() -> None:
    rotation = build_matrix(choose_matrix(12, rotations="hadamard", seed=0))
    with pytest.raises(UsageError, match="size 12 cannot act on 24 channels"):
        rotation.rotate(np.ones((2, 24)), 1)


def file_reference(folder: Path, matrix: np.ndarray, **changes: object) -> MatrixRef:
    save_file({"R1": matrix}, folder / "rotations.safetensors")
    return MatrixRef("file", len(matrix), file=str(folder / "rotations.safetensors"), key="R1", **changes)


def test_a_learned_matrix_becomes_the_nearest_orthogonal_one(tmp_path: Path) -> None:
    exact = build_matrix(choose_matrix(24, rotations="random", seed=1)).dense()
    ref = file_reference(tmp_path, exact.astype(np.float32))
    matrix = build_matrix(ref).dense()
    assert np.abs(matrix @ matrix.T - np.eye(24)).max() <= 1e-12
    assert np.abs(matrix - exact).max() <= 1e-6


def test_files_that_hold_no_such_matrix(tmp_path: Path) -> None:
    ref = file_reference(tmp_path, np.eye(8, dtype=np.float32) * 1.01)
    with pytest.raises(InputRefused, match="not orthogonal"):
        build_matrix(ref)
    ref = file_reference(tmp_path, np.full((8, 8), np.nan, np.float32))
    with pytest.raises(InputRefused, match="not finite"):
        build_matrix(ref)
    ref = file_reference(tmp_path, np.eye(8, dtype=np.float32))
    with pytest.raises(InputRefused, match="lacks a matrix"):
        build_matrix(MatrixRef("file", 8, file=ref.file, key="R2"))
    with pytest.raises(InputRefused, match=r"shape \(8, 8\), and the model needs \(16, 16\)"):
        build_matrix(MatrixRef("file", 16, file=ref.file, key="R1"))
    with pytest.raises(InputRefused, match="does not exist"):
        build_matrix(MatrixRef("file", 8, file=str(tmp_path / "none.safetensors"), key="R1"))
    (tmp_path / "broken.safetensors").write_bytes(b"no")
    with pytest.raises(InputRefused, match="cannot be read"):
        build_matrix(MatrixRef("file", 8, file=str(tmp_path / "broken.safetensors"), key="R1"))
    ref = file_reference(tmp_path, -np.eye(8, dtype=np.float32), mean_preserving=True)
    with pytest.raises(InputRefused, match="all-ones vector"):
        build_matrix(ref)
