"""The entrypoint with its preflight, on a stand-in for vLLM; with vLLM itself: tests/patches."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from sparkforge.serving.options import EX_CONFIG
from tests.haproxy import needs_haproxy
from tests.integration.test_warmup import Start, start
from tests.support import PATIENCE_S

pytestmark = needs_haproxy

__all__ = ["start"]  # a fixture

ANSWERS = [
    {
        "tokens": [40, 41, 42],
        "prompt": [-1.5, -2.5],
        "next": [{"token": 7, "logprob": -0.5, "lead": 2.0}],
    }
]


@pytest.fixture
def variables(tmp_path: Path) -> dict[str, str]:
    """An image with a reference, and a stand-in that answers as that says."""
    folder = tmp_path / "share" / "preflight"
    folder.mkdir(parents=True)
    for name in (folder / "reference.json", tmp_path / "answers.json"):
        name.write_text(json.dumps({"schema": 1, "answers": ANSWERS}))
    served = {"moe_backend": "marlin", "expect": {"moe": "MARLIN"}}
    (tmp_path / "served.json").write_text(json.dumps(served))
    return {
        "SPARKFORGE_SHARE": str(tmp_path / "share"),
        "SPARKFORGE_CHECKS": "preflight=always",
        "SPARKFORGE_PROFILE": str(tmp_path / "served.json"),
        "FAKE_REFERENCE": str(tmp_path / "answers.json"),
    }


def test_a_right_one_is_followed_by_the_server(start: Start, variables: dict[str, str]) -> None:
    one = start(**variables)
    said = one.ready()
    assert "preflight: log-probabilities 0.00 nats from the reference" in said
    trial, real = said.index("/share/preflight --uds "), said.index("/model --uds ")
    assert trial < said.index("preflight: log-prob") < real
    command = said[trial:].splitlines()[0]
    assert "--moe-backend marlin" in command
    assert "--enforce-eager" in command
    assert re.search(r"ready after \d+ s: checks \d+, preflight \d+, vLLM \d+, warm-up", said)
    assert one.health() == "well"
    one.stop()
    (mark,) = one.folder.glob("jit/*/preflight")
    assert len(mark.read_text()) == 64


@pytest.mark.parametrize(
    ("what", "error"),
    [
        ("number", "log-probabilities 0.00 nats from the reference in the median, 19 of 20"),
        ("token", "token 1 after 3 differs"),
        ("late backend", "vLLM chose the moe backend TRITON; the profile says MARLIN"),
        ("no answer", "KeyError: "),
    ],
)
def test_a_wrong_one_ends_the_start_before_the_model_is_touched(
    start: Start, variables: dict[str, str], tmp_path: Path, what: str, error: str
) -> None:
    answers: Any = json.loads(json.dumps(ANSWERS))
    if what == "number":
        answers[0]["prompt"] = [-1.5, -2.0]
    elif what == "token":
        answers[0]["next"][0]["token"] = 8
    elif what == "no answer":
        answers = []
    else:
        variables["FAKE_LATE"] = "INFO [mxfp4.py:8] Using 'TRITON' Mxfp4 MoE backend."
    Path(variables["FAKE_REFERENCE"]).write_text(json.dumps({"answers": answers}))
    one = start(**variables)
    assert one.process.wait(PATIENCE_S) == EX_CONFIG
    said = one.text()
    assert f"error: {error}" in said
    assert "the preflight failed" in said
    assert "/model --uds " not in said and "Traceback" not in said
    assert not list(tmp_path.glob("jit/*/preflight"))
