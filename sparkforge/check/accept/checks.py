"""The checks of a running server, as its clients see it.

The questions suit the real model and the tiny one with fixed replies (checkpoints/chat.py): its
tool is ``weather``, its schema has an integer ``temperature``, and "Answer in JSON" asks for that.
Words are checked only if the profile has ``answers``, so with the real weights.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from threading import Event
from typing import Any, Literal

from sparkforge.check.accept.server import Subject, Unseen
from sparkforge.core.run import in_parallel
from sparkforge.runtime import client
from sparkforge.runtime.client import Place, Said
from sparkforge.serving.profile import Watch

State = Literal["ok", "fail", "not checked"]
STATES: tuple[State, ...] = ("ok", "fail", "not checked")
IDLE_S = 60.0
"""Time for the gauges to reach 0: the engine handles an abort between two steps."""
GROWTH_MIB = 64
"""Limit for the growth of memory in 32 chats; an estimate."""
_SUM, _RESULT = "What is 17 + 25?", re.compile(r"(?<!\d)42(?!\d)")
_WEATHER = {"role": "user", "content": "What is the weather in Paris? Use the tool."}
_CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
_FUNCTION = {"name": "weather", "description": "Weather of a city", "parameters": _CITY}
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
_LINE_TOKENS = 8  # minimum for a line of the long text; 14 by o200k's vocabulary
_RESERVE = 600  # tokens for the answer to the long prompt, and for the frame of messages
_PARSER = "see --reasoning-parser and --tool-call-parser in the server's log (docs/serving.md)"


class Unmet(Exception):
    """A check failed; the message says what was expected, and what came."""


@dataclass(frozen=True)
class Row:
    """The result of a check.

    Attributes:
        seen: the reading; else what failed, or why it was not checked.
        hint: for a failure.
    """

    name: str
    state: State
    seconds: float
    seen: str
    hint: str = ""


@dataclass(frozen=True)
class Check:
    """One promise of the server.

    Attributes:
        what: its subject; Markdown.
        hint: for a failure.
        read: returns the reading; raises Unmet or Unseen.
    """

    name: str
    what: str
    hint: str
    read: Callable[[Subject], str]

    def run(self, subject: Subject) -> Row:
        """Return the result, whatever the server does."""
        began = time.monotonic()
        state: State = "fail"
        try:
            state, seen = "ok", self.read(subject)
        except Unseen as reason:
            state, seen = "not checked", str(reason)
        except Unmet as error:
            state, seen = "fail", str(error)
        except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as e:
            # no answer, or one of another shape
            state, seen = "fail", f"expected an answer, got {type(e).__name__}: {shown(str(e))}"
        took = round(time.monotonic() - began, 2)
        return Row(self.name, state, took, seen, self.hint if state == "fail" else "")


CHECKS: list[Check] = []
"""In their order."""
_Read = Callable[[Subject], str]


def check(hint: str = "see the server's log") -> Callable[[_Read], _Read]:
    """Add a function to the checks: its name and docstring are the check's."""

    def add(read: _Read) -> _Read:
        what = str(read.__doc__).rstrip(".")
        CHECKS.append(Check(read.__name__.replace("_", " "), what, hint, read))
        return read

    return add


def need(truth: object, expected: str, got: object) -> None:
    """Raise Unmet unless ``truth`` is true."""
    if not truth:
        raise Unmet(f"expected {expected}, got {shown(got)}")


def shown(value: object) -> str:
    """Return a value on one short line."""
    line = " ".join((value if isinstance(value, str) else repr(value)).split())
    printable = "".join(letter if letter.isprintable() else "?" for letter in line)
    return (printable if len(printable) <= 160 else f"{printable[:160]}…") or "nothing"


def _word(subject: Subject, word: str, text: str) -> None:
    need(not subject.profile.answers or word in text.lower(), f"{word} in the answer", text)


