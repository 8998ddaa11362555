"""What the facts mean: one line for each thing that has to work, and the command that mends it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from graphrot.doctor.facts import Facts, Run
from graphrot.doctor.ranges import (
    BELOW_FOR_CUDA,
    CAPABILITY,
    CORE,
    EIGHT_BIT_RUNTIME,
    EXTRAS,
    NEWEST_RUNTIME,
    PYTHON,
    RUNTIME,
    RUNTIME_PACKAGES,
    Range,
    numbers,
)

TOLERANCE = {"float": 1e-5, "float16": 4e-3, "bfloat16": 3e-2}
"""Largest error of a result that reaches about 5: a few units of the last place of the type."""
LEAST_TOLERANCE = {"RotatedAttention": 1e-4}
"""Of operators that may round their inputs, to 15 bits or more."""
REINSTALL = "pip install --force-reinstall --no-deps .  # in graphrot's folder"


@dataclass(frozen=True)
class Check:
    """One line of the report.

    Attributes:
        name: what is checked.
        ok: it works.
        detail: what was seen.
        fix: the command that mends it; empty where ``ok``.
        essential: without it graphrot does not do its main job on the CPU.
    """

    name: str
    ok: bool
    detail: str
    fix: str = ""
    essential: bool = True


def examine(facts: Facts) -> list[Check]:
    """All checks, in an order in which the first failed line is the one to mend first."""
    checks = [_python(facts), _core(facts), _one_runtime(facts), _runtime(facts)]
    if facts.runtime is not None:
        checks += _runtime_details(facts)
    checks += _library(facts)
    checks += _runs(facts)
    checks += [_extra(facts, name) for name in EXTRAS]
    return checks


def _check(name: str, ok: bool, detail: str, fix: str, *, essential: bool = True) -> Check:
    return Check(name, ok, detail, "" if ok else fix, essential)


def _python(facts: Facts) -> Check:
    return _check(
        "python",
        PYTHON.holds(facts.python),
        f"{facts.python} (supported: {PYTHON})",
        f"make an environment of a newer one: python{PYTHON.low} -m venv .venv",
    )


def _outside(facts: Facts, wanted: dict[str, Range]) -> list[str]:
    """Packages that are missing or of an unsupported version, as pip takes them."""
    versions = {name: facts.packages.get(name) for name in wanted}
    return [f"{name}{span}" for name, span in wanted.items() if not (found := versions[name]) or not span.holds(found)]


def _seen(facts: Facts, wanted: dict[str, Range]) -> str:
    return ", ".join(f"{name} {facts.packages.get(name) or 'not installed'}" for name in wanted)


def _pip(requirements: list[str]) -> str:
    return "pip install " + " ".join(f"'{requirement}'" for requirement in requirements)


def _core(facts: Facts) -> Check:
    wrong = _outside(facts, CORE)
    detail = f"missing or unsupported: {', '.join(wrong)}" if wrong else _seen(facts, CORE)
    return _check("packages", not wrong, detail, _pip(wrong))


def _installed_runtimes(facts: Facts) -> dict[str, str]:
    return {name: version for name in RUNTIME_PACKAGES if (version := facts.packages.get(name))}


def _again(facts: Facts) -> str:
    """The runtime's files once more."""
    return f"pip install --force-reinstall {next(iter(_installed_runtimes(facts)), 'onnxruntime')}"


def _one_runtime(facts: Facts) -> Check:
    """Two wheels in one folder overwrite each other; so does one whose files are no longer its own."""
    name, found = "one onnxruntime", _installed_runtimes(facts)
    listed = ", ".join(f"{package} {version}" for package, version in found.items()) or "none"
    keep = "gpu" if "onnxruntime-gpu" in found else "cpu"
    clean = f"pip uninstall -y {' '.join(found)} && pip install 'graphrot[{keep}]'"
    if len(found) > 1:
        return Check(name, False, f"{listed} are installed together and overwrite each other's files", clean)
    for package, version in found.items():
        if facts.runtime is not None and facts.runtime != version:
            detail = (
                f"{package} {version} is installed, and the files are those of {facts.runtime_package} {facts.runtime}"
            )
            return Check(name, False, detail, clean)
    return Check(name, True, listed)


