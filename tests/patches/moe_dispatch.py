"""FlashInfer's CUTLASS MoE for SM12x on the CPU: what its generator writes, what it dispatches."""

import re
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sparkforge.core.run import call
from tests.patches.checkout import ROOT

PROBES = Path(__file__).with_name("probes")
STUBS = ROOT / "sparkforge" / "build" / "packs" / "include"  # names of cuBLAS's status codes
TIMEOUT_S = 1800
_INTERNAL = "csrc/nv_internal"
INCLUDES = (
    _INTERNAL,
    f"{_INTERNAL}/include",
    f"{_INTERNAL}/tensorrt_llm/cutlass_extensions/include",
    f"{_INTERNAL}/tensorrt_llm/kernels/cutlass_kernels/include",
    f"{_INTERNAL}/tensorrt_llm/kernels/cutlass_kernels",
    "3rdparty/cccl/cub",
    "3rdparty/cccl/libcudacxx/include",
    "3rdparty/cccl/thrust",
    "include",
    "csrc",
    "3rdparty/cutlass/include",
    "3rdparty/cutlass/tools/util/include",
    "3rdparty/spdlog/include",
)
# gen_cutlass_fused_moe_sm120_module's, without what shapes device code only
SM120_MACROS = (
    "COMPILE_BLACKWELL_TMA_GEMMS",
    "COMPILE_BLACKWELL_SM120_TMA_GROUPED_GEMMS",
    "ENABLE_BF16",
    "ENABLE_FP8",
    "ENABLE_FP4",
    "USING_OSS_CUTLASS_MOE_GEMM",
    "NDEBUG",
)
_HOST_SOURCES = (
    "tensorrt_llm/kernels/cutlass_kernels/cutlass_heuristic.cpp",
    "cpp/common/tllmException.cpp",
    "cpp/common/stringUtils.cpp",
    "cpp/common/logger.cpp",
)

_INSTANTIATION = re.compile(
    r"INSTANTIATE_TMA_WARP_SPECIALIZED_MOE_GEMM\(Sm(\d+), (\w+), (\w+), (\w+),"
    r"\s*void, EpilogueOpDefault, (\w+),\s*(\d+), (\d+), (\d+), 1, 1, 1,"
    r"\s*(true|false), false, false, (true|false)\);"
)
_FUSED = re.compile(
    r"template void sm80_generic_fused_moe_gemm_kernelLauncher<cutlass::(\w+), cutlass::\w+,"
    r" (\d+), (\d+), (\d+), (\d+), [\w:]*::EpilogueOpDefault(\w+)>"
)
_LAUNCH = re.compile(
    r"sm(\d+) (fp\dxfp\d) out(\w+) (\d+)x(\d+)x(\d+) (NONE|FINALIZE) mx([01]) swap([01])"
)
_OUT = {"half": "F16", "__nv_bfloat16": "BF16"}
_ELEMENTS = {"__nv_fp8_e4m3": "fp8", "SafeFP4": "fp4"}


@dataclass(frozen=True)
class Gemm:
    """One grouped GEMM: what the generator instantiates, and what a dispatch launches."""

    types: str
    """Of activations and weights, for example ``fp8xfp4``."""
    tile: tuple[int, int, int]
    """Rows, columns and depth in elements."""
    out: str
    """F16 or BF16."""
    fusion: str
    mx: bool
    swap_ab: bool


def generate(tree: Path, folder: Path, arch: str) -> dict[str, str]:
    """Run a tree's generator for one architecture; return the files' text by relative path."""
    code = (
        "import sys, importlib; sys.path.insert(0, sys.argv[1]);"
        "importlib.import_module('cutlass.generate_kernels')"
        ".generate_gemm_operations(sys.argv[2], sys.argv[3])"
    )
    words: list[str | Path] = [sys.executable, "-B", "-c", code, tree / "flashinfer/jit/gemm"]
    call(*words, folder, f"{arch};{arch}-real", timeout=TIMEOUT_S)
    return {
        str(path.relative_to(folder)): path.read_text(encoding="utf-8")
        for path in folder.rglob("*.generated.cu")
    }


def gemms(files: dict[str, str], types: str) -> Counter[Gemm]:
    """Return the SM120 GEMMs of these types, for example ``fp8xfp4``, that generated files hold."""
    found = Counter(
        Gemm(
            f"{_ELEMENTS[act]}x{_ELEMENTS[weight]}",
            (int(m), int(n), int(k)),
            _OUT[out],
            fusion,
            mx == "true",
            swap == "true",
        )
        for text in files.values()
        for arch, act, weight, out, fusion, m, n, k, mx, swap in _INSTANTIATION.findall(text)
        if arch == "120"
    )
    return Counter({gemm: count for gemm, count in found.items() if gemm.types == types})


def fused(files: dict[str, str]) -> Counter[tuple[str, tuple[int, int, int], int, str]]:
    """Return the fused kernels for SM80: type, tile, stages and activation."""
    return Counter(
        (dtype, (int(m), int(n), int(k)), int(stages), activation)
        for text in files.values()
        for dtype, m, n, k, stages, activation in _FUSED.findall(text)
    )


def instantiations(files: dict[str, str]) -> Counter[str]:
    """Return every kernel that generated files instantiate, in their words."""
    found = re.compile(r"(?:INSTANTIATE_\w+|template void) ?[^;]+;")
    return Counter(" ".join(one.split()) for text in files.values() for one in found.findall(text))


