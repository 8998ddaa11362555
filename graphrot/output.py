"""The files of a converted model: where they go, and how they get there whole or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from graphrot.errors import EnvironmentProblem, UsageError

if TYPE_CHECKING:
    import onnx_ir as ir

    from graphrot.plan.types import RotationPlan
    from graphrot.report.manifest import Manifest


@dataclass(frozen=True)
class Target:
    """Where the files go: a folder of its own, or ``X.onnx`` and files named after it."""

    model: Path
    manifest: Path
    plan: Path
    own_folder: bool

    @property
    def folder(self) -> Path:
        return self.model.parent

    @property
    def data(self) -> Path:
        """External data of the model."""
        return self.model.with_name(self.model.name + ".data")

    @classmethod
    def of(cls, output: str | Path, *, force: bool) -> Target:
        """Decide the form from the name: ``.onnx`` is a file, everything else a folder.

        Raises:
            UsageError: something is in the way.
        """
        path = Path(output).expanduser()
        if path.suffix == ".onnx":
            target = cls(path, path.with_suffix(".graphrot.json"), path.with_suffix(".plan.json"), False)
        else:
            target = cls(path / "model.onnx", path / "graphrot.json", path / "plan.json", True)
        if path.is_file() if target.own_folder else path.is_dir():
            raise UsageError(
                "The output has the wrong form",
                where=str(path),
                why="a name that ends in .onnx is a file, any other a folder",
                do="choose another output",
            )
        taken = path.is_dir() and any(path.iterdir()) if target.own_folder else path.exists()
        if taken and not force:
            raise UsageError("The output exists already", where=str(path), do="choose another output, or add --force")
        return target


def scratch_beside(folder: Path | None) -> TemporaryDirectory[str]:
    """A scratch folder on the disk that the output goes to (None: the system's), removed when cleaned up.

    Raises:
        EnvironmentProblem: the place cannot be written.
    """
    parent = folder
    while parent is not None and not parent.is_dir():
        parent = parent.parent
    try:
        return TemporaryDirectory(prefix=".graphrot-", dir=parent, ignore_cleanup_errors=True)
    except OSError as error:
        raise _cannot_write(parent or Path(), error) from error


def write(
    model: ir.Model, plan: RotationPlan, report: Manifest, target: Target, *, tokenizer_dir: Path | None
) -> Manifest:
    """Write all files beside the target, then move them into place.

    Args:
        model: its weights are streamed from where they are.
        plan: written as JSON that can be replayed.
        report: gets the size of the written model.
        target: where to.
        tokenizer_dir: the folder whose tokenizer files are copied; folder form only.

    Returns:
        The manifest as written.

    Raises:
        EnvironmentProblem: the disk is full, or the place cannot be written.
    """
    from graphrot.model.files import tokenizer_files
    from graphrot.model.save import save_model
    from graphrot.plan.serialize import plan_to_json

    try:
        target.folder.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(prefix=".graphrot-", dir=target.folder, ignore_cleanup_errors=True) as staging:
            stage = Path(staging)
            save_model(model, stage / target.model.name)
            size = sum(file.stat().st_size for file in stage.iterdir())
            final = report.model_copy(update={"sizes": report.sizes.model_copy(update={"model_bytes": size})})
            (stage / target.plan.name).write_text(plan_to_json(plan) + "\n", encoding="utf-8")
            (stage / target.manifest.name).write_text(final.to_json(), encoding="utf-8")
            if target.own_folder and tokenizer_dir is not None:
                for file in tokenizer_files(tokenizer_dir):
                    shutil.copyfile(file, stage / file.name)
            for file in sorted(stage.iterdir(), key=lambda path: path.suffix == ".onnx"):
                os.replace(file, target.folder / file.name)
    except OSError as error:
        raise _cannot_write(target.folder, error) from error
    return final


def metadata(report: Manifest, plan: RotationPlan) -> Mapping[str, str]:
    """What the model file itself says about how it was made (``metadata_props``)."""
    import json

    from graphrot.plan.serialize import plan_hash

    online = [rotation.space.id for rotation in plan.rotations if rotation.placement == "online"]
    return {
        "graphrot.version": report.graphrot_version,
        "graphrot.plan": plan_hash(plan),
        "graphrot.online": ",".join(online),
        "graphrot.kv": json.dumps(report.cache.model_dump(), sort_keys=True),
        "graphrot.recipe": json.dumps(report.recipe, sort_keys=True),
    }


def _cannot_write(folder: Path, error: OSError) -> EnvironmentProblem:
    return EnvironmentProblem(
        "The output cannot be written",
        where=str(folder),
        why=str(error),
        do="check the free space and the permissions of the folder",
    )
