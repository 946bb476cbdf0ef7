"""The decode kernels' Python side: packing, choice, launches, self-check, as a CPU can run them.

What the kernels compute on a GPU is not tested here: the contract of probes/decode_contract.py
stands in for them, and the CUDA sources' own index functions (probes/probe_decode_layout.cu) are
compared with it.
"""

import shutil
from typing import Any

import numpy as np
import pytest

from tests.patches import mx_reference as mx

COVERED = ("9.0", "12.1")
KINDS = ("mxfp4", "mxfp8", "int8", "int6", "nvfp4")
NAMES = ("MxFp4", "Mxfp8", "Int8", "Int6", "NvFp4")
DECODE = " ".join(f"Decode{name}LinearKernel" for name in NAMES)
MARLIN = " ".join(f"{'Plain' if 'Int' in name else 'Marlin'}{name}LinearKernel" for name in NAMES)
CHOSEN = {DECODE: [True] * len(KINDS), MARLIN: [False] * len(KINDS)}
"""Whether weights are packed for our kernels, by what the log names."""
ROUNDED = 0.004
"""Largest relative error of a result that was rounded to BF16 twice."""

needs_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="no CUDA compiler here")


# -- layouts -------------------------------------------------------------------------------------


@needs_nvcc
def test_weights_are_packed_where_the_kernels_read_them(computed: Any) -> None:
    assert len(computed["packing"]) == 4 * len(KINDS) + 2
    assert all(computed["packing"].values()), computed["packing"]


@needs_nvcc
def test_scales_of_nvfp4_are_exact_in_bf16(decode_layout: Any) -> None:
    """Those that are normal: no quantiser of ours gives others."""
    two = np.array(decode_layout["two"], np.uint32)
    halves = np.stack([two << np.uint32(16), two & np.uint32(0xFFFF0000)], -1).view(np.float32)
    wanted = mx.E4M3.repeat(4)[32:] * 2.0**104
    np.testing.assert_array_equal(halves.flatten()[32:], wanted)


@needs_nvcc
def test_experts_are_read_in_marlins_order(computed: Any) -> None:
    assert computed["marlin"] == dict.fromkeys(("k", "n", "scales", "biases"), True)


@needs_nvcc
def test_operands_have_the_layout_of_the_cuda_sources(computed: Any, decode_layout: Any) -> None:
    for name, numbers in decode_layout["structures"].items():
        assert computed["structures"][name] == numbers, name


# -- choice --------------------------------------------------------------------------------------


@pytest.mark.parametrize("capability", ["8.9", *COVERED])
def test_dense_kernels_are_chosen_where_there_are_some(
    decode_answers: Any, capability: str
) -> None:
    for shipped, options in decode_answers[capability].items():
        for option, answer in options.items():
            there = shipped == "shipped" and capability in COVERED and option != "off"
            assert answer["chosen"] == (DECODE if there else MARLIN), (shipped, option)
            assert answer["packed"] == CHOSEN[answer["chosen"]], (shipped, option)
            refused = option == "on" and not there
            assert answer["refusal"].startswith("ValueError: decode_kernels is on: ") == refused
            # one line with the reason, not one a layer
            assert len(answer["said"]) == (0 if there or option == "off" else 1), (shipped, option)


@pytest.mark.parametrize(
    ("capability", "shipped", "reason"),
    [
        ("8.9", "shipped", "there are none for this device's capability"),
        ("12.1", "none", "this wheel has no cubin for sm_121a"),
        ("12.1", "damaged", "sm_121a.cubin is not the file that its manifest names"),
        ("12.1", "unreadable", "manifest.json cannot be read: JSONDecodeError"),
        ("9.0", "newer", "manifest.json has schema 2, this package reads 1"),
    ],
)
def test_the_reason_is_named(
    decode_answers: Any, capability: str, shipped: str, reason: str
) -> None:
    assert reason in decode_answers[capability][shipped]["on"]["refusal"]
    (line,) = decode_answers[capability][shipped]["auto"]["said"]
    assert line.startswith("are off: ")
    assert reason in line


