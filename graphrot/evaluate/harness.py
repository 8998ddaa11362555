"""What evaluation harnesses ask of a language model, answered by a decoder: likelihoods and continuations."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from graphrot.errors import CheckFailed, InputRefused
from graphrot.evaluate.compare import longest_run
from graphrot.evaluate.generate import Sampling, stream
from graphrot.evaluate.session import DecoderSession
from graphrot.evaluate.text import Tokenizer, refuse_foreign
from graphrot.progress import Progress, silent

_LOGITS = 1 << 28
"""Bytes of logits that one batch makes, about."""
_MOST_ROWS = 16
_NEW_TOKENS = 256
"""Of a continuation that names no number."""


class HarnessModel:
    """A decoder with its tokenizer.

    Requests run in batches of rows of about the same length, padded on the right: behind a row nothing attends to its
    padding, so that a request's answer does not depend on its company.

    Args:
        decoder: the model.
        tokenizer: its tokenizer.
        progress: told of each batch.
    """

    def __init__(self, decoder: DecoderSession, tokenizer: Tokenizer, *, progress: Progress = silent) -> None:
        self._decoder = decoder
        self._tokenizer = tokenizer
        self._progress = progress
        self._most = 0
        self._runs_on = True
        self.shortened = 0
        """Requests that were cut at their beginning, since the model takes no more tokens at once."""

    @property
    def start_token(self) -> int:
        """What stands in front of a text that has nothing in front.

        Raises:
            InputRefused: the tokenizer names no such token.
        """
        token = self._tokenizer.start_token
        if token is None:
            raise InputRefused(
                "The tokenizer names no token to begin a text with",
                where=str(self._tokenizer.folder),
                why="the task asks for the likelihood of a text's first token",
                do="name bos_token or eos_token in tokenizer_config.json",
            )
        return token

    def encode(self, text: str, *, special: bool | None = None) -> list[int]:
        """Token ids of a text.

        Args:
            text: what to encode.
            special: add what the tokenizer puts around a text; None: unless the text itself has it in front.

        Raises:
            InputRefused: the text has tokens that the model does not have.
        """
        around = not self._tokenizer.begins_itself(text) if special is None else special
        ids = self._tokenizer.encode(text, special=around)
        refuse_foreign(ids, self._tokenizer, self._decoder.vocabulary)
        return ids

    def score(self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[tuple[float, bool]]:
        """The log-likelihood of each continuation behind its context, and whether it is what greedy decoding writes.

        Args:
            pairs: context, of at least one token, and continuation, as token ids.

        Returns:
            In the same order; natural logarithms, summed in float64.

        Raises:
            CheckFailed: the model's logits are no numbers.
        """
        sequences = [[*context, *continuation] for context, continuation in pairs]
        most = self._fitting(max((len(ids) - 1 for ids in sequences), default=1))
        alike: dict[tuple[int, ...], list[int]] = {}
        for number, (ids, (_, continuation)) in enumerate(zip(sequences, pairs, strict=True)):
            if len(continuation) > most:
                raise InputRefused(
                    "A continuation is longer than the model takes",
                    where=f"{len(continuation)} tokens",
                    why=f"the model takes at most {most} at once",
                    do="leave the task out",
                )
            self.shortened += len(ids) - 1 > most
            alike.setdefault(tuple(ids[-most - 1 : -1]), []).append(number)
        answers: list[tuple[float, bool]] = [(0.0, True)] * len(pairs)
        for rows, logits in self._batches([row for row in alike if row]):
            for row, scores in zip(rows, logits, strict=True):
                for number in alike[row]:
                    continuation = list(pairs[number][1])
                    answers[number] = _likelihood(scores[len(row) - len(continuation) : len(row)], continuation)
        return answers

    def continue_text(self, context: str, options: Mapping[str, Any], *, seed: int = 0) -> str:
        """What the model writes behind ``context``, up to a stop.

        Args:
            context: the prompt.
            options: ``until`` (texts that end the answer, which they are no part of), ``max_gen_toks``, ``do_sample``,
                ``temperature`` and ``top_p``, as harnesses name them.
            seed: of the draws.
        """
        until = options.get("until") or []
        stops = [stop for stop in ([until] if isinstance(until, str) else until) if stop]
        count = next((int(options[name]) for name in _COUNTS if options.get(name) is not None), _NEW_TOKENS)
        temperature = float(options.get("temperature") or 0.0)
        draws = bool(options.get("do_sample", temperature > 0)) and temperature > 0
        sampling = Sampling(temperature, float(options.get("top_p") or 1.0), seed) if draws else None
        special = not self._tokenizer.begins_itself(context)
        text = ""
        pieces = stream(
            self._decoder, self._tokenizer, context, max_new_tokens=count, sampling=sampling, special=special
        )
        for piece in pieces:
            text += piece.text
            if ends := [text.index(stop) for stop in stops if stop in text]:
                return text[: min(ends)]
        return text

    def render_chat(self, messages: Sequence[Mapping[str, str]]) -> str:
        """A conversation in the model's chat template, up to where the answer starts."""
        return self._tokenizer.render_chat(messages)

    @property
    def name(self) -> str:
        """Of the tokenizer: its folder."""
        return str(self._tokenizer.folder)

    def _fitting(self, wanted: int) -> int:
        """``wanted`` tokens, or as many as the model takes at once."""
        if wanted > self._most and self._runs_on:
            found = longest_run(self._decoder, wanted, batch=self._decoder.batch)
            self._most = max(self._most, found or 0)
            self._runs_on = found == wanted
        return min(wanted, max(self._most, 1))

    def _batches(self, rows: list[tuple[int, ...]]) -> Iterator[tuple[list[tuple[int, ...]], np.ndarray]]:
        """Rows and their logits ``[B, S, V]``, the longest rows first."""
        ordered = sorted(rows, key=lambda row: (-len(row), row))
        fixed = self._decoder.batch
        done = 0
        while done < len(ordered):
            self._progress("requests", done, len(ordered))
            longest = len(ordered[done])
            fitting = max(1, min(_MOST_ROWS, _LOGITS // (4 * longest * self._decoder.vocabulary)))
            batch = ordered[done : done + (fixed or fitting)]
            tokens = np.zeros((fixed or len(batch), longest), np.int64)
            for number, row in enumerate(batch):
                tokens[number, : len(row)] = row
            yield batch, self._decoder.run(tokens)[0][: len(batch)]
            done += len(batch)
        self._progress("requests", len(ordered), len(ordered))


_COUNTS = ("max_gen_toks", "max_new_tokens", "max_tokens")


def _likelihood(logits: np.ndarray, tokens: list[int]) -> tuple[float, bool]:
    """Of ``tokens [S]``, from the logits ``[S, V]`` in front of each."""
    rows = logits.astype(np.float64)
    top = rows.max(axis=-1)
    if not np.isfinite(top).all():
        raise CheckFailed("The model's logits are not finite", do="check the model's weights")
    normalizer = top + np.log(np.exp(rows - top[:, None]).sum(axis=-1))
    picked = rows[np.arange(len(rows)), tokens]
    return float((picked - normalizer).sum()), bool((logits.argmax(axis=-1) == tokens).all())
