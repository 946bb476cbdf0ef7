"""The preflight's checkpoint and reference, and what its limits let through."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from sparkforge.checkpoints.tiny import make_trial
from sparkforge.serving import preflight
from sparkforge.serving.options import StartError
from tests import reference as gptoss

Tensors = dict[str, npt.NDArray[Any]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("preflight") / "checkpoint"
    make_trial(made)
    return made


@pytest.fixture(scope="module")
def model(folder: Path) -> gptoss.Model:
    """The checkpoint, for computing in float64."""
    found = gptoss.load(folder)
    floats = {name: one for name, one in found.tensors.items() if one.dtype == np.float32}
    return found.replaced(tensors={name: one.astype(np.float64) for name, one in floats.items()})


@pytest.fixture(scope="module")
def reference(folder: Path) -> Any:
    return json.loads((folder / preflight.REFERENCE).read_text())


def chosen(model: gptoss.Model, part: str, change: Callable[[Any], Any]) -> Tensors:
    found = {name: change(one) for name, one in model.tensors.items() if part in name}
    assert found
    return found


def distances(model: gptoss.Model, reference: Any) -> list[float]:
    """What a server with this model would be away from the reference, by its prompts."""
    found = []
    for wanted in reference["answers"]:
        tokens = wanted["tokens"]
        logits = gptoss.logits(model, tokens)
        rows = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
        answer = {
            "choices": [
                {
                    "prompt_logprobs": [
                        None,
                        *(
                            {str(token): {"logprob": float(rows[i, token])}}
                            for i, token in enumerate(tokens[1:])
                        ),
                    ],
                    "token_ids": [one["token"] for one in wanted["next"]],
                    "logprobs": {"token_logprobs": [one["logprob"] for one in wanted["next"]]},
                }
            ]
        }
        one, problem = preflight.compare(wanted, answer)
        assert problem == ""
        found += one
    return found


LENGTHS = (2, 17, 48, 100)  # of prompts: within and beyond a window and YaRN's original context
DECODED = 4  # tokens after each prompt: steps of one row, for which there are other kernels
DIGITS = 4


def test_the_answers_are_those_of_the_definition(model: gptoss.Model, reference: Any) -> None:
    """Else write this one, as JSON and a new line, to sparkforge/checkpoints/trial.json.

    ``prompt``: the natural log-probability of each token but the first, after those before it;
    ``next``: of the likeliest tokens that follow, each with its lead over the second likeliest.
    """
    random = np.random.RandomState(4)  # the legacy generator's stream is frozen
    answers = []
    for length in LENGTHS:
        tokens = [int(token) for token in random.randint(32, 127, size=length)]
        following, leads = gptoss.greedy(model, tokens, DECODED)
        text = [*tokens, *following]
        logits = gptoss.logits(model, text)
        rows = logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)
        found = [round(float(rows[i, token]), DIGITS) for i, token in enumerate(text[1:])]
        after = zip(following, found[length - 1 :], leads, strict=True)
        expected = [
            {"token": token, "logprob": logprob, "lead": round(lead, DIGITS)}
            for token, logprob, lead in after
        ]
        answers.append({"tokens": tokens, "prompt": found[: length - 1], "next": expected})
    digest = hashlib.sha256(json.dumps(answers, sort_keys=True).encode()).hexdigest()
    assert reference == {"schema": 1, "answers": answers, "sha256": digest}


def test_it_is_the_same_everywhere_and_small(folder: Path) -> None:
    sums = {one.name: hashlib.sha256(one.read_bytes()).hexdigest()[:12] for one in folder.iterdir()}
    assert sums["model.safetensors"] == "add0ed26a855"
    assert sums[preflight.REFERENCE] == "8aa9a45041c0"
    assert sum(one.stat().st_size for one in folder.iterdir()) < 10_000_000


def test_rounding_stays_within_the_limits(model: gptoss.Model, reference: Any) -> None:
    random = np.random.RandomState(1)

    def rounded(one: npt.NDArray[Any]) -> npt.NDArray[Any]:
        # by up to BF16's step, which no kernel of ours exceeds
        factor = 1 + random.uniform(-(2**-8), 2**-8, one.shape)
        return one * factor if one.dtype == np.float64 else one

    noisy = model.replaced(tensors={name: rounded(one) for name, one in model.tensors.items()})
    found = distances(noisy, reference)
    assert max(found) > 0.001
    assert preflight.judge(found) == ""


WRONG: dict[str, Callable[[gptoss.Model], gptoss.Model]] = {
    "no sinks": lambda m: m.replaced(tensors=chosen(m, "sinks", lambda one: one - 50)),
    "no window": lambda m: m.replaced(config={"layer_types": ["full_attention"] * 2}),
    "no YaRN": lambda m: m.replaced(
        config={"rope_scaling": {**m.config["rope_scaling"], "factor": 1.0}}
    ),
    "swapped nibbles": lambda m: m.replaced(
        tensors=chosen(m, "_blocks", lambda one: (one >> 4) | (one << 4))
    ),
    "gate and up in halves": lambda m: m.replaced(
        tensors=chosen(m, "gate_up", lambda one: np.concatenate([one[:, ::2], one[:, 1::2]], 1))
    ),
    "scales of down doubled": lambda m: m.replaced(
        tensors=chosen(m, "down_proj_scales", lambda one: one + 1)
    ),
    "no bias of down": lambda m: m.replaced(
        tensors=chosen(m, "down_proj_bias", lambda one: one * 0)
    ),
    "one expert of 16 gone": lambda m: m.replaced(
        tensors=chosen(m, "down_proj", lambda one: np.concatenate([one[:1] * 0, one[1:]]))
    ),
    "three experts, not four": lambda m: m.replaced(config={"num_experts_per_tok": 3}),
    "no limit of the activation": lambda m: m.replaced(config={"swiglu_limit": 100.0}),
}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_a_wrong_model_does_not(
    model: gptoss.Model, reference: Any, wrong: Callable[[gptoss.Model], gptoss.Model]
) -> None:
    assert "nats from the reference" in preflight.judge(distances(wrong(model), reference))


def test_what_is_no_number_does_not() -> None:
    assert "the limits are" in preflight.judge([0.0] * 9 + [float("nan")])


WANTED = {
    "tokens": [1, 2],
    "prompt": [-1.0],
    "next": [
        {"token": 5, "logprob": -0.5, "lead": 0.2},
        {"token": 6, "logprob": -0.1, "lead": 3},
    ],
}


def answer(tokens: list[int]) -> Any:
    return {
        "choices": [
            {
                "prompt_logprobs": [None, {"2": {"logprob": -1.1}}],
                "token_ids": tokens,
                "logprobs": {"token_logprobs": [-0.5, -0.3]},
            }
        ]
    }


def test_a_close_race_may_end_otherwise_and_a_clear_one_not() -> None:
    for tokens, distances in (([5, 6], [0.1, 0.0, 0.2]), ([9, 9], [0.1])):
        found, problem = preflight.compare(WANTED, answer(tokens))
        assert found == pytest.approx(distances)
        assert problem == ""
    assert preflight.compare(WANTED, answer([5, 9]))[1] == "token 2 after 2 differs"


def test_a_pass_counts_for_the_same_driver_and_backends_only(tmp_path: Path) -> None:
    def key(driver: str, words: str) -> str:
        return preflight.key(tmp_path, preflight.small_options(words.split()), driver)

    (tmp_path / preflight.REFERENCE).write_text("{}")
    first = key("580.95", "--moe-backend marlin")
    assert key("580.95", "--moe-backend=marlin --seed 1") == first
    others = [
        key("590.1", "--moe-backend marlin"),
        key("580.95", "--moe-backend triton"),
        key("580.95", "--moe-backend marlin --decode-kernels off"),
    ]
    (tmp_path / preflight.REFERENCE).write_text("{} ")
    assert first not in (*others, key("580.95", "--moe-backend marlin"))
    (tmp_path / preflight.REFERENCE).unlink()
    with pytest.raises(StartError, match="preflight=always"):
        key("", "")
