"""How ``benchmarks/gpu.py`` checks a kernel against float64 NumPy, on the device at hand.

Every check draws numbers of its own, poisons what is to be written, looks at the guards of all buffers, and runs the
kernel twice: two runs that differ in a bit fail, since that is how a race shows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from gpu_device import Buffer, Device, GpuError, Memory
from gpu_kernels import DTYPES

ROUNDING = {"float32": 0.0, "float16": 2.0**-11, "bfloat16": 2.0**-8}
"""What rounding to a type changes at most, relative to the number."""


@dataclass(frozen=True)
class Check:
    """One kernel at one size.

    Args:
        name: what was checked.
        error: the largest error by what is allowed; over 1 fails, and so does NaN.
        words: why it failed, or why nothing was checked.
    """

    name: str
    error: float
    words: str = ""

    @property
    def passed(self) -> bool:
        return self.error <= 1


def checked(device: Device, name: str, measure: Callable[[Memory], float], *, fits: bool = True) -> Check:
    """One check; a refusal is none where the device has too little shared memory (``fits``)."""
    try:
        with device.memory() as memory:
            error = measure(memory)
            memory.check()
    except GpuError as problem:
        return Check(name, np.inf if fits else 0.0, str(problem))
    return Check(name, error, "" if error <= 1 else "the result is wrong")


def twice(device: Device, run: Callable[[], None], results: Sequence[Buffer]) -> list[np.ndarray]:
    """What two runs wrote, which must be the same; both write over poison."""
    found = []
    for _ in range(2):
        for result in results:
            result.fill(np.full(256, 0xFF, np.uint8))
        device.run(run)
        found.append([result.array(np.uint8, (result.nbytes,)) for result in results])
    if any((one != other).any() for one, other in zip(*found, strict=True)):
        raise GpuError("two runs gave different results")
    return found[0]


def some_numbers(seed: int, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Random numbers with a few large ones among them, as activations are."""
    rng = np.random.default_rng(seed)
    values = rng.standard_normal(shape) * np.where(rng.random(shape) < 0.01, 30.0, 1.0)
    return values.astype(DTYPES[dtype])


def relative(found: np.ndarray, expected: np.ndarray, allowed: np.ndarray) -> float:
    """The largest error by what is allowed."""
    return float((np.abs(found.astype(np.float64) - expected) / allowed).max(initial=0.0))
