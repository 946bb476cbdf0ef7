"""Checks of single requests: chats, tools, schemas, the responses endpoint, limits.

The questions suit the real model and the tiny one with fixed replies (checkpoints/chat.py): its
tool is ``weather``, its schema has an integer ``temperature``, and "Answer in JSON" asks for that.
Words are judged only if the profile has ``answers``, so for real weights.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from sparkforge.core import plain
from sparkforge.inspect.accept.document import Document
from sparkforge.inspect.accept.row import Check, Subject, Unmet, need, shown
from sparkforge.inspect.doctor.chats import long_question
from sparkforge.runtime import client
from sparkforge.runtime.client import Place, Reply, Said
from sparkforge.serving import warmup as answers

_WEATHER = "What is the weather in Paris? Use the tool."
_PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
_FUNCTION = {"name": "weather", "description": "Weather of a city", "parameters": _PARAMETERS}
_TOOLS = [{"type": "function", "function": _FUNCTION}]
_DEGREES = 21
_SCHEMA = {
    "type": "object",
    "properties": {"temperature": {"type": "integer"}},
    "required": ["temperature"],
    "additionalProperties": False,
}
_FORMAT = {"type": "json_schema", "json_schema": {"name": "weather", "schema": _SCHEMA}}
_IN_JSON = f"In Paris it is {_DEGREES} degrees. How warm is Paris? Answer in JSON with temperature."
_WORD = "kingfisher"
_COUNTING = (  # after this gpt-oss writes a final message, without reasoning
    "<|start|>user<|message|>Repeat: one two three four five six seven eight nine ten<|end|>"
    "<|start|>assistant<|channel|>final<|message|>"
)
_FEW = 5  # tokens: less than the shortest answer, whose frame alone has that many
_TOP = 3
_LINE_TOKENS = 8  # minimum for a line of the long text; 14 by o200k's vocabulary
_RESERVE = 600  # tokens for the answer to the long prompt, and for the frame of messages
_PARSER = "see --reasoning-parser and --tool-call-parser in the server's log (docs/serving.md)"


def _sum(subject: Subject, said: Said) -> None:
    """Judge the answer to ``answers.QUESTION``."""
    message = {"reasoning": said.reasoning, "content": said.content}
    answer = Document("the answer", {"choices": [{"message": message}]})
    if said.empty or subject.profile.answers:
        problem = answers.judge(answer.value)
        need(not problem, "42 in the answer", problem)


def whole(subject: Subject, said: Said) -> None:
    """Check an answer to ``answers.QUESTION``: there, and right if words are judged."""
    _sum(subject, said)
    need(said.content.strip(), "content", f"reasoning alone: {said.reasoning}")
    need(said.finish == "stop", "finish_reason stop", said.finish)


def _chat(subject: Subject) -> str:
    said = client.chat(subject.place, subject.body(answers.QUESTION))
    whole(subject, said)
    need(said.tokens > 0, "tokens in usage", said.tokens)
    return f"{shown(said.content)} ({said.tokens} tokens)"


def _streamed(subject: Subject) -> str:
    said = client.streamed(subject.place, subject.body(answers.QUESTION))
    whole(subject, said)
    need(said.complete, "[DONE] at the end", "the end of the stream")
    # vLLM joins tokens that wait for its front end: on a busy machine, a tiny model's whole answer
    several = len(said.moments) > 1 or not subject.profile.answers
    need(several, "more than one piece", f"{len(said.moments)}")
    need(said.tokens > 0, "usage at the end", "none")
    need(not said.reasoning_last, "reasoning before content", "content first")
    return f"{len(said.moments)} pieces, {said.tokens} tokens"


def _reasoning(subject: Subject) -> str:
    body = subject.body("Which is larger: 9.11 or 9.9?", reasoning_effort="medium")
    said = client.chat(subject.place, body)
    need(said.reasoning.strip(), "reasoning of its own", f"none; content {said.content!r}")
    need(said.content.strip(), "content", f"none; reasoning {said.reasoning!r}")
    for name, text in (("content", said.content), ("reasoning", said.reasoning)):
        need("<|" not in text, f"{name} without Harmony's own tokens", text)
    need(said.reasoning.strip() not in said.content, "content without the reasoning", said.content)
    return f"{len(said.reasoning)} characters of reasoning, {len(said.content)} of content"


def _called(subject: Subject, said: Said) -> Mapping[str, Any]:
    """Check a tool call; return it as a client sends it back."""
    need(said.calls, "a tool call", said.content or "neither call nor content")
    call = said.calls[0]
    need(call.name == "weather", "a call of weather", call.name)
    try:
        city = Document("arguments", plain.json_of(call.arguments)).get(str, "city")
    except ValueError:
        raise Unmet('arguments {"city": …}', shown(call.arguments)) from None
    need(not subject.profile.answers or "paris" in city.lower(), "city Paris", city)
    need(said.finish == "tool_calls", "finish_reason tool_calls", said.finish)
    need(not said.content.strip(), "no content beside the call", said.content)
    function = {"name": call.name, "arguments": call.arguments}
    made = {"id": call.id, "type": "function", "function": function}
    return {"role": "assistant", "reasoning": said.reasoning, "tool_calls": [made]}


def _tool(subject: Subject) -> str:
    asked = {"role": "user", "content": _WEATHER}
    back = _called(subject, client.chat(subject.place, subject.body([asked], tools=_TOOLS)))
    _called(subject, client.streamed(subject.place, subject.body([asked], tools=_TOOLS)))
    (call,) = back["tool_calls"]
    need(call["id"], "an id of the call", "none")
    result = {"role": "tool", "tool_call_id": call["id"], "content": f'{{"degrees": {_DEGREES}}}'}
    said = client.chat(subject.place, subject.body([asked, back, result], tools=_TOOLS))
    need(said.content.strip(), "content after the tool's result", said.reasoning)
    if subject.profile.answers:
        need(str(_DEGREES) in said.content, f"the result, {_DEGREES}", said.content)
    return f"{call['function']['arguments']}; then {shown(said.content)}"


def _schema(subject: Subject) -> str:
    said = client.chat(subject.place, subject.body(_IN_JSON, response_format=_FORMAT))
    try:
        found = plain.json_of(said.content)
    except ValueError:
        raise Unmet("JSON", shown(said.content)) from None
    need(
        found == {"temperature": _DEGREES} and type(found["temperature"]) is int,
        f'{{"temperature": {_DEGREES}}}',
        said.content,
    )
    return shown(said.content)


def _responses(subject: Subject) -> str:
    body = {
        "model": subject.model.name,
        "input": answers.QUESTION,
        "temperature": 0,
        "max_output_tokens": subject.body("")["max_tokens"],
    }
    found = client.post(subject.place, client.RESPONSES, body).json()
    text = _output(found)
    if subject.profile.answers:
        need("42" in text, "42 in the answer", text)
    deltas: list[str] = []
    last: dict[str, Any] = {}
    for event in client.events(subject.place, client.RESPONSES, {**body, "stream": True}):
        last = dict(event or last)
        if last.get("type") == "response.output_text.delta":
            deltas.append(str(last.get("delta")))
    done = last.get("type")
    need(done == "response.completed", "response.completed as the last event", done)
    need("".join(deltas) == _output(last.get("response")), "pieces of the text", deltas)
    return f"{shown(text)}; streamed: {len(deltas)} pieces"


def _output(response: Any) -> str:
    """Return the text of a response's message."""
    document = Document("the response", response)
    need(document.get(str, "status") == "completed", "status completed", response.get("status"))
    count = len(document.get(list, "output"))
    kinds = [document.get(str, "output", at, "type") for at in range(count)]
    need("message" in kinds, "a message", f"only {', '.join(kinds) or 'nothing'}")
    text = document.get(str, "output", kinds.index("message"), "content", 0, "text")
    need(text.strip(), "text", "an empty message")
    return text


