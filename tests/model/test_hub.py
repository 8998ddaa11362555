"""Models of the hub, out of a cache that is laid out as the hub client does; there is no network here."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import constants, errors

import graphrot
from graphrot.errors import EnvironmentProblem, GraphrotError, InputRefused, UsageError
from graphrot.model.hub import cached_files, fetch, is_hub_id
from graphrot.model.load import load_source
from tests.exported import write_tokenizer
from tests.tiny import tiny_llama

ROOT = Path(__file__).resolve().parents[2]
COMMIT, OLD = "a" * 40, "b" * 40


def _store(cache: Path, commit: str, refs: tuple[str, ...], folder: Path) -> Path:
    """Put a folder into the cache as the snapshot ``commit`` of org/tiny: links to blobs that bear their hashes."""
    repo = cache / "models--org--tiny"
    snapshot = repo / "snapshots" / commit
    for place in (repo / "blobs", repo / "refs", snapshot):
        place.mkdir(parents=True, exist_ok=True)
    for file in folder.iterdir():
        content = file.read_bytes()
        blob = repo / "blobs" / hashlib.sha256(content).hexdigest()
        blob.write_bytes(content)
        (snapshot / file.name).symlink_to(os.path.relpath(blob, snapshot))
    for name in refs:
        (repo / "refs" / name).parent.mkdir(parents=True, exist_ok=True)
        (repo / "refs" / name).write_text(commit)
    return snapshot


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("hub")
    folder = place / "tiny"
    tiny_llama(tied=True, layers=1).save_pretrained(folder)
    write_tokenizer(folder)
    _store(place / "hub", COMMIT, ("main",), folder)
    tiny_llama(tied=True, layers=1, seed=1).save_pretrained(folder)
    _store(place / "hub", OLD, ("v1", "refs/pr/1"), folder)
    return place / "hub"


@pytest.fixture
def offline(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return cache


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("org/name", True), ("Org-1/na.me_2", True), ("org/name@main", True), ("org/name@refs/pr/1", True),
        ("name", False), ("./org/name", False), ("/org/name", False), ("../name", False), ("org/name/more", False),
        ("org/name.onnx", False), ("org/name.gguf", False), ("org/name@", False), ("~/name", False), ("demo", False),
    ],
)  # fmt: skip
def test_what_reads_as_an_id(spec: str, expected: bool) -> None:
    assert is_hub_id(spec) is expected


def test_a_path_that_exists_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "org" / "tiny").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert not is_hub_id("org/tiny")
    with pytest.raises(InputRefused, match=r"The folder holds no config\.json"):
        load_source("org/tiny", workdir=tmp_path / "work")


def test_a_model_in_the_cache_converts_offline(cache: Path, tmp_path: Path) -> None:
    """The whole way, told what to do by the hub's own environment variables alone."""
    settings = {"HF_HUB_CACHE": str(cache), "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "graphrot", "convert", "org/tiny", "-o", "out", "--json"]
    command += ["--recipe", "rotate-only", "--certificate", "off"]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, check=False, env={**os.environ, **settings}
    )
    assert done.returncode == 0, done.stderr
    source = json.loads(done.stdout)["source"]
    assert (source["kind"], source["name"]) == ("hub", "org/tiny")
    assert (tmp_path / "out" / "tokenizer.json").is_file()
    done = subprocess.run(
        [*command[:4], "org/other", "-o", "other"], cwd=tmp_path, capture_output=True, text=True, check=False,
        env={**os.environ, **settings},
    )  # fmt: skip
    assert done.returncode == 4 and "not in the hub's cache" in done.stderr
    assert sorted(file.name for file in tmp_path.iterdir()) == ["out"]


def test_revisions_are_followed(offline: Path) -> None:
    repo = offline / "models--org--tiny" / "snapshots"
    assert fetch("org/tiny") == repo / COMMIT
    for revision in ("v1", "refs/pr/1", OLD):
        assert fetch(f"org/tiny@{revision}") == repo / OLD


