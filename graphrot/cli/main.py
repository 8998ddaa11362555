"""The ``graphrot`` command: the list of commands, and how errors become exit codes."""

from __future__ import annotations

import os
import sys
import traceback

import typer

from graphrot.cli.convert import convert
from graphrot.cli.evaluate import evaluate
from graphrot.cli.generate import generate
from graphrot.cli.inspect import inspect
from graphrot.cli.verify import verify
from graphrot.errors import GraphrotError

_ClickUsageError = typer.BadParameter.__mro__[1]
"""Typer carries its own copy of Click from 0.2x on; this is the class of whichever copy it uses."""
EXIT_USAGE = 2
EXIT_INTERNAL = 70
EXIT_INTERRUPTED = 130

COMMANDS = (("convert", convert), ("inspect", inspect), ("verify", verify), ("eval", evaluate), ("generate", generate))

app = typer.Typer(
    name="graphrot",
    help="Rotate ONNX transformers and quantize them to 4 bits.",
    invoke_without_command=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for _name, _function in COMMANDS:
    app.command(_name)(_function)


def _version(value: bool) -> None:
    if value:
        from importlib.metadata import version

        typer.echo(version("graphrot"))
        raise typer.Exit


@app.callback()
def _root(
    context: typer.Context,
    _asked: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Print the version."),
) -> None:
    """Rotate ONNX transformers and quantize them to 4 bits."""
    if context.invoked_subcommand is None:
        _say(context.get_help())
        raise typer.Exit(EXIT_USAGE)


def run(arguments: list[str] | None = None) -> int:
    """Run one command line and return its exit code; nothing escapes but ``SystemExit`` of ``--help``.

    Returns:
        0 done; 1 a check failed; 2 usage; 3 input refused; 4 environment; 70 a defect of graphrot;
        130 interrupted.
    """
    try:
        result = typer.main.get_command(app).main(args=arguments, prog_name="graphrot", standalone_mode=False)
    except GraphrotError as error:
        _say(f"{error.label}: {error}")
        return error.exit_code
    except (KeyboardInterrupt, typer.Abort):
        _say("interrupted")
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:  # whatever is left: a usage error of Click, or a defect
        if isinstance(error, _ClickUsageError):
            _say(f"usage: {_message(error)}\n  do:    see graphrot --help, or graphrot COMMAND --help")
            return EXIT_USAGE
        if os.environ.get("GRAPHROT_DEBUG"):
            traceback.print_exc()
        _say(
            f"internal error: {type(error).__name__}: {error}\n"
            "  why:   this is a defect of graphrot, not of your input\n"
            "  do:    run again with GRAPHROT_DEBUG=1 and report the traceback"
        )
        return EXIT_INTERNAL
    return result if isinstance(result, int) else 0


def _message(error: Exception) -> str:
    """Click's errors build their text on demand."""
    build = getattr(error, "format_message", None)
    return str(build() if build is not None else error)


def _say(message: str) -> None:
    print(message, file=sys.stderr)


def main() -> None:
    """Entry point of the installed command."""
    sys.exit(run())


if __name__ == "__main__":
    main()
