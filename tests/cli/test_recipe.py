"""Recipes: names, files, options, contradictions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import onnx
import pytest

from graphrot.errors import UsageError
from graphrot.recipe import DEFAULT_RECIPE, NAMED, Recipe, default_recipe, resolve_recipe


def test_the_default_is_w4a8kv8() -> None:
    recipe = resolve_recipe()
    assert recipe == resolve_recipe("w4a8kv8")
    assert (recipe.weights, recipe.group, recipe.activations, recipe.kv) == ("int4", "channel", "int8", "int8")
    assert (recipe.solver, recipe.symmetric, recipe.embedding, recipe.head) == ("gptq", True, "int8", "int8")
    assert (recipe.rotations, recipe.seed, recipe.target, recipe.dtype) == ("hadamard", 0, "ort", None)
    assert recipe.certificate == "full"


@pytest.mark.parametrize("source", ["model.onnx", Path("folder") / "MODEL.ONNX", onnx.ModelProto()])
def test_programs_keep_the_cache_of_a_file_that_they_run(source: object) -> None:
    recipe = resolve_recipe(default_recipe(source))
    assert (recipe.name, recipe.kv) == ("w4a8", None)


@pytest.mark.parametrize("source", ["owner/name", "demo", "model.gguf", Path("folder")])
def test_what_has_no_graph_yet_gets_the_default(source: object) -> None:
    assert default_recipe(source) == DEFAULT_RECIPE


def test_w4a16_has_groups_and_float_activations() -> None:
    recipe = resolve_recipe("w4a16")
    assert (recipe.weights, recipe.group, recipe.group_size, recipe.activations) == ("int4", 32, 32, None)


def test_rotate_only_quantizes_nothing_and_rotates_everywhere() -> None:
    recipe = resolve_recipe("rotate-only")
    assert not recipe.quantizes
    assert recipe.sites == ("R1", "R2", "R3", "R4")
    assert recipe.group is recipe.solver is recipe.symmetric is recipe.embedding is recipe.head is None


def test_r3_is_left_out_unless_it_is_named() -> None:
    assert resolve_recipe("w4a8").sites == ("R1", "R2", "R4")
    assert resolve_recipe("w4a8", only="R1,R3").sites == ("R1", "R3")
    assert resolve_recipe("w4a8", only="R1,R2,R3,R4,O").sites == ("R1", "R2", "R3", "R4", "O")
    assert resolve_recipe("rotate-only", only="O").sites == ("O",)
    assert resolve_recipe("w4a8", rotations=None).sites == ()


def test_an_option_replaces_a_field_and_what_hung_on_it() -> None:
    recipe = resolve_recipe("w4a8", weights="none", activations="int4")
    assert recipe.quantizes
    assert recipe.weights is recipe.group is recipe.solver is recipe.head is recipe.embedding is None
    assert recipe.name == "w4a8+"


def test_weights_bring_their_defaults() -> None:
    recipe = resolve_recipe("rotate-only", weights="int8", head="none")
    assert (recipe.group, recipe.solver, recipe.symmetric, recipe.embedding) == ("channel", "gptq", True, "int8")
    assert recipe.head is None
    assert resolve_recipe(resolve_recipe("rotate-only"), weights="int8").head == "int8"


@pytest.mark.parametrize("name", NAMED)
def test_every_named_recipe_is_valid(name: str) -> None:
    assert resolve_recipe(name).name == name


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"kv": "int8", "kv_scales": "tensor"}, "kv_scales tensor says how ONNX Runtime's own attention stores"),
        ({"kv_range": "mse", "kernels": "ort"}, "kv_range mse says how ONNX Runtime's own attention stores"),
        ({"kv": "int8", "kernels": "ort", "kv_range": "none"}, "kv int8 with kernels ort needs kv_range"),
        ({"kv": "int4", "kernels": "ort", "target": "portable", "kv_scales": "channel"}, "kv_scales channel says how"),
        (
            {"rotations": "auto", "weights": "none", "activations": "none"},
            "rotations auto measures what rounding costs",
        ),
        ({"bits": 4.6, "weights": "int8"}, "bits 4.6 lets every weight have 4 or 8 bits, and weights int8 leave no"),
        ({"bits": 4.6, "weights": "none"}, "bits 4.6 says how weights are quantized, but weights are none"),
        ({"bits": 3.5}, "not valid"),
        ({"provider": "cuda", "dtype": "float32"}, "dtype float32 is not written for provider cuda"),
        ({"provider": "tpu"}, r"provider: should be one of cpu, cuda \(got 'tpu'\)"),
        ({"dtype": "float8"}, r"dtype: should be one of float32, float16, bfloat16 \(got 'float8'\)"),
        ({"kernels": "cuda"}, r"kernels: should be one of graphrot, ort \(got 'cuda'\)"),
        ({"certificate": "layers"}, "layer-by-layer certificate is not available in this version"),
        ({"weights": "none", "group": 32}, "group 32 says how weights are quantized, but weights are none"),
        ({"weights": "none", "solver": "gptq"}, "solver gptq says how weights are quantized"),
        ({"weights": "none", "symmetric": False}, "symmetric false says how weights are quantized"),
        ({"rotations": "none", "only": "R1"}, "'only' names rotations, but rotations are none"),
        ({"rotations": "none", "weights": "none", "activations": "none"}, "Nothing to do"),
        ({"only": ""}, "'only' names no site"),
        ({"only": "R1,R1"}, "names a site twice"),
        ({"only": "R7"}, "not valid"),
        ({"weights": "int3"}, "not valid"),
        ({"group": 48}, "not valid"),
        ({"seed": -1}, "not valid"),
        ({"rotations": "none", "seed": 3}, "'seed' is for rotations, but rotations are none"),
        ({"colour": "red"}, "not valid"),
    ],
)
def test_what_is_refused_and_in_which_words(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        resolve_recipe("w4a8", **fields)


def test_an_unknown_key_is_named() -> None:
    with pytest.raises(UsageError, match="colour: unknown key") as caught:
        resolve_recipe({"weights": "int4", "colour": "red"})
    assert caught.value.exit_code == 2


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(UsageError, match="There is no recipe 'w2a2'") as caught:
        resolve_recipe("w2a2")
    assert "w4a16" in str(caught.value)


def test_a_file_is_read_and_may_build_on_a_name(tmp_path: Path) -> None:
    yaml = tmp_path / "mine.yaml"
    yaml.write_text("recipe: w4a8\ngroup: 64\nhead: none\ncertificate: off\nonly: [R1, R2]\n", encoding="utf-8")
    recipe = resolve_recipe(yaml)
    assert (recipe.name, recipe.group, recipe.head, recipe.certificate) == ("mine", 64, None, None)
    assert recipe.sites == ("R1", "R2")
    as_json = tmp_path / "mine.json"
    as_json.write_text(json.dumps({"weights": "int4", "activations": "int4", "group": 32}), encoding="utf-8")
    assert resolve_recipe(str(as_json)).activation_bits == 4


@pytest.mark.parametrize("content", ["[1, 2]", "weights: {", "recipe: nothing-such", "1: 2"])
def test_a_bad_file_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(UsageError, match="recipe file"):
        resolve_recipe(path)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read"):
        resolve_recipe(tmp_path / "absent.yaml")


def test_a_recipe_survives_json() -> None:
    recipe = resolve_recipe("w4a8", only="R1,R2")
    assert Recipe.model_validate_json(recipe.model_dump_json()) == recipe
