"""The text that a conversion calibrates and certifies on, as tokens of the model at hand."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from graphrot.calibration.choice import Choice, choose
from graphrot.calibration.fingerprint import fingerprint
from graphrot.calibration.token_file import read_tokens
from graphrot.errors import InputRefused
from graphrot.evaluate.text import Tokenizer, default_calibration_text, foreign_notes, read_text, refuse_foreign
from graphrot.model.files import tokenizer_folder
from graphrot.progress import Progress, silent
from graphrot.report.parts import CalibrationPart

if TYPE_CHECKING:
    import onnx_ir as ir

    from graphrot.calibration.samples import OwnSamples
    from graphrot.recipe import Recipe


class Texts:
    """Tokens of one text, for one model.

    Args:
        tokenizer_dir: folder with tokenizer.json, or None.
        choice: what to read; None: the help topics that every Python brings along. See
            :func:`graphrot.calibration.choice.choose` for the words.

    Raises:
        UsageError: the choice means nothing.
        InputRefused: a file cannot be read, or a text is given without a tokenizer.
        EnvironmentProblem: the package for data sets is missing.
    """

    def __init__(self, tokenizer_dir: Path | None, choice: Choice | str | Path | None) -> None:
        self.tokenizer_dir = tokenizer_dir
        self.choice = choice if isinstance(choice, Choice) else choose(choice)
        self.notes: tuple[str, ...] = ()
        """What a user has to know about the tokenizer; complete once tokens have been read."""
        self._ids: np.ndarray | None = None
        self._vocabulary: int | None = None
        self._model: Path | None = None
        self._progress: Progress = silent
        self._samples: OwnSamples | None = None
        self._taken = 0
        check_choice(self.choice)
        if self.choice.kind != "default" and self.choice.needs_tokenizer:
            self.require("a text was given")

    @property
    def available(self) -> bool:
        """Whether there can be tokens: with a tokenizer, or where none is needed."""
        return self.tokenizer_dir is not None or not self.choice.needs_tokenizer

    def fit(self, model: ir.Model, path: Path | None = None, *, progress: Progress = silent) -> None:
        """From now on, tokens that the model does not have are refused, and its own samples are those of ``path``.

        Args:
            model: a decoder.
            path: its file, which samples are drawn from.
            progress: told of each token that is drawn.
        """
        self._vocabulary = vocabulary_of(model)
        self._model = path
        self._progress = progress

    def serve(self, recipe: Recipe, *, tokens: int = 0) -> None:
        """Refuse to go on without what a recipe calibrates on, or with fewer than ``tokens`` tokens of it.

        Raises:
            InputRefused: there is no tokenizer, or the text is too short.
        """
        self.require(f"{recipe.reader} calibrates on text", tokens=tokens, instead=recipe.without_text)

    def require(self, why: str, *, tokens: int = 0, instead: str = "") -> None:
        """Refuse to go on without a tokenizer, or with a text of fewer than ``tokens`` tokens.

        Args:
            why: it is needed.
            tokens: the least.
            instead: options that need none.

        Raises:
            InputRefused: there is none, or the text is too short.
        """
        if not self.available:
            raise InputRefused(
                "There is no tokenizer",
                where="the folder of the source",
                why=why,
                do="give --tokenizer DIR with tokenizer.json" + (f", or use {instead}" if instead else ""),
            )
        if tokens and (there := len(self.look(tokens))) < tokens:
            raise self._too_short(there, f"{why}, on {tokens} tokens at least")

    def tokens(self, limit: int) -> np.ndarray:
        """The first ``limit`` tokens to calibrate on, fewer if there are fewer; int64, no special tokens.

        :meth:`part` tells of all that were handed out here.

        Raises:
            InputRefused: there is no tokenizer, it cannot be read, or there are tokens that the model does not have.
        """
        ids = self.look(limit)
        self._taken = max(self._taken, len(ids))
        return ids

    def look(self, limit: int) -> np.ndarray:
        """The same tokens as :meth:`tokens`, for checks that leave no trace in what is made of the model."""
        if self.choice.kind == "self":
            return self._own().tokens(limit)
        if self._ids is None:
            self._ids = self._read()
        return self._ids[:limit]

    def sequences(self, count: int, length: int, skip: int = 0) -> np.ndarray:
        """Sequences that follow each other in the text without overlap, ``[count, length] int64``.

        Args:
            count: of sequences.
            length: tokens of each.
            skip: sequences at the start that are left out, which somebody else may use.

        Raises:
            InputRefused: the text is too short, or as :meth:`tokens`.
        """
        wanted = (skip + count) * length
        ids = self.tokens(wanted)
        if len(ids) < wanted:
            raise self._too_short(len(ids), f"{skip + count} sequences of {length} tokens need {wanted}")
        return ids[skip * length :].reshape(count, length)

    def part(self) -> CalibrationPart | None:
        """What ``graphrot.json`` says of the tokens that were handed out; None: none were."""
        if not self._taken:
            return None
        ids = self.look(self._taken)
        return CalibrationPart(
            kind=self.choice.kind,
            name=self.choice.name,
            tokens=len(ids),
            sha256=hashlib.sha256(ids.astype("<i8").tobytes()).hexdigest(),
            fingerprint=fingerprint(ids),
        )

    def _read(self) -> np.ndarray:
        choice = self.choice
        if choice.kind == "tokens" and choice.file is not None:
            ids = read_tokens(choice.file)
            if self._vocabulary is not None and int(ids.max()) >= self._vocabulary:
                raise InputRefused(
                    "The tokens are not the model's own",
                    where=str(choice.file),
                    why=f"it has token {int(ids.max())}, and the model knows {self._vocabulary} tokens",
                    do="make them by the model's own tokenizer",
                )
            return ids
        self.require("the text is read in tokens")
        assert self.tokenizer_dir is not None
        tokenizer = Tokenizer(self.tokenizer_dir)
        ids = np.asarray(tokenizer.encode(_text(choice)), dtype=np.int64)
        if self._vocabulary is not None:
            refuse_foreign(ids, tokenizer, self._vocabulary)
            self.notes = foreign_notes(tokenizer, self._vocabulary)
        return ids

    def _own(self) -> OwnSamples:
        if self._samples is None:
            from graphrot.calibration.samples import OwnSamples
            from graphrot.evaluate.session import open_decoder

            if self._model is None:
                raise RuntimeError("samples of a model that has not been named")
            decoder = open_decoder(self._model, threads=1)
            self._samples = OwnSamples(decoder, self.choice.seed, progress=self._progress)
        return self._samples

    def _too_short(self, there: int, why: str) -> InputRefused:
        return InputRefused(
            "The calibration text is too short",
            where=f"{self.choice.where}: {there} tokens",
            why=why,
            do="give a longer text, or leave it out",
        )


def check_choice(choice: Choice) -> None:
    """Refuse a choice whose file or package is not there, without reading more of it than that takes.

    Raises:
        InputRefused: a file cannot be read.
        EnvironmentProblem: the package for data sets is missing.
    """
    if choice.kind == "dataset":
        from graphrot.calibration.dataset import refuse_without_package

        refuse_without_package(choice.name)
    elif choice.file is not None:
        _ = read_tokens(choice.file) if choice.kind == "tokens" else read_text(choice.file)


def _text(choice: Choice) -> str:
    if choice.dataset is not None:
        from graphrot.calibration.dataset import read_dataset

        return read_dataset(choice.dataset, choice.name)
    return default_calibration_text() if choice.file is None else read_text(choice.file)


def look_ahead(source: object, *, choice: Choice, tokenizer: Path | None, recipe: Recipe) -> None:
    """Refuse texts and tokenizers that cannot be used before minutes go into loading and exporting a model.

    Args:
        source: what is converted.
        choice: what to calibrate on.
        tokenizer: the folder that was given for the tokenizer, or None: the source's own.
        recipe: where it calibrates, there must be a tokenizer.

    Raises:
        InputRefused: the text or the tokenizer is missing or cannot be read.
        EnvironmentProblem: the package for data sets is missing.
    """
    check_choice(choice)
    if tokenizer is not None:
        Tokenizer(tokenizer)
    elif recipe.calibrates and choice.needs_tokenizer and isinstance(source, str) and Path(source).is_dir():
        Texts(tokenizer_folder(Path(source)), choice).serve(recipe)


def vocabulary_of(model: ir.Model) -> int | None:
    """How many tokens a decoder knows: rows of its table, or its number of logits if that is less."""
    sizes: list[int] = []
    for value in model.graph.outputs:
        if value.name == "logits" and value.shape is not None and isinstance(value.shape[-1], int):
            sizes.append(value.shape[-1])
    for value in model.graph.inputs:
        if value.name == "input_ids":
            sizes += [rows for use in value.uses() if (rows := _rows(use.node, use.idx)) is not None]
    return min(sizes, default=None)


def _rows(node: ir.Node, position: int) -> int | None:
    """Rows of the table that the node looks up its input in."""
    table = node.inputs[0]
    if node.op_type != "Gather" or position != 1 or table is None or not table.is_initializer():
        return None
    if table.shape is None or len(table.shape) != 2 or not isinstance(table.shape[0], int):
        return None
    return table.shape[0]
