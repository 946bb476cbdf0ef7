"""Dense layers in few bits (vllm_sparkforge.mx), tried in the interpreter they are for.

The engine never runs in the test process; `probes/probe_mxfp4_layers.py` runs in the baked
interpreters. Its results are compared with `tests/reference.py`,
whose weights are quantised by `mx_reference.py`: neither shares anything with the engine.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from sparkforge.checkpoints.tiny import VOCAB_SIZE, to_bf16
from sparkforge.serving.options import for_plugin
from sparkforge.serving.profile import Watch
from tests import reference
from tests.patches import mx_reference as mx
from tests.patches.dequant_probe import read_raw, write_raw
from tests.patches.probing import (
    PROMPT,
    TIMEOUT_S,
    assert_close,
    relative_distance,
    result_of,
    runner,
)
from tests.reference import TinyCheckpoint

# What is asked of the engine, and the formats that the reference gets for it.
ENGINES: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    "none": ({}, {}),
    "lossless": ({"mxfp4_layers": "qkv=lossless,o=lossless,lm_head=lossless"}, {}),
    "all": (
        {"mxfp4_layers": "qkv,o,lm_head"},
        {"qkv": "mxfp4", "o": "mxfp4", "lm_head": "mxfp4"},
    ),
    "head": ({"mxfp4_layers": "lm_head"}, {"lm_head": "mxfp4"}),
    "mixed": (
        {"mxfp4_layers": "qkv=mxfp8,o,lm_head=mxfp8"},
        {"qkv": "mxfp8", "o": "mxfp4", "lm_head": "mxfp8"},
    ),
    "int8": (
        {"mxfp4_layers": "qkv=int8,o=int8,lm_head=int8"},
        {"qkv": "int8", "o": "int8", "lm_head": "int8"},
    ),
    "others": (
        {"mxfp4_layers": "qkv=nvfp4,o=int6,lm_head=nvfp4"},
        {"qkv": "nvfp4", "o": "int6", "lm_head": "nvfp4"},
    ),
}
QUANTIZED = [name for name, (_, formats) in ENGINES.items() if formats]

# Two references that differ in the format of one kind of layer are 0.042 apart or more, at the
# median position; an engine and its own 0.008 to 0.011.
CONTROL = 0.035

# Rows and columns of the weights in one layer, by kind, and of the head as it is padded.
SHAPES = {"qkv": (256, 128), "o": (128, 128), "lm_head": (320, 128)}
MODULES = {"attn.qkv_proj": "qkv", "attn.o_proj": "o", "lm_head": "lm_head"}
# of 32 elements and of their scales; here, INT6 takes a byte an element
BYTES = {"mxfp4": (16, 1), "mxfp8": (32, 1), "int8": (32, 1), "int6": (32, 2), "nvfp4": (16, 2)}

# Three float32 values of an element, and what is one for a block.
RANKS = [2, 8]
QUANTIZERS = mx.QUANTIZERS


@pytest.fixture(scope="module")
def expected(model: reference.Model) -> dict[str, npt.NDArray[np.float32]]:
    """Logits of the reference for what each engine is asked for."""
    return {
        name: reference.logits(mx.quantize_layers(model, formats), list(PROMPT))
        for name, (_, formats) in ENGINES.items()
    }


@pytest.fixture(scope="module")
def weights() -> dict[str, npt.NDArray[np.float32]]:
    """Tensors for the quantisers: every decision there is, and random ones in BF16 and float32."""
    return {"edges": _edges(), "bfloat16": _heavy_tailed(), "float32": _all_sizes()}


@pytest.fixture(scope="module")
def probe(
    tiny: TinyCheckpoint,
    model: reference.Model,
    weights: dict[str, npt.NDArray[np.float32]],
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[Path, str], Path]:
    """Run steps of the probe in an interpreter; the folder with what it wrote."""
    folder = tmp_path_factory.mktemp("probe")
    head = model.tensors["lm_head.weight"]
    np.save(folder / "head.npy", head)
    for name, tensor in weights.items():
        np.save(folder / f"{name}.npy", tensor)
    damaged = model.tensors["model.layers.1.self_attn.k_proj.weight"].copy()
    damaged[3, 5] = np.inf
    request = {
        "checkpoint": str(tiny.path),
        "tied": str(_changed(tiny.path, folder / "tied", {"lm_head.weight": None}, tied=True)),
        "not_finite": str(
            _changed(
                tiny.path,
                folder / "not-finite",
                {"model.layers.1.self_attn.k_proj.weight": damaged},
            )
        ),
        "drafts": {
            "without": str(_changed(tiny.path, folder / "without", {"lm_head.weight": None})),
            "with": str(tiny.path),
        },
        "prompt": list(PROMPT),
        "engines": {name: arguments for name, (arguments, _) in ENGINES.items()},
        "weights": {name: str(folder / f"{name}.npy") for name in weights},
        "head": str(folder / "head.npy"),
        "ranks": RANKS,
        "layers": [*PARSED, *(case for step, case in REFUSED if step == "layers")],
        "command line": for_plugin(["--mxfp4-layers", "o,lm_head=mxfp8"]),
    }
    return runner("probe_mxfp4_layers", request, folder, TIMEOUT_S)


@pytest.fixture(scope="module")
def patched(probe: Callable[[Path, str], Path], patched_python: Path) -> Path:
    steps = "logits,linear,refusals,options,shards,selectors,quantizers"
    return probe(patched_python, steps)


@pytest.fixture(scope="module")
def seen(patched: Path) -> dict[str, Any]:
    return result_of(patched)


@pytest.fixture(scope="module")
def two_ranks(probe: Callable[[Path, str], Path], patched_python: Path) -> Path:
    return probe(patched_python, "two_ranks")


# -- the formats ---------------------------------------------------------------


@pytest.mark.parametrize("way", ["", "-otherwise"])
@pytest.mark.parametrize("name", ["edges", "bfloat16", "float32"])
@pytest.mark.parametrize("fmt", QUANTIZERS)
def test_quantisers_equal_the_definition(
    patched: Path,
    weights: dict[str, npt.NDArray[np.float32]],
    fmt: str,
    name: str,
    way: str,
) -> None:
    """Whole and on one thread, and in slices on three."""
    codes, scales = _quantized(fmt, weights[name])
    np.testing.assert_array_equal(np.load(patched / f"{name}-{fmt}-scales{way}.npy"), scales)
    found = np.load(patched / f"{name}-{fmt}{way}.npy").view(codes.dtype)
    np.testing.assert_array_equal(found, codes)


def test_the_definition_itself() -> None:
    """Values that can be worked out by hand, so that the reference is not its own witness."""
    block = np.zeros(32)
    block[:12] = [6, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, -5.01, 0.26, -0.25, 6]
    four = mx.mxfp4(block)
    assert four.scales.tolist() == [127]
    assert four.values[:12].tolist() == [6, 0, 1, 1, 2, 2, 4, 4, -6, 0.5, 0, 6]
    assert four.codes[:12].tolist() == [7, 0, 2, 2, 4, 4, 6, 6, 15, 1, 8, 7]
    # 6.99 is cut to six; seven is as far from six as from eight, and takes the larger scale.
    assert mx.mxfp4(np.full(32, 6.99)).values[0] == 6
    assert mx.mxfp4(np.full(32, 7.0)).values[0] == 8
    # Four is exact, and three under half the scale. That makes 0.25 exact, which would be zero: a
    # gain of 1/16 for each, so that it takes more than sixteen.
    block = np.zeros(32)
    block[0], block[1:17] = 4, 0.25
    assert mx.mxfp4(block).scales.tolist() == [127]
    assert mx.mxfp4(block).values[:2].tolist() == [4, 0]
    block[17] = -0.25
    assert mx.mxfp4(block).scales.tolist() == [126]
    assert mx.mxfp4(block).values[[0, 1, 17, 18]].tolist() == [3, 0.25, -0.25, 0]
    # Below the smallest scale there is none.
    assert mx.mxfp4(block * 2.0**-127).scales.tolist() == [0]
    eight = mx.mxfp8(np.full(32, 448.0))
    assert (eight.scales[0], eight.codes[0], eight.values[0]) == (127, 0x7E, 448)
    assert mx.mxfp8(np.full(32, -449.0)).scales[0] == 128
    assert mx.mxfp8(np.full(32, -449.0)).codes[0] == 0xF6  # 1.75 * 2**7, less two
    assert mx.mxfp8(np.full(32, -449.0)).values[0] == -448
    # 127 is exact under one; 1.5 and 2.5 take the even neighbour
    block = np.full(64, 40.0)
    block[:4] = [127, -1.5, 2.5, 2.51]
    found = mx.int8(block)
    assert found.scales.tolist() == [1]
    assert found.codes[:4].tolist() == [127, -2, 2, 3]
    # a 127th of the largest rounds to one, though the next number has the smaller error
    block[:4], block[4:] = [127.3, 100 + 100 / 128, 0, 0], 0
    assert mx.int8(block).scales.tolist() == [1]
    assert mx.int8(block).codes[:2].tolist() == [127, 101]
    assert mx.int8(np.zeros(64)).scales.tolist() == [0]
    assert mx.int8(np.full(64, 2.0**-125)).scales.tolist() == [2.0**-126]


def test_mxfp8_expands_exactly(patched: Path) -> None:
    actual = np.load(patched / "mxfp8-values.npy").astype(np.float64)
    magnitude = np.append(mx.E4M3, np.nan)
    exact = np.concatenate((magnitude, -magnitude)) * np.exp2(np.arange(256.0) - 127)[:, None]
    # BF16 ends below 2**128 and has fewer bits below 2**-126; a scale of 255 is NaN in the format
    # and never written by a quantiser.
    representable = (np.abs(exact) < 2.0**128) & (np.abs(exact) >= 2.0**-126) | (exact == 0)
    representable[255] = False
    assert representable.sum() > 250 * 220
    np.testing.assert_array_equal(actual[representable], exact[representable])


def test_int8_expands_with_one_rounding(patched: Path) -> None:
    factors = np.load(patched / "int8-factors.npy").astype(np.float64)
    exact = factors[:, None] * np.minimum(np.arange(-127, 129), 127)
    finite = np.abs(exact) < 2.0**127
    actual = np.load(patched / "int8-values.npy")[finite]
    np.testing.assert_array_equal(actual, mx.bf16(exact[finite].astype(np.float32)))


@pytest.mark.parametrize("fmt", QUANTIZERS)
def test_the_cpu_kernel_multiplies(seen: dict[str, Any], fmt: str) -> None:
    """In one piece and in slices, with a bias; what remains is the rounding of the result."""
    whole, sliced = seen["linear"][fmt]
    assert whole < 0.004
    assert sliced < 0.004


# -- the model -----------------------------------------------------------------


@pytest.mark.parametrize("name", ENGINES)
def test_logits_equal_the_reference(
    patched: Path, expected: dict[str, npt.NDArray[np.float32]], name: str
) -> None:
    assert_close(np.load(patched / f"{name}.npy"), expected[name])


@pytest.mark.parametrize("name", ENGINES)
def test_other_layers_would_be_noticed(
    patched: Path, expected: dict[str, npt.NDArray[np.float32]], name: str
) -> None:
    """The control of the test above: the same logits against models quantised otherwise."""
    logits = np.load(patched / f"{name}.npy")
    for other, (_, formats) in ENGINES.items():
        # INT8 moves logits no further than BF16's rounding
        if formats != ENGINES[name][1] and not {name, other} <= {"none", "lossless", "int8"}:
            assert np.median(relative_distance(logits, expected[other])) > CONTROL, other


def test_lossless_layers_stay_in_bf16_on_a_cpu(patched: Path) -> None:
    np.testing.assert_array_equal(np.load(patched / "lossless.npy"), np.load(patched / "none.npy"))


def test_two_ranks_give_the_same(
    two_ranks: Path, expected: dict[str, npt.NDArray[np.float32]]
) -> None:
    assert_close(np.load(two_ranks / "two_ranks.npy"), expected["all"])


# -- memory --------------------------------------------------------------------


@pytest.mark.parametrize("name", QUANTIZED)
def test_weights_take_what_the_format_says(seen: dict[str, Any], name: str) -> None:
    formats, tensors = ENGINES[name][1], seen["logits"][name]["tensors"]
    modules = {name.rpartition(".")[0] for name in tensors}
    assert len(modules) == 9
    for module in modules:
        kind = next(kind for suffix, kind in MODULES.items() if module.endswith(suffix))
        present = {
            key.rpartition(".")[2]: value
            for key, value in tensors.items()
            if key.rpartition(".")[0] == module
        }
        if kind not in formats:
            assert set(present) == {"weight"}
            assert present["weight"]["dtype"] == "torch.bfloat16"
            continue
        rows, columns = SHAPES[kind]
        if formats[kind] == "nvfp4":
            assert present.pop("weight_global_scale")["bytes"] == 4
        assert set(present) == {"weight", "weight_scale"}
        elements, scales = BYTES[formats[kind]]
        assert present["weight"]["bytes"] == rows * columns // 32 * elements
        assert present["weight_scale"]["bytes"] == rows * columns // 32 * scales


@pytest.mark.parametrize("name", QUANTIZED)
def test_no_full_precision_copy_is_left(seen: dict[str, Any], name: str) -> None:
    loaded = seen["logits"][name]
    layers = sum(1 if kind == "lm_head" else 4 for kind in ENGINES[name][1])
    assert loaded["strays"] == []
    # One layer at a time, while the checkpoint is still being read, not all of them at its end.
    assert loaded["freed"] == [True] * (layers + 1)
    assert loaded["early"] == [True] * layers


# -- tensor parallelism --------------------------------------------------------


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("fmt", QUANTIZERS)
def test_vocabulary_shards(
    patched: Path, seen: dict[str, Any], model: reference.Model, fmt: str, ranks: int
) -> None:
    """Ranks hold the rows of the whole head and then zeros; with eight, one has nothing else."""
    layers = seen["shards"][f"{fmt}-{ranks}"]
    assert [layer["rows"] for layer in layers] == [320 // ranks] * ranks
    assert sum(layer["loaded"] for layer in layers) == VOCAB_SIZE
    assert (0 in [layer["loaded"] for layer in layers]) == (ranks == 8)
    # Each as soon as its last row has come, although the padding never does.
    assert all(layer["done"] for layer in layers)

    rows = np.array_split(
        model.tensors["lm_head.weight"], range(320 // ranks, VOCAB_SIZE, 320 // ranks)
    )
    parts = [_quantized(fmt, part) for part in rows]  # each with a factor of its own, in NVFP4
    codes, scales = (np.concatenate(each) for each in zip(*parts, strict=True))
    actual = np.load(patched / f"{fmt}-{ranks}.npy").view(codes.dtype)
    np.testing.assert_array_equal(actual[:VOCAB_SIZE], codes)
    found = np.load(patched / f"{fmt}-{ranks}-scales.npy")
    np.testing.assert_array_equal(found[:VOCAB_SIZE], scales)
    assert len(actual) == 320
    assert not actual[VOCAB_SIZE:].any()


# -- selection -----------------------------------------------------------------


@pytest.mark.parametrize("fmt", ["MXFP4", "MXFP8", "INT8", "INT6", "NVFP4"])
def test_the_log_names_the_kernel_as_a_profile_does(patched: Path, fmt: str) -> None:
    log = (patched / "log").read_text(encoding="utf-8").splitlines()
    (line,) = [line for line in log if f"for {fmt} GEMM" in line]
    watch = Watch({"linear": "CPU"})
    assert watch.feed(line) is None
    assert not watch.missing()


# -- refusals ------------------------------------------------------------------

COMBINED = "mxfp4_layers cannot be combined"
REFUSED = {
    # vLLM's emulation dequantises at load: accuracy would be lost, and no memory saved
    ("selectors", "mxfp4, ROCM"): "no kernel on ROCM",
    # heads that others rely on
    ("refusals", "tied"): "tied to the input embeddings",
    ("refusals", "float32"): "head_dtype asks for torch.float32",
    ("refusals", "lora names it"): "LoRA applies to it",
    ("refusals", "eagle without"): "has no lm_head of its own",
    ("refusals", "mtp"): "has no lm_head of its own",
    ("refusals", "not finite"): (
        "model.layers.1.attn.qkv_proj.weight has elements that are not finite"
    ),
    ("refusals", "96 columns"): "INT8 requires input_size_per_partition (96) to be divisible by 64",
    # the option
    ("layers", "qkv,"): "unknown layer kind ''",
    ("layers", "q_proj"): "unknown layer kind 'q_proj'",
    ("layers", "o,qkv,o"): "o occurs twice",
    (
        "layers",
        "lm_head=fp8",
    ): "lm_head cannot be 'fp8'; expected mxfp4 or mxfp8 or int8 or int6 or nvfp4",
    ("layers", "moe=int8"): "moe cannot be 'int8'; expected mxfp4",
    ("options", "linear"): COMBINED,
    ("options", "other targets"): COMBINED,
    # models that would ignore it
    ("options", "None"): "the quantization of some-model is None",
}


@pytest.mark.parametrize(("step", "case"), REFUSED)
def test_what_cannot_be_is_refused(seen: dict[str, Any], step: str, case: str) -> None:
    failure = (seen["options"]["parsed"] if step == "layers" else seen[step])[case]
    assert failure["type"] == "ValueError"
    assert REFUSED[step, case] in failure["message"]
    assert case == "not finite" or not failure.get("loaded")


@pytest.mark.parametrize("case", ["lora elsewhere", "eagle with"])
def test_heads_that_nothing_relies_on_are_not(seen: dict[str, Any], case: str) -> None:
    assert seen["refusals"][case]["value"] == "mxfp4"


# -- the option ----------------------------------------------------------------

PARSED = {
    "qkv,o,lm_head": {"qkv": "mxfp4", "o": "mxfp4", "lm_head": "mxfp4"},
    "moe,qkv, o=int8,lm_head=mxfp8": {"qkv": "mxfp4", "o": "int8", "lm_head": "mxfp8"},
    "qkv=int6,o=nvfp4": {"qkv": "int6", "o": "nvfp4"},
    "qkv=lossless": {"qkv": "lossless"},
    "moe": {},
}


@pytest.mark.parametrize("layers", PARSED)
def test_layer_kinds_and_their_formats(seen: dict[str, Any], layers: str) -> None:
    assert seen["options"]["parsed"][layers]["value"] == PARSED[layers]


def test_the_command_line(seen: dict[str, Any]) -> None:
    """As sparkforge writes it."""
    assert seen["options"]["command line"] == {"o": "mxfp4", "lm_head": "mxfp8"}
    assert seen["options"]["no option"] == {}
    assert seen["options"]["gpt_oss_mxfp4"]["type"] is None


def test_compiled_graphs_are_told_apart(seen: dict[str, Any]) -> None:
    """A graph that torch.compile left in the cache is never taken for other formats."""
    *graphs, again = seen["options"]["graphs"]
    assert again == graphs[1]
    assert len(set(graphs)) == 8


# -- helpers -------------------------------------------------------------------


def _quantized(fmt: str, tensor: npt.NDArray[np.float32]) -> tuple[Any, Any]:
    """Codes, as an engine stores them, and scales."""
    found = QUANTIZERS[fmt](tensor)
    return found.packed if fmt.endswith("fp4") else found.codes, found.scales


def _edges() -> npt.NDArray[np.float32]:
    """Blocks whose largest element, and whose others, stand on and beside every limit, under
    scales from one end of float32 to the other; zeros of both signs and subnormals too."""
    midpoints = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]
    limits = [*midpoints, 0, 0.5, 1, 1.5, 2, 3, 4, 6, 7, 7.5]
    fine = np.array([1 - 2**-20, 1, 1 + 2**-20])
    others = np.outer(limits, fine).ravel()
    blocks = []
    for largest in (3.5, 3.999, 4, 6, 6.99, 7, 7.0001, 448 / 64, 449 / 64, 7.999):
        inside = others[others <= largest]
        inside = np.resize(inside, -(-len(inside) // 31) * 31).reshape(-1, 31)
        signs = np.where(np.arange(inside.size).reshape(inside.shape) % 3, 1, -1)
        blocks.append(np.column_stack((inside * signs, np.full(len(inside), -largest))))
    # E4M3 has limits of its own: all values, all midpoints, under a largest of 448.
    small = np.concatenate((mx.E4M3, (mx.E4M3[1:] + mx.E4M3[:-1]) / 2))
    small = np.resize(small, 9 * 31).reshape(9, 31)
    blocks.append(np.column_stack((small, np.full(9, 448.0))))
    rows = np.concatenate(blocks)
    scaled = [rows * 2.0**power for power in (-140, -126, -100, -9, 0, 5, 100, 116)]
    # Where two scales cost the same, and a little to both sides of that: the largest loses 4, what
    # the 16 others gain.
    ties = np.zeros((7, 32))
    ties[:, 0] = [8, 8 * (1 + 2**-20), 8 * (1 - 2**-20), 8, 8, 8, 8]
    ties[:, 1:17] = 0.5
    ties[3:5, 1] = 0.5 * (1 + 2**-20), 0.5 * (1 - 2**-20)
    ties[5:, 17] = 0.25 * (1 + 2**-20), 0.25
    scaled += [ties * 2.0**power for power in (-149, -128, -127, -126, -125, -9, 0, 100)]
    zeros = np.zeros((2, 32))
    zeros[1] = -0.0
    subnormal = np.full((1, 32), 2.0**-149)
    flat = np.concatenate((*scaled, zeros, subnormal)).astype(np.float32)
    assert np.isfinite(flat).all()
    return flat[: len(flat) // 4 * 4].reshape(-1, 128)


def _heavy_tailed() -> npt.NDArray[np.float32]:
    """BF16 weights with outliers, as trained ones have."""
    random = np.random.default_rng(3)
    weight = (random.standard_t(3, size=(200, 512)) * 0.02).astype(np.float32)
    return mx.bf16(weight)


def _all_sizes() -> npt.NDArray[np.float32]:
    """All bits of float32 in use, blocks of a row anywhere from subnormals to 2**100."""
    random = np.random.default_rng(4)
    sizes = np.exp2(random.uniform(-135, 100, size=(200, 4, 1)))
    blocks = random.standard_normal((200, 4, 32)) * sizes
    return blocks.reshape(200, 128).astype(np.float32)


def _changed(
    source: Path,
    dest: Path,
    changes: dict[str, npt.NDArray[np.float32] | None],
    *,
    tied: bool = False,
) -> Path:
    """A copy of a checkpoint in which tensors are replaced (by BF16) or left out."""
    old, raw = read_raw(source)
    header: dict[str, Any] = {"__metadata__": old.pop("__metadata__")}
    data = b""
    for name in sorted({*old, *changes}):
        tensor = changes.get(name)
        if tensor is not None:
            dtype, shape = "BF16", list(tensor.shape)
            piece = to_bf16(tensor.astype(np.float32)).tobytes()
        elif name in changes:
            continue
        else:
            low, high = old[name]["data_offsets"]
            dtype, shape = old[name]["dtype"], old[name]["shape"]
            piece = raw[low:high]
        offsets = [len(data), len(data) + len(piece)]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": offsets}
        data += piece
    write_raw(source, dest, header, data)
    config = json.loads((dest / "config.json").read_text(encoding="utf-8"))
    config["tie_word_embeddings"] = tied
    (dest / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return dest
