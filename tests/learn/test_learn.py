"""graphrot learn as a whole: what it writes, what convert makes of it, how it stops and goes on, what it refuses."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

import graphrot
from graphrot.cli.main import run
from graphrot.errors import InputRefused, UsageError
from graphrot.learn.descent import Schedule, descend
from graphrot.learn.result import Learned
from graphrot.progress import silent
from graphrot.rotation.file import read_rotations, write_rotations
from tests.learn.subjects import source

SMALL = {"steps": 40, "rate": 0.05, "sequences": 16}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("learn")
    source("llama", folder)
    return folder


@pytest.fixture(scope="module")
def learned(place: Path) -> Learned:
    return graphrot.learn(
        place / "model.onnx",
        output=place / "r.safetensors",
        recipe="w4a4kv4",
        calibration=place / "text.txt",
        **SMALL,
    )


def test_the_held_out_loss_falls_and_the_file_says_how(place: Path, learned: Learned) -> None:
    assert learned.end_loss < 0.9 * learned.start_loss
    assert learned.start_loss == learned.part.heldout[0][1]
    assert all(distance > 0.1 for distance in learned.part.distance.values())
    assert set(learned.part.distance) == {"R1.0", "R2.0", "R2.1"} and set(learned.distances) == {"R1", "R2"}
    file = read_rotations(place / "r.safetensors")
    assert file.sizes == {"R1.0": 48, "R2.0": 16, "R2.1": 16}
    said = dict(file.provenance)
    assert said["loss"] == "local" and said["steps"] == 40 and said["recipe"]["activations"] == "int4"
    assert said["heldout"] == [list(pair) for pair in learned.part.heldout] and len(said["curve"]) == 40
    assert said["calibration"]["name"] == "text.txt" and said["orthogonality"] < 1e-10
    assert learned.part.sha256 == file.sha256
    for matrix in load_file(place / "r.safetensors").values():
        assert matrix.dtype == np.float64 and np.abs(matrix.T @ matrix - np.eye(len(matrix))).max() < 1e-10


def test_convert_folds_learned_matrices_exactly(place: Path, learned: Learned) -> None:
    result = graphrot.convert(
        place / "model.onnx",
        rotations=str(learned.path),
        recipe="w4a4kv4",
        solver="rtn",
        calibration=place / "text.txt",
    )
    assert result.certificate is not None and result.certificate.relative < 1e-9  # in float64
    matrices = {r.space.id: r.matrix for r in result.plan.rotations}
    assert matrices["R1.0"].construction == "file" and matrices["R1.0"].sha256 == learned.part.sha256
    assert matrices["R4.0"].construction == "hadamard" and matrices["R3.0"].construction == "hadamard"
    assert result.report.learning == learned.part
    assert not [note for note in result.notes if "another source" in note]


def test_a_plan_replays_and_a_changed_file_is_refused(place: Path, learned: Learned, tmp_path: Path) -> None:
    shutil.copy(learned.path, tmp_path / "copy.safetensors")
    options = {"recipe": "w4a8", "solver": "rtn", "certificate": "off"}
    made = graphrot.convert(
        place / "model.onnx", output=tmp_path / "one", rotations=str(tmp_path / "copy.safetensors"), **options
    )
    plan = tmp_path / "one" / "plan.json"
    again = graphrot.convert(place / "model.onnx", output=tmp_path / "two", plan=plan, **options)
    assert again.plan == made.plan and again.report.learning == made.report.learning
    assert (tmp_path / "one" / "model.onnx.data").read_bytes() == (tmp_path / "two" / "model.onnx.data").read_bytes()
    tensors = load_file(tmp_path / "copy.safetensors")
    write_rotations(tmp_path / "copy.safetensors", {key: matrix.T for key, matrix in tensors.items()}, {})
    with pytest.raises(InputRefused, match="has changed since the plan was made"):
        graphrot.convert(place / "model.onnx", output=tmp_path / "three", plan=plan, **options)
    assert not (tmp_path / "three").exists()


def test_files_that_do_not_fit_are_refused_before_anything_is_written(place: Path, tmp_path: Path) -> None:
    def attempt(matrices: dict[str, np.ndarray]) -> str:
        save_file(matrices, tmp_path / "odd.safetensors")
        with pytest.raises(InputRefused) as caught:
            graphrot.convert(
                place / "model.onnx", output=tmp_path / "out", rotations=str(tmp_path / "odd.safetensors"), solver="rtn"
            )
        assert not (tmp_path / "out").exists()
        return str(caught.value)

    good = {"R1.0": np.eye(48), "R2.0": np.eye(16), "R2.1": np.eye(16)}
    assert "R2.0, R2.1" in attempt({"R1.0": np.eye(48)})
    assert "R1.0 is 64, and the model has 48" in attempt({**good, "R1.0": np.eye(64)})
    assert "not orthogonal" in attempt({**good, "R1.0": np.eye(48) * 1.001})
    assert "not finite" in attempt({**good, "R1.0": np.full((48, 48), np.nan)})
    assert "not square" in attempt({**good, "R1.0": np.eye(48)[:40]})
    assert "holds no rotations" in attempt({})


def test_rotations_of_another_source_are_taken_with_a_note(learned: Learned, tmp_path: Path) -> None:
    source("llama_tied", tmp_path)
    result = graphrot.convert(
        tmp_path / "model.onnx", rotations=str(learned.path), recipe="rotate-only", certificate="off"
    )
    assert any("r.safetensors were learned on another source" in note for note in result.notes)


def test_an_interrupted_run_goes_on_with_the_same_bits(place: Path, learned: Learned, tmp_path: Path) -> None:
    target = tmp_path / "r.safetensors"

    def attempt(stop: int | None, **options: bool) -> Learned:
        def progress(step: str, done: int, total: int) -> None:
            if step == "learning rotations" and done == stop:
                raise KeyboardInterrupt

        return graphrot.learn(
            place / "model.onnx",
            output=target,
            recipe="w4a4kv4",
            calibration=place / "text.txt",
            progress=progress,
            **SMALL,
            **options,
        )

    with pytest.raises(KeyboardInterrupt):
        attempt(13)
    assert not target.exists() and (tmp_path / ".r.safetensors.graphrot-work").is_dir()
    with pytest.raises(KeyboardInterrupt):
        attempt(29, resume=True)
    result = attempt(None, resume=True)
    assert result.resumed == 29 and not (tmp_path / ".r.safetensors.graphrot-work").exists()
    assert result.part.heldout == learned.part.heldout and result.part.curve == learned.part.curve
    assert target.read_bytes() == learned.path.read_bytes()


@pytest.mark.parametrize("loss", ["data-free", "ce", "kl"])
def test_other_losses_fall_too(loss: str, place: Path, tmp_path: Path) -> None:
    text = {} if loss == "data-free" else {"calibration": place / "text.txt", "sequences": 16}
    result = graphrot.learn(
        place / "model.onnx", output=tmp_path / "r.safetensors", recipe="w4a4kv4", loss=loss, steps=20, **text
    )
    assert result.end_loss < result.start_loss and result.best > 0
    assert result.part.orthogonality < 1e-10 and (result.part.calibration is None) == (loss == "data-free")


class Misleading:
    """What lowers the loss of a batch raises the held-out loss by as much."""

    def __init__(self) -> None:
        self._slope = torch.from_numpy(np.random.default_rng(0).standard_normal((8, 8)))

    @property
    def heldout(self) -> Sequence[float]:
        return [-1.0]

    def batch(self, generator: np.random.Generator) -> float:
        return 1.0

    def __call__(self, matrices: Mapping[str, torch.Tensor], batch: float) -> torch.Tensor:
        return batch * (self._slope * matrices["R1.0"]).sum()


def test_learning_stops_early_and_keeps_the_best() -> None:
    start = {"R1.0": torch.eye(8, dtype=torch.float64)}
    schedule = Schedule(60, 0.02, measurements=12, patience=3)
    found = descend(Misleading(), start, schedule, progress=silent)
    assert found.stopped and found.steps == 3 * 60 // 12 and found.best == 0
    losses = [loss for _, loss in found.heldout]
    assert losses == sorted(losses) and found.curve[-1][1] < found.curve[0][1]
    assert torch.equal(found.matrices["R1.0"], start["R1.0"])


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"recipe": "rotate-only"}, UsageError, "rounds no weight, no activation and no cache"),
        ({"rotations": None, "recipe": "w4a8"}, UsageError, "cannot start from rotations none"),
        ({"loss": "mse"}, UsageError, "There is no loss 'mse'"),
        ({"steps": 0}, UsageError, "--steps 0 is too few"),
        ({"rate": 2.0}, UsageError, "--rate 2 is out of range"),
        ({"top_k": 5}, UsageError, "--top-k is for the loss kl"),
        ({"loss": "data-free", "sequences": 8}, UsageError, "reads no text"),
        ({"recipe": "w4a8", "only": "R4"}, InputRefused, "No rotation of this model can be learned"),
        ({"output": "r.bin"}, UsageError, "written as a safetensors file"),
        ({"output": "absent/r.safetensors"}, UsageError, "folder for the output does not exist"),
        ({"output": "model.onnx"}, UsageError, "written as a safetensors file"),
    ],
)
def test_refusals(options: dict[str, object], error: type[Exception], words: str, place: Path, tmp_path: Path) -> None:
    output = tmp_path / str(options.pop("output", "r.safetensors"))
    with pytest.raises(error, match=words):
        graphrot.learn(place / "model.onnx", **{"recipe": "w4a4kv4", "output": output, **options})
    assert not output.exists() and not list(tmp_path.iterdir())


def test_an_existing_file_stays_unless_forced(place: Path, tmp_path: Path) -> None:
    target = tmp_path / "r.safetensors"
    target.write_bytes(b"mine")
    with pytest.raises(UsageError, match="The output exists"):
        graphrot.learn(place / "model.onnx", output=target, recipe="w4a8")
    assert target.read_bytes() == b"mine"


def test_the_command_prints_and_writes_json(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    command = ["learn", str(place / "model.onnx"), "--loss", "data-free", "--steps", "4", "--recipe", "w4a8"]
    assert run([*command, "-o", "a.safetensors"]) == 0
    printed = capsys.readouterr().out
    for words in ("written    a.safetensors (3 matrices)", "held out:", "|R1 - R10| = ", "orthogonal |R'R - 1| <= "):
        assert words in printed
    assert run([*command, "-o", "b.safetensors", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["heldout_start"] == said["heldout"][0][1] and said["distance_by_kind"]["R2"]["count"] == 2
    assert {"heldout_end", "orthogonality", "seconds", "curve", "sha256"} <= set(said)
    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "b.safetensors").read_bytes()


def test_without_torch_the_command_says_which_extra_brings_it(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # The package is imported anew and then sets its name in graphrot, where a function has it.
    monkeypatch.setattr(graphrot, "learn", graphrot.learn)
    for name in [name for name in sys.modules if name.startswith("graphrot.learn")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "torch", None)
    assert run(["learn", str(place / "model.onnx"), "-o", str(tmp_path / "r.safetensors")]) == 4
    assert "pip install 'graphrot[learn]'" in capsys.readouterr().err
