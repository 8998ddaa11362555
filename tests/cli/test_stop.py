"""A command that is stopped from outside says so, exits as signals do, and leaves nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from graphrot.cli.main import run

pytestmark = pytest.mark.skipif(os.name == "nt", reason="signals of POSIX")

# A conversion that stops for the signal once its scratch folder exists, and says so on stdout.
_WAITING = """
import sys, time
from graphrot.__main__ import main

def wait(job, *_, **__):
    (job.work.scratch / "weights").write_bytes(b"much")
    print("ready", flush=True)
    {wait}

import graphrot.convert
sys.modules["graphrot.job"].Job.run = wait
main()
"""
_SLEEP = "time.sleep(60)"
_IN_AN_IMPORT = "\n".join(
    ["try:", "        time.sleep(60)", "    except BaseException as e:", "        raise ImportError('x') from e"]
)


@pytest.mark.parametrize("wait", [_SLEEP, _IN_AN_IMPORT], ids=["working", "importing"])
@pytest.mark.parametrize(
    ("number", "code", "word"), [(signal.SIGTERM, 143, "terminated"), (signal.SIGINT, 130, "interrupted")]
)
def test_signals(tmp_path: Path, number: signal.Signals, code: int, word: str, wait: str) -> None:
    arguments = ["convert", "any.onnx", "-o", str(tmp_path / "out")]
    command = [sys.executable, "-c", _WAITING.format(wait=wait), *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        assert [path.name for path in tmp_path.iterdir()] == [".out.graphrot-work"]
        process.send_signal(number)
        _, err = process.communicate(timeout=120)
    assert (process.returncode, err) == (code, f"{word}\n")
    assert list(tmp_path.iterdir()) == []


def test_ctrl_c_while_modules_load(tmp_path: Path) -> None:
    """``typer`` is slow here: the signal comes in the middle of the command line's own imports."""
    (tmp_path / "typer.py").write_text("import time\nprint('loading', flush=True)\ntime.sleep(60)\n")
    path = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    command = [sys.executable, "-m", "graphrot", "--version"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": path}
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "loading\n"
        time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=120)
    assert (process.returncode, err) == (130, "interrupted\n")


_SWALLOWING = """
import time
from graphrot.__main__ import main
import graphrot.convert, sys

def swallow(work, progress):
    try:
        print("ready", flush=True)
        time.sleep(60)
    except BaseException:
        print("swallowed", flush=True)
    progress("the next step", 0, 1)
    print("lost", flush=True)

sys.modules["graphrot.job"].Job.run = lambda job, *_, **__: swallow(job.work, job.progress)
main()
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_that_someone_swallows_is_not_lost(tmp_path: Path, number: signal.Signals, code: int) -> None:
    command = [sys.executable, "-c", _SWALLOWING, "convert", "any.onnx", "-o", str(tmp_path / "out")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(number)
        out, err = process.communicate(timeout=120)
    assert (process.returncode, out) == (code, "swallowed\n")
    assert err in ("interrupted\n", "terminated\n")
    assert list(tmp_path.iterdir()) == []


def test_the_version_of_a_checkout_that_is_not_installed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def absent(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    import importlib.metadata

    monkeypatch.setattr(importlib.metadata, "version", absent)
    assert run(["--version"]) == 0
    assert capsys.readouterr().out == "unknown\n"


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("--certificate=maybe", "certificate: should be one of full, off (got 'maybe')"),
        ("--kv=int5", "kv: should be one of int8, int4, none (got 'int5')"),
        ("--weights=int5", "weights: should be one of int8, int4, none (got 'int5')"),
        ("--group=31", "group: should be one of channel, 32, 64, 128, none (got 31)"),
        ("--only=R9", "only: should be one of R1, R2, R3, R4, O (got 'R9')"),
        (
            "--rotations=most",
            "rotations: should be one of FILE.safetensors, hadamard, random, block-hadamard, auto, none (got 'most')",
        ),
    ],
)
def test_a_wrong_word_is_answered_with_the_right_ones(
    option: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["convert", "demo", "-o", str(tmp_path / "x"), option]) == 2
    assert f"  where: {words}\n" in capsys.readouterr().err
