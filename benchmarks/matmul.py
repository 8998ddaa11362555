"""``RotatedMatMul`` against ONNX Runtime doing the same with its own operators, paired, on one thread.

    python benchmarks/matmul.py --json matmul.json

Each runs a model of many equal linears with weights of their own, in turns. "ort" is a Hadamard transform in standard
operators and MatMulNBits (block 128, accuracy level 4); "dq8" is DynamicQuantizeMatMul on 8-bit weights without any
transform, the faster of its two weight types. Ratios over 1: RotatedMatMul is faster. "read" is the weights' bytes by
the time, as a part of what a loop that only reads as many bytes reaches in the same turn; "peak" are the multiply-adds
by the time, as a part of what a loop of the instruction set's own products in registers makes.
"""

from __future__ import annotations

import argparse
import gc
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
from common import bound, isas, multiplying, place, reading, repeated, session, spread, write
from linears import Linears

from graphrot.bench.timing import CPU, WALL, Stopwatch, figure, interleaved

ROWS = (1, 4, 16, 256)
GROUPS = (0, 128, 32)
COPIES = 32
FEW = 16
"""Below so many rows the table shows the part of a streaming read, from there on that of the integer peak."""
LEAST_COPIES = 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="1536x576,14336x4096", help="KxN,...")
    parser.add_argument("--rows", default=",".join(map(str, ROWS)))
    parser.add_argument("--groups", default=",".join(map(str, GROUPS)), help="0: a scale per channel")
    parser.add_argument("--isas", default=isas()[0], help=f"of {','.join(isas())}")
    parser.add_argument("--memory", type=float, default=256e6, help="bytes of packed weights of one model, at most")
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--budget", type=float, default=0.03, help="seconds per turn and contender")
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()

    found = []
    for shape in options.shapes.split(","):
        k, n = map(int, shape.split("x"))
        copies = max(LEAST_COPIES, min(COPIES, int(options.memory / (k * n / 2))))
        linears = Linears(k, n, copies)
        fewer = "" if copies == COPIES else f" (not {COPIES}: memory)"
        print(f"\nK {k}, N {n}: {copies} weights{fewer}", flush=True)
        found += measure(linears, options)
        gc.collect()
    if options.json:
        write(options.json, rows=found)


def measure(linears: Linears, options: argparse.Namespace) -> list[dict[str, Any]]:
    """All figures of one shape."""
    groups = [int(group) for group in options.groups.split(",")]
    peers = {"ort": session(linears.runtimes_own())}
    for name, dtype in (("dq u8", np.uint8), ("dq s8", np.int8)):
        peers[name] = session(linears.dynamic(dtype))
    found = []
    for isa in options.isas.split(","):
        ours = {group: session(linears.rotated(group), isa=isa) for group in groups}
        for rows in map(int, options.rows.split(",")):
            found += one(linears, isa, rows, peers, ours, options)
        found.append(threads(linears, isa, groups[0], max(map(int, options.rows.split(","))), options))
    return found


def one(
    linears: Linears,
    isa: str,
    rows: int,
    peers: dict[str, ort.InferenceSession],
    ours: dict[int, ort.InferenceSession],
    options: argparse.Namespace,
) -> list[dict[str, Any]]:
    """The figures of one number of rows: a row of the table for each group."""
    io = _Tensors(linears, rows)
    agree(io, peers["ort"], ours)
    runs = {**{name: io.bind(ready) for name, ready in peers.items()}, **{g: io.bind(r) for g, r in ours.items()}}
    tasks: list[Callable[[], Stopwatch]] = [repeated(run, options.budget) for run in runs.values()]
    bytes_read = linears.weight_bytes(0)
    tasks.append(reading([np.ones(bytes_read // 8, np.uint64)], options.budget))
    names = [*runs, "read"]
    if (best := multiplying(isa)) is not None:
        tasks.append(best)
        names.append("peak")
    time = dict(zip(names, interleaved(tasks, options.turns)[..., CPU].T, strict=True))
    dynamic = np.minimum(time["dq u8"], time["dq s8"])
    result = []
    for group in ours:
        own = time[group]
        read = linears.weight_bytes(group) / own / (bytes_read / time["read"])
        work = linears.copies * rows * linears.in_features * linears.out_features
        part = None if best is None else work * time["peak"] / own
        row: dict[str, Any] = {
            "isa": isa, "K": linears.in_features, "N": linears.out_features, "copies": linears.copies, "rows": rows,
            "group": group or "channel",
            "us": figure(own / linears.copies * 1e6).to_dict(),
            "ort_us": figure(time["ort"] / linears.copies * 1e6).to_dict(),
            "ratio_ort": figure(time["ort"] / own).to_dict(),
            "ratio_dynamic": figure(dynamic / own).to_dict(),
            "of_read": figure(read).to_dict(),
            "read_gb_per_s": figure(bytes_read / time["read"] / 1e9).to_dict(),
            "of_peak": None if part is None else figure(part).to_dict(),
            "peak_gmac_per_s": None if part is None else figure(1e-9 / time["peak"]).to_dict(),
        }  # fmt: skip
        result.append(row)
        bound_by = f"read {spread(read)}" if rows < FEW or part is None else f"peak {spread(part)}"
        print(
            f"{isa:10s} M {rows:4d}  {row['group']!s:8s} {row['us']['median']:10.1f} us  "
            f"ort {spread(time['ort'] / own)}  dq8 {spread(dynamic / own)}  {bound_by}",
            flush=True,
        )
    return result


def threads(linears: Linears, isa: str, group: int, rows: int, options: argparse.Namespace) -> dict[str, Any]:
    """Two threads against one, in wall time."""
    io = _Tensors(linears, rows)
    model = linears.rotated(group)
    tasks = [repeated(io.bind(session(model, isa=isa, threads=count)), options.budget) for count in (1, 2)]
    before = os.getloadavg()
    seconds = interleaved(tasks, options.turns)[..., WALL]
    ratio = seconds[:, 0] / seconds[:, 1]
    load = [before, os.getloadavg()]
    print(f"{isa:10s} M {rows:4d}  2 threads against 1: {spread(ratio)} in wall time, load {before[0]:.2f}", flush=True)
    return {
        "isa": isa, "K": linears.in_features, "N": linears.out_features, "rows": rows, "group": group or "channel",
        "two_threads": figure(ratio).to_dict(), "load": load,
    }  # fmt: skip


class _Tensors:
    """Inputs and outputs of one number of rows, which all sessions share."""

    def __init__(self, linears: Linears, rows: int) -> None:
        rng = np.random.default_rng(7)
        self._inputs = {}
        self.outputs = {}
        for x, y in linears.names():
            self._inputs[x] = place(rng.standard_normal((rows, linears.in_features)).astype(np.float32))
            self.outputs[y] = place(np.zeros((rows, linears.out_features), np.float32))

    def bind(self, ready: ort.InferenceSession) -> Callable[[], None]:
        return bound(ready, self._inputs, self.outputs)


def agree(io: _Tensors, peer: ort.InferenceSession, ours: dict[int, ort.InferenceSession]) -> None:
    """Stop unless all compute the same, but for the rounding of their activations."""
    name = next(iter(io.outputs))

    def result(ready: ort.InferenceSession) -> np.ndarray:
        io.bind(ready)()
        return np.array(io.outputs[name].numpy())

    expected = result(peer)
    for group, ready in ours.items():
        error = np.abs(result(ready) - expected).max() / np.abs(expected).max()
        if not error < 0.05:
            raise SystemExit(f"group {group}: the two differ by {error:.2%}")


if __name__ == "__main__":
    main()
