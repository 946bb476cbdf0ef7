"""vLLM's CMakeLists.txt, run for a list of architectures: which flags each source gets.

The whole file runs, with torch's reading of TORCH_CUDA_ARCH_LIST, in CMake's script mode. What
stands in is told in cmake/cuda_archs.cmake; in a tree, two things beside:

* one empty file in the place of each group of sources that vLLM generates while it configures;
* ``CONFIGURE_DEPENDS``, which script mode does not know and which adds no file, is taken out.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import cmake

from sparkforge.core.run import call
from tests.patches import trees

_HERE = Path(__file__).parent / "cmake"
_GENERATED = (
    *(
        f"quantization/marlin/sm{sm}_kernel_x_{dtype}.cu"
        for sm in (75, 80, 89)
        for dtype in ("float16", "bfloat16")
    ),
    *(f"moe/marlin_moe_wna16/sm{sm}_kernel_x.cu" for sm in (75, 80, 89)),
    "quantization/machete/generated/x.cu",
)
_HELPERS = ("marlin", "marlin_int4_fp8_preprocess", "gptq_marlin_repack", "awq_marlin_repack")
MARLIN_HELPERS = (
    *(f"csrc/quantization/marlin/{name}.cu" for name in _HELPERS),
    "csrc/moe/marlin_moe_wna16/ops.cu",
)


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
        script = _HERE / "cuda_archs.cmake"
        done = call(_cmake(), *words, "-P", script, cwd=self.folder, check=False, timeout=1800)
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
        printed = call(_cmake(), "-P", script, cwd=self.folder, timeout=1800).stderr.decode()
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


def _cmake() -> Path:
    # the script in bin names the folder that the environment was made in, which is not where it is
    return Path(cmake.CMAKE_BIN_DIR) / "cmake"