@pytest.mark.parametrize("variable", ["VLLM_BATCH_INVARIANT", "VLLM_LORA_ENABLE_DUAL_STREAM"])
def test_variables_switch_them_off(decode_answers: Any, variable: str) -> None:
    answer = decode_answers["9.0"][variable]["auto"]
    assert answer["chosen"] == MARLIN
    assert answer["packed"] == CHOSEN[MARLIN]
    assert variable in answer["said"][0]


def test_the_compile_cache_tells_them_apart(decode_answers: Any) -> None:
    keys = {
        (capability, shipped, option): decode_answers[capability][shipped][option]["key"]
        for capability in ("9.0", "12.1")
        for shipped in ("shipped", "none")
        for option in ("auto", "off")
    }
    # off is the same everywhere; so is auto where there are none
    assert len(set(keys.values())) == 4, keys
    assert keys["9.0", "shipped", "auto"] != keys["9.0", "none", "auto"]
    assert keys["9.0", "shipped", "auto"] != keys["12.1", "shipped", "auto"]


@pytest.mark.parametrize("form", ["mxfp4", "mxfp8", "nvfp4"])
def test_the_compile_cache_knows_which_layers_marlin_computes(computed: Any, form: str) -> None:
    starts = {name: computed["cache"][f"{form} {name}"] for name in ("passes", "fails")}
    assert starts["passes"]["key"] != starts["fails"]["key"]
    assert starts["fails"]["size"] == pytest.approx(10 * starts["passes"]["size"], rel=0.02)
    assert computed["cache"][f"{form} passes again"] == starts["passes"]
    others = (computed["cache"][f"{form} {which} layer fails"] for which in ("one", "other"))
    assert len({starts["passes"]["key"], *(start["key"] for start in others)}) == 3


def test_the_compile_cache_knows_which_int8_layers_are_kept_in_bf16(computed: Any) -> None:
    assert computed["cache"]["int8 passes"] != computed["cache"]["int8 fails"]


# -- launches ------------------------------------------------------------------------------------


def test_the_driver_is_called_as_the_kernels_need_it(computed: Any) -> None:
    load, *attributes, first, second = computed["driver"]["calls"]
    assert load == ["load", "cubin of 90a"]
    # every kernel is loaded before the first launch, with all shared memory that is left to it
    names = ["experts_combine", "expand_mxfp4"]
    wanted = [[["load", name], [name, "dynamic shared", 101_376 - 512]] for name in names]
    assert attributes == [call for calls in wanted for call in calls]
    assert first == second
    assert first == {
        "function": "experts_combine",
        "grid": [3, 2, 1],
        "block": [256, 1, 1],
        "shared": 1024,
        "stream": 77,
        "dependent": ["dependent", 1],
        "operands": [16, 32, 48, 64],
    }
    assert computed["driver"]["refused"] == [
        "KeyError: 'no'",
        "RuntimeError: CUDA driver: CUDA_ERROR_INVALID_VALUE",
    ]
    assert computed["driver"]["sizes"] == [101_376, 48]


def _narrow(kind: str, warps: int, *most: int) -> list[str]:
    return [f"dense_{kind}_narrow_{warps}_{rows}" for rows in most]


