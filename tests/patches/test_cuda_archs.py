"""What vLLM's CMake makes of a list of architectures, as released and with the series.

The whole CMakeLists.txt runs, with torch's reading of TORCH_CUDA_ARCH_LIST, in CMake's script mode.
What stands in is told in cmake/cuda_archs.cmake; in a tree, two things beside: one empty file in
the place of each group of sources that vLLM generates while it configures, and
``CONFIGURE_DEPENDS``, which script mode does not know and which adds no file, is taken out.

golden/cuda-archs.json holds the flags of every source. After a change that is meant:

    SPARKFORGE_UPDATE_GOLDEN=1 python -m pytest tests/patches/test_cuda_archs.py
"""

import json
import os
import re
import shutil
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cmake
import pytest

from sparkforge.core.run import call
from tests.patches import trees

GOLDEN = Path(__file__).with_name("golden") / "cuda-archs.json"
SCRIPT = Path(__file__).with_name("cmake") / "cuda_archs.cmake"
CUDA = ("12.9.86", "13.0.88")
ALL_BUT_11 = "7.5;8.0;8.6;8.9;9.0;10.0;12.0"
WITH_12 = ("12.0", "12.0a", "12.0f", "12.1", "12.1f", "12.1+PTX", "12.0a;12.1", ALL_BUT_11)
WITHOUT_12 = ("8.0;8.6;9.0", "9.0+PTX", "10.0f", "7.5;8.0;8.6;8.7;8.9;9.0;10.0;11.0")
_GENERATED = (
    *(
        f"quantization/marlin/sm{sm}_kernel_x_{dtype}.cu"
        for sm in (75, 80, 89)
        for dtype in ("float16", "bfloat16")
    ),
    *(f"moe/marlin_moe_wna16/sm{sm}_kernel_x.cu" for sm in (75, 80, 89)),
    "quantization/machete/generated/x.cu",
)
CMAKE = Path(cmake.CMAKE_BIN_DIR) / "cmake"  # bin's script names the folder it was made in
_HELPERS = ("marlin", "marlin_int4_fp8_preprocess", "gptq_marlin_repack", "awq_marlin_repack")
MARLIN_HELPERS = (
    *(f"csrc/quantization/marlin/{name}.cu" for name in _HELPERS),
    "csrc/moe/marlin_moe_wna16/ops.cu",
)


_QUANT = "csrc/quantization"
FP4 = f"{_QUANT}/fp4/nvfp4_scaled_mm_sm120_kernels.cu"
SCALED_MM = f"{_QUANT}/w8a8/cutlass/c3x/scaled_mm_sm120_fp8.cu"
QUTLASS = "fetched/qutlass/qutlass/csrc/gemm.cu"
CUTLASS_SM12X = (FP4, f"{_QUANT}/fp4/nvfp4_blockwise_moe_kernel.cu", SCALED_MM)


@dataclass(frozen=True)
class Configured:
    """What a run of CMake said and decided."""

    flags: dict[str, tuple[str, ...]]
    """Per source the codes it is compiled to, e.g. ``120f``, or ``80+PTX`` for PTX alone."""
    warnings: tuple[str, ...]
    """Each in one line."""
    error: str
    """The first error in one line, or empty."""


@dataclass(frozen=True)
class Tree:
    """A vLLM tree that CMake can be run on, and torch's CMake files."""

    folder: Path
    torch: Path

    def replace(self, file: str, old: str, new: str) -> None:
        """Change a file of the tree, as somebody who patches vLLM might."""
        path = self.folder / file
        text = path.read_text(encoding="utf-8")
        assert old in text, f"{file}: {old!r} is not in it"
        path.write_text(text.replace(old, new), encoding="utf-8")

    def configure(self, archs: str, cuda: str) -> Configured:
        """Run CMakeLists.txt for TORCH_CUDA_ARCH_LIST and a version of nvcc."""
        out = self.folder / "flags"
        given = {"ARCHS": archs, "CUDA": cuda, "TORCH": self.torch, "OUT": out}
        given["STAND_INS"] = self.folder / "stand-ins"
        words = [f"-D{name}={value}" for name, value in given.items()]
        done = call(CMAKE, *words, "-P", SCRIPT, cwd=self.folder, check=False, timeout=1800)
        printed = done.stderr.decode()
        said = [" ".join(part.split()) for part in printed.split("CMake ")[1:]]
        errors = [one for one in said if one.startswith("Error")]
        assert bool(errors) == bool(done.returncode), printed
        flags: dict[str, tuple[str, ...]] = {}
        for line in out.read_text(encoding="utf-8").splitlines():
            source, flag = line.removeprefix(f"{self.folder}/").split("|")
            code = _code(flag)
            if code not in flags.get(source, ()):
                flags[source] = (*flags.get(source, ()), code)
        return Configured(
            {source: tuple(sorted(codes)) for source, codes in flags.items()},
            tuple(one for one in said if one.startswith("Warning")),
            errors[0] if errors else "",
        )

    def intersect(self, entries: str, targets: str) -> list[str]:
        """Return what the tree's loose intersection makes of two lists."""
        script = self.folder / "intersect.cmake"
        script.write_text(
            "cmake_minimum_required(VERSION 3.25)\n"
            'include("${CMAKE_SOURCE_DIR}/cmake/utils.cmake")\n'
            f'cuda_archs_loose_intersection(out "{entries}" "{targets}")\n'
            'message("${out}")\n',
            encoding="utf-8",
        )
        printed = call(CMAKE, "-P", script, cwd=self.folder, timeout=1800).stderr.decode()
        return [arch for arch in printed.strip().split(";") if arch]


