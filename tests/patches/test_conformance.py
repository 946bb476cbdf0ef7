"""Every endpoint, whole and streamed, says the same of each reply of gpt-oss, wherever it is cut.

No token of Harmony is in a text; usage, statuses and ends are right; what the official packages
make of the events is the whole answer; and what a client sends back is rendered to what the model
wrote, less the analysis that Harmony drops after a final answer.
"""

from pathlib import Path
from typing import Any

import pytest

from sparkforge.build.serve import chat_model, in_environment
from tests.patches import probing
from tests.patches.conformance import ENDPOINTS, KINDS, REPLIES
from tests.patches.scripting import Scripts

Faults = dict[str, dict[str, list[str]]]
CUTS = (2, 4, 6, 9, 13, 16, 20, 24, 27, 29)
"""Of the reply with all kinds of messages: in each header, each text, and between them."""


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
    assert not faults[name][endpoint]


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
    assert not served_faults[name][endpoint]
