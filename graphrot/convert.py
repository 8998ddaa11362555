"""The pipeline: from a source to a rotated, quantized, checked model. The only file that names the order.

Heavy imports stand inside the functions, so that ``import graphrot`` stays fast.
"""

from __future__ import annotations

import shutil
import time
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import mkdtemp
from typing import TYPE_CHECKING, Any

from graphrot.errors import CheckFailed, EnvironmentProblem, InputRefused, UsageError
from graphrot.progress import Progress, silent

if TYPE_CHECKING:
    import onnx
    import onnx_graphsurgeon as gs
    import onnx_ir as ir

    from graphrot.analysis.types import Facts
    from graphrot.evaluate.certificate import Certificate
    from graphrot.model.inputs import Inputs
    from graphrot.model.interop import ModelObject
    from graphrot.model.load import Source
    from graphrot.plan.types import RotationPlan
    from graphrot.recipe import Recipe
    from graphrot.report.manifest import Manifest
    from graphrot.texts import Texts


@dataclass
class Converted:
    """A converted model, its plan, its certificate and its report.

    ``model`` reads its weights from files: the written output or, without one, a scratch folder that
    lives as long as the model. ``notes`` say what a user has to know about how the model runs.
    """

    model: ir.Model
    plan: RotationPlan
    certificate: Certificate | None
    report: Manifest
    notes: tuple[str, ...] = ()
    tokenizer_dir: Path | None = None
    inputs: Inputs | None = None

    def save(self, output: str | Path, *, force: bool = False) -> Path:
        """Write the model, its manifest, its plan and, into a folder, the tokenizer's files.

        Args:
            output: a folder, or ``X.onnx``.
            force: replace what an earlier conversion wrote, but never a file that this one read.

        Returns:
            The path of the .onnx file.

        Raises:
            UsageError: the output exists and may not be replaced.
            EnvironmentProblem: the disk is full, or the place cannot be written.
        """
        from graphrot.model.save import named, save_directory, save_file
        from graphrot.plan.serialize import plan_to_json

        target = named(Path(output))
        content, plan = self.report.model_dump(), plan_to_json(self.plan)
        sources = () if self.inputs is None else self.inputs.files()
        if target.suffix == ".onnx":
            saved = save_file(self.model, content, target, force=force, plan=plan, sources=sources)
        else:
            words = self.tokenizer_dir
            saved = save_directory(self.model, content, words, target, force=force, plan=plan, sources=sources)
        sizes = self.report.sizes.model_copy(update={"model_bytes": saved.model_bytes})
        self.report = self.report.model_copy(update={"sizes": sizes})
        return saved.path

    def to_proto(self) -> onnx.ModelProto:
        """The model as one protobuf with all weights inside; see :func:`graphrot.model.interop.to_proto`."""
        from graphrot.model.interop import to_proto

        return to_proto(self.model)

    def to_graphsurgeon(self) -> gs.Graph:
        """The model as an onnx-graphsurgeon graph; see :func:`graphrot.model.interop.to_graphsurgeon`.

        Raises:
            EnvironmentProblem: onnx-graphsurgeon is not installed.
        """
        from graphrot.model.interop import to_graphsurgeon

        return to_graphsurgeon(self.model)


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
    progress: Progress = silent,
    **overrides: Any,
) -> Converted:
    """Rotate and quantize a decoder.

    Args:
        source: a Hugging Face directory, a hub id (``owner/name`` or ``owner/name@revision``), ``X.gguf``,
            ``X.onnx``, ``demo``, or a model in memory: an ``onnx.ModelProto``, an ``onnx_ir.Model`` or an
            ``onnx_graphsurgeon.Graph``, which stays as it is.
        output: a folder or ``X.onnx`` to write; None: write nothing, :meth:`Converted.save` does it later.
        recipe: a name, a YAML or JSON file, a mapping of fields, or a recipe; None: the default.
        calibration: text for gptq and for the certificate; None: the help topics that Python brings along.
        tokenizer: a folder with tokenizer.json, for an .onnx source that has none beside it.
        plan: a plan (JSON) that is replayed instead of making one; its rotations replace the recipe's.
        allow_partial: go on where some of the asked rotations are refused.
        force: replace what an earlier conversion wrote, but never a file that this one reads.
        progress: told of each step.
        overrides: fields of the recipe.

    Raises:
        UsageError: options or recipe are wrong, or the output exists.
        InputRefused: the source cannot be used, or nothing in it can be rotated.
        CheckFailed: the rotated model does not answer like the source.
        EnvironmentProblem: a package, disk space or a permission is missing.
    """
    from graphrot.model.inputs import Inputs
    from graphrot.model.onnxfile import open_onnx
    from graphrot.model.save import named, refuse_target
    from graphrot.plan.serialize import load_plan
    from graphrot.recipe import resolve_recipe

    wanted = resolve_recipe(recipe, **overrides)
    replayed = None if plan is None else load_plan(Path(plan))
    if replayed is not None:
        wanted = _follow(replayed, wanted, overrides)
    if calibration is not None and wanted.solver != "gptq" and wanted.certificate is None:
        raise UsageError(
            "Nothing would read the calibration text",
            where="--calibration",
            why=f"the solver is {wanted.solver or 'none'} and the certificate is off",
            do="leave it out, or use --solver gptq",
        )
    target = None if output is None else named(Path(output))
    recipe_file = recipe if isinstance(recipe, str | Path) else None
    given = str(source) if isinstance(source, Path) else source
    inputs = Inputs.of(given, (calibration, tokenizer, plan, recipe_file))
    if target is not None:
        refuse_target(target, force=force, sources=inputs.files())
    scratch = _scratch(target)
    try:
        job = _Job(wanted, scratch, progress)
        result = job.run(
            given,
            calibration=None if calibration is None else Path(calibration),
            tokenizer=None if tokenizer is None else Path(tokenizer),
            plan=replayed,
            allow_partial=allow_partial,
        )
        result.inputs = inputs
        if target is None:
            weakref.finalize(result.model, shutil.rmtree, scratch, ignore_errors=True)
            return result
        progress("writing the model", 0, 1)
        result.model = open_onnx(result.save(target, force=force))
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise
    shutil.rmtree(scratch, ignore_errors=True)
    return result


