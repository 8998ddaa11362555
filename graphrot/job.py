"""One conversion: the steps from a source to a rotated, quantized, checked model, in their order.

Heavy imports stand inside the methods, so that ``import graphrot`` stays fast.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from graphrot.converted import Converted
from graphrot.errors import InputRefused
from graphrot.progress import Progress, Timed

if TYPE_CHECKING:
    import onnx_ir as ir

    from graphrot.analysis.types import AttentionSites, Facts
    from graphrot.calibration.choice import Choice
    from graphrot.evaluate.certificate import Certificate
    from graphrot.evaluate.outliers import Outlier
    from graphrot.half import HalfError, HalfTypes
    from graphrot.model.interop import ModelObject
    from graphrot.model.load import Source
    from graphrot.plan.types import RotationPlan
    from graphrot.quant.groups import SolvedGroups
    from graphrot.recipe import Recipe
    from graphrot.report.parts import ChoicePart
    from graphrot.texts import Texts

_T = TypeVar("_T")


@dataclass(frozen=True)
class Places:
    """Folders of a run: for scratch files, for the export of the source, and for solved weights."""

    scratch: Path
    export: Path
    groups: Path


class Job(Timed):
    """One conversion: its recipe, its folders, its clock."""

    def __init__(self, recipe: Recipe, work: Places, progress: Progress) -> None:
        super().__init__()
        self.recipe = recipe
        self.work = work
        self.progress = progress
        self.notes: tuple[str, ...] = ()
        self.longest: int | None = None
        self.opens_attention = False
        """Rotary positions are taken out of attention nodes."""

    def run(
        self,
        spec: str | ModelObject,
        *,
        calibration: Choice,
        tokenizer: Path | None,
        plan: RotationPlan | None,
        allow_partial: bool,
    ) -> Converted:
        """The order of things."""
        from graphrot.analysis.analyze import analyze
        from graphrot.cache import cache_names, cache_notes, find_sites
        from graphrot.emit.genai import genai_parts, restore_names
        from graphrot.emit.half_ends import restore_ends
        from graphrot.half import half_notes, half_types, wanted_dtype
        from graphrot.model.load import load_source, widened
        from graphrot.plan.replay import refuse_less, same_source
        from graphrot.prepare import opened_up, plan_for
        from graphrot.quantize import quantize
        from graphrot.report.learning import learning_part, rotation_file, source_note
        from graphrot.report.manifest import build_manifest, metadata, outlier_parts
        from graphrot.texts import Texts

        with self.step("export"):
            source = load_source(spec, workdir=self.work.export, progress=self.progress)
            source = widened(source, self.work.scratch / "widened")
        texts = Texts(tokenizer or source.tokenizer_dir, calibration)
        self._check(source, texts)
        genai_parts(self.recipe, source.model, source, texts.tokenizer_dir)
        with self.step("analysis"):
            rotates = "R3" in self.recipe.sites if plan is None else _rotates(plan, "R3")
            self.opens_attention = rotates or self.recipe.kv is not None
            source = opened_up(source, rotary=self.opens_attention)
            facts = analyze(source.model, progress=self.progress)
            sites = find_sites(source.model, facts, self.recipe, allow_partial=allow_partial, progress=self.progress)
        dtype = wanted_dtype(self.recipe.dtype, self.recipe.provider, source.floats)
        types = half_types(source.model, facts, source.floats, dtype, cache_names(sites))
        self.recipe = self.recipe.model_copy(update={"dtype": types.dtype})
        choices: tuple[ChoicePart, ...] = ()
        with self.step("plan"):
            chosen = (
                plan_for(facts, self.recipe, source_hash=source.sha256)
                if plan is None
                else same_source(plan, source.sha256)
            )
            learned = rotation_file(chosen)
            self.notes += source_note(learned, source.sha256)
            if self.recipe.rotations not in (None, "auto"):
                refuse_less(chosen, self.recipe, allow_partial=allow_partial)
        if plan is None and self.recipe.rotations == "auto":
            with self.step("choose rotations"):
                chosen, choices = self._choose_rotations(source, facts, sites, texts)
        with self.step("rotate"):
            rotated = self._rotated(source.model, chosen)
        certificate = None
        outliers: tuple[Outlier, ...] = ()
        if self.recipe.certificate is not None:
            with self.step("certificate"):
                certificate = self._certify(source, rotated, chosen, texts)
            with self.step("outliers"):
                outliers = self._outliers(source, rotated, facts, chosen, texts)
        if self.recipe.bits is not None and not chosen.grids:
            with self.step("choose grids"):
                chosen, choices = self._choose_grids(rotated, facts, chosen, choices, texts)
        with self.step("quantize"):
            solved = self._solved(source, chosen, texts)
            done = quantize(
                rotated,
                source.model,
                facts,
                chosen,
                self.recipe,
                texts=texts,
                scratch=self.work.scratch / "quantized",
                solved=solved,
                longest=self.longest,
                sites=sites,
                progress=self.progress,
            )
        if solved is not None and solved.known:
            self.notes += (f"resumed: {solved.known} groups of weights had been solved before",)
        half = None
        tested = rotated
        if types.half is not None:
            with self.step("narrow"):
                tested = self._narrow(rotated, types)
                if self.recipe.certificate is not None:
                    half = self._measure(source, tested, types, texts)
        else:
            restore_ends(rotated, types.ends)
        if types.half is not None or (self.recipe.quantizes and self.recipe.certificate is not None):
            with self.step("check"):
                self._try(tested)
        report = build_manifest(
            source, rotated, self.recipe, chosen, certificate, done, facts, sites, self.seconds, types, half
        )
        report = report.model_copy(
            update={
                "outliers": outlier_parts(outliers),
                "calibration": texts.part(),
                "learning": learning_part(learned),
                "choices": list(choices),
            }
        )
        rotated.metadata_props.update(metadata(report, chosen))
        parts = genai_parts(self.recipe, rotated, source, texts.tokenizer_dir)
        restore_names(rotated, source)
        notes = source.notes + texts.notes + self.notes + done.notes
        notes += half_notes(types, source.kind, self.recipe.provider)
        notes += cache_notes(sites, self.recipe, source.kind) + parts.notes
        return Converted(rotated, chosen, certificate, report, notes, texts.tokenizer_dir, beside=parts.beside)

    def _choose_rotations(
        self, source: Source, facts: Facts, sites: AttentionSites, texts: Texts
    ) -> tuple[RotationPlan, tuple[ChoicePart, ...]]:
        """The plan with the rotations that a measurement shows to be worth it."""
        from graphrot.auto.rotations import choose_rotations
        from graphrot.auto.trial import Trials

        recipe, folder = self.recipe, self.work.scratch / "trials"

        def choose(window: int) -> tuple[RotationPlan, tuple[ChoicePart, ...]]:
            trials = Trials(source, facts, sites, recipe, texts, folder, window=window)
            found = choose_rotations(facts, recipe, source_hash=source.sha256, trials=trials, progress=self.progress)
            return found.plan, found.choices

        return self._in_windows(source.path, choose)

    def _choose_grids(
        self, rotated: ir.Model, facts: Facts, plan: RotationPlan, choices: tuple[ChoicePart, ...], texts: Texts
    ) -> tuple[RotationPlan, tuple[ChoicePart, ...]]:
        """The plan with the grid of every weight, as a measurement finds it."""
        from graphrot.auto.grids import choose_grids

        found = choose_grids(
            rotated,
            facts,
            plan,
            self.recipe,
            texts=texts,
            folder=self.work.scratch / "grids",
            longest=self.longest,
            progress=self.progress,
        )
        return found.plan, (*choices, *found.choices)

    def _solved(self, source: Source, plan: RotationPlan, texts: Texts) -> SolvedGroups | None:
        """Where gptq keeps what it has solved, and finds what an interrupted run has solved for the same job."""
        import hashlib

        from graphrot.plan.serialize import plan_hash
        from graphrot.quant.groups import SolvedGroups
        from graphrot.quantize import CALIBRATION_TOKENS
        from graphrot.report.manifest import library_versions

        if self.recipe.solver != "gptq" or self.recipe.weight_bits is None:
            return None
        job = {
            "source": source.sha256,
            "recipe": self.recipe.model_dump(mode="json"),
            "plan": plan_hash(plan),
            "calibration text": hashlib.sha256(texts.tokens(CALIBRATION_TOKENS).tobytes()).hexdigest(),
            "versions": library_versions(),
        }
        solved = SolvedGroups(self.work.groups, job)
        if solved.changed:
            note = f"not resumed, since the interrupted run had another {', another '.join(solved.changed)}"
            self.progress(note, 0, 1)
            self.notes += (note,)
        return solved

    def _check(self, source: Source, texts: Texts) -> None:
        """Refuse early what would fail after minutes."""
        import onnx_ir as ir

        from graphrot.model.finite import refuse_not_finite
        from graphrot.quantize import SHORTEST_CALIBRATION

        runs = self.recipe.calibrates or self.recipe.certificate is not None
        if runs and "input_ids" not in [value.name for value in source.model.graph.inputs]:
            raise InputRefused(
                "The model is not a decoder",
                where="inputs " + ", ".join(str(value.name) for value in source.model.graph.inputs),
                why="none is called input_ids, which the certificate and gptq feed tokens to",
                do="give a decoder with input_ids in and logits out; --certificate off rotates other transformers",
            )
        refuse_not_finite(source.model)
        for value in source.model.graph.initializers.values():
            if value.dtype == ir.DataType.DOUBLE and value.shape is not None and len(value.shape) > 1:
                raise InputRefused(
                    "The source's weights are float64",
                    where=f"tensor {value.name!r}",
                    why="float32, float16 and bfloat16 models are converted",
                    do="export the model in float32",
                )
        texts.fit(source.model, source.path, progress=self.progress)
        if self.recipe.calibrates:
            texts.serve(self.recipe, tokens=SHORTEST_CALIBRATION)
        elif self.recipe.certificate is not None and texts.available:
            texts.look(1)

    def _rotated(self, model: ir.Model, plan: RotationPlan, name: str = "rotated") -> ir.Model:
        """A rotated copy of the model; its new weights lie in the scratch folder."""
        from graphrot.folded import materialize
        from graphrot.graph import WeightStore
        from graphrot.prepare import rotated_graph

        self.progress("rotating the weights", 0, 1)
        result = rotated_graph(model, plan, quantizes=self.recipe.quantizes)
        materialize(result, WeightStore(self.work.scratch / name), progress=self.progress)
        return result

    def _certify(self, source: Source, rotated: ir.Model, plan: RotationPlan, texts: Texts) -> Certificate:
        from graphrot.evaluate.certificate import TEXT_TOKENS, certify
        from graphrot.model.save import save_model
        from graphrot.prepare import opened_up

        folder = self.work.scratch / "certificate"
        folder.mkdir()
        save_model(rotated, folder / "rotated.onnx")
        text = texts.look(TEXT_TOKENS) if texts.available else ()
        return self._in_windows(
            source.path,
            lambda window: certify(
                source.path,
                folder / "rotated.onnx",
                plan,
                rotate=lambda model: self._rotated(
                    opened_up(replace(source, model=model), rotary=self.opens_attention).model, plan, "rotated64"
                ),
                text=text,
                window=window,
                progress=self.progress,
            ),
        )

    def _outliers(
        self, source: Source, rotated: ir.Model, facts: Facts, plan: RotationPlan, texts: Texts
    ) -> tuple[Outlier, ...]:
        """On the certificate's first row, by the file that the certificate was measured on."""
        from graphrot.evaluate.outliers import first_row, measure_outliers

        self.progress("measuring outliers", 0, 1)
        path = self.work.scratch / "certificate" / "rotated.onnx"
        row = first_row(path, texts.look if texts.available else None, longest=self.longest)
        return measure_outliers(path, rotated, source.model, facts, plan, row)

    def _in_windows(self, source: Path, measure: Callable[[int], _T]) -> _T:
        """Measure in rows of the usual length or, if the source takes fewer tokens, as long as it does."""
        from graphrot.evaluate.compare import WINDOW, longest_run
        from graphrot.evaluate.session import open_decoder

        try:
            return measure(self.longest or WINDOW)
        except InputRefused:
            decoder = open_decoder(source)
            longest = longest_run(decoder, self.longest or WINDOW, batch=decoder.batch)
            if longest in (None, self.longest or WINDOW):
                raise
        assert longest is not None
        self.longest = longest
        self.notes += (f"the model takes at most {longest} tokens at once: it was run on rows of so many",)
        return measure(longest)

    def _narrow(self, model: ir.Model, types: HalfTypes) -> ir.Model:
        """Narrow a model for its provider; returns what the CPU can run of it, the model itself if it can."""
        from graphrot.emit.cuda.check import check_cuda
        from graphrot.emit.cuda.lower import lower_for_cuda
        from graphrot.half import narrow_model

        folder, provider = self.work.scratch / "narrowed", self.recipe.provider
        if provider == "cpu":
            narrow_model(model, types, folder, progress=self.progress)
            return model
        lower_for_cuda(model)
        twin = model.clone() if types.dtype == "bfloat16" else model
        narrow_model(model, types, folder, provider=provider, progress=self.progress)
        check_cuda(model)
        if twin is not model:
            narrow_model(twin, types, folder / "twin", progress=self.progress)
        return twin

    def _measure(self, source: Source, narrowed: ir.Model, types: HalfTypes, texts: Texts) -> HalfError:
        from graphrot.evaluate.certificate import TEXT_TOKENS
        from graphrot.half import measure_half

        text = texts.look(TEXT_TOKENS) if texts.available else ()
        return self._in_windows(
            source.path,
            lambda window: measure_half(
                source.path,
                narrowed,
                types,
                self.work.scratch / "half",
                text=text,
                window=window,
                progress=self.progress,
            ),
        )

    def _try(self, model: ir.Model) -> None:
        """Load the finished model, and run it if it is a decoder: what does not run must not be written."""
        from graphrot.evaluate.trial import try_model
        from graphrot.model.save import check_written, save_model

        self.progress("trying the model", 0, 1)
        folder = self.work.scratch / "tried"
        folder.mkdir()
        save_model(model, folder / "model.onnx")
        check_written(folder / "model.onnx")
        try_model(folder, decoder=self.recipe.certificate is not None)


def _rotates(plan: RotationPlan, kind: str) -> bool:
    return any(rotation.space.kind == kind for rotation in plan.rotations)
