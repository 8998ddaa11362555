"""One of the models that run side by side: where its file lies, and the pieces of work that are timed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from graphrot.bench.timing import Stopwatch
from graphrot.errors import InputRefused
from graphrot.evaluate.device import Provider
from graphrot.evaluate.session import Cache, DecoderSession

GENAI = "onnxruntime-genai"
_OURS, _PLAIN = "graphrot", "onnx"
_CONFIG, _REPORT = "genai_config.json", "graphrot.json"


def find_file(model: Path) -> tuple[Path, str]:
    """The .onnx file of a model, and what it is: ``graphrot``, ``onnxruntime-genai`` or ``onnx``.

    Args:
        model: an .onnx file; a folder that ``convert`` wrote; a folder of onnxruntime-genai; any with ``model.onnx``.

    Raises:
        InputRefused: there is no such file, or the folder is none of these.
    """
    if model.is_file():
        return model, _PLAIN
    if not model.is_dir():
        raise InputRefused("There is no such model", where=str(model), do="give an .onnx file or a folder with one")
    kind = _OURS if (model / _REPORT).is_file() else GENAI if (model / _CONFIG).is_file() else _PLAIN
    path = model / (_decoder_of(model / _CONFIG) if kind == GENAI else "model.onnx")
    if not path.is_file():
        raise InputRefused(
            "The folder holds no model",
            where=str(model),
            why=f"it has no {path.name}",
            do="give a folder that convert wrote, one of onnxruntime-genai's model builder, or an .onnx file",
        )
    return path, kind


def _decoder_of(config: Path) -> str:
    try:
        name = json.loads(config.read_text(encoding="utf-8"))["model"]["decoder"]["filename"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputRefused(
            "The folder's genai_config.json names no decoder",
            where=str(config),
            why=f"{type(error).__name__}: {error}",
            do="give the decoder's .onnx file itself",
        ) from error
    return str(name)


class Contender:
    """A decoder with a KV cache, and its timed work. All are run the same way.

    A run's inputs and outputs are bound beforehand and outside of the time. A model that can writes new tokens into
    the buffers of its cache; others make a longer cache each time, and copy.

    Args:
        model: see :func:`find_file`.
        threads: of ONNX Runtime.
        batch: rows.
        provider: where it runs.

    Raises:
        InputRefused: it is no decoder, has no KV cache, or takes another batch only.
    """

    def __init__(self, model: Path, *, threads: int, batch: int, provider: Provider = "cpu") -> None:
        self.model = model
        self.path, self.kind = find_file(model)
        self.decoder = DecoderSession(self.path, threads=threads, provider=provider)
        if not self.decoder.has_cache:
            raise InputRefused(
                "The model has no KV cache",
                where=str(self.path),
                why="without one every token runs all tokens before it again, so that decoding is no figure of its own",
                do="export it with past_key_values.N.key/value and present.N.key/value",
            )
        if self.decoder.batch not in (None, batch):
            raise InputRefused(
                f"The model takes a batch of {self.decoder.batch} only",
                where=str(self.path),
                why=f"asked for {batch}",
                do=f"use --batch {self.decoder.batch}, or export it with an open batch",
            )
        self._batch = batch

    @property
    def in_place(self) -> bool:
        """Whether new tokens are written into the buffers of the cache."""
        return self.decoder.layout.shared

    def cache_bytes(self, context: int) -> int:
        """Bytes of a cache of ``context`` tokens in every row of the batch."""
        return self.decoder.layout.nbytes(self._batch, context)

    @property
    def vocabulary(self) -> int:
        """Token ids below it are valid."""
        return self.decoder.vocabulary

    def fill(self, context: int, room: int) -> Cache:
        """A cache of ``context`` random tokens of the model's own layout, for every row of the batch, with room for so
        many more in the same buffers where the model writes in place."""
        return self.decoder.filled(self._batch, context, room)

    def prefill(self, tokens: np.ndarray) -> Stopwatch:
        """Run ``tokens [count]`` from an empty cache, in every row at once."""
        watch = Stopwatch()
        bound = self.decoder.bind(np.broadcast_to(tokens, (self._batch, len(tokens))))
        with watch:
            bound.run()
        return watch

    def decode(self, tokens: Sequence[int], cache: Cache) -> Stopwatch:
        """Run ``tokens`` one after the other, each after the cache that the one before left.

        Raises:
            InputRefused: the model does not take so many tokens.
        """
        watch = Stopwatch()
        for token in tokens:
            bound = self.decoder.bind(np.full((self._batch, 1), token, dtype=np.int64), cache)
            with watch:
                bound.run()
            cache = bound.cache()
        return watch