def _scratch(target: Path | None) -> Path:
    """A new scratch folder, on the disk that the output goes to (it holds copies of all weights)."""
    parent = None if target is None else target.absolute().parent
    try:
        return Path(mkdtemp(prefix=".graphrot-", dir=parent))
    except OSError as error:
        raise EnvironmentProblem(
            "There is no place for scratch files", where=str(parent), why=str(error), do="check permissions and space"
        ) from error


def _follow(plan: RotationPlan, recipe: Recipe, overrides: Mapping[str, Any]) -> Recipe:
    """The recipe with the rotations of a replayed plan.

    Raises:
        UsageError: an option asks for other rotations than the plan has.
    """
    from graphrot.recipe import resolve_recipe

    fields = ("rotations", "only", "seed")
    for name in fields:
        if name in overrides:
            raise UsageError(
                f"--{name} and --plan contradict each other",
                where="--plan",
                why="a plan names its rotations one by one",
                do="leave one of the two out",
            )
    same = {name: plan.recipe[name] for name in fields if name in plan.recipe}
    if same.get("rotations", "") is None:
        same = {"rotations": None}
    followed = resolve_recipe(recipe, name=recipe.name, **same)
    if plan.tie is not None and followed.embedding != followed.head:
        raise UsageError(
            "The plan keeps one table for embedding and head, and the recipe quantizes them differently",
            where=f"embedding {followed.embedding or 'none'}, head {followed.head or 'none'}",
            do="give both the same, or make a new plan",
        )
    return followed