def _turns(subject: Subject) -> str:
    first = {"role": "user", "content": f"The word is {_WORD}. Say OK."}
    said = client.chat(subject.place, subject.body([first]))
    need(said.content.strip(), "content in the first turn", said.reasoning)
    reply = {"role": "assistant", "content": said.content}
    second = {"role": "user", "content": "Which word was it? Answer with the word alone."}
    again = client.chat(subject.place, subject.body([first, reply, second]))
    need(again.content.strip(), "content in the second turn", again.reasoning)
    need(
        again.prompt_tokens > said.prompt_tokens,
        f"a prompt of more than the first turn's {said.prompt_tokens} tokens",
        f"{again.prompt_tokens}",
    )
    if subject.profile.answers:
        need(_WORD in again.content.lower(), f"{_WORD} of the first turn", again.content)
    return f"prompts of {said.prompt_tokens} and {again.prompt_tokens} tokens"


def _long(subject: Subject) -> str:
    tokens = min(subject.long_tokens, subject.model.max_len - _RESERVE)
    need(tokens >= 64, f"--max-model-len above {_RESERVE + 64}", subject.model.max_len)
    text = long_question(tokens)
    said = client.streamed(subject.place, subject.body(text))
    least = _LINE_TOKENS * text.count("\n")
    need(said.prompt_tokens >= least, f"a prompt of {least} tokens or more", said.prompt_tokens)
    need(said.content.strip(), "content", said.reasoning)
    if subject.profile.answers:
        need(_WORD in said.content.lower(), f"{_WORD}, a word of the prompt", said.content)
    first = f"first piece after {said.moments[0]:.1f} s" if said.moments else ""
    return f"{said.prompt_tokens} tokens, {first}"


