"""Learning from the outside: what is asked for is settled and checked, and the file appears whole or not at all."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from graphrot.calibration.choice import Choice, choose
from graphrot.errors import InputRefused, UsageError
from graphrot.evaluate.compare import longest_run
from graphrot.evaluate.session import open_decoder
from graphrot.learn.checkpoint import Checkpoint, as_tensors
from graphrot.learn.descent import Descended, Schedule, descend
from graphrot.learn.result import Learned
from graphrot.learn.settings import END_TO_END, HELDOUT, Settings, settle
from graphrot.learn.sites import data_free_task, local_task
from graphrot.learn.stiefel import orthogonality
from graphrot.learn.subject import Subject, load_subject
from graphrot.learn.task import Task
from graphrot.model.inputs import Inputs
from graphrot.model.load import Source
from graphrot.progress import Progress, Timed
from graphrot.quantize import SHORTEST_CALIBRATION
from graphrot.recipe import Recipe, default_recipe, resolve_recipe
from graphrot.report.parts import CalibrationPart, LearningPart
from graphrot.rotation.file import write_rotations
from graphrot.texts import Texts, look_ahead
from graphrot.work.folder import WorkFolder

if TYPE_CHECKING:
    from graphrot.model.interop import ModelObject

SUFFIX = ".safetensors"


def learn(
    source: str | Path | ModelObject,
    *,
    output: str | Path,
    recipe: str | Path | Mapping[str, Any] | Recipe | None = None,
    loss: str = "local",
    steps: int | None = None,
    rate: float | None = None,
    sequences: int | None = None,
    top_k: int | None = None,
    calibration: str | Path | None = None,
    tokenizer: str | Path | None = None,
    allow_partial: bool = False,
    force: bool = False,
    resume: bool = False,
    progress: Progress,
    **overrides: Any,
) -> Learned:
    """See :func:`graphrot.api.learn`."""
    given = str(source) if isinstance(source, Path) else source
    wanted = resolve_recipe(default_recipe(source) if recipe is None else recipe, **overrides)
    settings = settle(
        wanted,
        loss=loss,
        steps=steps,
        rate=rate,
        sequences=sequences,
        top_k=top_k,
        calibration=calibration is not None,
    )
    choice = choose(calibration)
    words = None if tokenizer is None else Path(tokenizer)
    others = (choice.file, tokenizer, recipe if isinstance(recipe, str | Path) else None)
    inputs = Inputs.of(given, others)
    target = Path(output)
    _check_target(target, inputs, force=force)
    if settings.loss != "data-free":
        look_ahead(given, choice=choice, tokenizer=words, recipe=wanted)
    with WorkFolder(target, resume=resume) as work:
        work.begin()
        work.resume = True  # an interrupted run leaves what it has learned, for the next one with resume
        run = _Run(wanted, settings, work, progress)
        try:
            return run.go(given, target, choice, words, allow_partial=allow_partial)
        except (UsageError, InputRefused):
            work.resume = resume
            raise


class _Run(Timed):
    """One run: its recipe, its folder, its clock."""

    def __init__(self, recipe: Recipe, settings: Settings, work: WorkFolder, progress: Progress) -> None:
        super().__init__()
        self.recipe = recipe
        self.settings = settings
        self.work = work
        self.progress = progress
        self.notes: tuple[str, ...] = ()

    def go(
        self, spec: str | ModelObject, target: Path, choice: Choice, tokenizer: Path | None, *, allow_partial: bool
    ) -> Learned:
        """The order of things."""
        with self.step("prepare"):
            subject = load_subject(
                spec,
                self.recipe,
                export=self.work.export,
                scratch=self.work.scratch,
                written=self.settings.loss not in END_TO_END,
                allow_partial=allow_partial,
                progress=self.progress,
            )
        texts = Texts(tokenizer or subject.source.tokenizer_dir, choice)
        texts.fit(subject.source.model, subject.source.path, progress=self.progress)
        with self.step("data"):
            sequences = None if self.settings.loss == "data-free" else self._sequences(subject.source, texts)
            task = self._task(subject, sequences)
        part = texts.part()
        checkpoint = Checkpoint(self.work.groups, self._job(subject, part))
        if checkpoint.changed:
            self.notes += (
                f"not resumed, since the interrupted run had another {', another '.join(checkpoint.changed)}",
            )
        start = as_tensors(subject.start)
        schedule = Schedule(self.settings.steps, self.settings.rate, self.settings.seed)
        with self.step("learn"):
            found = descend(task, start, schedule, checkpoint=checkpoint, progress=self.progress)
        return self._write(target, subject, found, checkpoint.resumed, part)

    def _sequences(self, source: Source, texts: Texts) -> np.ndarray:
        """The calibration sequences: fewer or shorter ones where the model or the text allows no more."""
        if "input_ids" not in [value.name for value in source.model.graph.inputs]:
            raise InputRefused(
                "The model is not a decoder",
                where="inputs " + ", ".join(str(value.name) for value in source.model.graph.inputs),
                why="none is called input_ids, which tokens are fed to",
                do="use --loss data-free",
            )
        texts.require("the loss is measured on text", tokens=SHORTEST_CALIBRATION, instead="--loss data-free")
        longest = longest_run(open_decoder(source.path), self.settings.length)
        if longest is None:
            raise InputRefused("The model does not run on a single row of tokens", where=source.name)
        if longest < self.settings.length:
            self.notes += (f"the model takes at most {longest} tokens at once: it was run on rows of so many",)
        tokens = texts.tokens(self.settings.sequences * longest)
        length = min(longest, len(tokens) // HELDOUT)
        count = min(self.settings.sequences, len(tokens) // length)
        if count * length < self.settings.sequences * longest:
            self.notes += (f"the calibration text has {len(tokens)} tokens: {count} sequences of {length} were used",)
        return tokens[: count * length].reshape(count, length)

    def _task(self, subject: Subject, sequences: np.ndarray | None) -> Task:
        if sequences is None:
            return data_free_task(subject, self.settings.seed)
        heldout = max(1, len(sequences) // HELDOUT)
        if self.settings.loss == "local":
            return local_task(
                subject,
                self.recipe,
                sequences,
                heldout=heldout,
                seed=self.settings.seed,
                progress=self.progress,
            )
        from graphrot.learn.end_to_end import end_to_end_task

        return end_to_end_task(
            subject,
            self.recipe,
            sequences,
            heldout=heldout,
            loss="ce" if self.settings.loss == "ce" else "kl",
            top_k=self.settings.top_k,
        )

    def _job(self, subject: Subject, part: CalibrationPart | None) -> dict[str, Any]:
        """What the matrices depend on."""
        return {
            "source": subject.source.sha256,
            "recipe": self.recipe.model_dump(mode="json"),
            "settings": asdict(self.settings),
            "calibration text": None if part is None else part.sha256,
            "versions": {"torch": torch.__version__, "numpy": np.__version__},
        }

    def _write(
        self, target: Path, subject: Subject, found: Descended, resumed: int, part: CalibrationPart | None
    ) -> Learned:
        distance = {
            key: float(np.linalg.norm(matrix.numpy() - subject.start[key])) for key, matrix in found.matrices.items()
        }
        facts = LearningPart(
            file=target.name,
            sha256="",
            loss=self.settings.loss,
            steps=found.steps,
            seed=self.settings.seed,
            curve=found.curve,
            heldout=found.heldout,
            distance=distance,
            orthogonality=max(orthogonality(matrix) for matrix in found.matrices.values()),
            calibration=part,
        )
        provenance = {
            **facts.model_dump(mode="json", exclude={"file", "sha256"}),
            "source": subject.source.sha256,
            "graphrot_version": _version(),
            "recipe": self.recipe.model_dump(mode="json"),
        }
        matrices = {key: matrix.numpy() for key, matrix in found.matrices.items()}
        sha256 = write_rotations(target, matrices, provenance)
        if found.best == 0:
            self.notes += ("the held-out loss never fell below that of the start: the file holds the start",)
        return Learned(
            target,
            facts.model_copy(update={"sha256": sha256}),
            found.best,
            found.stopped,
            resumed,
            self.seconds,
            subject.source.notes + self.notes,
        )


def _version() -> str:
    try:
        return version("graphrot")
    except PackageNotFoundError:
        return "unknown"


def _check_target(target: Path, inputs: Inputs, *, force: bool) -> None:
    """Refuse a file that may not be written."""
    if target.suffix != SUFFIX:
        raise UsageError(
            "Learned rotations are written as a safetensors file", where=str(target), do=f"name a file X{SUFFIX}"
        )
    if not target.absolute().parent.is_dir():
        raise UsageError("The folder for the output does not exist", where=str(target), do="make it first")
    if target.is_dir() or (target.exists() and not force):
        raise UsageError("The output exists", where=str(target), do="give another name, or --force")
    if target.exists() and any(target.samefile(file) for file in inputs.files() if file.exists()):
        raise UsageError("The output is a file that is read", where=str(target), do="give another name")
