"""Which layers take the decode kernels that join operators, and what becomes of wrong kernels.

As in test_decode_kernels.py, a contract stands in for the kernels (probes/decode_contract.py); what
they are used for is tested in test_decode_half.py and test_decode_rotary.py.
"""

from collections.abc import Callable
from typing import Any

import pytest

NORMS, ROTARY = "norms and routers", "rotary embedding and KV cache"
SHAPES = {NORMS: "32 x 192", ROTARY: "4 x 2"}
LAYERS = {NORMS: 3, ROTARY: True}
"""How many are joined, or whether one is."""
REFUSED = {
    NORMS: {
        "another backend": "the experts are not MXFP4 with Marlin or CUTLASS as MoE backend",
        "LoRA": "LoRA is enabled",
        "another router": "experts are chosen by OtherRouter",
        "float16": "activations are torch.float16, not bfloat16",
        "two devices": "the model is spread over devices by more than tensor parallelism",
        "spread rows": "rows are spread over devices between norms",
        "offloaded": "weights are offloaded to the host",
        "k = 96": "a hidden size of 96",
        "20 experts": "20 experts",
        "float16 norm": "norms and routers are not bfloat16",
    },
    ROTARY: {
        "float16": "activations are torch.float16, not bfloat16",
        "a cache in E5M2": "the KV cache is fp8_e5m2, neither bfloat16 nor E4M3",
        "another backend": "the attention backend FLEX_ATTENTION",
        "an encoder": "the attention has no cache of its own",
        "another layer's cache": "the attention has no cache of its own",
        "heads of 128": "heads of 128, 64 of them rotated",
        "half rotated": "heads of 64, 32 of them rotated",
        "BF16 cosines": "another kind of rotary embedding",
    },
}
UNSAID = {NORMS: ("a pipeline",), ROTARY: ()}
FITS = {NORMS: ("padded", "the largest"), ROTARY: ("fits",)}
CASES = [(kind, layer) for kind in SHAPES for layer in (*REFUSED[kind], *UNSAID[kind], *FITS[kind])]
TOO_LARGE, ERROR = "more than 0.02", "RuntimeError: CUDA driver: CUDA_ERROR_ILLEGAL_ADDRESS"
ANYWHERE = {"3 % too large": TOO_LARGE, "NaN": "they differ by nan", "an error": ERROR}
WRONG = {
    NORMS: ANYWHERE
    | {
        "add_norm 3 % too large": TOO_LARGE,
        "experts_combine 3 % too large": TOO_LARGE,
        "route NaN": "they differ by nan",
        "an expert twice": "ValueError: a row has an expert twice",
        "experts beside those chosen": TOO_LARGE,
        "padding that has experts": "ValueError: a row that pads has experts",
    },
    ROTARY: ANYWHERE
    | {
        "rotated the other way": TOO_LARGE,
        "another slot": "ValueError: a slot that is no row's was written",
        "padding that is written": "ValueError: a slot that is no row's was written",
        "nothing written": TOO_LARGE,
    },
}
WRONG_CASES = [(kind, name) for kind, names in WRONG.items() for name in names]
RIGHT_CASES = [(NORMS, "right"), (NORMS, "1 % too large"), (NORMS, "large logits")]
RIGHT_CASES += [(ROTARY, "right")]

Choice = Callable[[str], Any]


@pytest.fixture(scope="module")
def choice(computed: Any) -> Choice:
    """A kind's answers; where one kind's are missing, the other's are there."""
    return lambda kind: computed["half"]["choice"] if kind == NORMS else computed["rotary"]


@pytest.mark.parametrize(("kind", "layer"), CASES)
def test_a_layer_that_it_cannot_take_leaves_all_as_they_are(
    choice: Choice, kind: str, layer: str
) -> None:
    answers, joined = choice(kind)["refused"], LAYERS[kind] if layer in FITS[kind] else 0
    reasons = [reason for name, reason in REFUSED[kind].items() if name == layer]
    said = [f"INFO: Decode kernels are not used for {kind}: {reason}." for reason in reasons]
    assert answers[f"{layer}, auto"] == {"joined": joined, "said": said}
    assert answers[f"{layer}, off"] == {"joined": 0, "said": []}


@pytest.mark.parametrize("option", ["auto", "on"])
@pytest.mark.parametrize(("kind", "name"), RIGHT_CASES)
def test_right_kernels_pass(choice: Choice, kind: str, name: str, option: str) -> None:
    answer = choice(kind)["self_check"][f"{name}, {option}"]
    assert answer["used"]
    assert not answer["compared again"]
    (line,) = answer["said"]
    assert line.startswith(f"INFO: Decode kernels are used for {kind} {SHAPES[kind]}: ")


@pytest.mark.parametrize(("kind", "name"), WRONG_CASES)
def test_wrong_kernels_are_switched_off(choice: Choice, kind: str, name: str) -> None:
    """Or are an error where they were asked for."""
    checks, reason = choice(kind)["self_check"], WRONG[kind][name]
    answer = checks[f"{name}, auto"]
    assert not answer["used"]
    assert not answer["compared again"]
    (line,) = answer["said"]
    assert line.startswith(f"WARNING: Decode kernels for {kind} are switched off. ")
    assert reason in line
    raised = checks[f"{name}, on"]["raised"]
    assert raised.startswith(f"decode_kernels is on: those for {kind} {SHAPES[kind]} ")
    assert reason in raised
