"""Names mean nothing: renamed at random and with shuffled initializers, a model gives the same facts."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import onnx_ir as ir
import pytest

from graphrot.analysis.analyze import analyze
from tests.exported import tiny_onnx

MISLEADING = ("past_key", "down_proj.weight", "lm_head", "logits", "norm", "q_proj", "position_ids", "attention_mask")


def _rename(model: ir.Model, seed: int) -> dict[str, str]:
    """Give every tensor, node and symbolic dimension a new name; returns old -> new of tensors."""
    rng = random.Random(seed)
    values = list(model.graph.inputs)
    values += [v for v in model.graph.initializers.values() if not v.is_graph_input()]
    values += [v for node in model.graph for v in node.outputs if v.name]
    fresh = [f"{rng.choice(MISLEADING)}.{n}" for n in range(len(values))]
    rng.shuffle(fresh)
    new = {v.name or "": name for v, name in zip(values, fresh, strict=True)}
    for value, name in zip(values, fresh, strict=True):
        value.name = name
    for node in model.graph:
        node.name = f"{rng.choice(MISLEADING)}_{rng.random()}"
    dims: dict[str | None, str] = {}
    for value in (*model.graph.inputs, *model.graph.outputs):
        assert value.shape is not None
        value.shape = ir.Shape(
            d if isinstance(d, int) else dims.setdefault(d.value, f"dim{rng.randrange(10**9)}") for d in value.shape
        )
    order = list(model.graph.initializers.items())
    rng.shuffle(order)
    model.graph.initializers.clear()
    model.graph.initializers.update(order)
    return new


def _translated(fact: Any, names: dict[str, str]) -> Any:
    """The same facts under the new names."""
    if isinstance(fact, str):
        return names.get(fact, fact)
    if isinstance(fact, tuple):
        return tuple(_translated(part, names) for part in fact)
    if dataclasses.is_dataclass(fact) and not isinstance(fact, type):
        fields = {f.name: getattr(fact, f.name) for f in dataclasses.fields(fact)}
        keep = ("op", "id", "kind", "role", "placement", "form", "layout", "seconds")
        return dataclasses.replace(fact, **{k: v if k in keep else _translated(v, names) for k, v in fields.items()})
    return fact


@pytest.mark.parametrize("name", ["llama_tied", "phi3", "gpt2"])
def test_facts_follow_a_renaming(name: str) -> None:
    path = tiny_onnx(name)
    expected = analyze(ir.load(path))
    model = ir.load(path)
    names = _rename(model, seed=len(name))
    assert all(old != new for old, new in names.items())
    assert analyze(model) == _translated(expected, names)


def test_dimensions_without_names() -> None:
    """Every input has its own anonymous batch, sequence and past."""
    path = tiny_onnx("qwen3")
    expected = analyze(ir.load(path))
    model = ir.load(path)
    for value in model.graph.inputs:
        assert value.shape is not None
        value.shape = ir.Shape(d if isinstance(d, int) else None for d in value.shape)
    assert analyze(model) == expected


def test_every_dimension_has_a_name_of_its_own() -> None:
    path = tiny_onnx("llama")
    expected = analyze(ir.load(path))
    model = ir.load(path)
    for number, value in enumerate(model.graph.inputs):
        assert value.shape is not None
        value.shape = ir.Shape(d if isinstance(d, int) else f"s{number}_{axis}" for axis, d in enumerate(value.shape))
    assert analyze(model) == expected
