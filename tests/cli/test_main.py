"""The command line without a model: usage, refusals, exit codes, streams."""

from __future__ import annotations

import errno
import subprocess
import sys
from pathlib import Path

import pytest

import graphrot
from graphrot.cli import main
from graphrot.cli.main import COMMANDS, run
from graphrot.errors import CheckFailed, EnvironmentProblem, GraphrotError, InputRefused, UsageError


def test_the_list_of_commands() -> None:
    assert [name for name, _ in COMMANDS] == [
        "convert",
        "learn",
        "inspect",
        "verify",
        "eval",
        "generate",
        "bench",
        "report",
        "doctor",
    ]


@pytest.mark.parametrize("name", ["", *(name for name, _ in COMMANDS)])
def test_help_works(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*name.split(), "--help"]) == 0
    assert "Usage" in capsys.readouterr().out


def test_no_command_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("usage: Name a command: convert, learn, inspect")


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--version"]) == 0
    assert capsys.readouterr().out.strip() == graphrot.__version__


@pytest.mark.parametrize(
    "arguments",
    [
        ["convert"],
        ["convert", "demo"],
        ["convert", "demo", "-o", "x", "--nonsense"],
        ["convert", "demo", "-o", "x", "--seed", "many"],
        ["learn", "demo"],
        ["bench"],
        ["report"],
        ["doctor", "more"],
        ["generate", "x"],
        ["eval", "x", "--text", "y", "--window", "0"],
    ],
)
def test_typer_usage_errors_exit_with_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("usage: ")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--kv-scales", "channel"], "kv_scales channel says how ONNX Runtime's own attention stores"),
        (["--rotations", "auto", "--recipe", "rotate-only"], "rotations auto measures what rounding costs"),
        (["--weights", "int8", "--bits", "5"], "lets every weight have 4 or 8 bits"),
        (["--provider", "cuda", "--dtype", "float32"], "dtype float32 is not written for provider cuda"),
        (["--dtype", "float8"], "The recipe is not valid"),
        (["--certificate", "layers"], "the layer-by-layer certificate is not available in this version"),
        (["--weights", "none", "--group", "32"], "weights are none"),
        (["--recipe", "absent"], "There is no recipe 'absent'"),
        (["--weights", "int5"], "The recipe is not valid"),
    ],
)
def test_what_is_not_available_is_refused_in_words_before_the_source_is_read(
    options: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out"
    assert run(["convert", "no-such-source", "-o", str(output), *options]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert words in err
    assert "do:" in err
    assert not output.exists()


@pytest.mark.parametrize(
    ("error", "code"), [(CheckFailed, 1), (UsageError, 2), (InputRefused, 3), (EnvironmentProblem, 4)]
)
def test_errors_become_exit_codes(
    error: type[GraphrotError],
    code: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error("Something is off", where="here", why="because", do="that")

    monkeypatch.setattr(sys.modules["graphrot.convert"], "convert", fail)
    assert run(["convert", "demo", "-o", str(tmp_path / "x")]) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert err == f"{error.label}: Something is off\n  where: here\n  why:   because\n  do:    that\n"


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (ModuleNotFoundError("No module named 'onnxruntime'", name="onnxruntime"), "pip install 'graphrot[cpu]'"),
        (ModuleNotFoundError("No module named 'torch'", name="torch"), "pip install 'graphrot[hf]'"),
        (OSError(errno.ENOSPC, "No space left on device", "weights.bin"), "No space left on device"),
        (MemoryError("Unable to allocate 9 GiB"), "There is not enough memory"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_the_machine_is_to_blame(
    error: Exception, words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(sys.modules["graphrot.convert"], "convert", fail)
    assert run(["convert", "demo", "-o", "x"]) == 4
    err = capsys.readouterr().err
    assert err.startswith("environment: ")
    assert words in err


def test_a_defect_gives_a_short_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ZeroDivisionError("division by zero")

    monkeypatch.delenv("GRAPHROT_DEBUG", raising=False)
    monkeypatch.setattr(sys.modules["graphrot.convert"], "convert", fail)
    assert run(["convert", "demo", "-o", str(tmp_path / "x")]) == main.EXIT_INTERNAL
    err = capsys.readouterr().err
    assert "internal error: ZeroDivisionError: division by zero" in err
    assert "Traceback" not in err


def test_ctrl_c_is_clean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(sys.modules["graphrot.convert"], "convert", interrupt)
    assert run(["convert", "demo", "-o", str(tmp_path / "x")]) == 130
    out, err = capsys.readouterr()
    assert out == ""
    assert "Traceback" not in err


def test_the_module_is_the_command(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "graphrot",
        "convert",
        "nothing",
        "-o",
        str(tmp_path / "x"),
        "--certificate",
        "layers",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("usage: certificate layers: the layer-by-layer certificate is not available")


def test_public_functions_stay_callable() -> None:
    assert callable(graphrot.convert)
