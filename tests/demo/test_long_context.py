"""The demo model over a 4-bit cache: a sentence hidden in 1,500 tokens is found as the float model finds it.

Run with ``pytest -m demo``.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import graphrot
from graphrot.model.demo import demo_folder, demo_onnx
from tests.samples.test_samples import run

pytestmark = pytest.mark.demo


def test_the_4_bit_cache_answers_what_the_float_cache_answers(tmp_path: Path) -> None:
    source = demo_onnx(demo_folder())
    graphrot.convert("demo", output=tmp_path / "kv4", recipe="rotate-only", kv="int4", certificate="off")
    (tmp_path / "float").mkdir()
    for file in (*source.parent.glob("model.onnx*"), demo_folder() / "tokenizer.json"):
        (tmp_path / "float" / file.name).symlink_to(file)
    wide, narrow = (run("long_context.py", [name], tmp_path) for name in ("float", "kv4"))
    print(wide, narrow)
    assert int(wide.split()[0]) > 1490
    for printed in (wide, narrow):
        assert "answer: ' marmalade" in printed
    stored, as_float = map(int, re.findall(r"(\d+) bytes", narrow))
    assert as_float >= 7.1 * stored
