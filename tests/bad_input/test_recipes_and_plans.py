"""Recipes and plans that are no recipes and plans, or those of another model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest

from graphrot.cli.main import run
from tests.bad_input.conftest import QUICK, Refuse

Edit = Callable[[Callable[[onnx.ModelProto], object]], Path]


def _recipe(tmp_path: Path, content: str | bytes, name: str = "mine.yaml") -> Path:
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("colour: red", ("The recipe is not valid", "colour: unknown key", "weights")),
        ("weights: int5", ("weights: should be one of int8, int4, none", "'int5'")),
        ("recipe: w4a8\nseed: many", ("seed: ", "'many'")),
        ("recipe: nothing-such", ("unknown recipe 'nothing-such'", "w4a16")),
        ("weights: none\nsolver: gptq", ("solver gptq says how weights are quantized, but weights are none",)),
        ("weights: none\ngroup: 32", ("group 32 says how weights are quantized",)),
        ("rotations: none\nweights: int4\nonly: [R1]", ("'only' names rotations, but rotations are none",)),
        ("rotations: none", ("Nothing to do",)),
        ("only: [R1, R1]", ("names a site twice",)),
        ("[1, 2]", ("holds one mapping",)),
        ("weights: {", ("not valid YAML or JSON",)),
        ("a: !!python/object/apply:os.system ['true']", ("not valid YAML or JSON",)),
        (b"\xff\xfe", ("cannot be read",)),
        ("1: 2", ("holds one mapping",)),
    ],
)
def test_recipe_files(
    content: str | bytes, words: tuple[str, ...], model: Path, tmp_path: Path, refuse: Refuse
) -> None:
    path = _recipe(tmp_path, content)
    refuse(2, ["convert", model, "--recipe", path, "--certificate", "off"], *words)


def test_a_recipe_of_aliases_stays_small(model: Path, tmp_path: Path, refuse: Refuse) -> None:
    """Ten lines that mean 10^9 words; they are never written out."""
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 9)]
    lines += ["weights: *a8", "only: *a8", "circle: &c [*c]"]
    err = refuse(2, ["convert", model, "--recipe", _recipe(tmp_path, "\n".join(lines))], "weights: should be one of")
    assert len(err) < 10_000


def test_a_missing_recipe(model: Path, tmp_path: Path, refuse: Refuse) -> None:
    refuse(2, ["convert", model, "--recipe", tmp_path / "absent.yaml"], "cannot be read")
    (tmp_path / "folder.json").mkdir()
    refuse(2, ["convert", model, "--recipe", tmp_path / "folder.json"], "cannot be read")
    refuse(2, ["convert", model, "--recipe", "w2a2"], "There is no recipe 'w2a2'", "w4a16")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--weights", "none", "--group", "32"], "but weights are none"),
        (["--rotations", "none", "--only", "R1"], "'only' names rotations, but rotations are none"),
        (["--rotations", "none", "--seed", "3"], "'seed' is for rotations"),
        (["--weights", "none", "--activations", "none", "--rotations", "none"], "Nothing to do"),
        (["--group", "48"], "The recipe is not valid"),
        (["--only", "R7"], "The recipe is not valid"),
        (["--seed", "-1"], "The recipe is not valid"),
    ],
)
def test_contradictory_options(options: list[str], words: str, model: Path, refuse: Refuse) -> None:
    refuse(2, ["convert", model, "--recipe", "w4a8", *options], words)


@pytest.fixture
def plan(model: Path, tmp_path: Path) -> dict[str, Any]:
    """A plan of the model."""
    assert run(["convert", str(model), "-o", str(tmp_path / "made"), *QUICK]) == 0
    content: dict[str, Any] = json.loads((tmp_path / "made" / "plan.json").read_text(encoding="utf-8"))
    return content


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "not a rotation plan"),
        (b"{", "not a rotation plan"),
        (b"[]", "not a rotation plan"),
        (b"{}", "not a rotation plan"),
        (b"null", "not a rotation plan"),
        (b"\xff\xfe", "cannot be read"),
        (b'{"source_hash": 1}', "not a rotation plan"),
        (None, "cannot be read"),
    ],
)
def test_garbage(content: bytes | None, words: str, model: Path, tmp_path: Path, refuse: Refuse) -> None:
    path = tmp_path / "plan.json"
    if content is not None:
        path.write_bytes(content)
    refuse(2, ["convert", model, "--plan", path], words, "plan")


def test_a_plan_of_another_model(plan: dict[str, Any], edit: Edit, tmp_path: Path, refuse: Refuse) -> None:
    def other(proto: onnx.ModelProto) -> None:
        proto.producer_name = "somebody else"

    path = edit(other)
    refuse(
        2, ["convert", path, "--plan", tmp_path / "made" / "plan.json"], "made for another source", "make a new plan"
    )


def test_a_folder_as_plan(model: Path, tmp_path: Path, refuse: Refuse) -> None:
    refuse(2, ["convert", model, "--plan", tmp_path], "cannot be read")


@pytest.mark.parametrize("option", [["--seed", "3"], ["--rotations", "random"], ["--only", "R1"]])
def test_options_that_contradict_a_plan(
    option: list[str], plan: dict[str, Any], model: Path, tmp_path: Path, refuse: Refuse
) -> None:
    path = tmp_path / "made" / "plan.json"
    refuse(2, ["convert", model, "--plan", path, *QUICK, *option], "and --plan contradict each other")


def test_a_plan_whose_names_were_edited(plan: dict[str, Any], model: Path, tmp_path: Path, refuse: Refuse) -> None:
    plan["rotations"][0]["space"]["producers"][0]["node"] = "nowhere"
    path = tmp_path / "edited.json"
    path.write_text(json.dumps(plan), encoding="utf-8")
    refuse(3, ["convert", model, "--plan", path], "names a node that this model does not have", "'nowhere'")
