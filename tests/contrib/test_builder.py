"""What onnxruntime-genai's model builder writes: every site found, folded right, usable in its place."""

from __future__ import annotations

import functools
import json
import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import onnxruntime_genai as og
import pytest

import graphrot
from graphrot.converted import Converted
from graphrot.evaluate.compare import Reference, fitting, random_probes
from graphrot.evaluate.session import open_decoder
from tests.contrib.built import built

FORMS = [(name, "fp32") for name in ("llama", "llama_tied", "qwen2", "qwen3")]
FORMS += [("llama_tied", "int4"), ("qwen2", "int4"), ("qwen3", "fp16")]
SITES = {"llama": (48, 112, 2, 3), "llama_tied": (48, 112, 2, 3), "qwen2": (80, 96, 2, 5), "qwen3": (48, 80, 3, 6)}
"""Hidden size, inner size, layers, heads of 16."""


@functools.cache
def _rotated(name: str, precision: str) -> tuple[Converted, Path]:
    """``rotate-only`` of a builder's file; with a certificate where its weights are not float32. Do not change it."""
    output = built(name, precision).parent / f"rotated-{precision}" / "x.onnx"
    output.parent.mkdir()
    checked = None if precision == "fp32" else "full"
    source = built(name, precision) / "model.onnx"
    return graphrot.convert(source, output=output, recipe="rotate-only", certificate=checked), output


def _signature(path: Path) -> list[tuple[str, bytes]]:
    graph = onnx.load(path, load_external_data=False).graph
    return [(value.name, value.type.SerializeToString()) for value in (*graph.input, *graph.output)]


def _relative(source: Path, ours: Path) -> float:
    first, second = open_decoder(source), open_decoder(ours)
    with Reference(first, fitting(random_probes(first.vocabulary), first)) as reference:
        return reference.compare(second).relative


@pytest.mark.parametrize(("name", "precision"), FORMS)
def test_all_sites_are_rotated(name: str, precision: str) -> None:
    source = built(name, precision) / "model.onnx"
    hidden, inner, layers, _ = SITES[name]
    found = graphrot.inspect(source)
    assert not found.refused
    assert Counter((site.kind, site.placement, site.dim) for site in found.sites) == {
        ("R1", "merged", hidden): 1,
        ("R2", "merged", 16): layers,
        ("R3", "online", 16): layers,
        ("R4", "online", inner): layers,
    }
    result, ours = _rotated(name, precision)
    assert (result.certificate is None) == (precision == "fp32")
    assert result.certificate is None or result.certificate.relative <= 2e-5
    assert Counter(rotation.space.kind for rotation in result.plan.rotations) == {
        "R1": 1, "R2": layers, "R3": layers, "R4": layers,
    }  # fmt: skip
    assert _signature(ours) == _signature(source)
    if precision == "fp32":
        assert _relative(source, ours) <= 2e-5
    quantized = "the source was quantized already" in " ".join(result.notes)
    assert quantized == (precision == "int4")
    if quantized:
        assert "of 4 bits with one scale for 32 weights" in result.notes[0]


def test_without_r3_the_attention_stays_as_it_is(tmp_path: Path) -> None:
    graphrot.convert(
        built("llama") / "model.onnx",
        output=tmp_path / "x.onnx",
        recipe="rotate-only",
        only=("R1", "R2", "R4"),
        certificate=None,
    )
    nodes = onnx.load(tmp_path / "x.onnx").graph.node
    assert not any(node.op_type == "RotaryEmbedding" for node in nodes)
    attention = [node for node in nodes if node.op_type == "GroupQueryAttention"]
    assert all({a.name: a.i for a in node.attribute}["do_rotary"] == 1 for node in attention) and len(attention) == 2


def _told(path: Path) -> dict[str, object]:
    """What the metadata say of the cache."""
    metadata = {p.key: p.value for p in onnx.load(path, load_external_data=False).metadata_props}
    found = json.loads(metadata["graphrot.kv"])
    assert isinstance(found, dict)
    return found


def test_a_float_cache_is_still_written_in_place() -> None:
    """As in the builder's own file, and the metadata say so."""
    ours = _rotated("llama", "fp32")[1]
    assert _told(ours)["shared_buffers"] is True
    tokens = np.random.default_rng(0).integers(3, 131, (2, 6))
    logits = []
    for path in (built("llama") / "model.onnx", ours):
        decoder = open_decoder(path)
        first, cache = decoder.run(tokens, decoder.reserve(2, 12))
        logits.append(np.concatenate([first, decoder.run(tokens[:, :1], cache)[0]], axis=1))
    assert open_decoder(ours).reserve(2, 12) is not None
    assert np.abs(logits[1] - logits[0]).max() <= 2e-5 * np.abs(logits[0]).max()


def test_a_cache_that_grows_by_concat_is_not() -> None:
    """The builder writes attention in plain operators in float16."""
    ours = _rotated("qwen3", "fp16")[1]
    assert _told(ours)["shared_buffers"] is False and open_decoder(ours).reserve(2, 12) is None


