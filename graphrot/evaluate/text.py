"""Texts and tokenizers: read a file, find and load a tokenizer, the default calibration text.

Tokenizers are read from ``tokenizer.json`` by the ``tokenizers`` package, so that a converted model
runs without torch and transformers.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from graphrot.errors import EnvironmentProblem, InputRefused

_TOKENIZER = "tokenizer.json"
_AGAIN = "download it again, or save it again by transformers"


class Tokenizer:
    """A tokenizer with what belongs to it: end tokens and chat template.

    Args:
        folder: holds ``tokenizer.json`` and, optionally, ``tokenizer_config.json``,
            ``generation_config.json``, ``genai_config.json`` and ``chat_template.jinja``.

    Raises:
        InputRefused: there is no ``tokenizer.json``, or a file does not parse.
        EnvironmentProblem: the package ``tokenizers`` is not installed.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        file = folder / _TOKENIZER
        if not folder.is_dir():
            raise InputRefused(
                "The tokenizer's place is not a folder" if folder.exists() else "There is no such folder",
                where=str(folder),
                why="a tokenizer is read from the folder that its files lie in",
                do="give the folder with tokenizer.json",
            )
        if not file.is_file():
            raise InputRefused(
                "There is no tokenizer.json",
                where=str(folder),
                why="other tokenizer formats are not read",
                do="save it by transformers: AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)",
            )
        try:
            import tokenizers
        except ImportError as error:
            raise EnvironmentProblem(
                "Reading a tokenizer needs the package 'tokenizers'", do="pip install tokenizers"
            ) from error
        with _refusing("tokenizer.json does not parse", file):
            self._tokenizer = tokenizers.Tokenizer.from_file(str(file))
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._config = _read_json(folder / "tokenizer_config.json")
        self._generation = _read_json(folder / "generation_config.json")
        genai = _read_json(folder / "genai_config.json").get("model")
        self._genai: dict[str, Any] = genai if isinstance(genai, dict) else {}

    @property
    def size(self) -> int:
        """Number of tokens, added ones included."""
        return int(self._tokenizer.get_vocab_size(with_added_tokens=True))

    @property
    def end_tokens(self) -> frozenset[int]:
        """Token ids that end a text: those of generation_config.json, of genai_config.json, and the tokenizer's own."""
        named = [self._generation.get("eos_token_id"), self._genai.get("eos_token_id")]
        found = (token for entry in named for token in (entry if isinstance(entry, list) else [entry]))
        ids = {token for token in found if isinstance(token, int)}
        token = self._special("eos_token")
        own = self._tokenizer.token_to_id(token) if token else None
        return frozenset(ids if own is None else ids | {own})

    @property
    def start_token(self) -> int | None:
        """The id of the token that begins a text: the tokenizer's own BOS, else the first that ends one."""
        token = self._special("bos_token")
        own = self._tokenizer.token_to_id(token) if token else None
        return int(own) if own is not None else min(self.end_tokens, default=None)

    def begins_itself(self, text: str) -> bool:
        """Whether a text is written with its BOS, so that no other must be put in front."""
        token = self._special("bos_token")
        return bool(token) and text.startswith(token or "")

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """Token ids of a text; ``special`` adds what the tokenizer puts around it (such as BOS)."""
        with _refusing("The tokenizer fails on a text", self.folder / _TOKENIZER):
            return list(self._tokenizer.encode(text, add_special_tokens=special).ids)

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of token ids, special tokens left out."""
        with _refusing("The tokenizer fails on its own tokens", self.folder / _TOKENIZER):
            return str(self._tokenizer.decode(list(tokens), skip_special_tokens=True))

    def encode_chat(self, prompt: str) -> list[int]:
        """Token ids of a user's message in the model's chat template, up to where the answer starts.

        Raises:
            InputRefused: the tokenizer has no chat template, or the template fails.
        """
        return self.encode(self.render_chat([{"role": "user", "content": prompt}]))

    def render_chat(self, messages: Sequence[Mapping[str, str]]) -> str:
        """The text of a conversation, as the chat template writes it."""
        from jinja2 import TemplateError
        from jinja2.ext import loopcontrols
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        def refuse(message: str) -> None:
            raise TemplateError(message)

        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        environment.globals["raise_exception"] = refuse
        tokens = {name: self._special(name) or "" for name in ("bos_token", "eos_token", "pad_token", "unk_token")}
        try:
            template = environment.from_string(self._chat_template())
            return str(template.render(messages=list(messages), add_generation_prompt=True, **tokens))
        except TemplateError as error:
            raise InputRefused(
                "The chat template fails", where=str(self.folder), why=str(error), do="generate without --chat"
            ) from error

    def _chat_template(self) -> str:
        file = self.folder / "chat_template.jinja"
        if file.is_file():
            return file.read_text(encoding="utf-8")
        template = self._config.get("chat_template")
        if isinstance(template, list):
            template = next((t.get("template") for t in template if t.get("name") == "default"), None)
        if not isinstance(template, str):
            raise InputRefused(
                "The tokenizer has no chat template",
                where=str(self.folder),
                why="neither chat_template.jinja nor tokenizer_config.json has one",
                do="generate without --chat",
            )
        return template

    def _special(self, name: str) -> str | None:
        token = self._config.get(name)
        token = token.get("content") if isinstance(token, dict) else token
        return token if isinstance(token, str) else None


@contextlib.contextmanager
def _refusing(what: str, file: Path) -> Iterator[None]:
    """Turn what the package raises on an odd tokenizer.json into a refusal.

    It raises bare Exceptions; and where its own code panics, a class that is no Exception and has no name in
    Python's modules.
    """
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise InputRefused(what, where=str(file), why=str(error).strip()[:400], do=_AGAIN) from error


def find_tokenizer(explicit: Path | None, *, beside: Sequence[Path] = ()) -> Tokenizer:
    """Load the tokenizer of folder ``explicit``, or the first that lies beside (or in) one of the models.

    Raises:
        InputRefused: there is none.
    """
    if explicit is not None:
        return Tokenizer(explicit)
    folders = [path if path.is_dir() else path.absolute().parent for path in beside]
    for folder in folders:
        if (folder / _TOKENIZER).is_file():
            return Tokenizer(folder)
    raise InputRefused(
        "There is no tokenizer",
        where=", ".join(str(folder) for folder in folders) or None,
        why="no tokenizer.json lies beside the model",
        do="give its folder with --tokenizer",
    )


def encode_file(
    text: Path,
    tokenizer: Path | None,
    *,
    beside: Sequence[Path] = (),
    limit: int | None = None,
    vocabulary: int | None = None,
) -> np.ndarray:
    """Token ids ``[T] int64`` of a text file from its start, without special tokens.

    Args:
        text: a UTF-8 file.
        tokenizer: a folder with tokenizer.json; None: look beside the models.
        beside: models beside which a tokenizer may lie.
        limit: keep at most so many tokens.
        vocabulary: number of tokens that the model knows; None: not checked.

    Raises:
        InputRefused: the text or the tokenizer is missing or unusable, or has tokens that the model does not have.
    """
    content = read_text(text)
    words = find_tokenizer(tokenizer, beside=beside)
    ids = words.encode(content)
    if vocabulary is not None:
        refuse_foreign(ids, words, vocabulary)
    return np.asarray(ids[:limit], dtype=np.int64)


def refuse_foreign(ids: Sequence[int] | np.ndarray, tokenizer: Tokenizer, vocabulary: int) -> None:
    """Refuse token ids that a model does not have.

    Args:
        ids: token ids of a text.
        tokenizer: what made them.
        vocabulary: number of tokens that the model knows.

    Raises:
        InputRefused: an id is ``vocabulary`` or larger.
    """
    largest = int(np.max(ids, initial=0))
    if largest >= vocabulary:
        raise InputRefused(
            "The tokenizer is not the model's own",
            where=f"{tokenizer.folder / _TOKENIZER}: {tokenizer.size} tokens",
            why=f"the text has token {largest}, and the model knows {vocabulary} tokens",
            do="give the folder of the model's tokenizer with --tokenizer",
        )


def foreign_notes(tokenizer: Tokenizer, vocabulary: int) -> tuple[str, ...]:
    """A word on a tokenizer that is much smaller than the model's vocabulary: it may be another model's."""
    if 2 * tokenizer.size >= vocabulary:
        return ()
    sizes = f"the tokenizer has {tokenizer.size} tokens and the model {vocabulary}"
    return (f"{sizes}: check that they belong together ({tokenizer.folder / _TOKENIZER})",)


def read_text(path: Path) -> str:
    """Read a UTF-8 text.

    Raises:
        InputRefused: the file is missing, empty or not UTF-8.
    """
    if path.is_dir():
        raise InputRefused("The text is a folder", where=str(path), do="give one file")
    if not path.exists():
        raise InputRefused("There is no such text file", where=str(path), do="check the path")
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        why = error.strerror or str(error)
        raise InputRefused("The text cannot be read", where=str(path), why=why, do="check its permissions") from error
    except UnicodeDecodeError as error:
        raise InputRefused(
            "The text is not UTF-8", where=f"{path}, byte {error.start}", do="convert it to UTF-8"
        ) from error
    if not text.strip():
        raise InputRefused("The text is empty", where=str(path), do="give a text with words in it")
    return text


def default_calibration_text() -> str:
    """Text that every Python brings along: the topics of its help, in alphabetical order."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name].strip() for name in sorted(topics)) + "\n"


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise InputRefused(f"{path.name} does not parse", where=str(path), why=str(error), do=_AGAIN) from error
    return content if isinstance(content, dict) else {}