def _whole(subject: Subject, said: Said) -> None:
    """Check a complete answer to ``_SUM``."""
    need(not said.empty, "reasoning and content (vllm#37030)", "status 200 without both")
    need(said.content.strip(), "content", f"reasoning alone: {said.reasoning}")
    need("<|" not in said.content + said.reasoning, "no token of Harmony", said.content)
    right = not subject.profile.answers or _RESULT.search(said.content)
    need(right, "42 in the answer", said.content)
    need(said.finish == "stop", "finish_reason stop", said.finish)


@check(
    "no or a wrong answer: try another --moe-backend in SPARKFORGE_EXTRA_ARGS; status 400: the cpu"
    " target chats only with build.py serve --chat"
)
def chat(subject: Subject) -> str:
    """Reasoning and content apart, without Harmony's tokens; with real weights: 42."""
    said = subject.chat(_SUM, reasoning_effort="medium")
    _whole(subject, said)
    need(said.reasoning.strip(), "reasoning of its own", f"content alone: {said.content}")
    need(said.reasoning.strip() not in said.content, "content without reasoning", said.content)
    need(said.tokens > 0, "tokens in usage", said.tokens)
    return f"{shown(said.content)} ({said.tokens} tokens)"


@check(_PARSER)
def streamed_chat(subject: Subject) -> str:
    """Pieces, `[DONE]`, usage, reasoning before content."""
    said = subject.streamed(_SUM)
    _whole(subject, said)
    need(said.complete, "[DONE] at the end", "the end of the stream")
    # vLLM joins tokens that wait for its front end: on a busy machine, a tiny model's whole answer
    several = len(said.moments) > 1 or not subject.profile.answers
    need(several, "more than one piece", len(said.moments))
    need(said.tokens > 0, "usage at the end", "none")
    need(not said.reasoning_last, "reasoning before content", "content first")
    return f"{len(said.moments)} pieces, {said.tokens} tokens"


def _called(subject: Subject, said: Said) -> Mapping[str, Any]:
    """Check a tool call; return it as a client sends it back."""
    need(said.calls, "a tool call", said.content or "neither call nor content")
    call = said.calls[0]
    need(call.name == "weather", "a call of weather", call.name)
    _word(subject, "paris", json.loads(call.arguments)["city"])
    need(said.finish == "tool_calls", "finish_reason tool_calls", said.finish)
    need(not said.content.strip(), "no content beside the call", said.content)
    need(call.id, "an id of the call", "none")
    function = {"name": call.name, "arguments": call.arguments}
    made = {"id": call.id, "type": "function", "function": function}
    return {"role": "assistant", "reasoning": said.reasoning, "tool_calls": [made]}


@check(_PARSER)
def tool_call(subject: Subject) -> str:
    """A call, also streamed; its result is answered."""
    back = _called(subject, subject.chat([_WEATHER], tools=_TOOLS))
    _called(subject, subject.streamed([_WEATHER], tools=_TOOLS))
    (call,) = back["tool_calls"]
    result = {"role": "tool", "tool_call_id": call["id"], "content": f'{{"degrees": {_DEGREES}}}'}
    said = subject.chat([_WEATHER, back, result], tools=_TOOLS)
    need(said.content.strip(), "content after the tool's result", said.reasoning)
    _word(subject, str(_DEGREES), said.content)
    return f"{call['function']['arguments']}; then {shown(said.content)}"


@check("see xgrammar in the server's log")
def structured_output(subject: Subject) -> str:
    """Content that fits a JSON schema."""
    said = subject.chat(_IN_JSON, response_format=_FORMAT)
    wanted = {"temperature": _DEGREES}
    need(json.loads(said.content) == wanted, json.dumps(wanted), said.content)
    return shown(said.content)


def _output(response: Any) -> str:
    """Return the text of a response's message."""
    need(response["status"] == "completed", "status completed", response["status"])
    texts = [part["content"][0]["text"] for part in response["output"] if part["type"] == "message"]
    need(texts and texts[0].strip(), "a message with text", response["output"])
    return str(texts[0])