class _Job:
    """One conversion: its recipe, its scratch folder, its clock."""

    def __init__(self, recipe: Recipe, workdir: Path, progress: Progress) -> None:
        self.recipe = recipe
        self.workdir = workdir
        self.progress = progress
        self.seconds: dict[str, float] = {}

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Time a step."""
        start = time.perf_counter()
        yield
        self.seconds[name] = round(time.perf_counter() - start, 3)

    def run(
        self,
        spec: str | ModelObject,
        *,
        calibration: Path | None,
        tokenizer: Path | None,
        plan: RotationPlan | None,
        allow_partial: bool,
    ) -> Converted:
        """The order of things."""
        from graphrot.analysis.analyze import analyze
        from graphrot.model.load import load_source
        from graphrot.quantize import quantize
        from graphrot.report.manifest import build_manifest, metadata
        from graphrot.texts import Texts

        with self.step("export"):
            source = load_source(spec, workdir=self.workdir / "source", progress=self.progress)
        texts = Texts(tokenizer or source.tokenizer_dir, calibration)
        self._check(source, texts)
        with self.step("analysis"):
            facts = analyze(source.model, progress=self.progress)
        with self.step("plan"):
            chosen = self._planned(facts, source) if plan is None else _same_source(plan, source)
            self._refuse_less(chosen, allow_partial=allow_partial)
        with self.step("rotate"):
            rotated = self._rotated(source.model, chosen)
        certificate = None
        if self.recipe.certificate is not None:
            with self.step("certificate"):
                certificate = self._certify(source, rotated, chosen, texts)
        with self.step("quantize"):
            scratch = self.workdir / "quantized"
            done = quantize(
                rotated,
                source.model,
                facts,
                chosen,
                self.recipe,
                texts=texts,
                scratch=scratch,
                progress=self.progress,
            )
        if self.recipe.quantizes and self.recipe.certificate is not None:
            with self.step("check"):
                self._try(rotated)
        report = build_manifest(source, self.recipe, chosen, certificate, done, facts, self.seconds)
        rotated.metadata_props.update(metadata(report, chosen))
        return Converted(rotated, chosen, certificate, report, source.notes + done.notes, texts.tokenizer_dir)

    def _check(self, source: Source, texts: Texts) -> None:
        """Refuse early what would fail after minutes."""
        import onnx_ir as ir

        others = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16, ir.DataType.DOUBLE)
        for value in source.model.graph.initializers.values():
            matrix = value.shape is not None and len(value.shape) > 1
            if value.dtype in others and (matrix or value.dtype != ir.DataType.DOUBLE):
                raise InputRefused(
                    "The source's weights are not float32",
                    where=f"tensor {value.name!r} is {value.dtype}",
                    why="only float32 models are written in this version",
                    do="export the model in float32",
                )
        if self.recipe.solver == "gptq":
            texts.require("gptq calibrates on text")

    def _planned(self, facts: Facts, source: Source) -> RotationPlan:
        from graphrot.plan.build import PlanRequest, build_plan

        recipe = self.recipe
        request = PlanRequest(
            kinds=recipe.sites,
            rotations=recipe.rotations if recipe.rotations != "auto" else None,
            seed=recipe.seed,
            embedding_bits=recipe.embedding_bits,
            head_bits=recipe.head_bits,
            recipe=recipe.model_dump(),
        )
        return build_plan(facts, request, source_hash=source.sha256)

    def _refuse_less(self, plan: RotationPlan, *, allow_partial: bool) -> None:
        """Rotating less than was asked for needs the user's word.

        Raises:
            InputRefused: nothing can be rotated, or a site of the asked kinds is refused.
        """
        if self.recipe.rotations is None:
            return
        refused = "; ".join(f"{r.kind} at {r.node} ({r.op}): {r.reason}" for r in plan.refusals[:5])
        if len(plan.refusals) > 5:
            refused += f"; and {len(plan.refusals) - 5} more"
        found = {rotation.space.kind for rotation in plan.rotations}
        missing = [kind for kind in self.recipe.only or () if kind not in found]
        if not plan.rotations:
            raise InputRefused(
                "Nothing in this model can be rotated",
                where=refused or f"no site of {', '.join(self.recipe.sites)}",
                do="see graphrot inspect; --rotations none quantizes without rotation",
            )
        if (plan.refusals or missing) and not allow_partial:
            raise InputRefused(
                "Not everything that was asked for can be rotated",
                where=refused or f"no site of {', '.join(missing)}",
                do="--allow-partial goes on with the rest; --only names what to rotate",
            )

    def _rotated(self, model: ir.Model, plan: RotationPlan, name: str = "rotated") -> ir.Model:
        """A rotated copy of the model; its new weights lie in the scratch folder."""
        from onnx_ir.passes.common import RemoveUnusedNodesPass

        from graphrot.folded import materialize
        from graphrot.graph import WeightStore
        from graphrot.passes import ROTATION_PASSES
        from graphrot.passes.raise_opset import RaiseOpset

        self.progress("rotating the weights", 0, 1)
        result = model.clone()
        passes = [RaiseOpset(plan)] if self.recipe.quantizes else []
        for step in [*passes, *(kind(plan) for kind in ROTATION_PASSES)]:
            step(result)
        RemoveUnusedNodesPass()(result)
        result.graph.sort()
        materialize(result, WeightStore(self.workdir / name), progress=self.progress)
        return result

    def _certify(self, source: Source, rotated: ir.Model, plan: RotationPlan, texts: Texts) -> Certificate:
        from graphrot.evaluate.certificate import TEXT_TOKENS, certify
        from graphrot.model.save import save_model

        folder = self.workdir / "certificate"
        folder.mkdir()
        save_model(rotated, folder / "rotated.onnx")
        return certify(
            source.path,
            folder / "rotated.onnx",
            plan,
            rotate=lambda model: self._rotated(model, plan, "rotated64"),
            text=texts.tokens(TEXT_TOKENS) if texts.available else (),
            progress=self.progress,
        )

    def _try(self, model: ir.Model) -> None:
        """Load the quantized model and run a few tokens: a file that does not run must not be written.

        Raises:
            CheckFailed: it does not load, or its logits are not finite.
        """
        import numpy as np

        from graphrot.evaluate.session import DecoderSession

        self.progress("trying the quantized model", 0, 1)
        try:
            logits, cache = (decoder := DecoderSession(model)).run(np.zeros((1, 3), np.int64))
            logits, _ = decoder.run(logits[:, -1:].argmax(axis=-1), cache)
        except InputRefused as error:
            raise CheckFailed(
                "The quantized model does not run",
                where=error.where,
                why=error.why or error.what,
                do="report the model",
            ) from error
        if not np.isfinite(logits).all():
            raise CheckFailed("The quantized model's logits are not finite", do="report the model and the recipe")


def _same_source(plan: RotationPlan, source: Source) -> RotationPlan:
    if plan.source_hash != source.sha256:
        raise UsageError(
            "The plan was made for another source",
            where=f"plan: {plan.source_hash[:12]}, source: {source.sha256[:12]} (sha256)",
            do="make a new plan by converting without --plan",
        )
    return plan