def kernels_of(files: dict[str, str], folder: str) -> Counter[str]:
    """Return those of the files in a folder, for example ``gemm_grouped/120``."""
    return instantiations({name: text for name, text in files.items() if name.startswith(folder)})


def preprocess(source: Path, macros: Sequence[str]) -> str:
    """Return what is left of a source where these macros are defined, without its headers."""
    text = re.sub(r"^\s*#\s*(include|pragma).*$", "", source.read_text(), flags=re.MULTILINE)
    defined = [f"-D{name}" for name in macros]
    return call("c++", "-E", "-P", "-xc++", *defined, "-", stdin=text.encode()).stdout.decode()


def runners(text: str, template: str) -> set[tuple[str, ...]]:
    """Return types of activations and weights, and Hopper's mode, of a template's uses.

    Args:
        text: of ``preprocess``.
        template: ``MoeGemmRunner``, ``CutlassMoeFCRunner`` or ``switch_output_type``.
    """
    found = set()
    for arguments in re.findall(rf"\b{template}<([^<>;(){{}}]+)>", text):
        act, weight, *others = (word.strip().rpartition("::")[2] for word in arguments.split(","))
        if not act.startswith("Type"):  # inside the binding's own template
            found.add((act, weight, *(word for word in others if re.match("k[A-Z]", word))))
    return found


def compile_host(tree: Path, source: Path, out: Path, *, link: bool = False) -> None:
    """Compile a source on a tree's headers for this machine's CPU, to an object or a program.

    nvcc also parses a ``.cu`` for the device, though no kernel of it is wanted: half of the time.
    That pass gets an empty file.
    """
    if source.suffix == ".cu":
        wrapper = out.with_name(f"{source.stem}_host.cu")
        wrapper.write_text(f'#ifndef __CUDA_ARCH__\n#include "{source}"\n#endif\n')
        source = wrapper
    words: list[str | Path] = ["nvcc", "-std=c++17", "-O0", *(f"-D{name}" for name in SM120_MACROS)]
    for include in (STUBS, *(tree / name for name in INCLUDES)):
        words += ["-isystem", include]
    words += ["-Xcompiler", "-ffunction-sections,-fdata-sections"]
    words += ["--expt-relaxed-constexpr", "-static-global-template-stub=false", "-arch=sm_121a"]
    call(*words, *(() if link else ("-c",)), source, "-o", out, timeout=TIMEOUT_S)


def build_probe(tree: Path, folder: Path) -> Path:
    """Compile a tree's MoE dispatch, without its kernels, into a program for this machine.

    Takes 40 s of CPU (60 with the device pass): it is parsing, no device code is generated.
    """
    folder.mkdir()
    objects = []
    hosts = (tree / _INTERNAL / name for name in _HOST_SOURCES)
    for source in (PROBES / "probe_moe_dispatch.cu", *hosts):
        objects.append(folder / f"{source.stem}.o")
        compile_host(tree, source, objects[-1])
    program = folder / "probe"
    # what of the host sources nobody calls wants more of the CUDA runtime
    call("c++", "-Wl,--gc-sections", PROBES / "probe_fake_cudart.cpp", *objects, "-o", program)
    return program


@dataclass(frozen=True)
class Runner:
    """How one runner of a probe behaves on one capability."""

    tma_ws: bool
    """Whether it has kernels of the TMA warp specialized kind there."""
    launches: tuple[str, ...]
    """Per tactic of that kind that the autotuner keeps, what its dispatch launched."""
    dropped: tuple[str, ...]
    """The same per tactic without an occupancy, which the autotuner drops."""
    others: tuple[str, ...]
    """Per other tactic, what became of it."""

    def gemms(self) -> Counter[Gemm]:
        """Return the launches as GEMMs; each tactic must have launched exactly one, for SM120."""
        found = [_LAUNCH.fullmatch(text) for text in self.launches]
        return Counter(
            Gemm(
                match[2],
                (int(match[4]), int(match[5]), int(match[6])),
                match[3],
                match[7],
                match[8] == "1",
                match[9] == "1",
            )
            for match in found
            if match is not None and match[1] == "120"
        )


def ask(program: Path, capability: int) -> tuple[dict[str, Runner], dict[str, int]]:
    """Run a probe for a capability such as 121.

    Returns:
        Runners by type and output, for example ``mxfp8-bf16``; and how many tactics one offers that
        has nothing to launch there, by its source's name.
    """
    out = call(program, str(capability), timeout=TIMEOUT_S).stdout.decode()
    # a refusal is logged, on the same stream in parts
    said = [line for line in out.splitlines() if re.match(r"[a-z0-9]+-(bf|f)16 ", line)]

    def tactics(name: str, kind: str) -> tuple[str, ...]:
        head = f"{name} tactic {kind}:"
        return tuple(line.removeprefix(head).strip() for line in said if line.startswith(head))

    runners = {
        name: Runner(
            f"{name} supports_tma_ws 1" in said,
            tactics(name, "tma_ws 1"),
            tactics(name, "tma_ws 0"),
            tactics(name, "ampere 0"),
        )
        for name in dict.fromkeys(line.partition(" ")[0] for line in said)
    }
    counts = re.findall(r"^(\w+) tactics (\d+)$", out, re.MULTILINE)
    return runners, {name: int(count) for name, count in counts}
