"""A whole model on the GPU: the loop of ``samples/cuda_generate.py``, step by step and as a CUDA graph."""

from __future__ import annotations

import importlib.util
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from gpu_build import ROOT
from gpu_peers import Missing


def decode(model: Path, *, on_cpu: bool, tokens: int, prompt: int) -> list[dict[str, Any]]:
    """Tokens per second of ``tokens`` steps behind a prompt, without a graph and, where the model takes it, with one.

    Args:
        model: a folder that ``graphrot convert --provider cuda`` wrote, with a cache that is written in place.
        on_cpu: run on the CPU; then there is no graph.
        tokens: steps.
        prompt: tokens in front.

    Raises:
        Missing: the model does not load.
    """
    sample = _sample()
    gpu = None if on_cpu else 0
    found = []
    for graph in (False, True):
        try:
            decoder = sample.Decoder(str(model), gpu=gpu, capacity=prompt + tokens, graph=graph and not on_cpu)
        except (SystemExit, Exception) as error:  # onnxruntime has a class of its own for every status code
            raise Missing(str(error).strip().splitlines()[0]) from error
        token = int(decoder.read(np.random.default_rng(0).integers(3, 100, prompt).tolist()).argmax())
        if graph and not decoder.counts(token):
            break
        steps = []
        for _ in range(tokens):
            start = time.perf_counter()
            logits = decoder.next(token) if graph else decoder.read([token])
            steps.append(time.perf_counter() - start)
            token = int(logits.argmax())
        seconds = float("nan") if on_cpu else float(np.median(steps))
        row = {"model": model.name, "graph": graph, "prompt": prompt, "ms": 1e3 * seconds}
        found.append({**row, "tokens_per_s": 1 / seconds})
    return found


def _sample() -> ModuleType:
    spec = importlib.util.spec_from_file_location("cuda_generate", ROOT / "samples" / "cuda_generate.py")
    if spec is None or spec.loader is None:
        raise ImportError("samples/cuda_generate.py is missing")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
