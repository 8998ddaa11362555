"""The tiny decoders as onnxruntime-genai's model builder writes them, each built once per test run."""

from __future__ import annotations

import atexit
import contextlib
import functools
import io
import runpy
import shutil
import sys
import tempfile
from pathlib import Path
from unittest import mock

import torch

from tests.exported import write_tokenizer
from tests.tiny import tiny

_FOLDER = Path(tempfile.mkdtemp(prefix="graphrot-contrib-"))
atexit.register(shutil.rmtree, _FOLDER, ignore_errors=True)


@functools.cache
def _checkpoint(name: str) -> Path:
    folder = _FOLDER / name / "hf"
    tiny(name).to(torch.float32).save_pretrained(folder)
    write_tokenizer(folder)
    return folder


def built(name: str, precision: str = "fp32") -> Path:
    """The folder that the builder makes of ``tiny(name)``. Do not change the files.

    Args:
        name: see ``tests/tiny.py``.
        precision: fp32, fp16 or int4.
    """
    return _build(name, precision)


@functools.cache
def _build(name: str, precision: str) -> Path:
    folder = _FOLDER / name / precision
    command = ["builder", "-i", _checkpoint(name), "-o", folder, "-p", precision, "-e", "cpu", "-c", _FOLDER / "cache"]
    words = [str(word) for word in [*command, "--extra_options", "hf_token=false"]]
    with contextlib.redirect_stdout(io.StringIO()), mock.patch.object(sys, "argv", words):
        runpy.run_module("onnxruntime_genai.models.builder", run_name="__main__", alter_sys=True)
    return folder
