"""What a conversion gives: the model, and everything that was found out about it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import onnx
    import onnx_graphsurgeon as gs
    import onnx_ir as ir

    from graphrot.evaluate.certificate import Certificate
    from graphrot.model.files import Beside
    from graphrot.model.inputs import Inputs
    from graphrot.model.save import Claim
    from graphrot.plan.types import RotationPlan
    from graphrot.report.manifest import Manifest


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
    beside: Beside | None = None
    """What target genai puts beside the model; None: another target."""

    def save(self, output: str | Path, *, force: bool = False) -> Path:
        """Write the model, its manifest, its plan and, into a folder, the tokenizer's files and what the target adds.

        Args:
            output: a folder, or ``X.onnx``.
            force: replace what an earlier conversion wrote, but never a file that this one read.

        Returns:
            The path of the .onnx file.

        Raises:
            UsageError: the output exists and may not be replaced, or is a file where the target needs a folder.
            EnvironmentProblem: the disk is full, or the place cannot be written.
        """
        from graphrot.errors import UsageError
        from graphrot.model.save import claim

        if self.beside is not None and Path(output).suffix == ".onnx":
            raise UsageError(
                "The genai target writes a folder",
                where=str(output),
                why="onnxruntime-genai loads a model with its config and its tokenizer",
                do="name a folder, or convert with the target ort",
            )

        sources = () if self.inputs is None else self.inputs.files()
        with claim(Path(output), force=force, sources=sources) as held:
            return self.write(held)

    def write(self, held: Claim) -> Path:
        """As :meth:`save`, into an output that the caller has claimed."""
        from graphrot.model.save import save_directory, save_file
        from graphrot.plan.serialize import plan_to_json

        content, plan = self.report.model_dump(), plan_to_json(self.plan)
        if held.target.suffix == ".onnx":
            saved = save_file(self.model, content, held.target, held=held, plan=plan)
        else:
            saved = save_directory(
                self.model, content, self.tokenizer_dir, held.target, held=held, plan=plan, beside=self.beside
            )
        sizes = self.report.sizes.model_copy(update={"model_bytes": saved.model_bytes})
        files = {"tokenizer_files": saved.tokenizer_files, "other_files": saved.other_files}
        self.report = self.report.model_copy(update={"sizes": sizes, **files})
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