@pytest.mark.parametrize("kind", [*KINDS, "lossless"])
def test_dense_layers_launch_by_their_rows_and_shape(computed: Any, kind: str) -> None:
    wanted = {
        "narrow 0": [],
        "narrow 1": _narrow(kind, 12, 8),
        "narrow 7": _narrow(kind, 12, 8),
        "narrow 8": _narrow(kind, 12, 8),
        "narrow 9": _narrow(kind, 12, 16),
        "narrow 16": _narrow(kind, 12, 16),
        "narrow 17": _narrow(kind, 12, 16, 8),
        "narrow 64": _narrow(kind, 12, 16, 16, 16, 16),
        "narrow 65": [f"expand_{kind}"],
        "half an o 1": _narrow(kind, 12, 8),
        "half an o 9": _narrow(kind, 12, 16),
        "long 1": _narrow(kind, 16, 8),
        "long 9": _narrow(kind, 16, 16),
        "wide 1": [f"dense_{kind}_wide_8"],
        "wide 9": [f"dense_{kind}_wide_16"],
        "wide 17": [f"dense_{kind}_wide_16", f"dense_{kind}_wide_8"],
        "expanded in slices 65": [f"expand_{kind}"] * 2,
    }
    found = {
        name.removeprefix(f"{kind} "): answer["launches"]
        for name, answer in computed["dense"].items()
        if name.startswith(kind)
    }
    assert found == wanted
    without = computed["dense"]["wide without the shared memory"]["launches"]
    assert without == _narrow("mxfp4", 12, 16)


def test_dense_results_and_fakes_are_right(computed: Any) -> None:
    assert len(computed["dense"]) == 17 * (len(KINDS) + 1) + 3
    for name, answer in computed["dense"].items():
        assert answer["error"] < ROUNDED, name
        assert answer["fake"] == answer["shape"], name


def test_bf16_layers_take_them_in_gpt_oss_where_they_gain(computed: Any) -> None:
    kernels = {"(1,)": _narrow("bf16", 12, 8), "(2, 8)": _narrow("bf16", 12, 16)}
    for name, calls in computed["bf16"].items():
        used = name in ("large", "large, on")
        for shape, call in calls.items():
            assert call["launches"] == (kernels.get(shape, []) if used else []), (name, shape)
            assert call["error"] < ROUNDED, (name, shape)
            assert call["same shape"], (name, shape)
            assert call.get("fake") == (True if used else None), (name, shape)
    assert computed["head"] == ["dense_bf16_wide_8"]


# -- experts -------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [0, 1, 2, 3, 8, 9, 16, 17])
def test_experts_with_few_rows_go_through_the_kernels(computed: Any, rows: int) -> None:
    answer = computed["experts"][str(rows)]
    most = {3: 8, 9: 16, 17: 0}.get(rows, rows)
    kernels = [f"experts_gate_up_{most}", f"experts_down_{most}", "experts_combine"]
    assert answer["launches"] == (kernels if most else [])
    assert answer["error"] < ROUNDED + 0.002  # Marlin rounds more often


def test_rows_that_pad_are_zero(computed: Any) -> None:
    assert computed["experts"]["padding"]["zeros"]
    assert computed["experts"]["padding"]["error"] < ROUNDED


def test_experts_can_be_switched_off(computed: Any) -> None:
    assert computed["experts"]["switched off"] == []
    assert computed["experts"]["off"] == [False]


def test_what_only_marlin_computes_reaches_it_as_it_came(computed: Any) -> None:
    left = computed["experts"]["left to Marlin"]
    assert len(left) == 4
    assert all(left.values()), left


@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        ("LoRA", "LoRA is enabled"),
        ("float16", "activations are torch.float16, not bfloat16"),
        ("three experts a row", "a row has 3 experts, not 4"),
        ("no bias", "the experts are not gpt-oss's: SWIGLU-OAI with biases"),
        ("a scale of 191", "an E8M0 scale is 191, above 190"),
    ],
)
def test_experts_that_they_cannot_take_stay_with_marlin(
    computed: Any, layer: str, reason: str
) -> None:
    used, *said = computed["experts"][layer]
    assert not used
    assert said == [f"INFO: Decode kernels are not used for MXFP4 experts: {reason}."]


# -- the self-check ------------------------------------------------------------------------------

WRONG = {
    "3 % too large": "more than 0.02",
    "NaN": "",  # the words differ: a difference of NaN, or a padding row that is not zero
    "an error": "RuntimeError: CUDA driver: CUDA_ERROR_ILLEGAL_ADDRESS",
}


