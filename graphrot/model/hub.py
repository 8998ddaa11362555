"""Models named by their id on the Hugging Face hub: found in its cache, or fetched into it.

Everything about the network is the hub client's: its cache, tokens, proxies and ``HF_HUB_OFFLINE``. Only the
files that a conversion reads are fetched.
"""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

from graphrot.errors import EnvironmentProblem, GraphrotError, InputRefused
from graphrot.model.files import TOKENIZER_FILES, path_of
from graphrot.progress import Progress, silent

_ID = re.compile(r"(?P<id>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(@(?P<revision>[\w./-]+))?")
_FILE_ENDINGS = (".onnx", ".gguf", ".bin", ".safetensors", ".json", ".pt")
_TEXTS = ("config.json", *TOKENIZER_FILES)
_WEIGHTS = (
    ("model.safetensors", "model-*.safetensors", "model.safetensors.index.json"),
    ("pytorch_model.bin", "pytorch_model-*.bin", "pytorch_model.bin.index.json"),
)
"""What to fetch, safetensors first: a repository that has both needs only them."""


def is_hub_id(spec: str) -> bool:
    """Whether ``spec`` reads as ``owner/name`` or ``owner/name@revision`` and is no path that exists.

    Raises:
        InputRefused: it is longer than any file's name.
    """
    found = _ID.fullmatch(spec)
    return found is not None and not found["id"].endswith(_FILE_ENDINGS) and not path_of(spec).exists()


def split_id(spec: str) -> tuple[str, str | None]:
    """The id and the revision of what :func:`is_hub_id` takes; None: the main branch."""
    found = _ID.fullmatch(spec)
    assert found is not None
    return found["id"], found["revision"]


def cached_files(spec: str) -> list[Path]:
    """The files that the hub's cache holds of a model, of all its revisions; [] without the hub client."""
    if importlib.util.find_spec("huggingface_hub") is None:
        return []
    from huggingface_hub import constants

    folder = Path(constants.HF_HUB_CACHE) / f"models--{split_id(spec)[0].replace('/', '--')}"
    return [file for file in folder.rglob("*") if file.is_file()]


def fetch(spec: str, *, progress: Progress = silent) -> Path:
    """The folder in the hub's cache that holds a model's config, weights and tokenizer.

    Args:
        spec: ``owner/name`` or ``owner/name@revision`` (a branch, a tag or a commit).
        progress: told of the step.

    Raises:
        InputRefused: the hub has no such model or revision, or wants an agreement before it gives it.
        EnvironmentProblem: the hub client is not installed, the hub cannot be reached and the cache does
            not have the model, or the disk is full.
    """
    if importlib.util.find_spec("huggingface_hub") is None:
        raise EnvironmentProblem(
            "Models of the Hugging Face hub need a package that is not installed: huggingface_hub",
            where=spec,
            why="there is no file or folder of this name, so it was read as a hub id",
            do="pip install 'graphrot[hf]', or give a path that exists",
        )
    progress("fetching the model", 0, 1)
    folder = _snapshot(spec, (*_TEXTS, *_WEIGHTS[0]))
    if not any(folder.glob("model*.safetensors")):
        folder = _snapshot(spec, (*_TEXTS, *_WEIGHTS[1]))
    progress("fetching the model", 1, 1)
    return folder


def _snapshot(spec: str, patterns: tuple[str, ...]) -> Path:
    import huggingface_hub

    name, revision = split_id(spec)
    try:
        folder = huggingface_hub.snapshot_download(name, revision=revision, allow_patterns=list(patterns))
    except Exception as error:  # the client raises its own kinds, its HTTP library's, and OSErrors
        raise _explained(error, spec, name, revision) from error
    return Path(folder)


def _explained(error: Exception, spec: str, name: str, revision: str | None) -> GraphrotError:
    from huggingface_hub import errors

    said = next(iter(str(error).strip().splitlines()), "")[:300]
    what = f"{type(error).__name__}: {said}"
    if isinstance(error, errors.GatedRepoError):  # a kind of RepositoryNotFoundError: asked first
        return InputRefused(
            "The model on the hub is gated",
            where=spec,
            why="its owner wants an agreement first, or the token has no access to it",
            do=f"agree on https://huggingface.co/{name}, then hf auth login, or set HF_TOKEN",
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return InputRefused(
            "The model on the hub has no such revision",
            where=spec,
            why=f"there is no branch, tag or commit {revision or 'main'!r}",
            do=f"see https://huggingface.co/{name}/tree/main for its branches",
        )
    if isinstance(error, errors.RepositoryNotFoundError | errors.HFValidationError):
        return InputRefused(
            "There is no such model",
            where=spec,
            why="there is no file or folder of this name, and no model on the hub that the token may see",
            do="check the name; for a private model: hf auth login, or set HF_TOKEN",
        )
    if isinstance(error, errors.LocalEntryNotFoundError):
        offline = _is_offline()
        mend = "unset HF_HUB_OFFLINE" if offline else "check the network and HF_ENDPOINT"
        return EnvironmentProblem(
            "The model is not in the hub's cache, or not all of it" if offline else "The hub cannot be reached",
            where=spec,
            why="HF_HUB_OFFLINE is set, so nothing is fetched" if offline else what,
            do=f"{mend}, or on a machine with network: "
            f"hf download {name}{'' if revision is None else f' --revision {revision}'}, and copy its cache or folder",
        )
    if isinstance(error, OSError) and error.errno is not None:
        return EnvironmentProblem(
            "The model could not be written into the hub's cache",
            where=str(error.filename or spec),
            why=error.strerror or what,
            do="make room on the disk, or set HF_HOME to another place",
        )
    return EnvironmentProblem(
        "The model could not be fetched from the hub",
        where=spec,
        why=what,
        do="check the network and HF_ENDPOINT, try again, or give a folder with the model",
    )


def _is_offline() -> bool:
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)
