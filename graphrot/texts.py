"""The text that a conversion calibrates and certifies on, as tokens of the model at hand."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from graphrot.errors import InputRefused
from graphrot.evaluate.text import Tokenizer, default_calibration_text, read_text


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
        self._file = file
        self._ids: np.ndarray | None = None
        if file is not None:
            read_text(file)
            self.require("a text was given")

    @property
    def available(self) -> bool:
        """Whether text can be turned into tokens."""
        return self.tokenizer_dir is not None

    def require(self, why: str) -> None:
        """Refuse to go on without a tokenizer.

        Raises:
            InputRefused: there is none.
        """
        if self.tokenizer_dir is None:
            raise InputRefused(
                "There is no tokenizer",
                where="the folder of the source",
                why=why,
                do="give --tokenizer DIR with tokenizer.json, or use --solver clip",
            )

    def tokens(self, limit: int) -> np.ndarray:
        """The first ``limit`` tokens of the text, fewer if it is shorter; int64, no special tokens."""
        if self._ids is None:
            self.require("the text is read in tokens")
            assert self.tokenizer_dir is not None
            text = default_calibration_text() if self._file is None else read_text(self._file)
            self._ids = np.asarray(Tokenizer(self.tokenizer_dir).encode(text), dtype=np.int64)
        return self._ids[:limit]
