"""What the CUDA kernels cost: registers, shared and local memory, and how often the instructions that matter occur.

    python custom_ops/cuda_report.py [--architectures 80,90] [--sources custom_ops/hadamard/cuda.cu]
    python custom_ops/cuda_report.py --library libgraphrot_ops.so

The first compiles every kernel for every target and reads what ptxas says; instructions are counted where cuobjdump and
nvdisasm are found (wheels ``nvidia-cuda-cuobjdump``, ``nvidia-cuda-nvdisasm``). The second reads a built library with
these two. Exit code 1 where a kernel spills registers or keeps anything else in local memory, where a Hadamard kernel
has no loads of 16 bytes, or a tiled matmul no products of bytes in tiles (IMMA); 4 where a tool is missing.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from cuda_toolkit import find_tool

ROOT = Path(__file__).resolve().parent
FOLDERS = ("hadamard", "matmul", "attention")
ARCHITECTURES = "80,86,89,90,100,120"
SHOWN = {
    "LDG.128": r"\bLDG\.E\.(?:\w+\.)*128",
    "LDGSTS": r"\bLDGSTS",
    "IMMA": r"\bIMMA",
    "HMMA": r"\bHMMA",
    "IDP": r"\bIDP\.4A",
}
"""Instructions that are counted: loads of 16 bytes, asynchronous copies, products in tiles and of four bytes."""
WANTED = {"hadamard_": "LDG.128", "product_tile": "IMMA"}
"""Instructions that kernels with such names must have."""


class Failure(Exception):
    """A tool that is missing or does not do its work; the words say which, and ``code`` is the exit code."""

    def __init__(self, words: str, code: int = 1) -> None:
        super().__init__(words)
        self.code = code


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One kernel for one target."""

    architecture: str
    symbol: str
    registers: int
    shared: int
    """Bytes of static shared memory; what is asked for at a launch is not known here."""
    local: int
    """Bytes of local memory: spilled registers, arrays with computed indices."""
    instructions: Mapping[str, int] | None = None
    """How often the instructions of ``SHOWN`` stand in the code; None where they were not looked at."""


def parse_ptxas(text: str) -> Iterator[Kernel]:
    """The kernels in what ``ptxas -v`` prints."""
    for part in re.split(r"Compiling entry function ", text)[1:]:
        name = re.match(r"'(\w+)' for 'sm_(\w+)'", part)
        stack = re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores", part)
        used = re.search(r"Used (\d+) registers", part)
        if name is None or stack is None or used is None:
            raise ValueError(f"this is not what ptxas -v prints: {part[:200]}")
        shared = re.search(r"(\d+) bytes smem", part)
        local = max(int(stack[1]), int(stack[2]))
        yield Kernel(name[2], name[1], int(used[1]), int(shared[1]) if shared else 0, local)


def parse_usage(text: str) -> Iterator[Kernel]:
    """The kernels in what ``cuobjdump -res-usage`` prints of a library."""
    architecture = ""
    pattern = r"arch = sm_(\w+)|Function (\w+):\s+REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)"
    for found in re.finditer(pattern, text):
        if found[1]:
            architecture = found[1]
        else:
            registers, stack, shared, local = map(int, found.groups()[2:])
            yield Kernel(architecture, found[2], registers, shared, max(stack, local))


def parse_sass(text: str) -> dict[tuple[str, str], dict[str, int]]:
    """Counts of the instructions of ``SHOWN`` by target and symbol, in what ``cuobjdump -sass`` prints."""
    counts = {}
    for target in re.split(r"code for sm_", text)[1:]:
        for part in re.split(r"Function : ", target)[1:]:
            symbol = part.split(maxsplit=1)[0]
            found = {name: len(re.findall(pattern, part)) for name, pattern in SHOWN.items()}
            counts[target.split(maxsplit=1)[0], symbol] = found
    return counts


def ask(*command: str | Path) -> str:
    """What a tool prints.

    Raises:
        Failure: it fails.
    """
    folders = [str(tool.parent) for tool in (find_tool("nvdisasm"), find_tool("nvcc")) if tool]
    environment = {**os.environ, "PATH": os.pathsep.join([os.environ.get("PATH", ""), *folders])}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode != 0:
        raise Failure(f"{Path(command[0]).name} does not take {command[-1]}:\n{done.stdout}{done.stderr}")
    return done.stdout + done.stderr


def has_disassembler() -> bool:
    """Whether instructions can be looked at."""
    return find_tool("cuobjdump") is not None and find_tool("nvdisasm") is not None


def with_instructions(kernels: list[Kernel], file: Path) -> list[Kernel]:
    """The kernels of a file with the counts of their instructions, where they can be looked at."""
    cuobjdump = find_tool("cuobjdump")
    if cuobjdump is None or not has_disassembler() or not kernels:
        return kernels
    counts = parse_sass(ask(cuobjdump, "-sass", file))
    return [dataclasses.replace(each, instructions=counts[each.architecture, each.symbol]) for each in kernels]


