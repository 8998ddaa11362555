"""Continue a prompt token by token, greedily or by sampling."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from graphrot.errors import CheckFailed, InputRefused, UsageError
from graphrot.evaluate.perplexity import Decoder
from graphrot.evaluate.text import Tokenizer, refuse_foreign

_HALF = "\ufffd"
"""What a tokenizer decodes from a token that ends in the middle of a character."""
_ROOM = 512
"""New tokens that a cache has room for at first."""


@dataclass(frozen=True)
class Sampling:
    """Draw from the smallest set of tokens whose probabilities sum up to ``top_p``.

    ``temperature`` divides the logits; a ``seed`` of None draws differently at each run.
    """

    temperature: float = 0.7
    top_p: float = 0.9
    seed: int | None = None

    def __post_init__(self) -> None:
        if self.temperature <= 0 or not 0 < self.top_p <= 1:
            raise UsageError(
                "The sampling is not possible",
                where=f"temperature {self.temperature}, top_p {self.top_p}",
                do="use a temperature above 0 and a top_p in (0, 1]; greedy is no sampling at all",
            )


@dataclass(frozen=True)
class Piece:
    """One new token, and the text that became certain with it (empty inside a character).

    ``token`` is None in a last piece that only brings text which was held back.
    """

    token: int | None
    text: str


@dataclass(frozen=True)
class Generation:
    """The whole answer: its text and its tokens, the prompt left out."""

    text: str
    tokens: list[int]
    notes: tuple[str, ...] = ()
    """What a user has to know about the answer."""


def generate(
    model: Decoder,
    tokenizer: Tokenizer,
    prompt: str,
    *,
    max_new_tokens: int = 64,
    sampling: Sampling | None = None,
    chat: bool = False,
    on_text: Callable[[str], None] | None = None,
) -> Generation:
    """Collect :func:`stream`; ``on_text`` is called with each piece of text as it comes."""
    tokens: list[int] = []
    texts: list[str] = []
    for piece in stream(model, tokenizer, prompt, max_new_tokens=max_new_tokens, sampling=sampling, chat=chat):
        if piece.token is not None:
            tokens.append(piece.token)
        texts.append(piece.text)
        if on_text is not None and piece.text:
            on_text(piece.text)
    return Generation("".join(texts), tokens)


def stream(
    model: Decoder,
    tokenizer: Tokenizer,
    prompt: str,
    *,
    max_new_tokens: int = 64,
    sampling: Sampling | None = None,
    chat: bool = False,
    special: bool = True,
) -> Iterator[Piece]:
    """Yield new tokens until one that ends the text (which is not yielded) or ``max_new_tokens``.

    Args:
        model: the decoder.
        tokenizer: its tokenizer.
        prompt: the text to continue, or with ``chat`` the user's message.
        max_new_tokens: at most so many.
        sampling: None takes the likeliest token each time (the first of equals).
        chat: put the prompt into the chat template.
        special: without it, nothing is put around the prompt (such as BOS).

    Raises:
        InputRefused: the prompt has no tokens, or tokens that the model does not have.
        CheckFailed: the logits are not finite.
    """
    ids = tokenizer.encode_chat(prompt) if chat else tokenizer.encode(prompt, special=special)
    if not ids:
        raise InputRefused("The prompt is empty", do="give a prompt of at least one token")
    vocabulary = getattr(model, "vocabulary", None)
    if isinstance(vocabulary, int):
        refuse_foreign(ids, tokenizer, vocabulary)
    generator = None if sampling is None else np.random.default_rng(sampling.seed)
    text = _Text(tokenizer, ids)
    reserve = getattr(model, "reserve", None)  # the cache in place, where the model allows it
    cache = reserve(1, len(ids) + min(max_new_tokens, _ROOM)) if reserve is not None else None
    tokens: Sequence[int] = ids
    for _ in range(max_new_tokens):
        logits, cache = model.run(np.asarray([tokens], dtype=np.int64), cache)
        token = _pick(logits[0, -1], sampling, generator)
        if token in tokenizer.end_tokens:
            break
        yield Piece(token, text.add(token))
        tokens = [token]
    if rest := text.rest():
        yield Piece(None, rest)


def _pick(logits: np.ndarray, sampling: Sampling | None, generator: np.random.Generator | None) -> int:
    if not np.isfinite(logits.max()):  # NaN, or an infinity that leaves no distribution
        raise CheckFailed("The model's logits are not finite", do="check the model's weights")
    if sampling is None or generator is None:
        return int(logits.argmax())
    scaled = logits.astype(np.float64) / sampling.temperature
    probabilities = np.exp(scaled - scaled.max())
    probabilities /= probabilities.sum()
    order = np.argsort(-probabilities, kind="stable")
    sums = np.cumsum(probabilities[order])
    kept = order[: int(np.searchsorted(sums, sampling.top_p * sums[-1])) + 1]
    weights = probabilities[kept] / probabilities[kept].sum()
    return int(generator.choice(kept, p=weights))


class _Text:
    """Turns tokens into text as far as it is certain.

    The prompt's tokens are decoded along, for tokenizers that treat the start of a text differently.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._tokens = list(prompt)
        self._said = len(tokenizer.decode(self._tokens))

    def add(self, token: int) -> str:
        """The text that is new and certain after ``token``."""
        self._tokens.append(token)
        whole = self._tokenizer.decode(self._tokens)
        return "" if whole.endswith(_HALF) else self._say(whole)

    def rest(self) -> str:
        """What was held back, at the end."""
        return self._say(self._tokenizer.decode(self._tokens))

    def _say(self, whole: str) -> str:
        new, self._said = whole[self._said :], max(len(whole), self._said)
        return new
