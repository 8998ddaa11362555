"""What harnesses ask of a decoder, against torch: likelihoods in any company, and continuations up to a stop."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from graphrot.errors import CheckFailed, InputRefused
from graphrot.evaluate import harness
from graphrot.evaluate.harness import HarnessModel
from graphrot.evaluate.session import DecoderSession, open_decoder
from graphrot.evaluate.text import Tokenizer
from tests.exported import tiny_onnx, write_tokenizer
from tests.tiny import tiny


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("words")
    write_tokenizer(folder)
    return Tokenizer(folder)


@pytest.fixture(scope="module")
def decoder() -> DecoderSession:
    return open_decoder(tiny_onnx("llama"), threads=1)


def expected(name: str, context: Sequence[int], continuation: Sequence[int]) -> tuple[float, bool]:
    ids = torch.tensor([[*context, *continuation]])
    with torch.no_grad():
        scores = torch.log_softmax(tiny(name)(input_ids=ids[:, :-1]).logits[0].double(), dim=-1)
    rows = scores[len(context) - 1 :]
    target = ids[0, len(context) :]
    return float(rows.gather(1, target[:, None]).sum()), bool((rows.argmax(-1) == target).all())


def pairs(count: int) -> list[tuple[list[int], list[int]]]:
    rng = np.random.default_rng(0)
    return [
        (rng.integers(3, 99, rng.integers(1, 20)).tolist(), rng.integers(3, 99, rng.integers(1, 6)).tolist())
        for _ in range(count)
    ]


def test_likelihoods_equal_torch(decoder: DecoderSession, words: Tokenizer) -> None:
    asked = pairs(20)
    greedy = [3, 4, 5]
    with torch.no_grad():
        for _ in range(3):
            greedy.append(int(tiny("llama")(input_ids=torch.tensor([greedy])).logits[0, -1].argmax()))
    asked += [(greedy[:3], greedy[3:]), (greedy[:3], [*greedy[3:5], (greedy[5] + 1) % 99])]
    found = HarnessModel(decoder, words).score(asked)
    for (score, first), (context, continuation) in zip(found, asked, strict=True):
        wanted, best = expected("llama", context, continuation)
        assert score == pytest.approx(wanted, abs=2e-4) and first == best
    assert found[-2][1] and not found[-1][1]


def test_company_changes_nothing(decoder: DecoderSession, words: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = pairs(12)
    together = HarnessModel(decoder, words).score(asked)
    monkeypatch.setattr(harness, "_MOST_ROWS", 1)
    alone = HarnessModel(decoder, words).score(asked)
    assert [score for score, _ in together] == pytest.approx([score for score, _ in alone], abs=1e-4)


class _Counting:
    """Passes on to a decoder, as one of a fixed batch; keeps the shapes of what ran."""

    def __init__(self, decoder: DecoderSession, batch: int | None) -> None:
        self.batch = batch
        self.vocabulary = decoder.vocabulary
        self.shapes: list[tuple[int, ...]] = []
        self._decoder = decoder

    def run(self, tokens: np.ndarray, cache: Any = None) -> Any:
        assert self.batch in (None, len(tokens))
        self.shapes.append(tokens.shape)
        return self._decoder.run(tokens, cache)


@pytest.mark.parametrize("batch", [None, 1, 5])
def test_batches(batch: int | None, decoder: DecoderSession, words: Tokenizer) -> None:
    counting: Any = _Counting(decoder, batch)
    asked = pairs(12)
    found = HarnessModel(counting, words).score(asked)
    assert [score for score, _ in found] == pytest.approx(
        [score for score, _ in HarnessModel(decoder, words).score(asked)], abs=1e-4
    )
    ran = counting.shapes[1:]  # the first asks whether the longest runs
    assert len(ran) == {None: 1, 1: 12, 5: 3}[batch]
    assert [shape[1] for shape in ran] == sorted((shape[1] for shape in ran), reverse=True)


def test_the_same_row_runs_once(decoder: DecoderSession, words: Tokenizer) -> None:
    """Choices of one token differ in their last token only, which is predicted, not read."""
    counting: Any = _Counting(decoder, 1)
    found = HarnessModel(counting, words).score([([5, 6, 7], [choice]) for choice in (8, 9, 10)])
    assert len(counting.shapes) == 2
    for (score, _), choice in zip(found, (8, 9, 10), strict=True):
        assert score == pytest.approx(expected("llama", [5, 6, 7], [choice])[0], abs=1e-4)


def test_what_is_too_long_is_cut_at_its_beginning(words: Tokenizer) -> None:
    """The tiny GPT-2 has 64 positions."""
    model = HarnessModel(open_decoder(tiny_onnx("gpt2"), threads=1), words)
    rng = np.random.default_rng(1)
    context, continuation = rng.integers(3, 99, 100).tolist(), [7, 8]
    found = model.score([(context, continuation), ([5], [6])])
    assert model.shortened == 1
    assert found[0][0] == pytest.approx(expected("gpt2", context[-63:], continuation)[0], abs=2e-4)
    assert found[1][0] == pytest.approx(expected("gpt2", [5], [6])[0], abs=2e-4)
    with pytest.raises(InputRefused, match="longer than the model takes") as caught:
        model.score([([5], context)])
    assert "at most 64" in str(caught.value)


def test_nothing_asked(decoder: DecoderSession, words: Tokenizer) -> None:
    model = HarnessModel(decoder, words)
    assert model.score([]) == [] and model.score([([5], [])]) == [(0.0, True)]


def test_logits_that_are_no_numbers(decoder: DecoderSession, words: Tokenizer) -> None:
    counting: Any = _Counting(decoder, None)
    counting.run = lambda tokens, cache=None: (np.full((*tokens.shape, 131), np.nan), None)
    with pytest.raises(CheckFailed, match="not finite"):
        HarnessModel(counting, words).score([([5, 6], [7])])


def test_the_beginning_of_a_text(decoder: DecoderSession, words: Tokenizer, tmp_path: Path) -> None:
    model = HarnessModel(decoder, words)
    assert model.start_token == 1
    assert model.encode("a") == [1, *words.encode("a")] and model.encode("a", special=False) == words.encode("a")
    assert model.encode("<s>a") == [1, *words.encode("a")]
    write_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "</s>"}', encoding="utf-8")
    assert HarnessModel(decoder, Tokenizer(tmp_path)).start_token == 2
    (tmp_path / "tokenizer_config.json").write_text("{}", encoding="utf-8")
    with pytest.raises(InputRefused, match="no token to begin a text with"):
        _ = HarnessModel(decoder, Tokenizer(tmp_path)).start_token


def test_continuations(decoder: DecoderSession, words: Tokenizer) -> None:
    model = HarnessModel(decoder, words)
    whole = model.continue_text("Once upon", {"max_gen_toks": 12})
    assert whole and whole == model.continue_text("Once upon", {"max_new_tokens": 12, "do_sample": False})
    assert model.continue_text("<s>Once upon", {"max_gen_toks": 12}) == whole
    stop = whole[3:5]
    assert model.continue_text("Once upon", {"max_gen_toks": 12, "until": [stop, "never"]}) == whole.split(stop)[0]
    assert model.continue_text("Once upon", {"max_gen_toks": 12, "until": stop}) == whole.split(stop)[0]
    drawn = {"max_gen_toks": 12, "do_sample": True, "temperature": 1.0}
    first, again, other = (model.continue_text("Once upon", drawn, seed=seed) for seed in (0, 0, 1))
    assert first == again != other
