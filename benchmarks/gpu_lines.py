"""How ``benchmarks/gpu.py`` prints what it measured: one line a row of its JSON."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from gpu_speed import Shape

Figure = Callable[[float, str], str]
"""Writes a number that was measured, in a format; on the CPU a dash."""
Row = Mapping[str, Any]


def named(shape: Shape, rows: int) -> str:
    """A linear and its rows."""
    return f"{shape.model:3s} {shape.name:4s} {shape.channels:5d} -> {shape.columns:5d}  M {rows:4d}"


def limits_line(row: Row, f: Figure) -> str:
    copy, peak = f(row["copy_gb_per_s"], ".0f"), f(row["peak_tops"], ".0f")
    return f"copy {copy} GB/s (read and written), products of bytes {peak} TOPS"


def hadamard_line(row: Row, f: Figure) -> str:
    what = f"HadamardTransform {row['rows']:5d} x {row['channels']:5d} ({row['order']:4d}) {row['dtype']}"
    speed = f"{f(row['us'], '9.1f')} us  {f(row['gb_per_s'], '6.0f')} GB/s"
    return f"{what}  {speed}  {f(100 * row['of_copy'], '4.0f')} % of a copy of as many bytes"


def linear_line(what: str, row: Row, f: Figure, *, few: bool) -> str:
    """``few`` rows: the weights' bytes bound it, and not the products."""
    share = (
        f"{f(100 * row['of_copy_bandwidth'], '3.0f')} % copy" if few else f"{f(100 * row['of_peak'], '3.0f')} % peak"
    )
    return (
        f"{what} {row['group']!s:7s}  {f(row['rotated_us'], '8.1f')} us  product {f(row['product_us'], '8.1f')} us "
        f"({f(row['weights_gb_per_s'], '4.0f')} GB/s, {f(row['tops'], '4.0f')} TOPS, {share})  "
        f"Hadamard adds {f(row['hadamard_percent'], '4.1f')} %  "
        f"cuBLAS float16 takes {f(row['to_cublas'], '4.2f')} times as long"
    )


def attention_line(what: str, row: Row, f: Figure) -> str:
    return (
        f"{what}, {row['batch']:2d} x {row['tokens']:4d} tokens behind {row['slots']:6d} slots  "
        f"{f(row['us'], '9.1f')} us  {f(row['gb_per_s'], '6.0f')} GB/s "
        f"({f(100 * row['of_copy_bandwidth'], '3.0f')} % copy)  {f(row['tflops'], '6.1f')} TFLOPS"
    )


def runtime_line(what: str, row: Row, f: Figure) -> str:
    ratio = f(row["matmulnbits_us"] / row["us"], "4.2f")
    return f"{what}  RotatedMatMul {f(row['us'], '8.1f')} us  MatMulNBits takes {ratio} times as long"


def model_line(row: Row, f: Figure) -> str:
    way = "as a CUDA graph" if row["graph"] else "step by step"
    speed = f"{f(row['ms'], '.2f')} ms a token, {f(row['tokens_per_s'], '.0f')} tokens/s"
    return f"{row['model']} {way}, behind {row['prompt']} tokens  {speed}"
