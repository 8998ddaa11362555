"""The ``graphrot`` command: the list of commands, and how errors become exit codes."""

from __future__ import annotations

import errno
import os
import sys
import traceback

import typer

import graphrot
from graphrot.cli.bench import bench
from graphrot.cli.convert import convert
from graphrot.cli.doctor import doctor
from graphrot.cli.evaluate import evaluate
from graphrot.cli.generate import generate
from graphrot.cli.inspect import inspect
from graphrot.cli.learn import learn
from graphrot.cli.report import report
from graphrot.cli.stop import EXIT_INTERRUPTED, EXIT_TERMINATED, STOP, WORDS
from graphrot.cli.verify import verify
from graphrot.errors import EnvironmentProblem, GraphrotError, UsageError
from graphrot.model.files import no_such_name

_ClickUsageError = typer.BadParameter.__mro__[1]
"""Typer carries its own copy of Click from 0.2x on; this is the class of whichever copy it uses."""
EXIT_USAGE = 2
EXIT_INTERNAL = 70

EXTRAS = {"onnxruntime": "cpu", "torch": "hf", "transformers": "hf"}
"""Optional packages, and the extra that brings each."""

_MACHINE_ERRORS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EACCES, errno.EPERM, errno.EROFS})

COMMANDS = (
    ("convert", convert),
    ("learn", learn),
    ("inspect", inspect),
    ("verify", verify),
    ("eval", evaluate),
    ("generate", generate),
    ("bench", bench),
    ("report", report),
    ("doctor", doctor),
)

app = typer.Typer(
    name="graphrot",
    help="Rotate ONNX transformers and quantize them to 4 bits.",
    invoke_without_command=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
for _name, _function in COMMANDS:
    app.command(_name)(_function)


def _version(value: bool) -> None:
    if value:
        typer.echo(graphrot.__version__)
        raise typer.Exit


@app.callback()
def _root(
    context: typer.Context,
    _asked: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Print the version."),
) -> None:
    """Rotate ONNX transformers and quantize them to 4 bits."""
    if context.invoked_subcommand is None:
        raise UsageError(f"Name a command: {', '.join(name for name, _ in COMMANDS)}", do="see graphrot --help")


def run(arguments: list[str] | None = None) -> int:
    """Run one command line.

    Returns:
        0 done; 1 a check failed; 2 usage; 3 input refused; 4 environment; 70 a defect of graphrot;
        130 interrupted; 143 terminated.
    """
    try:
        result = typer.main.get_command(app).main(args=arguments, prog_name="graphrot", standalone_mode=False)
    except (KeyboardInterrupt, typer.Abort):
        return _stopped(EXIT_INTERRUPTED)
    except SystemExit as stop:
        if stop.code != EXIT_TERMINATED:
            raise
        return _stopped(EXIT_TERMINATED)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        return _explain(error)
    if result == EXIT_INTERRUPTED:  # Typer made it of a Ctrl-C, without a word
        return _stopped(EXIT_INTERRUPTED)
    return result if isinstance(result, int) else 0


def _explain(error: Exception) -> int:
    """Say on stderr what went wrong; returns the exit code."""
    if code := STOP.code or _stop_behind(error):
        return _stopped(code)
    known = _environment(error) or _overlong(error) or error
    if isinstance(known, GraphrotError):
        _say(f"{known.label}: {known}")
        return known.exit_code
    if isinstance(error, _ClickUsageError):
        _say(f"usage: {_message(error)}\n  do:    see graphrot --help, or graphrot COMMAND --help")
        return EXIT_USAGE
    if os.environ.get("GRAPHROT_DEBUG"):
        traceback.print_exception(error)
    _say(
        f"internal error: {type(error).__name__}: {error}\n"
        "  why:   this is a defect of graphrot, not of your input\n"
        "  do:    run again with GRAPHROT_DEBUG=1 and report the traceback"
    )
    return EXIT_INTERNAL


def _stopped(code: int) -> int:
    """Say on stderr that the user stopped the command; returns the exit code."""
    _say(WORDS[code])
    return code


def _stop_behind(error: BaseException) -> int | None:
    """The exit code, if it was a signal that made the error: compiled packages turn one into an ImportError."""
    cause = error.__cause__ or error.__context__
    if isinstance(cause, KeyboardInterrupt):
        return EXIT_INTERRUPTED
    if isinstance(cause, SystemExit) and cause.code == EXIT_TERMINATED:
        return EXIT_TERMINATED
    return None if cause is None else _stop_behind(cause)


def _environment(error: Exception) -> EnvironmentProblem | None:
    """Errors of the machine, wherever they arise: a missing package, a full disk, a permission, memory."""
    if isinstance(error, ModuleNotFoundError) and error.name in EXTRAS:
        return EnvironmentProblem(
            f"The package {error.name!r} is not installed", do=f"pip install 'graphrot[{EXTRAS[error.name]}]'"
        )
    if isinstance(error, OSError) and error.errno in _MACHINE_ERRORS:
        where = None if error.filename is None else str(error.filename)
        return EnvironmentProblem(
            "A file could not be written or read", where=where, why=error.strerror, do="check space and permissions"
        )
    if isinstance(error, MemoryError):
        return EnvironmentProblem("There is not enough memory", why=str(error) or None, do="close other programs")
    return None


def _overlong(error: Exception) -> GraphrotError | None:
    """A path that the system does not take, whichever option gave it."""
    if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
        return no_such_name(str(error.filename), error.strerror or "it is too long")
    return None


def _message(error: Exception) -> str:
    """Click's errors build their text on demand."""
    build = getattr(error, "format_message", None)
    return str(build() if build is not None else error)


def _say(message: str) -> None:
    print(message, file=sys.stderr)