def test_a_plan_is_replayed(tmp_path: Path) -> None:
    """Also with a recipe that would not ask for R3 itself."""
    source, plan = built("qwen2") / "model.onnx", _rotated("qwen2", "fp32")[1].with_suffix(".plan.json")
    again = graphrot.convert(source, output=tmp_path / "b.onnx", plan=plan, solver="clip", certificate=None)
    assert {rotation.space.kind for rotation in again.plan.rotations} == {"R1", "R2", "R3", "R4"}
    nodes = Counter(node.op_type for node in onnx.load(tmp_path / "b.onnx").graph.node)
    assert nodes["RotaryEmbedding"] == 4 and nodes["HadamardTransform"] == 4, "R4 is in the two down projections"


class _Runner:
    """Feeds a builder's file as a script would that knows nothing of us."""

    def __init__(self, path: Path) -> None:
        self.session = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])

    def run(
        self, tokens: np.ndarray, mask: np.ndarray, past: dict[str, np.ndarray]
    ) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        feeds = {"input_ids": tokens, "attention_mask": mask} | past
        if not past:
            caches = [v for v in self.session.get_inputs() if v.name.startswith("past")]
            feeds |= {v.name: np.zeros((len(tokens), v.shape[1], 0, 16), np.float32) for v in caches}
        names = [value.name for value in self.session.get_outputs()]
        found = dict(zip(names, self.session.run(names, feeds), strict=True))
        return found.pop("logits"), {k.replace("present", "past_key_values"): v for k, v in found.items()}


def test_padding_steps_and_chunks() -> None:
    answers = [_answers(_Runner(path)) for path in (built("llama") / "model.onnx", _rotated("llama", "fp32")[1])]
    for reference, ours in zip(*answers, strict=True):
        assert np.abs(reference - ours).max() <= 2e-5 * np.abs(reference).max()


def _answers(runner: _Runner) -> list[np.ndarray]:
    tokens = np.random.default_rng(4).integers(3, 131, (3, 8))
    lengths = np.array([3, 8, 5])
    mask = (np.arange(8) < lengths[:, None]).astype(np.int64)
    logits, past = runner.run(tokens * mask, mask, {})
    found = [logits[row, :length] for row, length in enumerate(lengths)]
    for step in range(1, 4):
        mask = (np.arange(8 + step) < (lengths + step)[:, None]).astype(np.int64)
        logits, past = runner.run(tokens[:, step : step + 1], mask, past)
        found.append(logits)
    past = {}
    for start, stop in ((0, 3), (3, 6), (6, 7), (7, 8)):
        logits, past = runner.run(tokens[:1, start:stop], np.ones((1, stop), np.int64), past)
        found.append(logits)
    return found


@pytest.mark.parametrize("options", [{}, {"recipe": "w4a8", "solver": "clip", "only": ("R1", "R2", "R3", "R4")}])
def test_the_folder_keeps_working_in_genai(options: dict[str, object], tmp_path: Path) -> None:
    source = built("llama")
    folder = tmp_path / "folder"
    shutil.copytree(source, folder)
    settings: dict[str, object] = {"recipe": "rotate-only", "certificate": None} | options
    graphrot.convert(source / "model.onnx", output=tmp_path / "made", **settings)
    for name in ("model.onnx", "model.onnx.data"):
        shutil.copy(tmp_path / "made" / name, folder / name)
    answers = [_generate(place) for place in (source, folder)]
    assert len(answers[1]) == 40
    if not options:
        assert answers[0] == answers[1]


def _generate(folder: Path) -> list[int]:
    model = og.Model(str(folder))
    parameters = og.GeneratorParams(model)
    parameters.set_search_options(max_length=40, min_length=40, do_sample=False)
    generator = og.Generator(model, parameters)
    generator.append_tokens(np.array([5, 6, 7, 8], np.int32))
    while not generator.is_done():
        generator.generate_next_token()
    return [int(token) for token in generator.get_sequence(0)]


@pytest.mark.parametrize(
    ("name", "precision", "settings", "most"),
    [
        ("llama_tied", "fp32", {"weights": "int8"}, 0.15),
        ("qwen2", "int4", {"weights": "int8"}, 0.15),
        ("qwen3", "fp16", {"solver": "clip"}, 0.9),
    ],
)
def test_quantized(name: str, precision: str, settings: dict[str, str], most: float, tmp_path: Path) -> None:
    """Rounded weights and activations of a random model: far from exact, and far from wrong."""
    source = built(name, precision) / "model.onnx"
    ours = tmp_path / "x.onnx"
    result = graphrot.convert(source, output=ours, recipe="w4a8", certificate=None, **settings)
    assert _signature(ours) == _signature(source)
    assert any(node.op_type == "RotatedMatMul" for node in onnx.load(ours).graph.node)
    assert result.report.sizes.bits_per_weight is not None
    assert _relative(_rotated(name, precision)[1], ours) < most
