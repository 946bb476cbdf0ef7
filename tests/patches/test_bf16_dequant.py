"""MXFP4 experts expanded to BF16 (vllm_sparkforge.bf16_experts), in the interpreter it is for.

The engine never runs in the test process; `probes/probe_logits.py` runs in theirs, once in each.
What is refused on a GPU is in test_selection.py.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from sparkforge.serving.profile import Watch
from tests import reference
from tests.patches import dequant_probe
from tests.patches.dequant_probe import (
    GREEDY_COUNT,
    GREEDY_PROMPT,
    MARGIN,
    POLICIES,
    too_little,
)
from tests.patches.probing import (
    MEDIAN_TOLERANCE,
    PROMPT,
    assert_close,
    relative_distance,
    result_of,
)
from tests.reference import TinyCheckpoint

METHOD = "Bf16ExpertsMethod"


@pytest.fixture(scope="module")
def seen(dequantized: Path) -> dict[str, Any]:
    return result_of(dequantized)


@pytest.fixture(scope="module")
def stock(
    tiny: TinyCheckpoint, stock_python: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    run = dequant_probe.make(tiny, tmp_path_factory.mktemp("stock"))
    return result_of(run(stock_python, "auto"))


# -- numerics ------------------------------------------------------------------


def test_every_value_is_exact(dequantized: Path) -> None:
    bits = np.load(dequantized / "values.npy")
    actual = (bits.astype(np.uint32) << np.uint32(16)).view(np.float32).astype(np.float64)

    magnitudes = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    values = np.concatenate((magnitudes, -magnitudes))
    byte = np.arange(256)
    pairs = values[np.stack((byte & 15, byte >> 4), axis=-1)]
    exact = pairs * np.exp2(np.arange(255.0) - 127)[:, None, None]
    largest = (2 - 2.0**-7) * 2.0**127
    beyond = np.abs(exact) > largest
    assert beyond.any(axis=(1, 2)).nonzero()[0].tolist() == [253, 254]

    np.testing.assert_array_equal(actual[:255][~beyond], exact[~beyond])
    np.testing.assert_array_equal(np.signbit(actual[:255]), np.signbit(exact))
    assert np.isinf(actual[:255][beyond]).all()
    assert np.isnan(actual[255]).all()


def test_logits_equal_the_reference(dequantized: Path, expected: npt.NDArray[np.float32]) -> None:
    assert_close(np.load(dequantized / "logits.npy"), expected)


WRONG_MODELS: dict[str, Callable[[reference.Model], reference.Model]] = {
    "no sinks": lambda m: _change(m, "sinks", lambda t: np.full_like(t, -1e9)),
    "window of one more": lambda m: m.replaced(config={"sliding_window": 33}),
    "no YaRN": lambda m: m.replaced(
        config={"rope_scaling": {**m.config["rope_scaling"], "factor": 1.0}}
    ),
    "no limit": lambda m: m.replaced(config={"swiglu_limit": 1e9}),
    "one layer's scales doubled": lambda m: _change(
        m, "3.mlp.experts.down_proj_scales", lambda t: t + 1
    ),
}


@pytest.mark.parametrize("name", WRONG_MODELS)
def test_a_wrong_model_is_noticed(
    name: str, model: reference.Model, expected: npt.NDArray[np.float32]
) -> None:
    """The control of the test above: what it would say of models that are a little wrong."""
    wrong = reference.logits(WRONG_MODELS[name](model), list(PROMPT))
    assert np.median(relative_distance(wrong, expected)) > 2 * MEDIAN_TOLERANCE


def test_greedy_tokens_agree(seen: dict[str, Any], model: reference.Model) -> None:
    tokens, margins = reference.greedy(model, GREEDY_PROMPT, GREEDY_COUNT)
    assert min(margins) > MARGIN, "choose another prompt: rounding could decide here"
    assert seen["by_name"]["tokens"] == tokens


@pytest.mark.parametrize("damage", ["nan", "overflow"])
def test_scales_beyond_bf16_are_an_error(seen: dict[str, Any], damage: str) -> None:
    failure = seen["damaged"][damage]
    assert failure["type"] == "ValueError"
    assert "model.layers.2.mlp.experts" in failure["message"]
    assert "expert 5 of w2_weight" in failure["message"]


# -- memory --------------------------------------------------------------------


def test_one_warning_tells_the_cost(dequantized: Path, tiny: TinyCheckpoint) -> None:
    lines = (dequantized / "log").read_text(encoding="utf-8").splitlines()
    # One in the whole process, in which five engines got as far as loading.
    (warning,) = [line for line in lines if "expands the MXFP4 experts" in line]
    assert "WARNING" in warning
    assert f"({tiny.packed_expert_bytes} bytes)" in warning
    assert f"({tiny.bf16_expert_bytes} bytes)" in warning
    assert f"{tiny.num_layers} layers x {tiny.num_experts} experts" in warning


def test_the_log_names_them_as_a_profile_does(dequantized: Path) -> None:
    watch = Watch({})
    for line in (dequantized / "log").read_text(encoding="utf-8").splitlines():
        watch.feed(line)
    assert "BF16_DEQUANT" in watch.seen["moe"]


def test_packed_weights_are_gone(seen: dict[str, Any], tiny: TinyCheckpoint) -> None:
    parameters = seen["by_name"]["parameters"]
    assert {p["dtype"] for p in parameters} == {"torch.bfloat16"}
    weights = sum(p["bytes"] for p in parameters if p["name"].endswith("_weight"))
    assert weights == tiny.bf16_expert_bytes
    # By the time a layer is done, not at the end of all.
    assert seen["by_name"]["freed"] == [True] * tiny.num_layers


def test_refused_before_loading_where_it_cannot_fit(
    seen: dict[str, Any], tiny: TinyCheckpoint
) -> None:
    for available in too_little(tiny):
        failure = seen["starved"][str(available)]
        assert failure["type"] == "ValueError"
        assert f"({available} bytes) are available" in failure["message"]
        assert f"({tiny.bf16_expert_bytes} bytes)" in failure["message"]
        assert not failure["loaded"]


def test_the_cost_is_counted_by_rank(seen: dict[str, Any]) -> None:
    weights = 24 * 32 * 3 * 2880 * 2880
    assert seen["shapes"]["whole"]["cost"] == {
        "packed": weights // 2 + weights // 32,
        "bf16": 2 * weights,
        "peak": 2 * weights + 32 * 2 * 2880 * 2880 * 2,
    }
    assert seen["shapes"]["two ranks"]["cost"]["bf16"] == weights
    # 720 is no multiple of the MXFP4 block; ranks hold 23 blocks each, the last one 21 and zeros.
    assert seen["shapes"]["four ranks"]["cost"]["bf16"] == 2 * weights * 736 // 2880


def test_ranks_share_the_memory_of_their_node(seen: dict[str, Any]) -> None:
    assert seen["memory"] == {
        "tight cgroup": 60,  # page cache counts as used there, and can be given back
        "two ranks, one node": 5,
        "bound, three ranks, two nodes": 5,
        "unbound, two ranks, two nodes": 10,
        "unbound, cgroup wider than a node": 130,
    }


def test_only_a_binding_limits_the_nodes(seen: dict[str, Any]) -> None:
    assert seen["policies"] == POLICIES


# -- dispatch ------------------------------------------------------------------


def test_stock_has_no_way_to_run_it(stock: dict[str, Any]) -> None:
    assert stock["auto"]["type"] == "NotImplementedError"
    assert "No MXFP4 MoE backend supports the deployment" in stock["auto"]["message"]
    assert "bf16_dequant" not in stock["auto"]["message"]


def test_without_the_option_the_error_names_it(seen: dict[str, Any], tiny: TinyCheckpoint) -> None:
    failure = seen["auto"]
    assert failure["type"] == "NotImplementedError"
    assert failure["message"].startswith(
        "No MXFP4 MoE backend supports the deployment configuration"
    )
    assert "--moe-backend bf16_dequant" in failure["message"]
    (given,) = re.findall("--additional-config '(.*?)'", failure["message"])
    assert json.loads(given) == {"sparkforge": {"experts": "bf16_dequant"}}
    assert f"({tiny.bf16_expert_bytes} bytes)" in failure["message"]
    assert not failure["loaded"]


def test_taken_by_name_also_where_mxfp4_runs_as_it_is(seen: dict[str, Any]) -> None:
    assert seen["amx"][""]["backend"] == "CPU"
    by_name = seen["amx"]["bf16_dequant"]
    assert (by_name["method"], by_name["experts"]) == (METHOD, "X86CPUUnquantizedExperts")
    (warning,) = by_name["warnings"]
    assert f"({by_name['cost']['bf16']} bytes)" in warning
    assert warning.endswith("keeps them in MXFP4: leave the option out.")
    (elsewhere,) = seen["shapes"]["whole"]["warnings"]
    assert elsewhere.endswith("so do the bytes read for every token.")


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        ("expert parallel", "expert parallelism"),
        ("odd intermediate", "multiples of the MXFP4 block"),
        ("lora", "does not support LoRA"),
    ],
)
def test_refused_with_the_reason(seen: dict[str, Any], case: str, reason: str) -> None:
    assert seen["shapes"][case]["type"] == "ValueError"
    assert reason in seen["shapes"][case]["message"]


def test_taken_by_name_only(seen: dict[str, Any]) -> None:
    assert seen["shapes"]["auto"]["type"] == "NotImplementedError"
    for case in ("whole", "two ranks", "four ranks"):
        assert seen["shapes"][case]["method"] == METHOD


# -- helpers -------------------------------------------------------------------


def _change(
    model: reference.Model,
    suffix: str,
    change: Callable[[npt.NDArray[Any]], npt.NDArray[Any]],
) -> reference.Model:
    changed = {name: change(t) for name, t in model.tensors.items() if suffix in name}
    assert changed
    return model.replaced(tensors=changed)