@check(_PARSER)
def responses(subject: Subject) -> str:
    """`/v1/responses`, whole and streamed."""
    body = {"model": subject.model.name, "input": _SUM, "temperature": 0}
    body["max_output_tokens"] = subject.body("")["max_tokens"]
    text = _output(client.post(subject.place, client.RESPONSES, body).json())
    need(not subject.profile.answers or _RESULT.search(text), "42 in the answer", text)
    found = client.events(subject.place, client.RESPONSES, {**body, "stream": True})
    events = [event for event in found if event is not None]
    pieces = [e["delta"] for e in events if e["type"] == "response.output_text.delta"]
    done = events[-1]["type"] if events else "no event"
    need(done == "response.completed", "response.completed as the last event", done)
    need("".join(pieces) == _output(events[-1]["response"]), "pieces of the text", pieces)
    return f"{shown(text)}; streamed: {len(pieces)} pieces"


@check("see the server's log; a lower --max-model-len needs less memory")
def long_prompt(subject: Subject) -> str:
    """An answer to as much as the server takes, at most `--long-prompt`."""
    tokens = min(subject.long_tokens, subject.model.max_len - _RESERVE)
    need(tokens >= 64, f"--max-model-len above {_RESERVE + 64}", subject.model.max_len)
    count = tokens // 16
    words = [_WORD if number == count // 2 else "heron" for number in range(count)]
    lines = [f"Line {at}: the word is {word}, and nothing else." for at, word in enumerate(words)]
    question = f"Which word is on line {count // 2}? Answer with the word alone."
    said = subject.streamed("\n".join([*lines, question]))
    least = _LINE_TOKENS * count
    need(said.prompt_tokens >= least, f"a prompt of {least} tokens or more", said.prompt_tokens)
    need(said.content.strip(), "content", said.reasoning)
    _word(subject, _WORD, said.content)
    return f"{said.prompt_tokens} tokens, first piece after {said.moments[0]:.1f} s"


def _complete(subject: Subject, **options: Any) -> tuple[str, str]:
    """Complete a raw prompt; return the text and its ``finish_reason``."""
    body = {"model": subject.model.name, "prompt": _COUNTING, "temperature": 0, "max_tokens": 48}
    answer = client.post(subject.place, client.COMPLETIONS, {**body, **options}).json()
    return str(answer["choices"][0]["text"]), str(answer["choices"][0]["finish_reason"])


@check()
def limits(subject: Subject) -> str:
    """A stop word ends a completion before it, `max_tokens` a chat after as many."""
    text, _ = _complete(subject)
    word = (text.split() or [""])[len(text.split()) // 2]
    cut, finish = _complete(subject, stop=[word])
    need(cut == text.partition(word)[0], f"the text before {word!r}", cut)
    need(finish == "stop", "finish_reason stop", finish)
    said = subject.chat(_SUM, max_tokens=_FEW)
    need(said.tokens == _FEW, f"{_FEW} tokens", said.tokens)
    need(said.finish == "length", "finish_reason length", said.finish)
    return f"{word!r} ends {shown(cut)!r}; {_FEW} tokens"


@check("a proxy in front of the server may change answers")
def refusals(subject: Subject) -> str:
    """404, 400 and (with a key) 401 for bad requests."""
    good = subject.body("Hello", max_tokens=1)
    cases: list[tuple[str, Place, Mapping[str, Any] | bytes, tuple[int, ...]]] = [
        ("another model", subject.place, {**good, "model": "no-such-model"}, (404,)),
        ("max_tokens -1", subject.place, {**good, "max_tokens": -1}, (400,)),
        ("broken JSON", subject.place, json.dumps(good).encode()[:-1], (400, 422)),
    ]
    if subject.place.key:
        cases.append(("no API key", Place(subject.place.url), good, (401,)))
    for what, place, body, codes in cases:
        reply = client.post(place, client.CHAT, body)
        expected = f"status {' or '.join(map(str, codes))} for {what}"
        need(reply.status in codes, expected, f"{reply.status} {reply.text}")
    return f"{len(cases)} bad requests refused"


def _crowd(subject: Subject, leave: int = 0) -> None:
    """Stream eight answers at once, while some clients leave after the first piece."""
    minutes = {"prompt": "Hello", "stream": True, "ignore_eos": True}
    minutes |= {"model": subject.model.name, "max_tokens": max(1, subject.model.max_len // 2)}

    def ask(leaves: bool, _: Event) -> None:
        if not leaves:
            return _whole(subject, subject.streamed(_SUM))
        stream = client.events(subject.place, client.COMPLETIONS, minutes)
        need(next(stream, None) is not None, "a piece before the client leaves", "none")
        return stream.close()

    kinds = [True] * leave + [False] * 8
    list(in_parallel(ask, kinds, len(kinds)))


@check("vllm#37030 showed first with requests at once: try another --moe-backend")
def eight_at_once(subject: Subject) -> str:
    """Eight streamed chats, while four clients go away."""
    _crowd(subject, 4)
    return "8 answers, 4 cancelled"


@check("the patch of vLLM's Harmony renderer is missing (docs/patches.md)")
def unbroken_text(subject: Subject) -> str:
    """600,000 times `x` end with an answer or 400, and `/health` answers meanwhile."""
    body = subject.body("x" * 600_000, 1)

    def ask(long: bool, stopping: Event) -> int:
        if long:
            return client.post(subject.place, client.CHAT, body).status
        looks = (client.look(subject.place, "/health", 10) for _ in range(10))
        return max(reply.status for reply in looks if not stopping.wait(0.2))

    health, status = in_parallel(ask, (False, True), 2)
    need(health == 200, "status 200 of /health meanwhile", health)
    need(status in (200, 400), "an answer or status 400", status)
    return f"status {status}, others are answered meanwhile"


@check("other clients? otherwise requests leak: doctor --report")
def idle_afterwards(subject: Subject) -> str:
    """No request runs or waits, the KV cache is free."""
    names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    end = time.monotonic() + IDLE_S
    while any(left := [sum(subject.metrics(f"vllm:{name}").values()) for name in names]):
        got = ", ".join(f"{name} {value:g}" for name, value in zip(names, left, strict=True))
        need(time.monotonic() < end, f"0 after {IDLE_S:.0f} s", got)
        time.sleep(0.2)
    return "0 running, 0 waiting"


@check("SPARKFORGE_EXTRA_ARGS may choose another; else the wheel lacks the kernel")
def backends(subject: Subject) -> str:
    """The log names those of the profile's `expect`."""
    # as if layers were quantised: vLLM's log shows whether some are
    options = subject.container.options
    expected = subject.profile.expectations(("--mxfp4-layers", "any"), options)
    if not expected:
        raise Unseen("the profile expects none")
    watch = Watch(expected)
    for line in subject.output().splitlines():
        watch.feed(line)
    if not watch.seen:
        raise Unseen("the log names no backend (rotated, or VLLM_LOGGING_LEVEL)")
    for kind, wanted in expected.items():
        names = watch.seen.get(kind, {wanted} if kind == "linear" else {"no line in the log"})
        need(names == {wanted}, f"{kind} {wanted}", "/".join(sorted(names)))
    return ", ".join(f"{kind} {'/'.join(sorted(names))}" for kind, names in watch.seen.items())


@check("the log has the reason (docs/kernels.md)")
def decode_kernels(subject: Subject) -> str:
    """`/metrics`: each kind passed its self-check."""
    found = subject.metrics("vllm:decode_kernels_in_use")  # none on a CPU
    kinds = {labels.rpartition('kind="')[2].rstrip('"'): value for labels, value in found.items()}
    need(all(kinds.values()), "every kind in use", kinds)
    return ", ".join(kinds)


@check("run it again; if it grows each time: doctor --report")
def memory(subject: Subject) -> str:
    """Before and after 32 chats."""
    _crowd(subject)  # buffers for that many users at once
    before, whose = subject.memory()
    for _ in range(4):
        _crowd(subject)
    grown = (subject.memory()[0] - before) / (1 << 20)
    need(grown <= GROWTH_MIB, f"at most {GROWTH_MIB} MiB more", f"{grown:.0f} MiB more of {whose}")
    return f"{before >> 20} MiB, {grown:+.1f} in 32 chats ({whose})"
