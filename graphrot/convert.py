"""Conversions from the outside: what is asked for is settled and checked, and what comes out is written as a whole.

Heavy imports stand inside the functions, so that ``import graphrot`` stays fast.
"""

from __future__ import annotations

import shutil
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import mkdtemp
from typing import TYPE_CHECKING, Any

from graphrot.converted import Converted
from graphrot.errors import EnvironmentProblem, UsageError
from graphrot.job import Job, Places
from graphrot.progress import Progress, silent

if TYPE_CHECKING:
    from graphrot.model.inputs import Inputs
    from graphrot.model.interop import ModelObject
    from graphrot.recipe import Recipe


def convert(
    source: str | Path | ModelObject,
    *,
    output: str | Path | None = None,
    recipe: str | Path | Mapping[str, Any] | Recipe | None = None,
    calibration: str | Path | None = None,
    tokenizer: str | Path | None = None,
    plan: str | Path | None = None,
    allow_partial: bool = False,
    force: bool = False,
    resume: bool = False,
    progress: Progress = silent,
    **overrides: Any,
) -> Converted:
    """Rotate and quantize a decoder.

    The same source, recipe and text give the same bytes, on any number of threads, interrupted or not.

    Args:
        source: a Hugging Face directory, a hub id (``owner/name`` or ``owner/name@revision``), ``X.gguf``,
            ``X.onnx``, ``demo``, or a model in memory: an ``onnx.ModelProto``, an ``onnx_ir.Model`` or an
            ``onnx_graphsurgeon.Graph``, which stays as it is.
        output: a folder or ``X.onnx`` to write; None: write nothing, :meth:`Converted.save` does it later.
        recipe: a name, a YAML or JSON file, a mapping of fields, or a recipe; None: the default (``w4a8kv8``, and
            ``w4a8`` for an ONNX file or a model in memory, whose cache stays as programs hold it).
        calibration: what gptq and the certificate read: a text file, a token file, ``datasets:ID...`` or ``self`` (see
            :func:`graphrot.calibration.choice.choose`); None: the help topics that Python brings along.
        tokenizer: a folder with tokenizer.json, for an .onnx source that has none beside it.
        plan: a plan (JSON) that is replayed instead of making one; its rotations replace the recipe's.
        allow_partial: go on where some of the asked rotations are refused.
        force: replace what an earlier conversion wrote, but never a file that this one reads.
        resume: go on where an earlier run with the same arguments was interrupted or killed, if there is one; and
            when this one stops, leave its work (a hidden folder beside the output) to the next.
        progress: told of each step.
        overrides: fields of the recipe.

    Raises:
        UsageError: options or recipe are wrong, the output exists, or another run is writing it.
        InputRefused: the source cannot be used, or nothing in it can be rotated.
        CheckFailed: the rotated model does not answer like the source.
        EnvironmentProblem: a package, disk space or a permission is missing.
    """
    from graphrot.calibration.choice import choose
    from graphrot.emit.genai import settle_target
    from graphrot.model.inputs import Inputs
    from graphrot.plan.replay import follow
    from graphrot.plan.serialize import load_plan
    from graphrot.recipe import default_recipe, resolve_recipe
    from graphrot.rotation.file import read_rotations
    from graphrot.texts import look_ahead
    from graphrot.threads import steady_blas

    if isinstance(source, str) and not source:
        raise UsageError("The source's name is empty", where="SOURCE", do="name a folder, a file, a hub id, or demo")
    wanted = resolve_recipe(default_recipe(source) if recipe is None else recipe, **overrides)
    replayed = None if plan is None else load_plan(Path(plan))
    if replayed is not None:
        wanted = follow(replayed, wanted, overrides)
    if calibration is not None and not wanted.calibrates and wanted.certificate is None:
        raise UsageError(
            "Nothing would read the calibration text",
            where="--calibration",
            why=f"the solver is {wanted.solver or 'none'} and the certificate is off",
            do="leave it out, or use --solver gptq",
        )
    if resume and output is None:
        raise UsageError("Nothing can be resumed without an output", where="resume", do="give the output of the run")
    given = str(source) if isinstance(source, Path) else source
    choice = choose(calibration)
    if wanted.rotations_file is not None:
        read_rotations(wanted.rotations_file)
    inputs = Inputs.of(
        given, (choice.file, tokenizer, plan, wanted.rotations_file, recipe if isinstance(recipe, str | Path) else None)
    )

    words = None if tokenizer is None else Path(tokenizer)
    wanted = settle_target(wanted, given, None if output is None else Path(output), words)
    look_ahead(given, choice=choice, tokenizer=words, recipe=wanted)

    def run(work: Places) -> Converted:
        result = Job(wanted, work, progress).run(
            given, calibration=choice, tokenizer=words, plan=replayed, allow_partial=allow_partial
        )
        result.inputs = inputs
        return result

    with steady_blas():
        if output is None:
            return _in_scratch(run)
        return _into(Path(output), run, force=force, resume=resume, inputs=inputs, progress=progress)


def _in_scratch(run: Callable[[Places], Converted]) -> Converted:
    """Run without an output; the scratch folder lives as long as the model."""
    try:
        folder = Path(mkdtemp(prefix="graphrot-"))
    except OSError as error:
        raise EnvironmentProblem(
            "There is no place for scratch files", why=str(error), do="check permissions and space"
        ) from error
    try:
        (folder / "scratch").mkdir()
        result = run(Places(folder / "scratch", folder / "export", folder / "groups"))
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    weakref.finalize(result.model, shutil.rmtree, folder, ignore_errors=True)
    return result


def _into(
    output: Path,
    run: Callable[[Places], Converted],
    *,
    force: bool,
    resume: bool,
    inputs: Inputs,
    progress: Progress,
) -> Converted:
    """Run, and write the output as a whole or not at all."""
    from graphrot.model.onnxfile import open_onnx
    from graphrot.model.save import claim

    with claim(output, force=force, sources=inputs.files(), resume=resume) as held:
        work = held.work
        result = run(Places(work.scratch, work.export, work.groups))
        progress("writing the model", 0, 1)
        written = result.write(held)
    result.model = open_onnx(written)
    return result
