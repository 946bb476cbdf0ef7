"""What gpt-oss writes reaches the client as it was meant: vLLM's Harmony parser, token by token."""

from pathlib import Path
from typing import Any

import pytest

from tests.patches.probing import ask

_NEXT = "<|start|>assistant<|channel|>"
ANSWER = (
    f"<|channel|>analysis<|message|>Think hard.<|end|>{_NEXT}final<|message|>Hello you.<|return|>"
)
CALL = f"{_NEXT}commentary to=functions.f <|constrain|>json<|message|>"
LONG = (
    f"<|channel|>analysis<|message|>First.<|end|>{_NEXT}analysis<|message|>Second.<|end|>"
    f'{_NEXT}commentary<|message|>I look.<|end|>{CALL}{{"a":  1}}<|call|>{CALL}{{"a": 2}}<|call|>'
    f"{_NEXT}final<|message|>Done.<|return|>"
)
CUT = [[ANSWER, None], [LONG, None]]
UNASKED = "<|channel|>commentary to=python code<|message|>print(1)<|call|>"
FRAMES = {
    "Hi": [None, "Hi", []],
    "<|message|>Hi<|return|>": [None, "Hi", []],
    "<|channel|>Final<|message|>Hi<|return|>": [None, "Hi", []],
    "<|channel|>thoughts<|message|>Hi<|return|>": [None, "Hi", []],
    "<|channel|>final<|message|>Hi<|reserved_200004|>!<|return|>": [None, "Hi!", []],
    "<|channel|>final<|message|>Hi<|return|> and on": [None, "Hi", []],
    "<|channel|>final Hi<|return|>": [None, "Hi", []],
    "<|channel|>analysis<|message|>Why?<|end|>Hi<|return|>": ["Why?", "Hi", []],
    "<|channel|>analysis<|message|>Why?<|end|>assistant<|channel|>final<|message|>Hi": [
        *("Why?", "Hi", []),
    ],
    f"<|channel|>analysis<|message|>Why?{_NEXT}final<|message|>Hi": ["Why?", "Hi", []],
    "<|channel|>final<|message|>Hi<|end|><|start|>user<|message|>No<|end|>": [None, "Hi", []],
    "<|start|>assistant to=functions.f<|channel|>commentary to=functions.f"
    " <|constrain|>json<|message|>{}<|call|>": [None, None, [["f", "{}"]]],
}
STOPS: list[tuple[str, str, list[Any]]] = [
    (ANSWER, "you", ["Think hard.", "Hello ", []]),
    (ANSWER, "lo y", ["Think hard.", "Hel", []]),
    (ANSWER, "hard", ["Think ", None, []]),
    (LONG, "ook", ["First.\nSecond.", "I l", []]),
    (LONG, '"a', ["First.\nSecond.", "I look.", []]),
    (ANSWER, "nowhere", ["Think hard.", "Hello you.", []]),
]

ENDS = [
    [f'{CALL}{{"a": 1}}<|call|>', "stop"],
    [f'{CALL}{{"a', "length"],
    [f"{CALL}<|call|>", "stop"],
]

FUNCTION: dict[str, Any] = {"name": "f", "parameters": {"type": "object"}}
STRICT = {"tools": [{"type": "function", "function": {**FUNCTION, "strict": True}}]}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}}
GRAMMARS = [
    STRICT,
    {**STRICT, "parallel_tool_calls": False},
    {"tools": [{"type": "function", "function": FUNCTION}], "response_format": SCHEMA},
]
THOUGHT = "<|channel|>analysis<|message|>Why?<|end|><|start|>assistant"
ONE = CALL.removeprefix("<|start|>assistant") + "{}"
OUTPUTS = [
    f"{THOUGHT}{ONE}",
    f"{THOUGHT}{ONE}<|end|>{CALL}{{}}",
    f"{THOUGHT}<|channel|>commentary<|message|>I look.<|end|><|start|>assistant{THOUGHT}{ONE}",
]


@pytest.fixture(scope="module")
def answers(patched_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The whole answer and two streamed ones for each cut of each case."""
    cases: list[list[Any]] = [*CUT, [UNASKED, None], *([frame, None] for frame in FRAMES)]
    cases += [[output, [stop, "xxxxxxxx"]] for output, stop, _ in STOPS]
    folder = tmp_path_factory.mktemp("agents")
    asked = {"cases": cases, "responses": ENDS, "outputs": OUTPUTS, "grammars": GRAMMARS}
    answer = ask(patched_python, "probe_agents", asked, folder=folder)
    found, first, second = answer["answers"], len(CUT) + 1, len(CUT) + 1 + len(FRAMES)
    return answer | {
        "cut": found[:first],
        "frames": found[first:second],
        "stops": found[second:],
    }


def test_incomplete_frames_are_read(answers: Any) -> None:
    for (frame, wanted), found in zip(FRAMES.items(), answers["frames"], strict=True):
        assert found[-1][0] == wanted, frame
    # a cut within a header gives no part of it
    for cuts in answers["cut"]:
        texts = {text for cut in cuts for text in cut[0][:2] if text}
        assert not any("<|" in text or "functions" in text for text in texts)


def test_streamed_answers_equal_whole_ones(answers: Any) -> None:
    for cuts in answers["cut"]:
        for whole, *streamed in cuts:
            assert all(one == whole for one in streamed)
    assert answers["cut"][1][-1][0] == [
        *("First.\nSecond.", "I look.\nDone."),
        [["f", '{"a":  1}'], ["f", '{"a": 2}']],
    ]
    assert answers["cut"][2][-1][0] == [None, "print(1)", []]


def test_stop_strings_are_in_no_text(answers: Any) -> None:
    for (_, stop, wanted), (found,) in zip(STOPS, answers["stops"], strict=True):
        assert all(one == wanted for one in found), stop


def test_a_stop_string_that_is_no_text_is_refused(answers: Any) -> None:
    assert "no text" in answers["refused"]


def test_the_stream_of_responses_says_what_was_cut(answers: Any) -> None:
    assert answers["responses"] == [
        [["function_call", '{"a": 1}', "completed"]],
        [["function_call", '{"a', "incomplete"]],
        [["function_call", "", "completed"]],
    ]


def test_strict_tools_may_be_called_in_parallel(answers: Any) -> None:
    assert answers["admitted"] == [[True] * 3, [True, False, True], [True] * 3]
