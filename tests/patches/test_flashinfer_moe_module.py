"""Which types and kernels FlashInfer's CUTLASS MoE module for SM12x is compiled from.

Read in the sources, as the preprocessor leaves them for each module; nothing is compiled for a GPU.
"""

import math
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from sparkforge.build.packs import modules, recipe
from tests.patches.moe_dispatch import (
    SM120_MACROS,
    fused,
    gemms,
    generate,
    kernels_of,
    preprocess,
    runners,
)
from tests.patches.trees import tree

needs_cxx = pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler here")

BACKEND = "csrc/fused_moe/cutlass_backend"
KERNELS = "csrc/nv_internal/tensorrt_llm/kernels/cutlass_kernels"

HOPPER_MACROS = ("COMPILE_HOPPER_TMA_GEMMS", "COMPILE_HOPPER_TMA_GROUPED_GEMMS", *SM120_MACROS[2:])


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """Sources of the module, by tree: what FlashInfer's own function lists."""
    (module,) = (one for one in modules.MODULES if one.name == "fused_moe_120")
    found = {}
    for kind in ("stock", "patched"):
        folder = tmp_path_factory.mktemp("described") / kind
        here = tree("flashinfer", folder, patched=kind == "patched", only=("flashinfer", "csrc"))
        (described,) = recipe.describe(here, "12.0f", (module,))
        found[kind] = [unit.source for unit in described.units]
    return found


@needs_cxx
def test_the_module_has_the_types_that_sm12x_computes(
    trees: dict[str, Path], sources: dict[str, list[str]]
) -> None:
    def types(kind: str, macros: Sequence[str]) -> tuple[set[tuple[str, ...]], ...]:
        """Types that the binding constructs, that are instantiated, and that have kernels."""
        binding, instantiated, *kernels = (
            preprocess(trees[kind] / name, macros)
            for name in (
                f"{BACKEND}/flashinfer_cutlass_fused_moe_binding.cu",
                f"{BACKEND}/cutlass_fused_moe_instantiation.cu",
                *(name for name in sources[kind] if "/moe_gemm_kernels_" in name),
            )
        )
        return (
            runners(binding, "CutlassMoeFCRunner") | runners(binding, "switch_output_type"),
            runners(instantiated, "CutlassMoeFCRunner"),
            set().union(*(runners(text, "MoeGemmRunner") for text in kernels)),
        )

    constructed, instantiated, compiled = types("patched", SM120_MACROS)
    assert constructed == instantiated == compiled
    assert {("__nv_fp8_e4m3", "Fp4Type"), ("Fp4Type", "Fp4Type")} < constructed
    # the control: what the release compiles for nobody
    _, _, release = types("stock", SM120_MACROS)
    assert compiled < release
    assert len(release - compiled) == 10


def fits(tile: tuple[int, int, int], stages: int) -> bool:
    """Return whether a fused kernel's stages and its output fit the 99 KB of a block on SM12x.

    Gate and weight share the columns of a tile.
    """
    m, n, k = tile
    return 2 * (stages * k * (m + n) + m * n // 2) < 101376


def test_fused_kernels_are_those_that_fit(trees: dict[str, Path], tmp_path: Path) -> None:
    def made(kind: str, arch: str) -> Counter[tuple[str, tuple[int, int, int], int, str]]:
        return fused(generate(trees[kind], tmp_path / f"{kind}-{arch}", arch))

    before, after = made("stock", "120"), made("patched", "120")
    assert len(before) == before.total() == 60
    # tiles that are offered for 16-bit weights, of sources that a user sees
    heuristic = (trees["patched"] / KERNELS / "cutlass_heuristic.cpp").read_text()
    _, _, text = heuristic.partition("base_configs{")
    text, _, _ = text.partition("switch (gemm_type)")
    offered = {
        (int(m), int(n), int(k)) for m, n, k in re.findall(r"CtaShape(\d+)x(\d+)x(\d+)_", text)
    }
    assert offered == {(32, 128, 64), (64, 128, 64), (128, 128, 64)}
    assert after == Counter(
        {one: count for one, count in before.items() if one[1] in offered and fits(one[1], one[2])}
    )
    assert after.total() == 24
    assert made("patched", "89") == made("stock", "89") == before


@needs_cxx
def test_the_dispatch_knows_which_fused_kernels_there_are(
    trees: dict[str, Path], tmp_path: Path
) -> None:
    header = trees["patched"] / KERNELS / "moe_gemm/launchers/fused_moe_gemm_launcher_sm80.h"
    tiles = [(16, 128, 64), (16, 256, 64), (32, 128, 64), (64, 128, 64), (128, 128, 64)]
    cases = [(tile, stages) for tile in tiles for stages in (2, 3, 4)]
    checks = (
        f"static_assert(has<{m}, {n}, {k}, {s}>() == {str(m > 16 and fits((m, n, k), s)).lower()});"
        for (m, n, k), s in cases
    )
    source = tmp_path / "checks.cpp"
    source.write_text(
        "#include <cstdint>\nusing cudaStream_t = void*;\n"
        f'#include "{header}"\n'
        "namespace tensorrt_llm::kernels::cutlass_kernels_oss {\n"
        "template <int M, int N, int K, int S> constexpr bool has() {"
        " return sm120_has_fused_moe_gemm<M, N, K, S>(); }\n" + "\n".join(checks) + "}\n"
    )
    done = subprocess.run(
        ["c++", "-std=c++17", "-fsyntax-only", source], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    dispatch = trees["patched"] / KERNELS / "moe_gemm/moe_gemm_template_dispatch.h"
    assert "arch::Sm75" not in preprocess(dispatch, SM120_MACROS)
    assert "arch::Sm75" in preprocess(dispatch, HOPPER_MACROS)


def test_files_that_take_the_most_memory_hold_fewer_kernels(
    trees: dict[str, Path], tmp_path: Path
) -> None:
    def counts(kind: str) -> dict[str, int]:
        """Most kernels in one file, by epilogue and size of a tile in it."""
        most: dict[str, int] = {}
        for text in generate(trees[kind], tmp_path / kind, "120").values():
            types = ("fp8xfp8", "fp8xfp4", "fp4xfp4")
            found = sum((gemms({"": text}, each) for each in types), Counter())
            for gemm in found:
                size = "large" if math.prod(gemm.tile) >= 128 * 128 * 256 else "small"
                if gemm.fusion == "NONE":
                    size = "long" if gemm.tile[2] >= 256 else "short"
                name = f"{gemm.fusion} {size}"
                most[name] = max(most.get(name, 0), found.total())
        return most

    assert set(counts("stock").values()) == {8}
    assert counts("patched") == {
        "NONE short": 8,
        "NONE long": 4,
        "FINALIZE small": 4,
        "FINALIZE large": 2,
    }
    # and all files together hold what they held
    before, after = (
        kernels_of(generate(trees[kind], tmp_path / kind, "120"), "gemm_grouped/120")
        for kind in ("stock", "patched")
    )
    assert before <= after
    assert max(after.values()) == 1