def make(folder: Path, torch: Path, *, patched: bool) -> Tree:
    """Check vLLM's tree out into a new folder and make it ready.

    Args:
        torch: torch's package folder.
        patched: with the series, or as upstream released it.
    """
    trees.tree("vllm", folder, patched=patched, only=("CMakeLists.txt", "cmake", "csrc"))
    for name in _GENERATED:
        path = folder / "csrc" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    for path in (folder / "cmake" / "external_projects").glob("*.cmake"):
        text = path.read_text(encoding="utf-8")
        path.write_text(text.replace(" CONFIGURE_DEPENDS", ""), encoding="utf-8")
    for name in (
        "torch/csrc/stable/stableivalue_conversions.h",  # torch 2.13's, which CMake reads
        "cutlass/include/cutlass/cutlass.h",
        "fetched/flashmla/flash_mla/flash_mla_interface.py",
    ):
        path = folder / "stand-ins" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    return Tree(folder, torch / "share" / "cmake")


def loads_on(code: str, device: str) -> bool:
    """Return whether machine code loads on a device of the same major version, e.g. ``121``.

    NVIDIA's rule: plain code on its own and later minor versions, ``f`` on those of its family
    (here: the major version), ``a`` on exactly its own; PTX is no machine code.
    """
    match = re.fullmatch(r"([0-9]+)([0-9])([af]?)", code)
    if match is None or match[1] != device[:-1]:
        return False
    return match[2] == device[-1] if match[3] == "a" else match[2] <= device[-1]


def _code(flag: str) -> str:
    match = re.fullmatch(r"arch=compute_(\w+),code=(sm|compute)_(\w+)", flag)
    assert match is not None, flag
    assert match[1] == match[3], flag
    return match[3] if match[2] == "sm" else f"{match[3]}+PTX"


Matrix = dict[tuple[str, str], tuple[Configured, Configured]]


@pytest.fixture(scope="module")
def torch(patched_python: Path) -> Path:
    """torch's package folder, for its CMake files and headers."""
    (found,) = patched_python.parent.parent.glob("lib/python3*/site-packages/torch")
    return found


@pytest.fixture(scope="module")
def stock(torch: Path, tmp_path_factory: pytest.TempPathFactory) -> Tree:
    return make(tmp_path_factory.mktemp("vllm") / "stock", torch, patched=False)


@pytest.fixture(scope="module")
def patched(torch: Path, tmp_path_factory: pytest.TempPathFactory) -> Tree:
    return make(tmp_path_factory.mktemp("vllm") / "patched", torch, patched=True)


@pytest.fixture
def changed(patched: Tree, tmp_path: Path) -> Iterator[Tree]:
    """A patched tree whose CMake files a test may change."""
    folder = tmp_path / "tree"
    shutil.copytree(patched.folder, folder)
    yield Tree(folder, patched.torch)
    shutil.rmtree(folder)  # pytest keeps folders of several runs


@pytest.fixture(scope="module")
def matrix(stock: Tree, patched: Tree) -> Matrix:
    """By CUDA and list: as released, and with the series."""
    return {
        (cuda, archs): (stock.configure(archs, cuda), patched.configure(archs, cuda))
        for cuda in CUDA
        for archs in (*WITH_12, "8.0;8.6;9.0")
    }


def _name(sources: list[str]) -> str:
    first, *others = sources
    return f"{Path(first).stem} and {len(others)} more" if others else first