def _complete(subject: Subject, **options: Any) -> tuple[str, str]:
    """Complete a raw prompt; return the text and its ``finish_reason``."""
    body = {"model": subject.model.name, "prompt": _COUNTING, "temperature": 0, "max_tokens": 48}
    found = client.post(subject.place, client.COMPLETIONS, {**body, **options}).json()
    answer = Document("the completion", found)
    return answer.get(str, "choices", 0, "text"), answer.get(str, "choices", 0, "finish_reason")


def _stop(subject: Subject) -> str:
    text, _ = _complete(subject)
    words = text.split()
    need(len(words) > 2, "a completion of several words", text)
    word = words[len(words) // 2]
    before = text.partition(word)[0]
    cut, finish = _complete(subject, stop=[word])
    need(cut == before, f"the text before {word!r}: {shown(before)!r}", cut)
    need(finish == "stop", "finish_reason stop", finish)
    return f"{word!r} ends {shown(cut)!r}"


def _max_tokens(subject: Subject) -> str:
    said = client.chat(subject.place, subject.body(answers.QUESTION, max_tokens=_FEW))
    need(said.tokens == _FEW, f"{_FEW} tokens", f"{said.tokens}")
    need(said.finish == "length", "finish_reason length", said.finish)
    return f"{_FEW} tokens, finish_reason length"


def _logprobs(subject: Subject) -> str:
    body = subject.body(answers.QUESTION, logprobs=True, top_logprobs=_TOP)
    answer = Document("the answer", client.post(subject.place, client.CHAT, body).json())
    tokens = answer.get(list, "choices", 0, "logprobs", "content")
    counted = answer.get(int, "usage", "completion_tokens")
    need(tokens and len(tokens) == counted, f"logprobs of {counted} tokens", f"{len(tokens)}")
    for at in range(len(tokens)):
        token = Document("a token", tokens[at])
        own, top = token.get(dict).get("logprob"), token.get(list, "top_logprobs")
        best: list[Any] = [row.get("logprob") for row in top if isinstance(row, dict)]
        need(len(best) == _TOP, f"{_TOP} likeliest tokens each", f"{len(best)} at token {at}")
        numbers = all(isinstance(x, int | float) and x <= 0 for x in (own, *best))
        need(numbers, "log-probabilities of 0 at most", f"{own}, {best} at token {at}")
        need(own == max(best), "the likeliest token at temperature 0", f"{own}, {best}")
    return f"{len(tokens)} tokens, {_TOP} each"


def _refusals(subject: Subject) -> str:
    good = subject.body("Hello", max_tokens=1)
    wrong: list[tuple[str, Mapping[str, Any] | bytes, tuple[int, ...]]] = [
        ("another model", {**good, "model": "no-such-model"}, (404,)),
        ("max_tokens -1", {**good, "max_tokens": -1}, (400,)),
        ("broken JSON", json.dumps(good).encode()[:-1], (400, 422)),
    ]
    for what, body, codes in wrong:
        _refused(what, client.post(subject.place, client.CHAT, body), codes)
    if subject.place.key:
        _refused("no API key", client.post(Place(subject.place.url), client.CHAT, good), (401,))
    return f"{len(wrong) + bool(subject.place.key)} bad requests refused"


def _refused(what: str, reply: Reply, codes: tuple[int, ...]) -> None:
    expected = f"status {' or '.join(map(str, codes))} for {what}"
    need(reply.status in codes, expected, f"{reply.status} {reply.text}")


CHECKS = (
    Check(
        "chat",
        "an answer with content; with real weights: 42",
        "no or a wrong answer: try another --moe-backend in SPARKFORGE_EXTRA_ARGS; status 400: the"
        " cpu target chats only with build.py serve --chat",
        _chat,
    ),
    Check("streamed chat", "pieces, `[DONE]`, usage, reasoning before content", _PARSER, _streamed),
    Check(
        "reasoning", "reasoning and content apart, no Harmony token in them", _PARSER, _reasoning
    ),
    Check("tool call", "a call, also streamed; its result is answered", _PARSER, _tool),
    Check(
        "structured output",
        "content that fits a JSON schema",
        "the log has the grammar's error (xgrammar)",
        _schema,
    ),
    Check("responses", "`/v1/responses`, whole and streamed", _PARSER, _responses),
    Check(
        "two turns", "the second turn has the first in its prompt", "see the server's log", _turns
    ),
    Check(
        "long prompt",
        "an answer to as much as the server takes, at most `--long-prompt`",
        "see the server's log; a lower --max-model-len needs less memory",
        _long,
    ),
    Check("stop", "a stop word ends a completion before it", "see the server's log", _stop),
    Check(
        "max_tokens",
        "exactly as many tokens, `finish_reason` length",
        "see the server's log",
        _max_tokens,
    ),
    Check(
        "logprobs",
        "of each token, three likeliest, the chosen one first",
        "see the server's log",
        _logprobs,
    ),
    Check(
        "refusals",
        "404, 400 and (with a key) 401 for bad requests",
        "a proxy in front of the server may change answers",
        _refusals,
    ),
)
