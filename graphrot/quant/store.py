"""Keeps the codes of many tensors in files instead of memory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from graphrot.quant.grid import QuantizedTensor


class CodeStore:
    """A scratch folder of codes; the caller owns it and removes it.

    Args:
        folder: made if it is not there; None: codes stay in memory.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._count = 0
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)

    def keep(self, tensor: QuantizedTensor) -> QuantizedTensor:
        """The same tensor with its codes memory-mapped, read-only."""
        if self._folder is None or tensor.codes.size == 0:
            return tensor
        path = self._folder / f"codes{self._count}.bin"
        self._count += 1
        np.ascontiguousarray(tensor.codes).tofile(path)
        return replace(tensor, codes=np.memmap(path, dtype=tensor.codes.dtype, mode="r", shape=tensor.codes.shape))
