"""What agents send to gpt-oss: tools, options, histories and parts of content."""

from pathlib import Path
from typing import Any

import pytest

from tests.patches.probing import ask

Answers = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def answers(
    patched_python: Path, stock_python: Path, tmp_path_factory: pytest.TempPathFactory
) -> Answers:
    found = {}
    for name, python in (("patched", patched_python), ("stock", stock_python)):
        folder = tmp_path_factory.mktemp(name)
        found[name] = ask(python, "probe_agents_in", folder=folder)
    return found


def in_order(text: str, *parts: str) -> bool:
    places = [text.find(part) for part in parts]
    return -1 not in places and places == sorted(places)


def test_schemas_are_rendered_whole(answers: Answers) -> None:
    whole = ("// Line one\n// line two\n", "city?: string", 'how?: "fast" | 1 | null,')
    assert in_order(answers["patched"]["schema"], *whole)
    assert "how?: any" in answers["stock"]["schema"]


def test_history_is_in_the_model_s_order(answers: Answers) -> None:
    order = ("analysis<|message|>Why", "commentary<|message|>Wait", "to=functions.")
    for name in ("turn", "items"):
        assert in_order(answers["patched"][name], *order)
        assert not in_order(answers["stock"][name], *order)


def test_tools_of_codex_are_functions(answers: Answers) -> None:
    found = answers["patched"]
    assert in_order(
        found["codex"], "// start: LINE+", "apply_patch = (_", "input: string", "mcp__read"
    )
    assert "web_search" not in found["codex"]
    again = ('functions.apply_patch<|channel|>commentary json<|message|>{"input":"a \\"b\\""}',)
    assert in_order(found["codex again"], *again, "Done", "to=functions.mcp__read", "one\ntwo")
    custom = ["custom_tool_call", "patch", None]
    assert found["calls"] == [custom, ["function_call", "read", "mcp"]]
    assert "type f = " in answers["patched"]["new tool"]
    for name in ("codex", "new tool"):
        assert "Error" in answers["stock"][name]


def test_text_is_read_and_other_parts_are_refused(answers: Answers) -> None:
    assert "Look\nhere" in answers["patched"]["texts"]
    assert in_order(answers["patched"]["one id"], "functions.f to=assistant", "functions.g to=")
    for name in ("image", "input image"):
        assert "reads text only, not content of type" in answers["patched"][name]
        assert "<|start|>user" in answers["stock"][name]


def test_options_work_or_are_refused(answers: Answers) -> None:
    assert "Reasoning: high" in answers["patched"]["effort"]
    assert "Reasoning: medium" in answers["stock"]["effort"]
    assert "does not support: add_generation_prompt" in answers["patched"]["continue"]
    assert answers["stock"]["continue"].endswith("<|start|>assistant")
    assert "cannot continue" in answers["patched"]["prefill"]
    assert "cannot continue" not in answers["stock"]["prefill"]
    assert answers["patched"]["nulls"].endswith("Hi<|end|><|start|>assistant")


def test_only_allowed_tools_are_there(answers: Answers) -> None:
    for name in ("allowed", "allowed item"):
        assert "type f = " in answers["patched"][name]
        assert "type g = " not in answers["patched"][name]
    assert "Error" in answers["stock"]["allowed"]
    assert "type g = " in answers["stock"]["allowed item"]


def test_tools_of_a_server_are_left_out(answers: Answers) -> None:
    for name in ("server tool", "chat tool"):
        assert "type f = " in answers["patched"][name]
        assert "Error" in answers["stock"][name]


def test_a_cut_call_is_answered_in_messages(answers: Answers) -> None:
    assert answers["patched"]["cut call"] == ["f", {}, "max_tokens"]
    assert answers["stock"]["cut call"] != answers["patched"]["cut call"]
