"""graphrot's CUDA kernels on the GPU at hand: are they right, and how fast are they?

    python benchmarks/gpu.py --json gpu.json

Builds ``custom_ops/bench`` for this GPU, checks every kernel against float64 NumPy, and measures the linears of models
of 1B, 8B and 70B parameters. Shares are of what this GPU does: "copy" is copying within its memory, "peak" are products
of bytes by the same instruction in registers. Lines come as they are measured, and the JSON is written anew after each:
what is there when time runs out is whole. A second run of the most important part costs half a minute:

    python benchmarks/gpu.py --sections checks,hadamard,linears --shapes 8B

``--on-cpu`` runs all of it on the CPU at tiny sizes, where no time is printed, since none would mean anything.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

from gpu_aims import aims
from gpu_build import build
from gpu_check import Check
from gpu_check_attention import attention_checks
from gpu_checks import hadamard_checks, product_checks, rows_checks
from gpu_device import Device, GpuError
from gpu_lines import attention_line, hadamard_line, limits_line, linear_line, model_line, named, runtime_line
from gpu_model import decode
from gpu_peers import Missing, Runtime, cublas, find_cublas, half_product, through_runtime
from gpu_plan import FULL, TINY, Plan
from gpu_speed import Limits, attend, limits, linear, transforms

from graphrot.bench.machine import record

SECTIONS = ("checks", "hadamard", "linears", "attention", "runtime")
ENVIRONMENT = 4
"""The exit code where there is no GPU, as of the graphrot command."""


class Report:
    """Prints what is found, keeps it, and knows how much time is left."""

    def __init__(self, device: Device, path: Path | None, end: float) -> None:
        self._path, self._end, self._record = path, end, record()
        self._timed = not device.on_cpu
        self.broken = 0
        self.content: dict[str, Any] = {
            "device": {
                "name": device.name, "capability": ".".join(map(str, device.capability)),
                "multiprocessors": device.multiprocessors, "shared_bytes": device.shared_bytes, "on_cpu": device.on_cpu,
            },
            "left_out": [],
        }  # fmt: skip

    def add(self, section: str, row: dict[str, Any], line: str) -> None:
        """A row of a section, and how it is printed."""
        self.content.setdefault(section, []).append(row)
        print(line, flush=True)
        self.save()

    def save(self) -> None:
        if self._path is not None:
            self._path.write_text(json.dumps({**self._record, **self.content}, indent=2), encoding="utf-8")

    def figure(self, value: float, form: str) -> str:
        """A number that was measured; a dash on the CPU."""
        return format(value, form) if self._timed else "-"

    def leave_out(self, what: str, why: str) -> None:
        print(f"{what}: left out, {why}", flush=True)
        self.content["left_out"].append({"what": what, "why": why})
        self.save()

    def on_time(self) -> None:
        """Leave the item out when the time is up."""
        if time.monotonic() >= self._end:
            raise Missing("the time is up")

    @contextmanager
    def item(self, what: str) -> Iterator[None]:
        """A part of the run; what is missing or breaks in it does not stop the others."""
        try:
            yield
        except Missing as problem:
            self.leave_out(what, str(problem))
        except GpuError as problem:
            self.broken += 1
            self.leave_out(what, str(problem))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--on-cpu", action="store_true", help="tiny sizes, kernels on the CPU, no times")
    parser.add_argument("--library", type=Path, help="built already; default: build it")
    parser.add_argument("--sections", default=",".join(SECTIONS), help=f"of {','.join(SECTIONS)}")
    parser.add_argument("--shapes", default="", help="of 1B,8B,70B; default: all")
    parser.add_argument(
        "--model", type=Path, help="a folder that graphrot convert --provider cuda wrote: decode with it"
    )
    parser.add_argument("--minutes", type=float, default=7.5, help="after which nothing new is begun")
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    end = time.monotonic() + 60 * options.minutes
    chosen = options.sections.split(",")
    if unknown := sorted(set(chosen) - set(SECTIONS)):
        parser.error(f"there are no sections {', '.join(unknown)}")
    try:
        device = Device(options.library or build(on_cpu=options.on_cpu))
    except GpuError as problem:
        print(f"benchmarks/gpu.py cannot run here: {problem}", file=sys.stderr)
        return ENVIRONMENT
    if device.on_cpu != options.on_cpu:
        parser.error("--library and --on-cpu do not fit together")
    plan = (TINY if device.on_cpu else FULL).only(options.shapes)
    report = Report(device, options.json, end)
    print(
        f"{device.name}, sm_{device.capability[0]}{device.capability[1]}, {device.multiprocessors} multiprocessors, "
        f"{device.shared_bytes} bytes of shared memory for a block",
        flush=True,
    )
    failed = sum(check_all(device, plan, report)) if "checks" in chosen else 0
    if set(chosen) - {"checks"}:
        with report.item("measuring"):
            measure(device, plan, report, chosen)
    if options.model is not None:
        measure_model(options.model, plan, report, on_cpu=device.on_cpu)
    report.content["failed_checks"] = failed
    report.content["aims"] = aims(report.content) if not device.on_cpu else []
    for aim in report.content["aims"]:
        print(f"{'reached' if aim['reached'] else 'missed '}  {aim['words']}", flush=True)
    report.save()
    if "checks" in chosen:
        print(f"{failed} of {len(report.content.get('checks', []))} checks failed", flush=True)
    return 1 if failed or report.broken else 0


def check_all(device: Device, plan: Plan, report: Report) -> Iterator[bool]:
    """Whether each check failed."""
    groups: dict[str, Iterator[Check]] = {
        "HadamardTransform": hadamard_checks(device, plan.sizes),
        "rows": rows_checks(device, plan.row_sizes),
        "product": product_checks(device, plan.products),
        "attention": attention_checks(device, plan.heads),
    }
    for name, checks in groups.items():
        for check in checks:
            row = {"name": check.name, "error": check.error, "passed": check.passed, "words": check.words}
            state = "ok    " if check.passed else "FAILED"
            words = f"  {check.words}" if check.words else ""
            report.add("checks", row, f"{state} {check.error:5.2f} of what is allowed  {check.name}{words}")
            yield not check.passed
            with report.item(f"more checks of {name}"):
                report.on_time()
                continue
            break


def measure(device: Device, plan: Plan, report: Report, chosen: Sequence[str]) -> None:
    """All sections with figures."""
    most = limits(device, stream=plan.stream, budget=plan.budget)
    row = {"copy_gb_per_s": most.copy / 1e9, "peak_tops": most.products / 1e12}
    report.add("limits", row, limits_line(row, report.figure))
    steps: dict[str, Callable[[Device, Limits, Plan, Report], None]] = {
        "hadamard": measure_hadamard,
        "linears": measure_linears,
        "attention": measure_attention,
        "runtime": measure_runtime,
    }
    for name, step in steps.items():
        if name in chosen:
            step(device, most, plan, report)


def measure_hadamard(device: Device, most: Limits, plan: Plan, report: Report) -> None:
    """HadamardTransform against copies."""
    for rows, channels in plan.transforms:
        with report.item(f"HadamardTransform {rows} x {channels}"):
            report.on_time()
            row = transforms(device, most, rows, channels)
            report.add("hadamard", row, hadamard_line(row, report.figure))


def measure_linears(device: Device, most: Limits, plan: Plan, report: Report) -> None:
    """Linears of models, with cuBLAS beside them."""
    library = None
    with report.item("cuBLAS"):
        library = find_cublas()
    for shape, count in product(plan.shapes, plan.rows):
        what, half = named(shape, count), float("nan")
        if library is not None:
            with report.item(f"cuBLAS {what}"):
                report.on_time()
                with cublas(device, library) as peer:
                    half = half_product(device, most, peer, shape, count)
        for group in plan.groups:
            with report.item(f"{what} group {group}"):
                report.on_time()
                row = linear(device, most, shape, count, group)
                row |= {"cublas_us": half * 1e6, "to_cublas": half * 1e6 / row["rotated_us"]}
                report.add("linears", row, linear_line(what, row, report.figure, few=count <= plan.few))


def measure_attention(device: Device, most: Limits, plan: Plan, report: Report) -> None:
    """Decoding and prefill over a quantized cache."""
    for case in plan.attention:
        what = f"attention {case['heads']}/{case['kv_heads']} heads of {case['size']}, {case['bits']} bits"
        with report.item(what):
            report.on_time()
            row = attend(device, most, **case)
            report.add("attention", row, attention_line(what, row, report.figure))


def measure_runtime(device: Device, most: Limits, plan: Plan, report: Report) -> None:
    """MatMulNBits and RotatedMatMul inside ONNX Runtime, as CUDA graphs."""
    with report.item("ONNX Runtime"):
        runtime = Runtime(on_cpu=device.on_cpu)
        for shape in plan.runtime_shapes:
            report.on_time()
            measured = through_runtime(runtime, shape, plan.rows, plan.budget * 4, most.stream)
            for count, found in zip(plan.rows, measured, strict=True):
                own, other = (found[name] * 1e6 for name in ("RotatedMatMul", "MatMulNBits"))
                row = {"K": shape.channels, "N": shape.columns, "M": count, "us": own, "matmulnbits_us": other}
                report.add("runtime", row, runtime_line(f"in ONNX Runtime {named(shape, count)}", row, report.figure))


def measure_model(model: Path, plan: Plan, report: Report, *, on_cpu: bool) -> None:
    """A whole model, token by token."""
    with report.item(f"{model}"):
        report.on_time()
        rows = decode(model, on_cpu=on_cpu, tokens=plan.tokens, prompt=plan.prompt)
        for row in rows:
            report.add("model", row, model_line(row, report.figure))
        if len(rows) == 1:
            raise Missing("no CUDA graph: its attention takes lengths from the shape of the mask")


if __name__ == "__main__":
    sys.exit(main())
