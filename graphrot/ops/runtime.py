"""ONNX Runtime: that it is there, new enough, and what its refusals to load a model mean."""

from __future__ import annotations

import re
from types import ModuleType

from graphrot.errors import EnvironmentProblem, InputRefused

OLDEST = (1, 20)
"""The oldest version that models and library are tested with."""

_UPGRADE = "pip install -U onnxruntime"


def runtime() -> ModuleType:
    """The module ``onnxruntime``, of a version that is supported.

    Raises:
        EnvironmentProblem: it is not installed, or too old.
    """
    try:
        import onnxruntime
    except ImportError as error:
        raise EnvironmentProblem(
            "ONNX Runtime is not installed", why=str(error), do="pip install 'graphrot[cpu]'"
        ) from error
    version = getattr(onnxruntime, "__version__", "0")
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    if numbers < OLDEST:
        raise EnvironmentProblem(
            f"ONNX Runtime {version} is not supported",
            where=str(getattr(onnxruntime, "__file__", None) or "onnxruntime"),
            why=f"the oldest supported version is {OLDEST[0]}.{OLDEST[1]}",
            do=f"{_UPGRADE} (or onnxruntime-gpu, whichever is installed)",
        )
    module: ModuleType = onnxruntime
    return module


def too_new(message: str, where: str | None) -> EnvironmentProblem | None:
    """The error for a model that only a newer ONNX Runtime loads; None if ``message`` says something else.

    Args:
        message: what ONNX Runtime raised.
        where: the model.
    """
    if not re.search(r"Unsupported model IR version|under development and support for this is limited", message):
        return None
    return EnvironmentProblem(
        f"The model is too new for ONNX Runtime {runtime().__version__}",
        where=where,
        why=message.strip()[:400],
        do=f"{_UPGRADE}, or export the model at an older opset",
    )


def without_kernel(message: str, where: str | None) -> InputRefused | None:
    """The refusal of a model with an operator that ONNX Runtime has, but not for the CPU; None if ``message`` says
    something else.

    Args:
        message: what ONNX Runtime raised.
        where: the model.
    """
    found = re.search(r"Could not find an implementation for (\w+)\(\d+\) node with name '(.*?)'", message)
    if found is None:
        return None
    op, name = found.groups()
    return InputRefused(
        f"ONNX Runtime has no {op} for the CPU",
        where=": ".join(filter(None, [where, f"{op} node {name!r}"])),
        why="models are analysed and compared on the CPU, and other operators are not put in its place",
        do="give the model as it was before it was optimized for a GPU, or packed",
    )