def test_the_check_leaves_the_random_numbers_as_they_are(computed: Any) -> None:
    assert computed["self_check"]["same random numbers"]


@pytest.mark.parametrize("name", ["right", "1 % too large"])
def test_right_kernels_pass_and_say_so(computed: Any, name: str) -> None:
    checks = computed["self_check"]
    cases = [
        *(
            f"{kind}, {option}"
            for kind in (*KINDS, *(f"zero {kind}" for kind in KINDS))
            for option in ("auto", "on")
        ),
        "another shape",
    ]
    for case in cases:
        answer = checks[f"{name}, {case}"]
        assert answer["packed"], case
        (kernel,) = answer["computed"]
        assert kernel.endswith("_narrow_12_8"), case
        (line,) = answer["said"]
        assert line.startswith("INFO: Decode kernels are used for "), case
    assert checks[f"{name}, BF16"]["launches"] == ["dense_bf16_narrow_12_8"]
    for weights in ("real", "zero"):
        answer = checks[f"{name}, {weights} experts"]
        if name != "right":  # 1 % in each of three kernels is more than 2 %
            assert not answer["used"], weights
            continue
        assert answer["used"], weights
        assert "used for MXFP4 experts 6 x 192 x 128: they differ by 0.0" in answer["said"][0]


@pytest.mark.parametrize("name", WRONG)
def test_wrong_kernels_are_switched_off(computed: Any, name: str) -> None:
    checks = computed["self_check"]
    for case in (*(f"{kind}, auto" for kind in KINDS), "zero mxfp4, auto"):
        answer = checks[f"{name}, {case}"]
        assert not answer["packed"], case
        assert answer["fallback"], case  # which got the weights as they were
        assert answer["computed"] == "by the fallback", case
        (line,) = answer["said"]
        assert line.startswith("WARNING: Decode kernels for "), case
        assert "are switched off" in line
        assert WRONG[name] in line
    # nothing more is said, or tried, for the kind's other shapes
    other = checks[f"{name}, another shape"]
    assert other["fallback"]
    assert other["said"] == []
    assert checks[f"{name}, BF16"]["launches"] == []
    for weights in ("real", "zero"):
        answer = checks[f"{name}, {weights} experts"]
        assert not answer["used"], weights
        assert len(answer["said"]) == 1


@pytest.mark.parametrize("name", WRONG)
def test_wrong_kernels_are_an_error_where_they_were_asked_for(computed: Any, name: str) -> None:
    for kind in (*KINDS, "zero mxfp4"):
        raised = computed["self_check"][f"{name}, {kind}, on"]["raised"]
        assert raised.startswith("decode_kernels is on: those for ")
        assert WRONG[name] in raised


@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        ("k = 96", "MXFP4 48 x 96: K = 96 is not a multiple of 64"),
        ("float16", "MXFP4 48 x 128: activations are torch.float16, not bfloat16"),
        ("a scale of 191", "MXFP4 48 x 128: an E8M0 scale is 191, above 190"),
        ("a scale of 2**64", "INT8 48 x 128: a scale is 1.84e+19, not from 2**-126 to 2**63"),
        ("a factor of 2**55", "NVFP4 48 x 128: the factor is 3.6e+16, above 2**54"),
    ],
)
def test_dense_layers_that_they_cannot_take_are_named(
    computed: Any, layer: str, reason: str
) -> None:
    answer = computed["self_check"][layer]
    assert not answer["packed"]
    assert answer["fallback"]
    assert answer["said"] == [f"INFO: Decode kernels are not used for {reason}."]


@pytest.mark.parametrize("form", ["int8", "int6"])
def test_integers_without_them_are_kept_in_bf16(computed: Any, form: str) -> None:
    answer = computed["self_check"]["kept in BF16"][form]
    assert answer["parameters"] == ["weight", "bias"]
    assert answer["as loaded"]
    assert answer["error"] < ROUNDED
    named, kept = answer["said"]
    label = form.upper()
    assert named == f"INFO: Using Plain{form.title()}LinearKernel for {label} GEMM"
    assert kept.startswith(f"WARNING: Layers in {label} stay in BF16, as they were loaded: ")


