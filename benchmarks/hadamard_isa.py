"""``HadamardTransform``: one instruction set against another, paired, on one thread.

    python benchmarks/hadamard_isa.py avx512 avx2

Both run in turns on the same buffers, in an order that changes; a figure is the ratio of the two times of one
turn (over 1: the first is faster), as median and the 10th and 90th percentile of all turns.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import time
from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime as ort

from graphrot.ops.hadamard import ensure_function, hadamard_node
from graphrot.ops.library import describe, register
from graphrot.rotation.orthogonal import choose_matrix

SIZES = (64, 80, 96, 128, 576, 1536, 4096, 4864, 14336, 18944)
TOKENS = (1, 256)
TYPES = {"float": ir.DataType.FLOAT, "float16": ir.DataType.FLOAT16, "bfloat16": ir.DataType.BFLOAT16}


def session(size: int, dtype: ir.DataType, isa: str) -> ort.InferenceSession:
    """A session of one node, with the kernels of one instruction set."""
    x = ir.Value(name="x", shape=ir.Shape(["tokens", size]), type=ir.TensorType(dtype))
    node = hadamard_node(x, choose_matrix(size, rotations="hadamard", seed=None), "y")
    model = ir.Model(ir.Graph([x], node.outputs, nodes=[node], opset_imports={"": 21}), ir_version=10)
    ensure_function(model)
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    os.environ["GRAPHROT_ISA"] = isa  # read when the kernel is made
    register(options)
    return ort.InferenceSession(ir.to_proto(model).SerializeToString(), options, providers=["CPUExecutionProvider"])


def binding(ready: ort.InferenceSession, size: int, tokens: int, dtype: ir.DataType) -> ort.IOBinding:
    """Input and output in place, so that a run is little more than the kernel; aligned like the runtime's own."""
    values = np.random.default_rng(0).standard_normal((tokens, size)).astype(dtype.numpy())
    raw = values if dtype == ir.DataType.FLOAT else values.view(np.uint16)
    bound = ready.io_binding()
    for bind, name in ((bound.bind_ortvalue_input, "x"), (bound.bind_ortvalue_output, "y")):
        bind(name, ort.OrtValue.ortvalue_from_numpy_with_onnx_type(aligned(raw), int(dtype)))
    return bound


def aligned(array: np.ndarray) -> np.ndarray:
    """A copy that begins at a multiple of 64 bytes."""
    room = np.empty(array.nbytes + 64, np.uint8)
    start = -room.ctypes.data % 64
    result = room[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    result[...] = array
    return result


def measure(names: list[str], size: int, tokens: int, dtype: ir.DataType, turns: int, budget: float) -> np.ndarray:
    """Seconds per run, ``[turns, names]``; a turn repeats runs until ``budget`` seconds are spent."""
    pairs = []
    for name in names:
        ready = session(size, dtype, name)
        pairs.append((ready, binding(ready, size, tokens, dtype)))
    start = time.perf_counter()
    for _ in range(10):
        pairs[0][0].run_with_iobinding(pairs[0][1])
    repeats = max(1, int(budget / ((time.perf_counter() - start) / 10)))
    seconds = np.zeros((turns, len(names)))
    for turn in range(turns):
        for position in range(len(names)):
            index = (position + turn) % len(names)
            ready, bound = pairs[index]
            start = time.thread_time()
            for _ in range(repeats):
                ready.run_with_iobinding(bound)
            seconds[turn, index] = (time.thread_time() - start) / repeats
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("first", choices=[isa["name"] for isa in describe()["isas"] if isa["available"]])
    parser.add_argument("second", choices=[isa["name"] for isa in describe()["isas"] if isa["available"]])
    parser.add_argument("--turns", type=int, default=41)
    parser.add_argument("--budget", type=float, default=0.005, help="seconds per turn and instruction set")
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()

    names = [options.first, options.second]
    rows = []
    print(f"{'type':9s} {'size':>6s} {'tokens':>6s} {names[0]:>10s} us {names[1]:>10s} us   ratio [p10, p90]")
    for (kind, dtype), tokens, size in itertools.product(TYPES.items(), TOKENS, SIZES):
        seconds = measure(names, size, tokens, dtype, options.turns, options.budget)
        ratio = np.percentile(seconds[:, 1] / seconds[:, 0], [50, 10, 90])
        first, second = np.median(seconds, axis=0) * 1e6
        spread = f"[{ratio[1]:.2f}, {ratio[2]:.2f}]"
        print(f"{kind:9s} {size:6d} {tokens:6d} {first:13.1f} {second:13.1f}   {ratio[0]:5.2f} {spread}", flush=True)
        row = {"type": kind, "size": size, "tokens": tokens, "ratio": ratio.tolist(), "us": [first, second]}
        rows.append(row)
    if options.json:
        options.json.write_text(json.dumps({"isas": names, "rows": rows}, indent=2), encoding="utf-8")


if __name__ == "__main__":
    main()
