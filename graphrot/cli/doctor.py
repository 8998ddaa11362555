"""``graphrot doctor``: what works on this machine, and what mends the rest."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from graphrot.cli.output import print_json
from graphrot.errors import EnvironmentProblem


def doctor(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """Check this installation; exit code 4 if an essential part does not work."""
    from graphrot.doctor import examine, gather

    facts = gather()
    checks = examine(facts)
    failed = [check for check in checks if not check.ok and check.essential]
    if as_json:
        print_json(
            {
                "ok": not failed,
                "checks": [asdict(check) for check in checks],
                "versions": {"python": facts.python, **facts.packages},
                "providers": facts.providers,
                "isa": facts.described.get("selected"),
                "kernels": facts.described.get("kernels", []),
                "cuda": facts.described.get("cuda"),
            }
        )
    else:
        installed = ", ".join(f"{name} {version}" for name, version in facts.packages.items() if version)
        typer.echo(f"Python {facts.python}; {installed}\n")
        for check in checks:
            mark = "ok  " if check.ok else ("FAIL" if check.essential else "note")
            typer.echo(f"{mark}  {check.name}: {check.detail}")
            if check.fix:
                typer.echo(f"      mend: {check.fix}")
        typer.echo(f"\n{_verdict(len(failed), sum(not check.ok for check in checks))}")
    if failed:
        raise typer.Exit(EnvironmentProblem.exit_code)


def _verdict(failed: int, wrong: int) -> str:
    if failed:
        return f"{failed} essential {'part does' if failed == 1 else 'parts do'} not work: mend from the top."
    return "All that graphrot needs works." if not wrong else "All that graphrot needs works; the notes are optional."