# -- BF16 in 12 bits -----------------------------------------------------------------------------


@pytest.mark.parametrize("case", ["packed", "on", "a dummy checkpoint", "a short list", "head"])
def test_lossless_layers_are_packed(computed: Any, case: str) -> None:
    answer = computed["lossless"][case]
    assert answer["method"] == "LosslessLinearMethod"
    wanted = {"weight": "int32", "weight_scale": "uint8", "weight_listed": "int32"}
    bias = {} if case == "head" else {"bias": "bfloat16"}
    assert answer["parameters"] == wanted | bias
    few = "wide_8" if case == "head" else "narrow_12_8"
    expanded = ["expand_lossless"] * (5 if case == "head" else 1)
    assert answer["launches"] == [f"dense_lossless_{few}", *expanded]
    assert max(answer["errors"]) < ROUNDED
    if case == "a short list":  # takes no other room: torch.compile's result is the same
        assert answer["listed"] == computed["lossless"]["packed"]["listed"]
    chosen, right = answer["said"]
    assert chosen == "INFO: Using DecodeLosslessLinearKernel for LOSSLESS GEMM"
    assert right.startswith("INFO: Decode kernels are used for LOSSLESS ")


OFF = "Layers stay in BF16: "
STAYS = {
    "a long list": "of its elements are not within 15 powers of two.",
    "a long list, on": "qkv_proj stays in BF16: ",
    "kernels that fail": "qkv_proj stays in BF16: its kernels are switched off.",
    "float16": "qkv_proj stays in BF16: activations are torch.float16, not bfloat16.",
    "96 columns": "qkv_proj stays in BF16: K = 96 is not a multiple of 64.",
    "off": f"{OFF}there are no decode kernels.",
    "part off": f"{OFF}there are no decode kernels.",
    "a failed trial": f"{OFF}the kernels failed their trial.",
    "a float32 head": f"{OFF}head_dtype asks for torch.float32",
}


@pytest.mark.parametrize("case", STAYS)
def test_lossless_layers_that_cannot_be_packed_stay_as_they_are(computed: Any, case: str) -> None:
    answer = computed["lossless"][case]
    plain = "Bf16Head" if "head" in case else "Bf16LinearMethod"
    assert answer["method"] == ("UnquantizedLinearMethod" if case == "off" else plain)
    assert "weight_scale" not in answer["parameters"]
    assert answer["launches"] == []  # it is small
    assert max(answer["errors"]) < ROUNDED
    assert sum(STAYS[case] in line for line in answer["said"]) == 1
    off = any(word in case for word in ("off", "head", "trial"))
    first = "Bf16" if off else "Decode"
    using = f"INFO: Using {first}LosslessLinearKernel for LOSSLESS GEMM"
    assert [line for line in answer["said"] if "Using" in line] == [using]


def test_the_compile_cache_knows_which_lossless_layers_stay(computed: Any) -> None:
    answers = computed["lossless"]
    assert answers["packed"]["key"] == answers["packed again"]["key"]
    assert answers["packed"]["key"] != answers["a long list"]["key"]
    assert answers["a long list"]["key"] == answers["kernels that fail"]["key"]


def test_every_expert_is_compared(computed: Any) -> None:
    assert set(computed["self_check"]["draws"]) == {"4", "6", "32", "128"}
    assert all(found == [True, True] for found in computed["self_check"]["draws"].values())


def test_an_order_that_marlin_reads_alike_is_found(computed: Any) -> None:
    """By the last expert's bytes of the checkpoint, which are kept until the comparison."""
    orders = computed["self_check"]["orders"]
    assert orders["false"][:3] == [True, True, False]
    used, *kept, said = orders["true"]
    assert not used
    assert kept == [True, False]
    assert "MXFP4 experts are switched off" in said[0]
