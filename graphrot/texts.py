"""The text that a conversion calibrates and certifies on, as tokens of the model at hand."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from graphrot.errors import InputRefused
from graphrot.evaluate.text import Tokenizer, default_calibration_text, foreign_notes, read_text, refuse_foreign
from graphrot.model.files import tokenizer_folder

if TYPE_CHECKING:
    import onnx_ir as ir

    from graphrot.recipe import Recipe


class Texts:
    """Tokens of one text, for one tokenizer.

    Args:
        tokenizer_dir: folder with tokenizer.json, or None.
        file: a UTF-8 text; None: the help topics that every Python brings along.

    Raises:
        InputRefused: the file cannot be read, or is given without a tokenizer.
    """

    def __init__(self, tokenizer_dir: Path | None, file: Path | None) -> None:
        self.tokenizer_dir = tokenizer_dir
        self.notes: tuple[str, ...] = ()
        """What a user has to know about the tokenizer; complete once tokens have been read."""
        self._file = file
        self._ids: np.ndarray | None = None
        self._vocabulary: int | None = None
        if file is not None:
            read_text(file)
            self.require("a text was given")

    @property
    def available(self) -> bool:
        """Whether text can be turned into tokens."""
        return self.tokenizer_dir is not None

    def fit(self, model: ir.Model) -> None:
        """From now on, tokens that the model does not have are refused."""
        self._vocabulary = vocabulary_of(model)

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
        if self.tokenizer_dir is None:
            raise InputRefused(
                "There is no tokenizer",
                where="the folder of the source",
                why=why,
                do="give --tokenizer DIR with tokenizer.json" + (f", or use {instead}" if instead else ""),
            )
        if tokens and (there := len(self.tokens(tokens))) < tokens:
            raise InputRefused(
                "The calibration text is too short",
                where=f"{self._file}: {there} tokens",
                why=f"{why}, on {tokens} tokens at least",
                do="give a longer text, or leave it out",
            )

    def tokens(self, limit: int) -> np.ndarray:
        """The first ``limit`` tokens of the text, fewer if it is shorter; int64, no special tokens.

        Raises:
            InputRefused: there is no tokenizer, it cannot be read, or it has tokens that the model does not have.
        """
        if self._ids is None:
            self.require("the text is read in tokens")
            assert self.tokenizer_dir is not None
            text = default_calibration_text() if self._file is None else read_text(self._file)
            tokenizer = Tokenizer(self.tokenizer_dir)
            ids = np.asarray(tokenizer.encode(text), dtype=np.int64)
            if self._vocabulary is not None:
                refuse_foreign(ids, tokenizer, self._vocabulary)
                self.notes = foreign_notes(tokenizer, self._vocabulary)
            self._ids = ids
        return self._ids[:limit]


def look_ahead(source: object, *, file: Path | None, tokenizer: Path | None, recipe: Recipe) -> None:
    """Refuse texts and tokenizers that cannot be used before minutes go into loading and exporting a model.

    Args:
        source: what is converted.
        file: the calibration text, or None.
        tokenizer: the folder that was given for the tokenizer, or None: the source's own.
        recipe: where it calibrates, there must be a tokenizer.

    Raises:
        InputRefused: the text or the tokenizer is missing or cannot be read.
    """
    if file is not None:
        read_text(file)
    if tokenizer is not None:
        Tokenizer(tokenizer)
    elif recipe.calibrates and isinstance(source, str) and Path(source).is_dir():
        Texts(tokenizer_folder(Path(source)), None).serve(recipe)


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
