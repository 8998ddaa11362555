"""The errors that graphrot raises on purpose.

Every error answers four questions: *what* is wrong, *where* (file, node, tensor or option), *why* it
matters, and what to *do* about it. The command line turns the type into an exit code.
"""

from __future__ import annotations

from typing import ClassVar


class GraphrotError(Exception):
    """Base of all deliberate errors.

    Args:
        what: one sentence that says what is wrong.
        where: the file, node, tensor or option it concerns.
        why: the reason, where it is not plain from ``what``.
        do: what the user can do about it.
    """

    exit_code: ClassVar[int] = 1
    label: ClassVar[str] = "error"

    def __init__(self, what: str, *, where: str | None = None, why: str | None = None, do: str | None = None) -> None:
        super().__init__(what)
        self.what = what
        self.where = where
        self.why = why
        self.do = do

    def __str__(self) -> str:
        lines = [self.what]
        if self.where:
            lines.append(f"  where: {self.where}")
        if self.why:
            lines.append(f"  why:   {self.why}")
        if self.do:
            lines.append(f"  do:    {self.do}")
        return "\n".join(lines)


class CheckFailed(GraphrotError):
    """A measured check (certificate, verify) is over its tolerance."""

    exit_code = 1
    label = "check failed"


class UsageError(GraphrotError):
    """Options or a recipe that are unknown, contradictory or not supported together."""

    exit_code = 2
    label = "usage"


class InputRefused(GraphrotError):
    """The model or text cannot be used: unsupported, corrupt, or nothing to rotate."""

    exit_code = 3
    label = "input refused"


class EnvironmentProblem(GraphrotError):
    """Something is missing on this machine: a package, a provider, disk space, a permission."""

    exit_code = 4
    label = "environment"
