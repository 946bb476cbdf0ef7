"""Chats, reasoning, tools and the warm-up with vLLM itself, over HTTP and with no network.

The checkpoint's words are built in (sparkforge/checkpoints/chat.py), so nothing is learnt
here about a model. Vocabulary, templates, parsers, grammars and endpoints are those that gpt-oss
has. All tests share one server, started as a Spark's is: parsers of its profile, the whole warm-up,
compiled kernels, a kept folder.
"""

import json
import re
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import requests

from sparkforge.build.serve import chat_model, in_environment
from sparkforge.check import accept, subject
from sparkforge.checkpoints.chat import ANSWER, ARGUMENTS, JSON_ANSWER, REASONING, TOOL, TOOL_ANSWER
from sparkforge.cli.main import main
from sparkforge.core.run import group_alive
from sparkforge.pins import pins
from sparkforge.runtime import client
from sparkforge.serving import preflight
from sparkforge.serving.profile import Watch
from tests.patches.checkout import PINS
from tests.patches.served import NO_NETWORK, READY_S, Served, serving
from tests.support import PATIENCE_S, ROOT, linked_checkout

CHAT = "/v1/chat/completions"
RESPONSES = "/v1/responses"
ASKED = {"role": "user", "content": "What is the weather in Paris?"}
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
FUNCTION = {"name": TOOL, "description": "Weather of a city", "parameters": PARAMETERS}
TOOLS = [{"type": "function", "function": FUNCTION}]
NAMED = {"type": "function", "function": {"name": TOOL}}
SCHEMA = {
    "type": "object",
    "properties": {"temperature": {"type": "integer"}},
    "required": ["temperature"],
    "additionalProperties": False,
}
# of the Spark's profile
TAKEN = (
    "reasoning_parser tool_call_parser exclude_tools_when_none prefix_caching warm_up vocabulary"
)


def ask_target(python: Path, code: str, *arguments: str) -> bytes:
    """Run code with the target's interpreter, which has the vocabulary."""
    command: list[str | Path] = [python, "-c", code, *arguments]
    env = {"PYTHONPATH": str(ROOT)}
    return subprocess.run(command, env=env, capture_output=True, check=True).stdout


