"""The report on the CUDA kernels: what it reads, what it takes for a fault, and the kernels where nvcc is found."""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from graphrot.ops.library import describe, library_path

SOURCE = Path(__file__).resolve().parents[2] / "custom_ops"
PTXAS = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_ZN8graphrot4cuda3rowEPKfi' for 'sm_80'
ptxas info    : Function properties for _ZN8graphrot4cuda3rowEPKfi
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 40 registers, used 1 barriers, 380 bytes cmem[0]
ptxas info    : Compiling entry function '_Z4tilei' for 'sm_80'
ptxas info    : Function properties for _Z4tilei
    24 bytes stack frame, 16 bytes spill stores, 8 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers, 24 bytes cumulative stack size, 4096 bytes smem, 380 bytes cmem[0]
"""
USAGE = """\
Fatbin elf code:
================
arch = sm_80
code version = [1,8]

Resource usage:
 Common:
  GLOBAL:0
 Function _Z4tilei:
  REG:255 STACK:16 SHARED:4096 LOCAL:0 CONSTANT[0]:409 TEXTURE:0 SURFACE:0 SAMPLER:0

Fatbin elf code:
================
arch = sm_90

Resource usage:
 Common:
  GLOBAL:0
 Function _Z4tilei:
  REG:40 STACK:0 SHARED:0 LOCAL:0 CONSTANT[0]:409 TEXTURE:0 SURFACE:0 SAMPLER:0
"""
SASS = """\
	code for sm_80
		Function : _Z4tilei
        /*0000*/                   LDG.E.NA.128.CONSTANT R4, [R2.64] ;
        /*0010*/                   IMMA.16832.U8.S8 R4, R4.ROW, R6.COL, R8 ;
        /*0020*/                   IMMA.16832.U8.S8 R4, R4.ROW, R6.COL, R8 ;
		Function : _Z3rowi
        /*0000*/                   LDG.E R4, [R2.64] ;
