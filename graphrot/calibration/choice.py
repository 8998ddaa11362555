"""What a user may calibrate on, read from the words of an option."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from graphrot.errors import InputRefused, UsageError

Kind = Literal["default", "text", "tokens", "dataset", "self"]

_SELF = re.compile(r"self(?::(?P<seed>.*))?", re.DOTALL)
_SPLIT = r"[^:\[](?:[^:\[]|\[[^\]]*\])*"
_DATASET = re.compile(rf"datasets:(?P<id>[^:]+)(?::(?P<split>{_SPLIT})(?::(?P<column>.+))?)?", re.DOTALL)
_HELD_BACK = re.compile(r"(?:^|[^a-z])(?:test|eval)", re.IGNORECASE)
"""Splits that measure models; validation splits are for choosing, which calibration is."""


@dataclass(frozen=True)
class DatasetChoice:
    """One text column of one split of a data set.

    Attributes:
        id: of the hub (``name`` or ``owner/name``), or a folder.
        config: of a data set that has several.
        split: as the package ``datasets`` writes it, slices included (``train[:1%]``).
        column: None: the column ``text``, or the only one that holds texts.
    """

    id: str
    config: str | None
    split: str
    column: str | None


@dataclass(frozen=True)
class Choice:
    """What to calibrate on.

    Attributes:
        kind: ``default`` (Python's help topics), ``text``, ``tokens``, ``dataset`` or ``self`` (the model's own
            samples).
        name: for people and for graphrot.json; of files, without their folder.
        file: of ``text`` and ``tokens``.
        dataset: of ``dataset``.
        seed: of ``self``.
    """

    kind: Kind
    name: str
    file: Path | None = None
    dataset: DatasetChoice | None = None
    seed: int = 0

    @property
    def needs_tokenizer(self) -> bool:
        """Whether it is text, not tokens."""
        return self.kind not in ("tokens", "self")

    @property
    def where(self) -> str:
        """What errors point at."""
        return self.name if self.file is None else str(self.file)


def choose(spec: str | Path | None) -> Choice:
    """Read what a user calibrates on.

    Args:
        spec: a text file; a token file (``X.npy``, ``X.npz``, ``X.tokens.json``);
            ``datasets:ID[/CONFIG][:SPLIT[:COLUMN]]``; ``self[:SEED]``; None: the help topics that Python brings along.
            A :class:`~pathlib.Path` always is a file; so is ``./self``.

    Raises:
        UsageError: words that mean nothing.
        InputRefused: the split of a data set is one to measure on.
    """
    if spec is None:
        return Choice("default", "pydoc_data.topics")
    if isinstance(spec, str):
        if found := _SELF.fullmatch(spec):
            return _own(spec, found["seed"])
        if spec.startswith("datasets:"):
            return _dataset(spec)
    file = Path(spec)
    return Choice("tokens" if is_token_file(file) else "text", file.name, file=file)


def is_token_file(file: Path) -> bool:
    """Whether a file holds tokens, by its name."""
    name = file.name.lower()
    return name.endswith((".npy", ".npz", ".tokens.json"))


def _own(spec: str, seed: str | None) -> Choice:
    if seed is None:
        return Choice("self", "self:0")
    if not (seed.isascii() and seed.isdigit()):
        raise UsageError(
            "The seed of the model's own samples is no number",
            where=f"--calibration {spec}",
            do="write self, or self:SEED with a whole number",
        )
    return Choice("self", f"self:{int(seed)}", seed=int(seed))


def _dataset(spec: str) -> Choice:
    found = _DATASET.fullmatch(spec)
    if found is None:
        raise UsageError(
            "The data set is not named as datasets:ID[/CONFIG][:SPLIT[:COLUMN]]",
            where=f"--calibration {spec}",
            do="write, for example, datasets:Salesforce/wikitext/wikitext-2-raw-v1:train:text",
        )
    split = found["split"] or "train"
    if _HELD_BACK.search(re.sub(r"\[.*?\]", "", split)):
        raise InputRefused(
            "This split is kept for measuring",
            where=f"--calibration {spec}, split {split!r}",
            why="a model that was calibrated on it would look better than it is",
            do="calibrate on the split train or validation",
        )
    name, config = _id_and_config(found["id"])
    return Choice("dataset", spec, dataset=DatasetChoice(name, config, split, found["column"]))


def _id_and_config(path: str) -> tuple[str, str | None]:
    """The longest beginning that is a folder; else owner/name, and the rest."""
    parts = path.split("/")
    for count in range(len(parts), 0, -1):
        folder = "/".join(parts[:count])
        if folder and Path(folder).is_dir():
            return folder, "/".join(parts[count:]) or None
    return "/".join(parts[:2]), "/".join(parts[2:]) or None