def of_library(library: Path) -> list[Kernel]:
    """The kernels of a built library.

    Raises:
        Failure: cuobjdump is not found, or there is no kernel.
    """
    cuobjdump = find_tool("cuobjdump")
    if cuobjdump is None:
        raise Failure("cuobjdump was not found: pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm", 4)
    kernels = list(parse_usage(ask(cuobjdump, "-res-usage", library)))
    if not kernels:
        raise Failure(f"{library} holds no CUDA kernels")
    return with_instructions(kernels, library)


def of_source(source: Path, architecture: str) -> list[Kernel]:
    """The kernels of a file, compiled for one target.

    Raises:
        Failure: nvcc is not found, or does not compile it.
    """
    nvcc = find_tool("nvcc")
    if nvcc is None:
        raise Failure("nvcc was not found: install the CUDA toolkit, or pip install nvidia-cuda-nvcc", 4)
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernels.cubin"
        flags = ["-std=c++17", "-O3", "-fmad=false", f"-arch=sm_{architecture}", "-Xptxas=-v", f"-I{ROOT}", "-cubin"]
        return with_instructions(list(parse_ptxas(ask(nvcc, *flags, "-o", cubin, source))), cubin)


def faults(kernel: Kernel) -> list[str]:
    """What is wrong with a kernel, in words."""
    words = [f"keeps {kernel.local} bytes in local memory (spilled registers)"] if kernel.local else []
    for name, instruction in WANTED.items():
        if kernel.instructions is not None and name in kernel.symbol and not kernel.instructions[instruction]:
            words.append(f"has no {instruction}")
    return words


def shortened(symbols: list[str]) -> list[str]:
    """Names for people: demangled where c++filt is found, without parameters and this project's namespaces."""
    tool = shutil.which("c++filt")
    if tool is not None and symbols:
        done = subprocess.run([tool], input="\n".join(symbols), capture_output=True, text=True, check=True)
        symbols = done.stdout.splitlines()
    names = []
    for symbol in symbols:
        name = re.sub(r"\(anonymous namespace\)::|graphrot::|cuda::|^void ", "", symbol)
        names.append(re.sub(r"\(.*\)$", "", name))
    return names


def table(kernels: list[Kernel]) -> Iterator[str]:
    """Lines for people."""
    rows: list[tuple[object, ...]] = [("sm", "kernel", "registers", "shared", "local")]
    if any(kernel.instructions is not None for kernel in kernels):
        rows[0] += tuple(SHOWN)
    for name, kernel in zip(shortened([kernel.symbol for kernel in kernels]), kernels, strict=True):
        sizes = (kernel.registers, kernel.shared, kernel.local)
        rows.append((kernel.architecture, name, *sizes, *(kernel.instructions or {}).values()))
    widths = [max(len(str(cell)) for cell in column) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(f"{cell!s:{'<' if i == 1 else '>'}{widths[i]}}" for i, cell in enumerate(row))


def main(arguments: list[str] | None = None) -> int:
    """The exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--architectures", default=ARCHITECTURES, help=f"numbers of targets (default {ARCHITECTURES})")
    parser.add_argument("--sources", nargs="+", type=Path, help="files (default: every kernel of the library)")
    parser.add_argument("--library", type=Path, help="read this library, and compile nothing")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout and nothing else")
    options = parser.parse_args(arguments)
    sources = options.sources or sorted(path for name in FOLDERS for path in (ROOT / name).glob("*.cu"))
    kernels: list[Kernel] = []
    try:
        if options.library is not None:
            kernels = of_library(options.library)
        else:
            for source in sources:
                for architecture in options.architectures.split(","):
                    print(f"{source.name} for sm_{architecture}", file=sys.stderr)
                    kernels += of_source(source.resolve(), architecture)
    except Failure as failure:
        print(f"FAULT: {failure}", file=sys.stderr)
        return failure.code
    if options.json:
        found = [dataclasses.asdict(kernel) | {"faults": faults(kernel)} for kernel in kernels]
        print(json.dumps({"kernels": found}, indent=1))
    else:
        print("\n".join(table(kernels)))
        if not has_disassembler():
            print("instructions were not looked at: pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm")
    bad = [(kernel, words) for kernel in kernels if (words := faults(kernel))]
    for kernel, words in bad:
        name = shortened([kernel.symbol])[0]
        print(f"FAULT: {name} (sm_{kernel.architecture}) {' and '.join(words)}", file=sys.stderr)
    print(f"{len(kernels)} kernels, {len(bad)} with faults", file=sys.stderr)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