"""
SPILLS = """\
__global__ void __launch_bounds__(1024, 2) spills(float* x) {
  float kept[96];
#pragma unroll
  for (int i = 0; i < 96; ++i) kept[i] = x[i * 1024 + threadIdx.x];
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 96; ++i) x[(95 - i) * 1024 + threadIdx.x] = kept[i] * kept[(i * 7) % 96];
}
"""


@pytest.fixture
def report(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(SOURCE))
    return importlib.import_module("cuda_report")


def found(tool: str) -> bool:
    """Whether the tool is found, as the script finds it."""
    done = subprocess.run(
        [sys.executable, SOURCE / "cuda_toolkit.py", tool], capture_output=True, text=True, check=True
    )
    return bool(done.stdout.strip())


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SOURCE / "cuda_report.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_what_ptxas_prints_is_read(report: ModuleType) -> None:
    row, tile = report.parse_ptxas(PTXAS)
    assert (row.architecture, row.registers, row.shared, row.local) == ("80", 40, 0, 0)
    assert (tile.architecture, tile.registers, tile.shared, tile.local) == ("80", 255, 4096, 24)
    assert report.faults(row) == []
    assert report.faults(tile) == ["keeps 24 bytes in local memory (spilled registers)"]
    assert [line.split()[1] for line in report.table([row, tile])] == ["kernel", "row", "tile"]
    with pytest.raises(ValueError, match="not what ptxas -v prints"):
        list(report.parse_ptxas("Compiling entry function 'x'"))


def test_what_cuobjdump_prints_is_read(report: ModuleType) -> None:
    kernels = [(each.architecture, each.registers, each.shared, each.local) for each in report.parse_usage(USAGE)]
    assert kernels == [("80", 255, 4096, 16), ("90", 40, 0, 0)]
    counts = report.parse_sass(SASS)
    assert counts["80", "_Z4tilei"] == {"LDG.128": 1, "LDGSTS": 0, "IMMA": 2, "HMMA": 0, "IDP": 0}
    assert counts["80", "_Z3rowi"]["LDG.128"] == 0


def test_kernels_must_have_their_instructions(report: ModuleType) -> None:
    counts = report.parse_sass(SASS)
    tile, row = counts["80", "_Z4tilei"], counts["80", "_Z3rowi"]
    for symbol, instructions, words in [
        ("_Z14hadamard_spansi", tile, []),
        ("_Z14hadamard_spansi", row, ["has no LDG.128"]),
        ("_Z12product_tilei", tile, []),
        ("_Z12product_tilei", row, ["has no IMMA"]),
        ("_Z12product_tilei", None, []),
        ("_Z12store_kerneli", row, []),
    ]:
        assert report.faults(report.Kernel("80", symbol, 32, 0, 0, instructions)) == words


def test_nvcc_is_looked_for_where_it_may_be(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(SOURCE))
    toolkit = importlib.import_module("cuda_toolkit")
    for name in ("CUDACXX", "CUDA_PATH", "CUDA_HOME"):
        monkeypatch.delenv(name, raising=False)

    def put(*parts: str) -> Path:
        tool = tmp_path.joinpath(*parts)
        tool.parent.mkdir(parents=True)
        tool.touch(mode=0o755)
        return tool

    packages = put("site", "nvidia", "cu13", "bin", "no-such-nvcc")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    assert toolkit.find_tool("no-such-nvcc") == packages
    path = put("path", "no-such-nvcc")
    monkeypatch.setenv("PATH", str(path.parent), prepend=":")
    assert toolkit.find_tool("no-such-nvcc") == path
    named = put("cuda", "bin", "no-such-nvcc")
    monkeypatch.setenv("CUDA_PATH", str(tmp_path / "cuda"))
    assert toolkit.find_tool("no-such-nvcc") == named
    monkeypatch.setenv("CUDACXX", str(path))
    assert toolkit.find_tool("nvcc") == path
    monkeypatch.setenv("CUDACXX", str(tmp_path / "nothing"))
    with pytest.raises(FileNotFoundError, match="CUDACXX names a compiler that does not exist"):
        toolkit.find_tool("nvcc")
    assert toolkit.find_tool("no-such-tool") is None


if found("nvcc"):

    def test_a_kernel_that_spills_fails(tmp_path: Path) -> None:
        (tmp_path / "spills.cu").write_text(SPILLS)
        done = run("--architectures", "80", "--sources", str(tmp_path / "spills.cu"))
        assert done.returncode == 1
        assert re.search(r"FAULT: spills \(sm_80\) keeps \d+ bytes in local memory", done.stderr), done.stderr
        assert "1 kernels, 1 with faults" in done.stderr

    def test_a_file_that_does_not_compile_is_told(tmp_path: Path) -> None:
        (tmp_path / "broken.cu").write_text("__global__ void broken() { nothing(); }\n")
        done = run("--architectures", "80", "--sources", str(tmp_path / "broken.cu"))
        assert done.returncode == 1
        assert "nvcc does not take" in done.stderr
        assert 'identifier "nothing" is undefined' in done.stderr


if describe()["cuda"]["built"] and found("cuobjdump"):

    def test_no_kernel_of_the_library_spills() -> None:
        done = run("--library", str(library_path()), "--json")
        assert done.returncode == 0, done.stderr
        kernels = json.loads(done.stdout)["kernels"]
        assert {kernel["architecture"] for kernel in kernels} == set(describe()["cuda"]["architectures"])
        for name in ("hadamard_spans", "quantize_rows", "product_tile", "gemv", "attend_few", "attend_many"):
            assert any(name in kernel["symbol"] for kernel in kernels), name
        assert all(kernel["registers"] > 0 and kernel["faults"] == [] for kernel in kernels)
        assert all((kernel["instructions"] is not None) == found("nvdisasm") for kernel in kernels)

    def test_a_library_without_kernels_is_told(tmp_path: Path) -> None:
        done = run("--library", sys.executable)
        assert done.returncode == 1
        assert "FAULT:" in done.stderr


@pytest.mark.parametrize(
    ("options", "package"), [([], "nvidia-cuda-nvcc"), (["--library", "x.so"], "nvidia-cuda-cuobjdump")]
)
def test_without_its_tools_it_says_what_to_install(options: list[str], package: str) -> None:
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); import cuda_report;"
        "cuda_report.find_tool = lambda name: None; sys.exit(cuda_report.main(sys.argv[2:]))"
    )
    command = [sys.executable, "-c", code, str(SOURCE), *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 4
    assert f"pip install {package}" in done.stderr