def _runtime(facts: Facts) -> Check:
    name = "onnxruntime"
    if facts.crash is not None:
        detail = f"looking at it ended in a crash: {facts.crash}"
        return Check(name, False, detail, _again(facts))
    if facts.runtime is None:
        if not _installed_runtimes(facts):
            return Check(name, False, "not installed", "pip install 'graphrot[cpu]'")
        return Check(name, False, f"cannot be imported: {facts.runtime_failure}", _again(facts))
    newer = numbers(facts.runtime)[:2] > numbers(NEWEST_RUNTIME)
    note = f"; newer than {NEWEST_RUNTIME}, the newest that was tested" if newer else ""
    detail = f"{facts.runtime} (supported: {RUNTIME}{note})"
    package = facts.runtime_package or name
    return _check(name, RUNTIME.holds(facts.runtime), detail, f"pip install -U '{package}{RUNTIME}'")


def _runtime_details(facts: Facts) -> Iterator[Check]:
    version, package = facts.runtime or "", facts.runtime_package or "onnxruntime"
    eight = EIGHT_BIT_RUNTIME.holds(version)
    yield _check(
        "8-bit embedding and head",
        eight,
        f"onnxruntime {version} {'has' if eight else 'lacks'} 8-bit MatMulNBits (from {EIGHT_BIT_RUNTIME.low} on); "
        + ("" if eight else "here, convert with --embedding none --head none; ")
        + "target ort, where activations are float or --kernels is ort",
        f"pip install -U '{package}{EIGHT_BIT_RUNTIME}'",
        essential=False,
    )
    yield _check(
        "CPU provider",
        "CPUExecutionProvider" in facts.providers,
        ", ".join(facts.providers) or "no providers",
        _again(facts),
    )
    if facts.packages.get("onnxruntime-gpu") or facts.cuda_build:
        yield from _cuda(facts)
    elif facts.gpu is not None:
        detail = f"{facts.gpu.name} is there, and onnxruntime is built without CUDA; graphrot runs on the CPU"
        yield Check("CUDA", True, detail, essential=False)


def _cuda(facts: Facts) -> Iterator[Check]:
    """A GPU wheel: its provider, the driver, the libraries. The CPU works without any of them."""
    built = facts.cuda_build or "an unknown version"
    offered = "CUDAExecutionProvider" in facts.providers
    yield _check(
        "CUDA provider",
        offered,
        f"onnxruntime-gpu built for CUDA {built}: "
        + ("offered" if offered else "CUDAExecutionProvider is not offered"),
        _again(facts),
        essential=False,
    )
    yield _driver(facts)
    if facts.cuda_build:
        missing = ", ".join(facts.cuda_missing)
        major = facts.cuda_build.partition(".")[0]
        yield _check(
            "CUDA libraries",
            not missing,
            f"not found: {missing}; a session sees those that pip brings after onnxruntime.preload_dlls()"
            if missing
            else f"those of CUDA {major} and cuDNN 9 are found",
            f"pip install 'onnxruntime-gpu[cuda,cudnn]=={facts.runtime}'",
            essential=False,
        )
    if facts.gpu is not None and facts.gpu.capability:
        yield _check(
            "CUDA device",
            CAPABILITY.holds(facts.gpu.capability),
            f"{facts.gpu.name} has compute capability {facts.gpu.capability} (graphrot's CUDA kernels: {CAPABILITY})",
            "use a GPU of the Ampere generation or later, or convert with --kernels ort",
            essential=False,
        )
    answer = facts.cuda_answer
    if answer is not None:
        detail = "a session with the CUDA provider runs" if answer.works else f"onnxruntime says: {answer.said}"
        yield _check("CUDA session", answer.works, detail, answer.fix, essential=False)