def test_what_is_not_in_the_cache_offline(offline: Path) -> None:
    for spec in ("org/other", "org/tiny@v2"):
        with pytest.raises(EnvironmentProblem) as caught:
            fetch(spec)
        message = str(caught.value)
        assert spec in message and "HF_HUB_OFFLINE is set" in message
        assert f"hf download {spec.partition('@')[0]}" in message
    assert "--revision v2" in message


def test_only_what_is_read_is_fetched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[dict[str, Any]] = []

    def download(name: str, **options: Any) -> str:
        asked.append({"name": name, **options})
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    (tmp_path / "model-00001-of-00002.safetensors").touch()
    fetch("org/tiny@v1")
    first = asked.pop()
    assert not asked and (first["name"], first["revision"]) == ("org/tiny", "v1")
    kept = list(
        huggingface_hub.utils.filter_repo_objects(
            [
                "config.json", "tokenizer.json", "chat_template.jinja", "generation_config.json", "merges.txt",
                "model.safetensors", "model-00001-of-00002.safetensors", "model.safetensors.index.json",
                "pytorch_model.bin", "onnx/model.onnx", "original/model.safetensors", "consolidated.safetensors",
                "README.md", "model.gguf", "modeling_mine.py", "tf_model.h5",
            ],
            allow_patterns=first["allow_patterns"],
        )
    )  # fmt: skip
    assert kept == [
        "config.json", "tokenizer.json", "chat_template.jinja", "generation_config.json", "merges.txt",
        "model.safetensors", "model-00001-of-00002.safetensors", "model.safetensors.index.json",
    ]  # fmt: skip
    (tmp_path / "model-00001-of-00002.safetensors").unlink()
    fetch("org/tiny")
    assert "pytorch_model.bin" in asked[1]["allow_patterns"] and "model.safetensors" not in asked[1]["allow_patterns"]


def _raised(kind: type[BaseException], said: str) -> BaseException:
    """An error of the client without the HTTP response that its constructor wants."""
    return kind.__new__(kind, said)


@pytest.mark.parametrize(
    ("error", "kind", "words"),
    [
        (_raised(errors.RepositoryNotFoundError, "404"), InputRefused, ("There is no such model", "HF_TOKEN")),
        (_raised(errors.GatedRepoError, "403"), InputRefused, ("gated", "agree on https://huggingface.co/org/tiny")),
        (_raised(errors.RevisionNotFoundError, "404"), InputRefused, ("no such revision", "'v9'")),
        (errors.HFValidationError("bad id"), InputRefused, ("There is no such model",)),
        (errors.LocalEntryNotFoundError("Got: ConnectError: no route"), EnvironmentProblem,
         ("The hub cannot be reached", "no route")),
        (_raised(errors.HfHubHTTPError, "503 Server Error"), EnvironmentProblem, ("HfHubHTTPError", "try again")),
        (OSError(errno.ENOSPC, "No space left on device", "/cache/x"), EnvironmentProblem,
         ("No space left on device", "/cache/x", "HF_HOME")),
        (RuntimeError("something else"), EnvironmentProblem, ("RuntimeError: something else",)),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)  # fmt: skip
def test_the_client_s_errors_say_what_to_do(
    error: BaseException, kind: type[GraphrotError], words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> str:
        raise error

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(kind) as caught:
        fetch("org/tiny@v9")
    for word in ("org/tiny", *words):
        assert word in str(caught.value) or (word == "org/tiny" and "/cache/x" in str(caught.value))


def test_without_the_client_the_package_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import importlib.util

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(EnvironmentProblem) as caught:
        load_source("org/tiny", workdir=tmp_path)
    assert "huggingface_hub" in str(caught.value) and "pip install 'graphrot[hf]'" in str(caught.value)
    assert cached_files("org/tiny") == []


def test_the_cache_is_never_replaced(offline: Path) -> None:
    inside = offline / "models--org--tiny" / "snapshots" / COMMIT
    with pytest.raises(UsageError, match="would replace a file that the conversion reads"):
        graphrot.convert("org/tiny", output=inside, force=True)
