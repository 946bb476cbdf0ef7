"""Every endpoint, whole and streamed, says the same of each reply of gpt-oss, wherever it is cut.

No token of Harmony is in a text; usage, statuses and ends are right; what the official packages
make of the events is the whole answer; and what a client sends back is rendered to what the model
wrote, less the analysis that Harmony drops after a final answer.
"""

import re
from pathlib import Path
from typing import Any

import pytest

from sparkforge.build.serve import chat_model, in_environment
from tests.patches import probing
from tests.patches.conformance import ENDPOINTS, KINDS, MESSAGES, REPLIES, RESPONSES
from tests.patches.scripting import Scripts

Faults = dict[str, dict[str, list[str]]]
CUTS = (2, 4, 6, 9, 13, 16, 20, 24, 27, 29)
"""Of the reply with all kinds of messages: in each header, each text, and between them."""

# What vLLM does not do right, by endpoint.
_STREAMED = "output of the response is not what was streamed: "
KNOWN = {
    "half or no arguments are an error": (MESSAGES, r"whole: 400: .*(Expecting|Unterminated|dict)"),
    "arguments are written again": ("", r"history.*[|'][^|']*\{\"(a|input)\": "),
    "no signature at a thought's start": (MESSAGES, r"ThinkingBlock\.signature"),
    "arguments count as reasoning": ("", r"usage: \[(\d+, \d+), \d+\], not \[\1, \d+\]"),
    "a thought's status": (RESPONSES, r"parts: .*'reasoning'.*incomplete|\['status', None"),
    "an empty item is not streamed": (RESPONSES, rf"{_STREAMED}\[\d, \d\]"),
    "an empty item is counted": (RESPONSES, r": output_index 1 of item 0"),
    "fields of the event in a call": (RESPONSES, rf"{_STREAMED}.*sequence_number"),
    "a custom call's status": (RESPONSES, rf"{_STREAMED}.*\['status', 'completed', None\]"),
    "half a custom call is raw": (RESPONSES, r"custom_tool_call: deltas"),
    "a cut role is the answer": ("", r"\['content', '', 'to'"),
    "half a character is not streamed": (RESPONSES, "deltas .*\ufffd"),
    "no phase": (RESPONSES, r"history( exactly)?: .*final.*I look"),
    "the end of parallel calls": ("", r"history exactly: .*<\|call\|><\|start\|>assistant"),
    "a garbled role": ("", r"^garbled role: "),
    "a call without tools": ("", r"nothing is seen of \[\('call'|, not \[\['content', '', '\{"),
}


def unknown(faults: Faults, name: str, endpoint: str) -> list[str]:
    """Return what is wrong apart from what is known."""
    found = [f"{name}: {fault}" for fault in faults[name][endpoint]]
    rules = [rule for place, rule in KNOWN.values() if place in ("", endpoint)]
    return [one for one in found if not any(re.search(rule, one) for rule in rules)]


@pytest.fixture(scope="module")
def faults(patched_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Faults:
    folder = tmp_path_factory.mktemp("conformance")
    model = chat_model(folder, in_environment(patched_python))
    given = {"model": str(model), "replies": dict.fromkeys(REPLIES)}
    found: Faults = probing.ask(patched_python, "probe_conformance", given, folder=folder)
    return found


@pytest.mark.parametrize(
    ("name", "endpoint"),
    [(name, endpoint) for name, reply in REPLIES.items() for endpoint in reply.endpoints],
)
def test_every_cut_is_right(faults: Faults, name: str, endpoint: str) -> None:
    assert not unknown(faults, name, endpoint)


@pytest.mark.parametrize("name", KNOWN)
@pytest.mark.xfail(strict=True, reason="told to those who mend the series")
def test_it_is_mended(faults: Faults, name: str) -> None:
    place, rule = KNOWN[name]
    found = [
        fault
        for reply, by_endpoint in faults.items()
        for endpoint, lines in by_endpoint.items()
        for fault in lines
        if place in ("", endpoint) and re.search(rule, f"{reply}: {fault}")
    ]
    assert not found


@pytest.fixture(scope="module")
def served_faults(
    patched_python: Path, scripted: Scripts, tmp_path_factory: pytest.TempPathFactory
) -> Faults:
    """What is wrong behind the front door, with an engine and its grammars."""
    given: dict[str, Any] = {"url": scripted.url, "key": "the-key", "replies": {}, "words": {}}
    for name, reply in KINDS.items():
        text = "".join(f"{start}{one.text}{end}" for one, start, end in reply.written())
        given["words"][name] = scripted.write(name, text)
        given["replies"][name] = [200]
    given["replies"]["preamble"] += CUTS
    folder = tmp_path_factory.mktemp("served")
    found: Faults = probing.ask(patched_python, "probe_conformance", given, folder=folder)
    return found


@pytest.mark.parametrize("endpoint", ENDPOINTS)
@pytest.mark.parametrize("name", KINDS)
def test_it_is_right_with_an_engine(served_faults: Faults, name: str, endpoint: str) -> None:
    assert not unknown(served_faults, name, endpoint)