def _driver(facts: Facts) -> Check:
    name, gpu = "CUDA driver", facts.gpu
    if gpu is None:
        detail = "nvidia-smi finds no GPU; the GPU wheel runs on the CPU alone"
        fix = "install NVIDIA's driver, or: pip uninstall -y onnxruntime-gpu && pip install 'graphrot[cpu]'"
        return Check(name, False, detail, fix, essential=False)
    built, own = facts.cuda_build.partition(".")[0], gpu.cuda.partition(".")[0]
    ok = not built or not own or int(own) >= int(built)
    detail = f"{gpu.name}, driver {gpu.driver}, runs CUDA up to {gpu.cuda or 'an unknown version'}"
    if not ok:
        detail += f", and onnxruntime-gpu {facts.runtime} is built for CUDA {facts.cuda_build}"
    below = BELOW_FOR_CUDA.get(own)
    older = f"pip install 'onnxruntime-gpu[cuda,cudnn]{RUNTIME},<{below}', or " if below else ""
    return _check(name, ok, detail, f"{older}install a driver for CUDA {built} or later", essential=False)


def _library(facts: Facts) -> Iterator[Check]:
    name = "native library"
    if facts.crash is not None:
        return
    if facts.library is None:
        yield Check(name, False, facts.library_failure or "not found", REINSTALL)
        return
    held: dict[str, list[str]] = {}
    for kernel in facts.described.get("kernels", []):
        held.setdefault(kernel["op"], []).append(kernel["type"])
    kernels = "; ".join(f"{op} ({', '.join(types)})" for op, types in held.items())
    yield Check(name, True, f"{facts.library}: {kernels or 'no kernels'}")
    isas = facts.described.get("isas", [])
    built = [isa["name"] for isa in isas if isa["built"]]
    available = [isa["name"] for isa in isas if isa["available"]]
    selected = facts.described.get("selected", "invalid")
    seen = f"built {', '.join(built)}; this machine runs {', '.join(available)}; "
    impossible = selected == "invalid"
    asked = f"GRAPHROT_ISA={facts.isa_wanted} is none of them" if impossible else f"in use: {selected}"
    yield _check("instruction sets", not impossible, seen + asked, "unset GRAPHROT_ISA")
    if facts.packages.get("onnxruntime-gpu") or facts.cuda_build:
        yield _cuda_kernels(facts.described.get("cuda") or {})
    if facts.runtime is not None:
        detail = facts.registers or f"onnxruntime {facts.runtime} takes it"
        yield _check(
            "registration",
            facts.registers is None,
            detail,
            f"pip install -U '{facts.runtime_package or 'onnxruntime'}{RUNTIME}' && {REINSTALL}",
        )


def _cuda_kernels(built: Mapping[str, Any]) -> Check:
    """The CUDA part of the native library, which a GPU wheel can use."""
    reason = built.get("reason") or "it was built before there were any"
    architectures = ", ".join(f"sm_{number}" for number in built.get("architectures", ()))
    detail = f"in the library, by nvcc {built.get('compiler')} for {architectures}"
    return _check(
        "CUDA kernels",
        built.get("built") is True,
        detail if built.get("built") is True else f"not in the native library: {reason}",
        "pip install nvidia-cuda-nvcc nvidia-cuda-cccl, or put nvcc into PATH, and " + REINSTALL,
        essential=False,
    )


def _runs(facts: Facts) -> Iterator[Check]:
    for title, runs in (("kernel", facts.kernels), ("function", facts.functions)):
        for run in runs:
            fix = REINSTALL if title == "kernel" else _again(facts)
            yield _ran(f"{title} {run.op} {run.type}", run, fix)


def _ran(name: str, run: Run, fix: str) -> Check:
    if run.error is None:
        return Check(name, False, run.failure or "did not run", fix)
    allowed = max(TOLERANCE[run.type], LEAST_TOLERANCE.get(run.op, 0.0))
    right = run.error <= allowed  # false for NaN too
    words = "agrees with the reference" if right else "is wrong"
    return _check(name, right, f"{words}: largest error {run.error:.2g} (allowed {allowed:g})", fix)


def _extra(facts: Facts, extra: str) -> Check:
    wanted = EXTRAS[extra]
    wrong = _outside(facts, wanted)
    detail = _seen(facts, wanted) + (f"; missing or unsupported: {', '.join(wrong)}" if wrong else "")
    return _check(f"extra {extra}", not wrong, detail, f"pip install 'graphrot[{extra}]'", essential=False)
