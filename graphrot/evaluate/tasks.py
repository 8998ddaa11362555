"""Run tasks of EleutherAI's lm-eval on a decoder."""

from __future__ import annotations

import contextlib
import logging
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from graphrot.errors import EnvironmentProblem, GraphrotError, InputRefused, UsageError
from graphrot.evaluate.harness import HarnessModel
from graphrot.progress import Progress

_UNFILTERED = ",none"
_STDERR = "_stderr"


def check_tasks(tasks: Sequence[str]) -> None:
    """Refuse tasks that cannot be run, before a model is loaded.

    Args:
        tasks: names that lm-eval knows, or YAML files.

    Raises:
        UsageError: no task, or a name that lm-eval does not know.
        InputRefused: there is no such file.
        EnvironmentProblem: lm-eval is not installed.
    """
    if not tasks or not all(tasks):
        raise UsageError("A task has no name", where="--tasks", do="write NAME or FILE.yaml, with commas between them")
    if find_spec("lm_eval") is None:
        raise EnvironmentProblem("Tasks need the package 'lm-eval'", where="--tasks", do='pip install "graphrot[eval]"')
    for task in tasks:
        if _is_file(task) and not Path(task).is_file():
            raise InputRefused("There is no such task file", where=task, do="check the path")
    if names := [task for task in tasks if not _is_file(task)]:
        known = set(_manager(tasks).all_tasks)
        for name in names:
            if name not in known:
                raise UsageError("lm-eval knows no such task", where=f"--tasks {name}", do="see lm-eval ls tasks")


def run_tasks(
    model: HarnessModel, tasks: Sequence[str], *, limit: int | None, progress: Progress
) -> dict[str, dict[str, float]]:
    """Metric -> figure for each task (and each group of tasks).

    A metric that is a mean over items also has its standard error, as ``NAME_stderr``. Metrics behind a filter are
    called ``NAME,FILTER``.

    Args:
        model: what answers.
        tasks: names that lm-eval knows, or YAML files. The functions that a file names run.
        limit: items of each task, from its start; None: all.
        progress: told of the start.

    Raises:
        EnvironmentProblem: a task's data set cannot be had.
        InputRefused: a task cannot be run.
    """
    import lm_eval

    progress("tasks: reading items", 0, 1)
    with _quiet():
        try:
            found = lm_eval.simple_evaluate(
                model=_adapter(model),
                tasks=list(tasks),
                limit=limit,
                task_manager=_manager(tasks),
                bootstrap_iters=0,
                log_samples=True,
            )
        except (GraphrotError, KeyboardInterrupt, SystemExit):
            raise
        except Exception as error:  # lm-eval and the data sets behind it raise what they like
            raise _refusal(error, ",".join(tasks)) from error
    samples = found.get("samples", {})
    return {name: _figures(metrics, samples.get(name, [])) for name, metrics in found["results"].items()}


def _is_file(task: str) -> bool:
    return task.endswith((".yaml", ".yml"))


def _manager(tasks: Sequence[str]) -> Any:
    """Reading lm-eval's own thousands of files takes seconds: only where one of them is named."""
    from lm_eval.tasks import TaskManager

    with _quiet():
        return TaskManager(include_defaults=not all(map(_is_file, tasks)))


def _adapter(model: HarnessModel) -> Any:
    """``model`` as lm-eval's own class, which is made here so that this module imports without lm-eval."""
    from lm_eval.api.model import TemplateLM
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

    def encode(_: Any, string: str, add_special_tokens: bool | None = None, **__: Any) -> list[int]:
        return model.encode(string, special=add_special_tokens)

    def likelihoods(lm: Any, requests: Sequence[Any], **__: Any) -> Any:
        return TemplateLM.loglikelihood(lm, requests, disable_tqdm=True)

    def score(_: Any, requests: Sequence[Any], **__: Any) -> list[tuple[float, bool]]:
        return model.score([(context, continuation) for _, context, continuation in requests])

    def rolling(_: Any, requests: Sequence[Any], **__: Any) -> list[float]:
        answers = []
        for request in requests:
            ids = model.encode(request.args[0])
            windows = get_rolling_token_windows(ids, model.start_token, ROLLING, 1)
            answers.append(math.fsum(score for score, _ in model.score([make_disjoint_window(w) for w in windows])))
        return answers

    def write(_: Any, requests: Sequence[Any], **__: Any) -> list[str]:
        return [model.continue_text(*request.args, seed=number) for number, request in enumerate(requests)]

    members = {
        "eot_token_id": property(lambda _: model.start_token),
        "tok_encode": encode,
        "loglikelihood": likelihoods,
        "_loglikelihood_tokens": score,
        "loglikelihood_rolling": rolling,
        "generate_until": write,
        "tokenizer_name": property(lambda _: model.name),
        "apply_chat_template": lambda _, chat_history, **__: model.render_chat(chat_history),
    }
    return type("GraphrotModel", (TemplateLM,), members)()


ROLLING = 1024
"""Tokens of one piece of a text whose whole likelihood a task asks for; pieces do not overlap."""


def _figures(metrics: Mapping[str, Any], samples: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    figures: dict[str, float] = {}
    for key, value in metrics.items():
        name = key.removesuffix(_UNFILTERED)
        if not isinstance(value, int | float) or isinstance(value, bool) or "," not in key:
            continue
        metric, _, kind = key.partition(",")
        if metric.endswith(_STDERR):
            continue
        figures[name] = float(value)
        items = [sample.get(metric) for sample in samples if sample.get("filter") in (None, kind)]
        if (error := _standard_error(float(value), items)) is not None:
            figures[f"{metric}{_STDERR}{name.removeprefix(metric)}"] = error
    return figures


def _standard_error(value: float, items: Sequence[Any]) -> float | None:
    """Of a metric that is the mean of ``items``; None: it is not."""
    numbers = [float(item) for item in items if isinstance(item, int | float)]
    if len(numbers) < 2 or len(numbers) < len(items):
        return None
    mean = math.fsum(numbers) / len(numbers)
    if not math.isclose(mean, value, rel_tol=1e-9, abs_tol=1e-12):
        return None
    return math.sqrt(math.fsum((number - mean) ** 2 for number in numbers) / (len(numbers) - 1) / len(numbers))


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """lm-eval's prints go to stderr, and of its log only what is wrong is said."""
    log = logging.getLogger("lm_eval")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        log.setLevel(level)


def _refusal(error: Exception, where: str) -> GraphrotError:
    why = f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"
    if isinstance(error, ConnectionError):
        return EnvironmentProblem(
            "A task's data set cannot be reached", where=f"--tasks {where}", why=why, do="check the network"
        )
    return InputRefused(
        "A task cannot be run", where=f"--tasks {where}", why=why, do="check its file, and the data set it names"
    )
