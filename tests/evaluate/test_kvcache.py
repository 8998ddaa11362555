"""A cache in a plain session: grown and in place, padded, cut, reordered; and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest

import graphrot
from graphrot import KVCache
from graphrot.errors import GraphrotError, InputRefused, UsageError
from tests.evaluate.decoders import KINDS, KV_HEADS, VOCABULARY, WIDTH, Kind, decoder
from tests.exported import tiny_onnx
from tests.tiny import VOCAB


def opened(path: Path, *, library: bool = True) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    if library:
        graphrot.register(options)
    return ort.InferenceSession(path, options)


def drawn(batch: int, length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, VOCABULARY, (batch, length))


def whole(session: ort.InferenceSession, tokens: Sequence[int] | np.ndarray) -> np.ndarray:
    """Logits ``[tokens, V]`` of one row, from an empty cache, by the runtime alone."""
    feeds: dict[str, Any] = {
        "input_ids": np.asarray(tokens)[None],
        "attention_mask": np.ones((1, len(tokens)), np.int64),
    }
    for value in session.get_inputs():
        if value.name.startswith("past"):
            dtype = {"tensor(uint8)": np.uint8, "tensor(int8)": np.int8}.get(value.type, np.float32)
            feeds[value.name] = np.zeros((1, value.shape[1], 0, value.shape[3]), dtype)
        elif value.name == "position_ids":
            feeds[value.name] = np.arange(len(tokens))[None]
    return np.asarray(session.run(["logits"], feeds)[0][0])


def same(found: np.ndarray, wanted: np.ndarray) -> None:
    np.testing.assert_allclose(found, wanted, rtol=0, atol=2e-5 * np.abs(wanted).max())


@pytest.mark.parametrize("capacity", [None, 9, 14])
@pytest.mark.parametrize("kind", KINDS)
def test_pieces_give_what_the_whole_gives(kind: Kind, capacity: int | None, tmp_path: Path) -> None:
    session = opened(decoder(tmp_path, kind))
    tokens = drawn(1, 9)
    cache = KVCache(session, capacity=capacity)
    parts = [cache.run(session, {"input_ids": piece})[0][0] for piece in np.split(tokens, [4, 5, 6], axis=1)]
    same(np.concatenate(parts), whole(session, tokens[0]))
    assert (cache.length, cache.capacity, cache.batch) == (9, capacity, 1)


@pytest.mark.parametrize("kind", KINDS)
def test_in_place_means_that_the_buffers_stay(kind: Kind, tmp_path: Path) -> None:
    session = opened(decoder(tmp_path, kind))
    cache = KVCache(session, capacity=6)
    held = [one.array for one in cache._held]
    cache.run(session, {"input_ids": drawn(1, 3)})
    before = [array.copy() for array in held]
    cache.run(session, {"input_ids": drawn(1, 2, seed=1)})
    for one, array, old in zip(cache._held, held, before, strict=True):
        assert one.array is array and one.value.data_ptr() == array.ctypes.data
        np.testing.assert_array_equal(array[:, :, :3], old[:, :, :3])
        assert array[:, :, 3:5].any() and not array[:, :, 5:].any()


def test_the_three_ways_to_run(tmp_path: Path) -> None:
    """``run``; ``feeds`` and ``take``, with arrays and with tensors of the runtime; ``bind`` and ``advance``."""
    session = opened(decoder(tmp_path, "rows4"))
    tokens = drawn(1, 5)
    wanted = whole(session, tokens[0])
    fed = KVCache(session)
    for start in range(5):
        feeds = {"input_ids": tokens[:, start : start + 1], "attention_mask": np.ones((1, start + 1), np.int64)}
        logits, *presents = session.run(["logits", *fed.presents], {**feeds, **fed.feeds()})
        fed.take(presents)
        same(logits[0], wanted[start : start + 1])
    for capacity in (None, 5):
        cache = KVCache(session, capacity=capacity)
        for start in range(5):
            binding = session.io_binding()
            binding.bind_cpu_input("input_ids", tokens[:, start : start + 1])
            binding.bind_cpu_input("attention_mask", np.ones((1, start + 1), np.int64))
            binding.bind_output("logits")
            cache.bind(binding)
            session.run_with_iobinding(binding)
            if capacity is None:
                cache.take(binding.get_outputs()[1:])
            else:
                cache.advance(start + 1)
            same(binding.get_outputs()[0].numpy()[0], wanted[start : start + 1])
        assert cache.length == 5


@pytest.mark.parametrize("capacity", [None, 12])
@pytest.mark.parametrize("kind", KINDS)
def test_padding_on_the_right(kind: Kind, capacity: int | None, tmp_path: Path) -> None:
    """Lengths are counted by the mask; each row answers as it does alone."""
    session = opened(decoder(tmp_path, kind))
    lengths = np.array([5, 2, 4])
    rows = [drawn(1, length + 3, seed=index)[0] for index, length in enumerate(lengths)]
    cache = KVCache(session, batch=3, capacity=capacity)
    prompt, mask = np.zeros((3, 5), np.int64), np.zeros((3, 5), np.int64)
    for index, length in enumerate(lengths):
        prompt[index, :length], mask[index, :length] = rows[index][:length], 1
    found = [[part] for part in cache.run(session, {"input_ids": prompt, "attention_mask": mask})[0]]
    for index, length in enumerate(lengths):
        found[index] = [found[index][0][:length]]
    for step in range(3):
        token = np.array([[row[length + step]] for row, length in zip(rows, lengths, strict=True)])
        mask = (np.arange(lengths.max() + step + 1) <= (lengths + step)[:, None]).astype(np.int64)
        logits = cache.run(session, {"input_ids": token, "attention_mask": mask})[0]
        for index in range(3):
            found[index].append(logits[index])
    for row, parts in zip(rows, found, strict=True):
        same(np.concatenate(parts), whole(session, row))
    assert cache.length == 8


def padded_like_alone(session: Any, cache: KVCache, row: np.ndarray, padding: int) -> None:
    """A row with two tokens of padding on its left, beside a longer one, answers as it does by itself."""
    prompt = np.stack([np.concatenate([[padding, padding], row[:4]]), np.arange(6)])
    mask = np.array([[0, 0, 1, 1, 1, 1], [1] * 6])
    found = [cache.run(session, {"input_ids": prompt, "attention_mask": mask})[0][0, 2:]]
    for token in row[4:]:
        mask = np.concatenate([mask, np.ones((2, 1), np.int64)], axis=1)
        found.append(cache.run(session, {"input_ids": np.full((2, 1), token), "attention_mask": mask})[0][0])
    same(np.concatenate(found), whole(session, row))


@pytest.mark.parametrize("capacity", [None, 12])
def test_padding_that_the_mask_hides(capacity: int | None, tmp_path: Path) -> None:
    session = opened(decoder(tmp_path, "rows8", "columns"))
    row = drawn(1, 7)[0]
    cache = KVCache(session, batch=2, capacity=capacity)
    padded_like_alone(session, cache, row, padding=3)


def test_positions_follow_the_mask() -> None:
    """A float decoder of standard operators with positions; padding on the left."""
    session = opened(tiny_onnx("llama"), library=False)
    row = np.random.default_rng(2).integers(3, VOCAB, 6)
    cache = KVCache(session, batch=2)
    padded_like_alone(session, cache, row, padding=0)


@pytest.mark.parametrize("capacity", [None, 12])
@pytest.mark.parametrize("kind", KINDS)
def test_a_cache_that_is_cut_goes_on_as_if_nothing_had_been(kind: Kind, capacity: int | None, tmp_path: Path) -> None:
    session = opened(decoder(tmp_path, kind))
    first, other = drawn(1, 8), drawn(1, 4, seed=1)
    cache = KVCache(session, capacity=capacity)
    cache.run(session, {"input_ids": first})
    cache.trim(3)
    assert cache.length == 3
    logits = cache.run(session, {"input_ids": other})[0][0]
    same(logits, whole(session, np.concatenate([first[0, :3], other[0]]))[3:])
    cache.trim(0)
    same(cache.run(session, {"input_ids": other})[0][0], whole(session, other[0]))
    with pytest.raises(UsageError, match="cannot be cut to 5"):
        cache.trim(5)


@pytest.mark.parametrize("capacity", [None, 12])
@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_reordered_and_repeated(kind: Kind, capacity: int | None, tmp_path: Path) -> None:
    session = opened(decoder(tmp_path, kind))
    rows, token = drawn(3, 5), np.array([[1], [2], [3]])
    cache = KVCache(session, batch=3, capacity=capacity)
    cache.run(session, {"input_ids": rows})
    held = [one.value.data_ptr() for one in cache._held]
    cache.reorder([2, 0, 2])
    assert capacity is None or held == [one.value.data_ptr() for one in cache._held]
    logits = cache.run(session, {"input_ids": token})[0]
    for index, source in enumerate([2, 0, 2]):
        same(logits[index], whole(session, [*rows[source], token[index, 0]])[-1:])
    cache.trim(5)
    cache.reorder([1])
    cache.reorder(np.zeros(4, np.int64))
    assert (cache.batch, cache.length, cache.capacity) == (4, 5, capacity)
    logits = cache.run(session, {"input_ids": np.arange(4)[:, None]})[0]
    for index in range(4):
        same(logits[index], whole(session, [*rows[0], index])[-1:])
    for wrong in ([], [4], [-1], [[0]], [0.5]):
        with pytest.raises(UsageError, match="has no rows"):
            cache.reorder(np.asarray(wrong))


def test_bytes(tmp_path: Path) -> None:
    numbers = 2 * KV_HEADS * WIDTH
    for kind, token in (("rows4", numbers // 2 + 8 * KV_HEADS), ("rows8", numbers + 8 * KV_HEADS), ("int8", numbers)):
        session = opened(decoder(tmp_path, kind))
        cache = KVCache(session, batch=3)
        assert cache.nbytes == 0
        cache.run(session, {"input_ids": drawn(3, 5)})
        assert (cache.nbytes, cache.float_nbytes) == (15 * token, 15 * 4 * numbers)
        assert cache.nbytes == sum(one.array.nbytes for one in cache._held)
        assert KVCache(session, capacity=7).nbytes == 7 * token


@pytest.mark.parametrize("kind", ["rows4", "rows8"])
def test_without_the_library(kind: Kind, tmp_path: Path) -> None:
    path = decoder(tmp_path, kind)
    with_kernels, without = opened(path), opened(path, library=False)
    tokens = drawn(2, 6)
    for capacity in (None, 6):
        cache = KVCache(without, batch=2, capacity=capacity)
        cache.run(without, {"input_ids": tokens[:, :4]})
        logits = cache.run(with_kernels, {"input_ids": tokens[:, 4:]})[0]  # the bytes are the same
        for row, found in zip(tokens, logits, strict=True):
            same(found, whole(with_kernels, row)[4:])


def test_of_a_file(tmp_path: Path) -> None:
    """A file that says nothing of its cache is looked into; a session of it cannot be."""
    path = decoder(tmp_path, "float", metadata=False)
    session = opened(path)
    cache = KVCache(path, capacity=8)
    tokens = drawn(1, 8)
    same(cache.run(session, {"input_ids": tokens})[0][0], whole(session, tokens[0]))
    with pytest.raises(InputRefused, match="fixed capacity") as caught:
        KVCache(session, capacity=8)
    assert "give its file" in str(caught.value)
    with pytest.raises(InputRefused, match="There is no such model"):
        KVCache(tmp_path / "absent.onnx")
    with pytest.raises(InputRefused, match="fixed capacity"):
        KVCache(tiny_onnx("llama"), capacity=8)


def test_a_width_that_is_open(tmp_path: Path) -> None:
    model = onnx.load(decoder(tmp_path, "float"))
    for value in (*model.graph.input, *model.graph.output):
        if "past" in value.name:
            value.type.tensor_type.shape.dim[3].dim_param = "w"
    onnx.save(model, tmp_path / "open.onnx")
    session = opened(tmp_path / "open.onnx")
    with pytest.raises(InputRefused, match="leaves the width of its cache open"):
        KVCache(session)
    cache = KVCache(session, width=WIDTH)
    same(
        cache.run(session, {"input_ids": drawn(1, 4)})[0][0],
        whole(opened(tmp_path / "float-counts.onnx"), drawn(1, 4)[0]),
    )
    described = json.loads(model.metadata_props[0].value) | {"width": WIDTH}
    model.metadata_props[0].value = json.dumps(described)
    onnx.save(model, tmp_path / "said.onnx")
    assert KVCache(opened(tmp_path / "said.onnx")).layout.entries[0].width == WIDTH


def changed(path: Path, **metadata: object) -> Path:
    """The model with other words about its cache."""
    model = onnx.load(path)
    model.metadata_props[0].value = json.dumps(json.loads(model.metadata_props[0].value) | metadata)
    onnx.save(model, path.with_name("changed.onnx"))
    return path.with_name("changed.onnx")


@pytest.mark.parametrize(
    ("kind", "words"),
    [("rows8", "bits"), ("float", "bits"), ("rotated", "its rotated is True"), ("scales", "its scales is 'token'"),
     ("silent", "says nothing of its own")],
)  # fmt: skip
def test_a_session_with_another_cache_is_refused(kind: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    mine = opened(decoder(tmp_path, "rows4"))
    if kind in ("rows8", "float"):
        other = decoder(tmp_path, kind)
    elif kind == "silent":
        other = decoder(tmp_path / "other", "rows4", metadata=False)
    else:
        words_of_it = {"rotated": {"rotated": False}, "scales": {"scales": None}}[kind]
        other = changed(decoder(tmp_path / "other", "rows4"), **words_of_it)
    session, cache = opened(other), KVCache(mine)
    cache.run(mine, {"input_ids": drawn(1, 3)})
    with pytest.raises(InputRefused, match="of another kind") as caught:
        cache.run(session, {"input_ids": drawn(1, 3)})
    for part in (words, "where:", "why:", "do:", "start from an empty cache"):
        assert part in str(caught.value)
    assert cache.length == 3


def test_shapes_are_compared_where_nothing_is_said(tmp_path: Path) -> None:
    cache = KVCache(opened(decoder(tmp_path, "float", metadata=False)))
    with pytest.raises(InputRefused, match="of another kind") as caught:
        cache.check(opened(decoder(tmp_path, "int8", metadata=False)))
    assert "the dtype of 'past_key_values.0.key' is float32 there and int8 here" in str(caught.value)
    with pytest.raises(InputRefused, match="of another kind") as caught:
        cache.check(opened(tiny_onnx("llama"), library=False))
    assert "one of the two has no 'past_key_values.1.key'" in str(caught.value)


def test_tensors_of_another_cache_are_refused(tmp_path: Path) -> None:
    cache = KVCache(opened(decoder(tmp_path, "rows4")), batch=2)
    good = [np.zeros((2, KV_HEADS, 3, WIDTH // 2 + 4), np.uint8)] * 2
    cache.take(good)
    assert cache.length == 3
    wrong = {
        "it has 1 tensors, not 2": good[:1],
        "is float32 ": [array.astype(np.float32) for array in good],
        "[2, 2, 3, 16], not": [np.zeros((2, KV_HEADS, 3, WIDTH), np.uint8)] * 2,
        "[1, 2, 3, 12], not": [array[:1] for array in good],
        "[2, 1, 3, 12], not": [array[:, :1] for array in good],
        "[2, 2, 2, 12], not": [good[0], good[1][:, :, :2]],
    }
    for words, tensors in wrong.items():
        with pytest.raises(InputRefused, match="of another kind") as caught:
            cache.take(tensors)
        assert words in str(caught.value)
    assert cache.length == 3


def test_a_full_cache_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    session = opened(decoder(tmp_path, "rows4"))
    cache = KVCache(session, capacity=4)
    cache.run(session, {"input_ids": drawn(1, 3)})
    before = [one.array.copy() for one in cache._held]
    with pytest.raises(InputRefused, match="The cache is full") as caught:
        cache.run(session, {"input_ids": drawn(1, 2)})
    assert "5 tokens in a cache of 4" in str(caught.value)
    assert all(np.array_equal(one.array, old) for one, old in zip(cache._held, before, strict=True))
    with pytest.raises(InputRefused, match="The cache is full"):
        cache.advance(5)


def test_what_does_not_fit_is_said(tmp_path: Path) -> None:
    session = opened(decoder(tmp_path, "rows4"))
    grown, fixed = KVCache(session), KVCache(session, capacity=4)
    grown.run(session, {"input_ids": drawn(1, 2)})
    ids, mask = drawn(1, 1), np.ones((1, 4), np.int64)
    cases = [
        (lambda: grown.run(session, {}), "no 'input_ids'"),
        (lambda: grown.run(session, {"input_ids": drawn(2, 1)}), "'input_ids' is [2, 1]"),
        (lambda: grown.run(session, {"input_ids": ids, "attention_mask": mask}), "'attention_mask' is [1, 4]"),
        (lambda: grown.run(session, {"input_ids": ids, "attention_mask": mask[:, :1]}), "'attention_mask' is [1, 1]"),
        (lambda: grown.run(session, {"input_ids": ids, "pixels": ids}), "no such input"),
        (lambda: grown.run(session, {"input_ids": ids, **grown.feeds()}), "the cache feeds it"),
        (lambda: grown.advance(3), "learns its length by itself"),
        (lambda: fixed.feeds(), "bound, not fed"),
        (lambda: fixed.take([]), "takes no tensors over"),
        (lambda: KVCache(session, batch=0), "0 rows"),
        (lambda: KVCache(session, capacity=0), "0 tokens"),
    ]
    for call, words in cases:
        with pytest.raises(GraphrotError) as caught:
            call()
        assert words in str(caught.value) and "do:" in str(caught.value)
    assert grown.length == 2


def test_a_model_without_a_cache(tmp_path: Path) -> None:
    head = '<ir_version: 10, opset_import: ["": 21]>'
    text = f"{head} g (int64[b,s] input_ids) => (float[b,s] logits) {{ logits = Cast <to = 1> (input_ids) }}"
    onnx.save(onnx.parser.parse_model(text), tmp_path / "x.onnx")
    with pytest.raises(InputRefused, match="has no KV cache"):
        KVCache(tmp_path / "x.onnx")
    with pytest.raises(InputRefused, match="has no KV cache"):
        KVCache(opened(tmp_path / "x.onnx"))
