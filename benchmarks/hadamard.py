"""What the online half costs: HadamardTransform, and rotating and rounding in front of the integer product.

    python benchmarks/hadamard.py --json hadamard.json

"share" is the time of rotating and rounding rows, by the kernels that RotatedMatMul uses, as a part of the time of the
MatMulNBits (block 128, accuracy level 4) that would follow in ONNX Runtime, whose weights stream from memory; "copy" is
the time of HadamardTransform's kernel by that of copying as many bytes. The kernels run without a runtime around them.
Everything takes its turn in every turn, on one thread.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from common import aligned, bound, counted, isas, native, place, repeated, session, spread, write
from linears import Linears

from graphrot.bench.timing import CPU, Stopwatch, figure, interleaved
from graphrot.rotation.hadamard import factor_matrix
from graphrot.rotation.orthogonal import choose_matrix, reference_split

SHAPES = ((1536, 576), (4096, 4096), (14336, 4096))
"""Channels that are rotated, and columns of the linear behind them."""
ROWS = (1, 256)
LEAST_BYTES = 128e6
"""Packed weights that a model has at least, unless 32 are enough: more than caches hold."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--isas", default=isas()[0], help=f"of {','.join(isas())}")
    parser.add_argument("--turns", type=int, default=21)
    parser.add_argument("--budget", type=float, default=0.02, help="seconds per turn and contender")
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()

    found = []
    for k, n in SHAPES:
        linears = Linears(k, n, min(32, int(np.ceil(LEAST_BYTES / (k * n / 2)))))
        peer = session(linears.runtimes_own(rotate=False))
        for rows in ROWS:
            inputs = np.random.default_rng(7).standard_normal((rows, k)).astype(np.float32)
            follow = bound(
                peer,
                {x: place(inputs) for x, _ in linears.names()},
                {y: place(np.zeros((rows, n), np.float32)) for _, y in linears.names()},
            )
            for isa in options.isas.split(","):
                found.append(measure(linears, inputs, repeated(follow, options.budget), isa, options))
        del peer
        gc.collect()
    if options.json:
        write(options.json, rows=found)


def measure(
    linears: Linears, inputs: np.ndarray, follow: Callable[[], Stopwatch], isa: str, options: argparse.Namespace
) -> dict[str, Any]:
    """One line of the table."""
    rows, k = inputs.shape
    tasks = {"follow": follow, **native_tasks(inputs, isa, options.budget)}
    seconds = interleaved(list(tasks.values()), options.turns)[..., CPU]
    time = dict(zip(tasks, seconds.T, strict=True))
    one = time["follow"] / linears.copies
    share, copy = 100 * time["rows"] / one, time["hadamard"] / time["copy"]
    print(
        f"{isa:10s} K {k:5d} M {rows:3d}  rotate and round {np.median(time['rows']) * 1e6:9.1f} us  "
        f"share {spread(share)} %  HadamardTransform {np.median(time['hadamard']) * 1e6:9.1f} us  copy {spread(copy)}",
        flush=True,
    )
    return {
        "isa": isa, "K": k, "N": linears.out_features, "rows": rows, "copies": linears.copies,
        "rotate_and_round_us": figure(time["rows"] * 1e6).to_dict(),
        "round_us": figure(time["round"] * 1e6).to_dict(),
        "matmulnbits_us": figure(one * 1e6).to_dict(),
        "share_percent": figure(share).to_dict(),
        "hadamard_us": figure(time["hadamard"] * 1e6).to_dict(),
        "hadamard_to_copy": figure(copy).to_dict(),
    }  # fmt: skip


def native_tasks(inputs: np.ndarray, isa: str, budget: float) -> dict[str, Callable[[], Stopwatch]]:
    """Rotating and rounding, rounding alone, the transform, and a copy, of the same rows."""
    rows, k = inputs.shape
    split = reference_split(choose_matrix(k, rotations="hadamard", seed=None))
    factor = np.ascontiguousarray(factor_matrix(split), np.float32)
    given, result = aligned(inputs), aligned(np.zeros_like(inputs))
    library, name = native(), isa.encode()
    transform = (k, split.size, split.order, factor.ctypes.data, split.size**-0.5, given.ctypes.data)
    one = np.ones((1, 1), np.float32)
    nothing = (k, 1, 1, one.ctypes.data, 1.0, given.ctypes.data)

    def keep(measure: Callable[..., float], *words: Any) -> Callable[[], Stopwatch]:
        alive = (given, result, factor, one)  # the loops have their addresses alone
        return counted(lambda repeat: measure(*words, repeat) if alive else 0.0, budget)

    return {
        "rows": keep(library.measure_rows, name, *transform, rows),
        "round": keep(library.measure_rows, name, *nothing, rows),
        "hadamard": keep(library.measure_hadamard, name, *transform, result.ctypes.data, rows),
        "copy": keep(library.measure_copy, given.ctypes.data, result.ctypes.data, given.nbytes),
    }


if __name__ == "__main__":
    main()
