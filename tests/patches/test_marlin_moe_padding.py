"""Marlin's MXFP4 experts: padded no further than the kernel demands, and right when padded so.

With the patch, and without it by our plugin, which pads a little more. What the kernel demands is
read from its own tables in the pinned release's csrc (which are no part of a wheel), so that a
rebase which changes them shows here. So is the padding that the roofline counts with, from vLLM's
own functions.
"""

import ast
import os
import re
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from sparkforge.check.roofline import Moe, Shape, padded_experts
from sparkforge.series import series
from tests.patches.checkout import CHECKOUT, ROOT
from tests.patches.probing import ask
from tests.patches.trees import release_file

BLOCKS = (8, 16, 32, 48, 64)
"""Rows of a block that fused_marlin_moe chooses from."""

SHARED_MEMORY = 101_376
"""Bytes that one block may have on SM12x, the least of all devices from SM80 on."""

SIZES = [
    *((2880, 2880 // ranks) for ranks in (1, 2, 3, 4, 5, 6, 8)),
    *((hidden, inner) for hidden in (32, 96, 160, 192, 320, 448) for inner in (32, 96, 128, 704)),
    *((4096, 1536), (7168, 2048), (2944, 2880), (3008, 1440)),
]
LAYERS: list[dict[str, int]] = [
    {"experts": 3, "top_k": 2, "seed": seed}
    | dict(zip(("hidden", "intermediate", "tokens", "ranks"), shape, strict=True))
    for seed, shape in enumerate(
        [
            (2880, 96, 2, 1),  # gpt-oss's hidden size, padded in w2 alone
            (192, 2880, 3, 1),  # gpt-oss's intermediate size, whole and in shards
            (192, 2880, 3, 4),  # shards of 736, 736, 736 and 672
            (96, 160, 3, 1),  # hidden size padded, and cut again
            (192, 96, 40, 1),  # blocks of more than 16 rows
        ]
    )
]


# of the roofline: the whole expert, and what two and four ranks have of it
SHAPE = Shape()
WIDTHS = [2880, 1440, 720]
NARROW = "pad-marlin-s-moe-hidden-size-to-64-not-to-256.patch"
BACKENDS: Mapping[str, Moe] = {
    "FLASHINFER_CUTLASS_MXFP4_BF16": "flashinfer_cutlass",
    "FLASHINFER_CUTLASS_MXFP4_MXFP8": "flashinfer_cutlass",
    "TRITON": "triton",
    "TRITON_UNFUSED": "triton",
}


@dataclass(frozen=True)
class Tile:
    """A thread configuration: k and n of a thread block's tile, its threads."""

    k: int
    n: int
    threads: int


@dataclass(frozen=True)
class Kernels:
    """What the kernel's sources offer: tiles for one 16-row block, for more, and what is built."""

    small: list[Tile]
    large: list[Tile]
    built: set[tuple[float, Tile]]
    least_k: int
    least_n: int


@pytest.fixture(scope="module")
def kernels() -> Kernels:
    sdist = release_file("vllm", "sdist")
    with tarfile.open(sdist) as archive:

        def text(path: str) -> str:
            member = archive.extractfile(f"{sdist.name.removesuffix('.tar.gz')}/csrc/{path}")
            assert member is not None
            return member.read().decode()

        ops = text("moe/marlin_moe_wna16/ops.cu")
        generator = text("quantization/marlin/generate_kernels.py")
        header = text("quantization/marlin/marlin.cuh")

    def table(name: str) -> list[Tile]:
        found = re.search(rf"{name}\[\] = \{{(.*?)\}};", ops, re.DOTALL)
        assert found
        rows = re.findall(r"\{(\d+), (\d+), (\d+)\}", found[1])
        return [Tile(*(int(number) for number in row)) for row in rows]

    def constant(name: str) -> int:
        found = re.search(rf"constexpr int {name} = (\d+);", header)
        assert found
        return int(found[1])

    lists: dict[str, Any] = {}
    for node in ast.parse(generator).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            name = node.targets[0].id
            if name in ("THREAD_CONFIGS", "THREAD_M_BLOCKS"):
                lists[name] = ast.literal_eval(node.value)
    built = {
        (blocks, Tile(*tile))
        for blocks in lists["THREAD_M_BLOCKS"]
        for tile in lists["THREAD_CONFIGS"]
        # generate_kernels.py leaves out the 256-thread tile that the size never takes.
        if tile[2] != 256 or tile[:2] == ((128, 128) if blocks <= 1 else (64, 256))
    }
    return Kernels(
        small=table("small_batch_thread_configs"),
        large=table("large_batch_thread_configs"),
        built=built,
        least_k=constant("min_thread_k"),
        least_n=constant("min_thread_n"),
    )


def _shared_memory(tile: Tile, rows: int, *, group: int = 32, stages: int = 4) -> int:
    """Bytes of a thread block: rows of A in BF16, four-bit B, its scales, the reduction."""
    rows = max(rows, 16)
    a = stages * rows * tile.k * 2
    b = stages * tile.k * tile.n // 2
    scales = stages * -(-tile.k // group) * tile.n * 2
    reduction = rows * (tile.n + 8) * 2
    return max(b, reduction, min(b, reduction) + tile.n * 2) + a + scales + rows * 16


def _tiles(kernels: Kernels, block: int, n: int, k: int) -> list[Tile]:
    """Return the tiles that can compute a GEMM with blocks of so many rows."""
    table = kernels.large if block > 16 else kernels.small
    return [
        tile
        for tile in table
        if k % tile.k == 0
        and n % tile.n == 0
        and tile.k >= kernels.least_k
        and tile.n >= kernels.least_n
        and (block / 16, tile) in kernels.built
        and _shared_memory(tile, block) <= SHARED_MEMORY - 512
    ]


def _w2_columns(name: str, hidden: int) -> int:
    """Return the columns of w2, of which MARLIN drops those that pad."""
    return -(-hidden // 128) * 128 if name == "MARLIN" else hidden


def _computable(kernels: Kernels, name: str, hidden: int, inner: int) -> bool:
    """Whether both GEMMs of an expert can be computed at every block size."""
    columns = _w2_columns(name, hidden)
    return all(
        _tiles(kernels, block, 2 * inner, hidden) and _tiles(kernels, block, columns, inner)
        for block in BLOCKS
    )


def _ask(python: Path, folder: Path, variables: Mapping[str, str] | None = None) -> Any:
    experts = [
        [backend, SHAPE.hidden, width] for backend in (*BACKENDS, "MARLIN") for width in WIDTHS
    ]
    questions = {"sizes": SIZES, "layers": LAYERS, "experts": experts}
    return ask(python, "probe_marlin_padding", questions, folder=folder, variables=variables)


@pytest.fixture(scope="module")
def patched(patched_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return _ask(patched_python, tmp_path_factory.mktemp("patched"))


@pytest.fixture(scope="module")
def stock(stock_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return _ask(stock_python, tmp_path_factory.mktemp("stock"))


@pytest.fixture(scope="module")
def plugin(stock_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The release with our plugin."""
    paths = {"PYTHONPATH": f"{ROOT}{os.pathsep}{CHECKOUT / 'kernels'}"}
    return _ask(stock_python, tmp_path_factory.mktemp("plugin"), paths)


def test_padding_is_the_least_that_marlin_takes(kernels: Kernels, patched: Any) -> None:
    for size, answers in zip(SIZES, patched["sizes"], strict=True):
        for name, (hidden, inner) in answers.items():
            what = f"{name}: {size} as {hidden} x {inner}"
            assert hidden >= size[0] and inner >= size[1], what
            assert _computable(kernels, name, hidden, inner), what
            assert not any(_computable(kernels, name, h, inner) for h in range(size[0], hidden)), (
                what
            )
            # batched experts are padded by 128 there, as in the release
            less = range(size[1], inner if name == "MARLIN" else size[1])
            assert not any(_computable(kernels, name, hidden, one) for one in less), what


def test_gpt_oss_keeps_its_sizes(stock: Any, patched: Any, plugin: Any) -> None:
    assert SIZES[0] == (2880, 2880)
    assert stock["sizes"][0]["MARLIN"] == [3072, 2944]
    assert patched["sizes"][0]["MARLIN"] == [2880, 2880]
    assert patched["sizes"][0]["BATCHED_MARLIN"] == [2880, 2944]
    # without the patch no columns of down can be left out
    assert plugin["sizes"][0]["MARLIN"] == [2944, 2880]


@pytest.mark.parametrize("kind", ["patched", "plugin"])
@pytest.mark.parametrize("index", range(len(LAYERS)))
def test_padded_experts_compute_what_the_checkpoint_says(
    kernels: Kernels, stock: Any, kind: str, index: int, request: pytest.FixtureRequest
) -> None:
    size, answer = LAYERS[index], request.getfixturevalue(kind)["layers"][index]
    # Both round the same inner values to BF16; the reference rounds none.
    assert answer["error"] < 0.01, (size, answer)
    assert answer["error"] < 1.2 * stock["layers"][index]["error"]
    hidden, inner = answer["rounded"]
    columns = _w2_columns("MARLIN", hidden) if kind == "patched" else hidden
    assert {(n, k) for _, n, k in answer["calls"]} == {(2 * inner, hidden), (columns, inner)}
    for block, n, k in answer["calls"]:
        assert _tiles(kernels, block, n, k), (block, n, k)


@pytest.mark.parametrize("kind", ["stock", "patched"])
def test_the_roofline_s_padding_is_vllm_s(kind: str, request: pytest.FixtureRequest) -> None:
    names = {patch.name for patch in series.read(CHECKOUT / "patches" / "vllm").patches}
    narrow = kind == "patched" and NARROW in names
    moes: Mapping[str, Moe] = {**BACKENDS, "MARLIN": "marlin" if narrow else "marlin-release"}
    told = request.getfixturevalue(kind)
    ours = [
        list(padded_experts(replace(SHAPE, intermediate=width), moe))
        for moe in moes.values()
        for width in WIDTHS
    ]
    assert told["experts"] == ours
