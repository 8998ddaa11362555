"""What ``benchmarks/gpu.py`` checks and measures: on a GPU, and in little on the CPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from gpu_checks import Linear
from gpu_kernels import Heads
from gpu_speed import SHAPES, Shape


@dataclass(frozen=True)
class Plan:
    """Sizes.

    Args:
        sizes: of HadamardTransform, to check.
        row_sizes: of rows to rotate and round, to check.
        products: to check.
        heads: attention to check.
        transforms: rows and channels of HadamardTransform, to measure.
        shapes: linears to measure.
        runtime_shapes: those of them that ONNX Runtime runs too.
        rows: of the linears.
        groups: channels of the linears that share a scale; 0: all.
        few: rows up to which a linear is bound by its weights, and not by its products.
        attention: cases to measure, as arguments of ``gpu_speed.attend``.
        stream: bytes after which nothing is in a cache any more.
        budget: seconds per figure.
        tokens: steps of a whole model.
        prompt: tokens in front of them.
    """

    sizes: tuple[int, ...]
    row_sizes: tuple[int, ...]
    products: tuple[Linear, ...]
    heads: tuple[Heads, ...]
    transforms: tuple[tuple[int, int], ...]
    shapes: tuple[Shape, ...]
    runtime_shapes: tuple[Shape, ...]
    rows: tuple[int, ...]
    groups: tuple[int, ...]
    few: int
    attention: tuple[Mapping[str, int], ...]
    stream: int
    budget: float
    tokens: int
    prompt: int

    def only(self, models: str) -> Plan:
        """With the linears of these models alone, named as in ``1B,8B``; none named: all."""
        names = [name for name in models.split(",") if name]
        if not names:
            return self
        chosen, inside = (
            tuple(shape for shape in shapes if shape.model in names) for shapes in (self.shapes, self.runtime_shapes)
        )
        return replace(self, shapes=chosen, runtime_shapes=inside)


def _attention(slots: int, batch: int, bits: int, tokens: int = 1, **heads: int) -> dict[str, int]:
    sizes = {"heads": 32, "kv_heads": 8, "size": 128, **heads}
    return {**sizes, "slots": slots, "batch": batch, "bits": bits, "tokens": tokens}


FULL = Plan(
    # Powers of two, factors of every kind, hidden sizes and FFN sizes of models; 29568 = 924 * 32 fits some GPUs only.
    sizes=(64, 80, 96, 128, 576, 1536, 4096, 4864, 5632, 8192, 9728, 14336, 18944, 28672, 29568),
    row_sizes=(64, 96, 576, 1536, 4096, 4864, 8192, 14336, 28672),
    products=(
        Linear(1, 4096, 4096, 0),
        Linear(1, 1536, 576, 128, zeros=True),
        Linear(2, 576, 1000, 128, bias=True),
        Linear(5, 1024, 384, 0, bits=8, bias=True),
        Linear(16, 4096, 1024, 128, zeros=True, bias=True),
        Linear(17, 14336, 200, 0, zeros=True),
        Linear(130, 1536, 576, 32, bias=True),
        Linear(257, 1032, 520, 0, zeros=True, bias=True),
        Linear(129, 512, 256, 64, bits=8, zeros=True),
        Linear(300, 576, 136, 128),
    ),
    heads=(
        Heads(32, 8, 128, 4, 2, 1, 1000),
        Heads(32, 8, 128, 8, 1, 1, 4096),
        Heads(8, 2, 64, 4, 3, 5, 130),
        Heads(4, 4, 256, 8, 1, 64, 64),
        Heads(6, 2, 96, 4, 1, 70, 200),
        Heads(32, 8, 128, 4, 1, 256, 300),
    ),
    transforms=((4096, 8192), (4096, 128), (4096, 4096), (4096, 14336), (16, 8192), (1, 14336)),
    shapes=SHAPES,
    runtime_shapes=tuple(shape for shape in SHAPES if shape.model == "8B"),
    rows=(1, 16, 256, 4096),
    groups=(0, 128),
    few=16,
    attention=(
        _attention(4096, 1, 4),
        _attention(4096, 1, 8),
        _attention(32768, 1, 4),
        _attention(4096, 16, 4),
        _attention(131072, 1, 4),
        _attention(4096, 16, 4, heads=64),
        _attention(2048, 1, 4, 2048),
        _attention(8192, 1, 4, 2048),
    ),
    stream=512 << 20,
    budget=0.06,
    tokens=128,
    prompt=256,
)

TINY = Plan(
    sizes=(64, 96, 352),
    row_sizes=(64, 96),
    products=(Linear(1, 96, 20, 0, zeros=True), Linear(18, 72, 24, 32, bias=True), Linear(3, 64, 16, 0, bits=8)),
    heads=(Heads(4, 2, 64, 4, 2, 1, 20), Heads(2, 1, 64, 8, 1, 5, 9)),
    transforms=((3, 128),),
    shapes=(Shape("1B", "up", 64, 48), Shape("8B", "down", 96, 40)),
    runtime_shapes=(Shape("8B", "down", 256, 40),),
    rows=(1, 17),
    groups=(0, 32),
    few=1,
    attention=(_attention(20, 1, 4, heads=2, kv_heads=1, size=64),),
    stream=4096,
    budget=0.0,
    tokens=4,
    prompt=8,
)