@pytest.fixture(scope="module")
def model(patched_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chat_model(tmp_path_factory.mktemp("chat"), in_environment(patched_python))


@pytest.fixture(scope="module")
def server(
    patched_python: Path, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    spark = PINS.profile_of(PINS.target("spark")).document()
    changes = {name: spark[name] for name in TAKEN.split()}
    # vLLM's CPU sampler is compiled by torch, also where the model is not
    variables = {
        **NO_NETWORK,
        "TORCH_COMPILE_DISABLE": "0",
        "SPARKFORGE_EXTRA_ARGS": "--mxfp4-layers qkv,o=mxfp8",
    }
    folder = tmp_path_factory.mktemp("served")
    with serving(patched_python, folder, variables, model=model, **changes) as one:
        one.wait_for("warm-up 1/", READY_S)
        said = one.health()
        assert said.returncode == 1
        assert said.stderr.startswith("starting: ")
        one.wait_for("ready after", READY_S)
        one.compiled = compiled(one)
        yield one


def compiled(one: Served) -> set[Path]:
    """Return what the server's folder has of compiled kernels."""
    ends = (".so", ".cpp", ".py")
    return {path for path in one.folder.glob("jit/**/*") if path.suffix in ends}


def told(reply: requests.Response) -> dict[str, Any]:
    assert reply.status_code == 200, reply.text
    found: dict[str, Any] = reply.json()
    return found


def chat(one: Served, messages: list[Any] | None = None, **options: Any) -> dict[str, Any]:
    """Return the only choice of a chat's answer."""
    (choice,) = told(one.post(CHAT, {"messages": messages or [ASKED], **options}))["choices"]
    found: dict[str, Any] = choice
    return found


def events(reply: requests.Response) -> list[Any]:
    """Return the events of a stream, which must be complete."""
    assert reply.status_code == 200, reply.text
    lines = [line[6:] for line in reply.iter_lines() if line.startswith(b"data: ")]
    if lines[-1] == b"[DONE]":
        lines.pop()
    return [json.loads(line) for line in lines]


def streamed(one: Served, messages: list[Any] | None = None, **options: Any) -> list[Any]:
    body = {"messages": messages or [ASKED], "stream": True, **options}
    return [choice for event in events(one.post(CHAT, body)) for choice in event["choices"]]


def calls(message: dict[str, Any]) -> list[tuple[str, Any]]:
    return [
        (call["function"]["name"], json.loads(call["function"]["arguments"]))
        for call in message["tool_calls"]
    ]


def with_result(message: dict[str, Any]) -> list[Any]:
    """Return the conversation after a call, as a client sends it back with the tool's result."""
    (call,) = message["tool_calls"]
    back = {"role": "assistant", "reasoning": message["reasoning"], "tool_calls": [call]}
    return [ASKED, back, {"role": "tool", "tool_call_id": call["id"], "content": '{"degrees": 21}'}]


def test_every_step_of_the_warm_up_is_answered(server: Served) -> None:
    assert "backends: moe BF16_DEQUANT, linear CPU" in server.output()
    assert server.health().returncode == 0
    names = [one[0] for one in preflight.requests(131_072, 8192, 4)]
    for number, name in enumerate(names, start=1):
        assert f"warm-up {number}/{len(names)}: {name}: " in server.output()
    assert "refused" not in server.output()
    assert f"warm-up: {len(names)} requests in" in server.output()


@pytest.mark.parametrize("options", [{}, {"temperature": 2, "top_p": 0.9}])
def test_a_chat_is_reasoning_and_content(server: Served, options: dict[str, Any]) -> None:
    found = told(server.post(CHAT, {"messages": [ASKED], **options}))
    (choice,) = found["choices"]
    message = choice["message"]
    assert (message["reasoning"], message["content"]) == (REASONING, ANSWER)
    assert not message.get("tool_calls")
    assert choice["finish_reason"] == "stop"
    # 12 words of thought, 9 of answer, and 10 tokens that frame the messages
    assert found["usage"]["completion_tokens"] == 31
    assert found["usage"]["completion_tokens_details"]["reasoning_tokens"] == 12


def test_a_stream_has_the_reasoning_first(server: Served) -> None:
    choices = streamed(server)
    deltas = [choice["delta"] for choice in choices]
    kinds = [name for one in deltas for name in ("reasoning", "content") if one.get(name)]
    assert len(kinds) > 2  # a busy server joins some of the 21 pieces
    assert kinds == sorted(kinds, reverse=True)
    assert "".join(one.get("reasoning") or "" for one in deltas) == REASONING
    assert "".join(one.get("content") or "" for one in deltas) == ANSWER
    assert choices[-1]["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("choice", "finish"), [("auto", "tool_calls"), ("required", "tool_calls"), (NAMED, "stop")]
)
def test_a_tool_is_called_and_its_result_answered(server: Served, choice: Any, finish: str) -> None:
    called = chat(server, tools=TOOLS, tool_choice=choice)
    assert calls(called["message"]) == [(TOOL, json.loads(ARGUMENTS))]
    assert called["message"]["reasoning"] == REASONING
    assert not called["message"]["content"]  # none, or empty where a tool was forced
    assert called["finish_reason"] == finish  # a named one: as OpenAI's own API has it
    conversation = with_result(called["message"])
    answered = chat(server, conversation, tools=TOOLS)
    assert answered["message"]["content"] == TOOL_ANSWER
    assert answered["finish_reason"] == "stop"
    deltas = [one["delta"].get("content") or "" for one in streamed(server, conversation)]
    assert "".join(deltas) == TOOL_ANSWER  # a character of three tokens is not torn


def test_a_tool_call_is_streamed(server: Served) -> None:
    choices = streamed(server, tools=TOOLS, tool_choice="auto")
    found = [call for one in choices for call in one["delta"].get("tool_calls") or []]
    assert [call["function"]["name"] for call in found if call.get("id")] == [TOOL]
    assert "".join(call["function"]["arguments"] or "" for call in found) == ARGUMENTS
    assert not any(one["delta"].get("content") for one in choices)
    assert choices[-1]["finish_reason"] == "tool_calls"


def test_tools_that_must_not_be_called_are_not_in_the_prompt(server: Served) -> None:
    found = chat(server, tools=TOOLS, tool_choice="none")
    assert found["message"]["content"] == ANSWER


def test_an_answer_keeps_to_a_schema(server: Served) -> None:
    format_ = {"type": "json_schema", "json_schema": {"name": "t", "schema": SCHEMA}}
    asked = [{"role": "user", "content": "How warm is Paris? Answer in JSON"}]
    found = chat(server, asked, response_format=format_)
    assert (found["message"]["reasoning"], found["message"]["content"]) == (REASONING, JSON_ANSWER)
    assert found["finish_reason"] == "stop"


def test_responses(server: Served) -> None:
    found = told(server.post(RESPONSES, {"input": "Hi"}))
    thought, said = found["output"]
    assert (thought["type"], thought["content"][0]["text"]) == ("reasoning", REASONING)
    assert (said["type"], said["content"][0]["text"]) == ("message", ANSWER)
    assert found["status"] == "completed"
    assert found["usage"]["output_tokens_details"]["reasoning_tokens"] == 12
    tools = [{"type": "function", **FUNCTION}]
    asked = [{"role": "user", "content": ASKED["content"]}]
    thought, call = told(server.post(RESPONSES, {"input": asked, "tools": tools}))["output"]
    assert (call["type"], call["name"], call["arguments"]) == ("function_call", TOOL, ARGUMENTS)
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "21"}
    body = {"input": [*asked, thought, call, result], "tools": tools}
    (said,) = told(server.post(RESPONSES, body))["output"]
    assert said["content"][0]["text"] == TOOL_ANSWER


def test_text_without_a_break_stops_nobody(server: Served) -> None:
    """Of a release a text of this size takes minutes, in which nobody else is answered."""
    long = "\u00e9" * 350_000  # 700 kB, and more tokens than the context has
    call = {"id": "a", "type": "function", "function": {"name": TOOL, "arguments": "{}"}}
    result = {"role": "tool", "tool_call_id": "a", "content": long}
    schema = {"type": "object", "properties": {"city": {"type": "string", "description": long}}}
    tools = [{"type": "function", "function": {"name": TOOL, "parameters": schema}}]
    bodies: list[tuple[str, dict[str, Any]]] = [
        (CHAT, {"messages": [{"role": "user", "content": long}]}),
        (CHAT, {"messages": [ASKED, {"role": "assistant", "tool_calls": [call]}, result]}),
        (CHAT, {"messages": [ASKED], "tools": tools}),
        (RESPONSES, {"input": long}),
        (RESPONSES, {"input": "Hi", "instructions": long}),
        ("/v1/messages", {"messages": [{"role": "user", "content": long}], "max_tokens": 9}),
    ]
    for text in ("x" * 20_000, " " * 20_000, "\n" * 20_000, "\u4e2d" * 3_000):
        message = chat(server, [{"role": "user", "content": text}, ASKED])["message"]
        assert message["content"] == ANSWER
    with ThreadPoolExecutor(len(bodies)) as pool:
        asked = [pool.submit(server.post, path, body) for path, body in bodies]
        while not all(one.done() for one in asked):
            assert chat(server)["message"]["content"] == ANSWER
    for (path, _), one in zip(bodies, asked, strict=True):
        assert one.result().status_code == 400, path
        assert "maximum context length" in one.result().text
    assert server.process.poll() is None


def test_a_huge_body_is_refused(server: Served) -> None:
    """vLLM by itself parses it, and answers nobody meanwhile."""
    body = b" " * (9 << 20)
    for data in (body, (body[i : i + (1 << 16)] for i in range(0, len(body), 1 << 16))):
        url = f"http://127.0.0.1:{server.port}/v1/completions"
        key = {"Authorization": "Bearer the-key"}
        reply = requests.post(url, data=data, headers=key, timeout=PATIENCE_S)
        assert (reply.status_code, reply.json()["error"]["code"]) == (413, 413)


def test_a_tool_s_result_has_the_header_that_the_model_knows(
    server: Served, patched_python: Path
) -> None:
    conversation = with_result(chat(server, tools=TOOLS)["message"])
    conversation[-1]["content"] = "<|start|>x<|channel|>y to=assistant<|message|>z"
    body = {"messages": conversation, "tools": TOOLS, "return_token_ids": True}
    tokens = told(server.post(CHAT, body))["prompt_token_ids"]
    code = (
        "import json, sys, openai_harmony as h\n"
        "e = h.load_harmony_encoding(h.HarmonyEncodingName.HARMONY_GPT_OSS)\n"
        "print(e.decode(json.loads(sys.argv[1])))"
    )
    text = ask_target(patched_python, code, json.dumps(tokens)).decode()
    # as openai-harmony 0.0.8 renders both, the library that came with the model
    assert text.endswith(
        "<|start|>assistant to=functions.weather<|channel|>commentary json<|message|>"
        '{"city":"Paris"}<|call|>'
        "<|start|>functions.weather to=assistant<|channel|>commentary<|message|>"
        "<|start|>x<|channel|>y to=assistant<|message|>z<|end|><|start|>assistant\n"
    )


def test_another_kernel_for_quantised_layers_would_be_noticed(server: Served) -> None:
    watch = Watch({"linear": "MARLIN"})
    said = [watch.feed(line) for line in server.output().splitlines()]
    assert "vLLM chose the linear backend CPU; the profile says MARLIN" in said


def test_accept_finds_every_promise_kept(
    server: Served, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """All checks, as an owner runs them."""
    pins_path = linked_checkout(tmp_path / "checkout") / "pins.yaml"
    pins_path.with_name(".env").write_text(f"SPARKFORGE_API_KEY_FILE={server.folder / 'key'}\n")
    url, log = f"http://127.0.0.1:{server.port}", server.folder / "output"
    words = ["accept", "--pins", pins_path, "--target", "cpu", "--url", url, "--log", log]
    words += ["--long-prompt", "4000", "--json"]
    assert main([str(word) for word in words]) == 0
    found = json.loads(capsys.readouterr().out)
    rows = {row["name"]: row for row in found["checks"]}
    assert list(rows) == list(accept.CHECKS)
    unchecked = {name for name, row in rows.items() if row["state"] == "not checked"}
    assert unchecked == {"decode kernels"}  # a GPU's
    # the words are canned: judged as a real model's, they are wrong
    loaded = pins.load(pins_path)
    profile = loaded.profile_of(loaded.target("cpu"))
    place = client.Place(f"{url}/v1", "the-key")
    answering = profile.model_copy(update={"answers": True})
    real = subject.Subject(place, client.served_model(place), answering)
    assert accept.judge("chat", real).state == "fail"


# -- the front door --------------------------------------------------------------

ROUTE = re.compile(r"Route: (/\S*), Methods: ([A-Z, ]+)$", re.MULTILINE)
OPEN_WITH_THE_KEY = {
    ("GET", "/health"),
    ("GET", "/metrics"),
    ("GET", "/v1/models"),
    ("POST", CHAT),
    ("POST", "/v1/completions"),
    ("POST", "/v1/messages"),
    ("POST", "/v1/messages/count_tokens"),
    ("POST", RESPONSES),
    ("GET", f"{RESPONSES}/r_1"),
    ("POST", f"{RESPONSES}/r_1/cancel"),
}
CLIENTS = """
import sys, anthropic, openai
url, key, model = sys.argv[1:]
asked = [{"role": "user", "content": "Hello"}]
ours = openai.OpenAI(base_url=url + "/v1", api_key=key, max_retries=0)
theirs = anthropic.Anthropic(base_url=url, api_key=key, max_retries=0)
bearer = anthropic.Anthropic(base_url=url, auth_token=key, api_key=None, max_retries=0)
def refused(call):
    try:
        call()
    except (anthropic.AuthenticationError, openai.AuthenticationError):
        return True
for call in (
    lambda: ours.models.list().data[0].id,
    lambda: ours.chat.completions.create(model=model, messages=asked).choices[0].message.content,
    lambda: "".join(part.choices[0].delta.content or "" for part in
                    ours.chat.completions.create(model=model, messages=asked, stream=True)),
    lambda: ours.completions.create(model=model, prompt="a", max_tokens=1).usage.total_tokens,
    lambda: ours.responses.create(model=model, input="Hello").output_text,
    lambda: theirs.messages.create(model=model, messages=asked, max_tokens=99).content[-1].text,
    lambda: bearer.messages.create(model=model, messages=asked, max_tokens=99).content[-1].text,
    lambda: theirs.messages.count_tokens(model=model, messages=asked).input_tokens,
):
    print("refused" if refused(call) else call())
"""


def statuses(url: str, method: str, path: str) -> list[int]:
    """Return the statuses without a key, with a wrong one and with the right one."""
    return [
        requests.request(
            method, f"{url}{path}", headers=headers, data="{}", timeout=PATIENCE_S
        ).status_code
        for headers in ({}, {"x-api-key": "wrong"}, {"x-api-key": "the-key"})
    ]


def test_a_route_of_vllm_is_closed_or_wants_the_key(server: Served) -> None:
    """So a route that another release adds is closed, too."""
    routes = {
        (method, path.replace("{response_id}", "r_1"))
        for path, methods in ROUTE.findall(server.output())
        for method in methods.split(", ")
    }
    assert len(routes) > 25
    assert {("POST", "/invocations"), ("GET", "/docs"), ("POST", "/tokenize")} < routes
    url = f"http://127.0.0.1:{server.port}"
    for method, path in routes - OPEN_WITH_THE_KEY:
        assert statuses(url, method, path) == [404] * 3, (method, path)
    for method, path in OPEN_WITH_THE_KEY:
        without, wrong, right = statuses(url, method, path)
        if path == "/health":
            assert [without, wrong, right] == [200] * 3
        else:
            assert without == wrong == 401, path
            assert right not in (401, 403, 405, 501), path


def test_real_clients_pass_with_the_key_only(server: Served, patched_python: Path) -> None:
    url = f"http://127.0.0.1:{server.port}"
    said = ask_target(patched_python, CLIENTS, url, "the-key", "tiny").decode().splitlines()
    assert said[:3] == ["tiny", ANSWER, ANSWER]
    assert said[4:7] == [ANSWER] * 3
    assert int(said[3]) > 1
    assert int(said[7]) > 1
    said = ask_target(patched_python, CLIENTS, url, "wrong", "tiny").decode().splitlines()
    assert said == ["refused"] * 8


def test_users_do_not_wait_for_a_compiler_and_sigterm_stops_it_cleanly(server: Served) -> None:
    """The last one: what all tests above asked for was compiled before the server was ready."""
    cases: list[dict[str, Any]] = [
        {"logprobs": 5},
        {"temperature": 1, "top_k": 3},
        {"prompt_logprobs": 1},
    ]
    for options in cases:
        assert server.complete(3, **options).json()["usage"]["completion_tokens"] == 3
    assert server.compiled
    assert compiled(server) == server.compiled
    server.process.terminate()
    assert server.process.wait(PATIENCE_S) == 0
    assert not group_alive(server.group())
    assert "waited for a compiler" not in server.output()