def _table(matrix: Matrix) -> dict[str, Any]:
    """Fold sources that come out alike everywhere into a group, named after its first."""
    columns: defaultdict[tuple[Any, ...], list[str]] = defaultdict(list)
    sources = {source for both in matrix.values() for one in both for source in one.flags}
    for source in sorted(sources):
        column = tuple(one.flags.get(source) for both in matrix.values() for one in both)
        columns[column].append(source)
    groups = {_name(members): members for members in columns.values()}
    assert len(groups) == len(columns)
    rows: dict[str, Any] = {}
    for (cuda, archs), (before, after) in matrix.items():
        row = rows.setdefault(cuda, {})[archs] = {}
        for group, (first, *_) in groups.items():
            old, new = (" ".join(one.flags.get(first, ())) for one in (before, after))
            if old or new:
                row[group] = old if old == new else {"released": old, "series": new}
    return {"groups": groups, "flags": rows}


def test_flags_are_as_recorded(matrix: Matrix) -> None:
    for both in matrix.values():
        assert [one.error for one in both] == ["", ""]
    found = _table(matrix)
    if os.environ.get("SPARKFORGE_UPDATE_GOLDEN"):
        GOLDEN.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    assert found == json.loads(GOLDEN.read_text(encoding="utf-8"))


def test_lists_without_12_x_come_out_as_released(stock: Tree, patched: Tree) -> None:
    for archs in WITHOUT_12:
        before, after = stock.configure(archs, CUDA[1]), patched.configure(archs, CUDA[1])
        assert after.flags == before.flags, archs
        assert len(after.warnings) == len(before.warnings), archs
        assert (before.error, after.error) == ("", ""), archs
        assert len(after.flags) > 50, archs


WARNED = {
    "12.9.86": {"12.0", "12.0a", ALL_BUT_11},
    "13.0.88": {"12.0a", "12.0a;12.1"},
}


@pytest.mark.parametrize("cuda", CUDA)
def test_lists_that_12_1_cannot_load_are_warned_about(cuda: str, matrix: Matrix) -> None:
    for archs in WITH_12:
        before, after = matrix[cuda, archs]
        ours = [one for one in after.warnings if "will not load on compute capability 12.1" in one]
        assert len(ours) == (archs in WARNED[cuda]), archs
        assert len(after.warnings) == len(before.warnings) + len(ours), archs
        # the warning is right: what is built for SM12x's own kernels does not load there
        assert any(loads_on(code, "121") for code in after.flags[FP4]) == (not ours), archs
        for warning in ours:
            requested = archs.replace("+PTX", "")
            assert f"{requested} was requested, and they are built for 12.0a" in warning
            assert ("(which was requested)" if "12.1" in archs else "DGX Spark") in warning
            assert ("List 12.0f" if cuda == "13.0.88" else "Build with CUDA 13.0") in warning
            assert ("list 12.1 as well" in warning) == (cuda == "12.9.86")


PLAIN = {"120", "121"}


def test_cutlass_is_never_compiled_for_a_plain_12_x(
    stock: Tree, changed: Tree, matrix: Matrix
) -> None:
    for both in matrix.values():
        for one in both:
            assert not any(PLAIN & set(one.flags.get(s, ())) for s in (*CUTLASS_SM12X, QUTLASS))

    # the trap: 12.1 among the supported architectures, which CUDA 13's list leaves out
    assert stock.intersect("12.0f", "12.1") == ["12.1"]
    assert changed.intersect("12.0f", "12.1") == ["12.1f"]
    changed.replace("CMakeLists.txt", '10.0;11.0;12.0")', '10.0;11.0;12.0;12.1")')
    for archs, code in (
        ("12.1", "121f"),
        ("12.1a", "121a"),
        ("12.0;12.1", "120f"),
    ):
        found = changed.configure(archs, "13.0.88")
        assert not found.error
        assert not found.warnings
        for source in (*CUTLASS_SM12X, QUTLASS):
            assert found.flags[source] == (code,), (archs, source)
        assert all(
            any(loads_on(c, "121") for c in codes)
            for s, codes in found.flags.items()
            if any(c.startswith("12") for c in codes)
        ), archs
    # as released
    assert changed.intersect("10.0f", "10.3") == ["10.3"]
    assert changed.intersect("12.0f", "12.1a") == ["12.1a"]


def test_marlin_s_helpers_are_native_on_sm12x(matrix: Matrix) -> None:
    for (cuda, archs), (before, after) in matrix.items():
        # what the sources get that are compiled for each listed architecture
        wanted = before.flags["csrc/sampler.cu"]
        for source in MARLIN_HELPERS:
            old, new = before.flags[source], after.flags[source]
            assert not any(code.startswith("12") for code in old)
            if "12" not in archs:
                assert new == old
                continue
            for device in ("120", "121"):
                if any(loads_on(code, device) for code in wanted):
                    assert any(loads_on(code, device) for code in new), (cuda, archs, source)
            older = [code for code in wanted if not code.startswith("12")]
            assert [code for code in new if not code.startswith("12")] == (
                list(old) if older else []
            ), (cuda, archs)
