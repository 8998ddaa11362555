"""What a model writes by itself: from its own distribution, the same each time."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from graphrot.calibration import samples
from graphrot.calibration.samples import ROWS, OwnSamples
from graphrot.errors import CheckFailed, InputRefused
from graphrot.evaluate.session import DecoderSession, open_decoder
from graphrot.texts import Texts
from tests.exported import tiny_onnx
from tests.tiny import VOCAB


class _Table:
    """A decoder whose logits for the next token depend on the current one by a table; it counts its runs."""

    path = "table"

    def __init__(self, table: np.ndarray, *, batch: int | None = None, most: int = 10**6) -> None:
        self.table, self.batch, self.most = table, batch, most
        self.vocabulary = len(table)
        self.runs = 0

    def reserve(self, batch: int, capacity: int) -> None:
        return None

    def run(self, tokens: np.ndarray, cache: Any = None) -> tuple[np.ndarray, int]:
        length = (cache or 0) + tokens.shape[1]
        if length > self.most:
            raise InputRefused("too long")
        assert self.batch in (None, len(tokens))
        self.runs += 1
        return self.table[tokens], length


def own(table: np.ndarray, seed: int = 0, **options: Any) -> OwnSamples:
    decoder: Any = _Table(table, **options)
    return OwnSamples(decoder, seed)


CHAIN = np.log(np.array([[0.1, 0.6, 0.3], [0.5, 0.25, 0.25], [0.2, 0.2, 0.6]], dtype=np.float32))


def test_they_follow_the_models_distribution() -> None:
    """Pairs of neighbours, without those that the likeliest tokens made."""
    rows = own(CHAIN).tokens(24 * ROWS * samples.LENGTH).reshape(-1, samples.LENGTH)[:, 4:]
    counts = np.zeros((3, 3))
    np.add.at(counts, (rows[:, :-1].ravel(), rows[:, 1:].ravel()), 1)
    found = counts / counts.sum(axis=1, keepdims=True)
    assert np.abs(found - np.exp(CHAIN)).max() < 0.015


def test_rows_begin_with_any_token_and_four_likely_ones() -> None:
    rows = own(CHAIN).tokens(4 * ROWS * samples.LENGTH).reshape(-1, samples.LENGTH)
    assert set(rows[:, 0]) == {0, 1, 2}
    likeliest = CHAIN.argmax(axis=1)
    for position in range(4):
        assert (rows[:, position + 1] == likeliest[rows[:, position]]).all()
    assert not (rows[:, 5] == likeliest[rows[:, 4]]).all()


def test_more_begin_with_the_fewer_and_seeds_differ() -> None:
    many = own(CHAIN).tokens(3 * ROWS * samples.LENGTH)
    few = own(CHAIN)
    for count in (1, 700, 5000):
        assert few.tokens(count).tolist() == many[:count].tolist()
    assert own(CHAIN, seed=1).tokens(500).tolist() != many[:500].tolist()


def test_nothing_is_written_twice() -> None:
    decoder: Any = _Table(CHAIN)
    found = OwnSamples(decoder, 0)
    found.tokens(10)
    before = decoder.runs
    found.tokens(ROWS * samples.LENGTH)
    assert decoder.runs == before


@pytest.mark.parametrize(("batch", "most"), [(1, 40), (3, 40), (None, 7)])
def test_models_of_few_positions_or_one_batch(batch: int | None, most: int) -> None:
    rows = own(CHAIN, batch=batch, most=most).tokens(most * 6).reshape(-1, most)
    assert (rows[:, 1] == CHAIN.argmax(axis=1)[rows[:, 0]]).all()


def test_a_model_without_numbers() -> None:
    with pytest.raises(CheckFailed, match="not finite"):
        own(np.full((3, 3), np.nan, np.float32)).tokens(5)
    with pytest.raises(InputRefused, match="writes no samples"):
        own(CHAIN, most=0)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_real_model_with_and_without_its_cache(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same tokens come out where all earlier tokens run again at each step."""
    monkeypatch.setattr(samples, "LENGTH", 24)
    path = tiny_onnx(name)
    found = OwnSamples(open_decoder(path, threads=1), 3).tokens(ROWS * 24).reshape(ROWS, 24)
    assert found.min() >= 0 and found.max() < VOCAB
    decoder = open_decoder(path, threads=1)
    draws = np.random.default_rng([3, 0])
    assert found[:, 0].tolist() == draws.integers(0, VOCAB, ROWS).tolist()
    uniform = draws.random((24, ROWS))
    for position in range(5, 24):
        logits = decoder.run(found[:, :position])[0][:, -1].astype(np.float64)
        shares = np.cumsum(np.exp(logits - logits.max(axis=-1, keepdims=True)), axis=-1)
        shares /= shares[:, -1:]
        edges = np.concatenate([np.zeros((ROWS, 1)), shares], axis=-1)
        row = np.arange(ROWS)
        assert (edges[row, found[:, position]] <= uniform[position] + 1e-4).all()
        assert (edges[row, found[:, position] + 1] >= uniform[position] - 1e-4).all()


def test_texts_draw_on_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samples, "LENGTH", 8)
    opened: list[int | None] = []
    start = DecoderSession.__init__

    def watch(self: DecoderSession, *args: Any, threads: int | None = None, **options: Any) -> None:
        opened.append(threads)
        start(self, *args, threads=threads, **options)

    monkeypatch.setattr(DecoderSession, "__init__", watch)
    path = tiny_onnx("llama")
    texts = Texts(None, "self:5")
    texts.fit(ir.load(path), path)
    assert texts.available and len(texts.tokens(20)) == 20 and opened == [1]
    part = texts.part()
    assert part is not None and (part.kind, part.name, part.tokens) == ("self", "self:5", 20)
