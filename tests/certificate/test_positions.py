"""Models with a short table of positions are measured, and calibrated, on rows that they take."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from graphrot.convert import convert
from graphrot.errors import InputRefused
from graphrot.evaluate.compare import longest_run, random_probes, text_probes
from graphrot.evaluate.verify import verify
from graphrot.quantize import calibration_feeds
from tests.exported import tiny_onnx, write_tokenizer

POSITIONS = 64


class _Short:
    """Takes ``limit`` tokens at once."""

    def __init__(self, limit: int) -> None:
        self.limit = limit

    def run(self, tokens: np.ndarray, cache: Any = None) -> tuple[np.ndarray, Any]:
        if tokens.shape[1] > self.limit:
            raise InputRefused("too long")
        return np.zeros((*tokens.shape, 3)), cache


@pytest.mark.parametrize("limit", [1, 2, 63, 64, 255, 256, 300])
def test_the_longest_row_is_found(limit: int) -> None:
    assert longest_run(_Short(limit), 256) == min(limit, 256)


def test_a_model_that_never_runs_has_none() -> None:
    assert longest_run(_Short(0), 256) is None


@pytest.mark.parametrize("window", [1, 2, 5, 30, 256])
def test_no_probe_is_longer_than_the_window(window: int) -> None:
    probes = [*random_probes(11, window=window), *text_probes(np.arange(70) % 11, limit=70, window=window)]
    assert max(probe.tokens.shape[1] for probe in probes) == min(window, 70)
    assert all(0 < probe.cut <= probe.tokens.shape[1] for probe in probes)


def test_calibration_windows_are_no_longer_than_the_model_takes() -> None:
    feeds = calibration_feeds(ir.load(tiny_onnx("gpt2")), np.arange(300), window=POSITIONS)
    assert [feed["input_ids"].shape for feed in feeds] == [(1, POSITIONS)] * 4


@pytest.mark.parametrize("solver", ["clip", "gptq"])
def test_a_model_of_few_positions_is_converted(solver: str, tmp_path: Path) -> None:
    folder = tmp_path / "source"
    shutil.copytree(tiny_onnx("gpt2").parent, folder)
    write_tokenizer(folder)
    done = convert(folder / "model.onnx", output=tmp_path / "out", solver=solver)
    assert done.certificate is not None and done.certificate.relative <= done.certificate.tolerance
    assert any(f"at most {POSITIONS} tokens" in note for note in done.notes)
    text = tmp_path / "text"
    text.write_text("Some words to compare with. " * 20, encoding="utf-8")
    assert verify(folder / "model.onnx", folder / "model.onnx", text=text).max_abs == 0
