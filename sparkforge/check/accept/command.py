"""``build.py accept``: checks of a running server, as its clients see it.

The questions suit the real model and the tiny one with fixed replies (checkpoints/chat.py): its
tool is ``weather``, its schema has an integer ``temperature``, and "Answer in JSON" asks for that.
Words are checked only if the profile has ``answers``, so with the real weights.
"""

import json
import platform
import re
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from threading import Event
from typing import Any

from cyclopts.types import PositiveInt

from sparkforge import __version__
from sparkforge.build import composing
from sparkforge.build.context import profile_of
from sparkforge.build.options import OutputOptions, command_options
from sparkforge.check.accept.subject import (
    CHECKS,
    Subject,
    Unseen,
    check,
    container_of,
    judge,
    need,
    shown,
)
from sparkforge.core import pages
from sparkforge.core.disk import write_file
from sparkforge.core.errors import ServerError, UsageError
from sparkforge.core.log import log
from sparkforge.core.run import in_parallel
from sparkforge.pins.types import MACHINES
from sparkforge.runtime import client
from sparkforge.runtime.client import Place, Said
from sparkforge.serving.profile import Watch
from sparkforge.sources.project import PinsFile, checkout

STATES = {"ok": ("32", "✓"), "fail": ("31;1", "✗"), "not checked": ("2", "·")}
"""Of a check, with colour and mark."""
IDLE_S = 60.0
"""Time for the gauges to reach 0: the engine handles an abort between two steps."""
GROWTH_MIB = 64
"""Limit for the growth of memory in 32 chats; an estimate."""
_FEW = 5  # tokens: less than the shortest answer, whose frame alone has that many
_LINE_TOKENS = 8  # minimum for a line of the long text; 14 by o200k's vocabulary
_RESERVE = 600  # tokens for the answer to the long prompt, and for the frame of messages
_SUM, _RESULT, _WORD, _DEGREES = "What is 17 + 25?", r"(?<!\d)42(?!\d)", "kingfisher", 21
_WEATHER = {"role": "user", "content": "What is the weather in Paris? Use the tool."}
_CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
_FUNCTION = {"name": "weather", "description": "Weather of a city", "parameters": _CITY}
_TOOLS = [{"type": "function", "function": _FUNCTION}]
_SCHEMA: dict[str, Any] = {"type": "object", "properties": {"temperature": {"type": "integer"}}}
_SCHEMA |= {"required": ["temperature"], "additionalProperties": False}
_IN_JSON = f"In Paris it is {_DEGREES} degrees. How warm is Paris? Answer in JSON with temperature."
_PARSER = "see --reasoning-parser and --tool-call-parser in the server's log (docs/serving.md)"


# -- the checks --------------------------------------------------------------------------


def _word(subject: Subject, pattern: str, text: str) -> None:
    right = not subject.profile.answers or re.search(pattern, text.lower())
    need(right, f"{pattern} in the answer", text)


def _whole(subject: Subject, said: Said) -> None:
    """Check a complete answer to ``_SUM``."""
    need(
        said.reasoning or said.content,
        "reasoning and content (vllm#37030)",
        "status 200 without both",
    )
    need(said.content.strip(), "content", f"reasoning alone: {said.reasoning}")
    need("<|" not in said.content + said.reasoning, "no token of Harmony", said.content)
    _word(subject, _RESULT, said.content)
    need(said.finish == "stop", "finish_reason stop", said.finish)


@check("try another --moe-backend; status 400: the cpu target chats only with serve --chat")
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
    need(call["name"] == "weather" and call["id"], "a call of weather with an id", call)
    _word(subject, "paris", json.loads(call["arguments"])["city"])
    need(said.finish == "tool_calls", "finish_reason tool_calls", said.finish)
    need(not said.content.strip(), "no content beside the call", said.content)
    function = {name: call[name] for name in ("name", "arguments")}
    made = {"id": call["id"], "type": "function", "function": function}
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
    schema = {"type": "json_schema", "json_schema": {"name": "weather", "schema": _SCHEMA}}
    said = subject.chat(_IN_JSON, response_format=schema)
    wanted = {"temperature": _DEGREES}
    need(json.loads(said.content) == wanted, json.dumps(wanted), said.content)
    return shown(said.content)


@check("see the server's log; a lower --max-model-len needs less memory")
def long_prompt(subject: Subject) -> str:
    """An answer to as much as the server takes, at most `--long-prompt`."""
    number = min(subject.long_tokens, subject.model.max_len - _RESERVE) // 16
    need(number >= 4, f"--max-model-len above {_RESERVE + 64}", subject.model.max_len)
    words = [_WORD if at == number // 2 else "heron" for at in range(number)]
    lines = [f"Line {at}: the word is {word}, and nothing else." for at, word in enumerate(words)]
    question = f"Which word is on line {number // 2}? Answer with the word alone."
    said = subject.streamed("\n".join([*lines, question]))
    least = _LINE_TOKENS * number
    need(said.prompt_tokens >= least, f"a prompt of {least} tokens or more", said.prompt_tokens)
    need(said.content.strip(), "content", said.reasoning)
    _word(subject, _WORD, said.content)
    return f"{said.prompt_tokens} tokens, first piece after {said.moments[0]:.1f} s"


@check("a proxy in front of the server may change answers")
def limits(subject: Subject) -> str:
    """`max_tokens` ends a chat; 404, 400 and (with a key) 401 for bad requests."""
    said = subject.chat(_SUM, max_tokens=_FEW)
    need(said.tokens == _FEW, f"{_FEW} tokens", said.tokens)
    need(said.finish == "length", "finish_reason length", said.finish)
    good, place = subject.body("Hello", max_tokens=1), subject.place
    cases: list[tuple[Place, dict[str, Any], int]]
    cases = [(place, {"model": "no-such-model"}, 404), (place, {"max_tokens": -1}, 400)]
    cases += [(Place(place.url), {}, 401)] if place.key else []
    for where, change, status in cases:
        reply = client.post(where, client.CHAT, {**good, **change})
        need(reply.status == status, f"status {status}", f"{reply.status} {reply.text}")
    return f"{_FEW} tokens; {len(cases)} bad requests refused"


def _crowd(subject: Subject) -> None:
    """Stream eight answers at once, while four clients leave after the first piece."""
    endless = {"model": subject.model.name, "prompt": "Hello", "stream": True, "ignore_eos": True}
    endless["max_tokens"] = max(1, subject.model.max_len // 2)

    def ask(leaves: bool, _: Event) -> None:
        if not leaves:
            return _whole(subject, subject.streamed(_SUM))
        stream = client.events(subject.place, client.COMPLETIONS, endless)
        need(next(stream, None) is not None, "a piece before the client leaves", "none")
        return stream.close()

    list(in_parallel(ask, [True] * 4 + [False] * 8, 12))


@check("vllm#37030 showed first with requests at once: try another --moe-backend")
def eight_at_once(subject: Subject) -> str:
    """Eight streamed chats, while four clients go away."""
    _crowd(subject)
    return "8 answers, 4 cancelled"


@check("other clients? otherwise requests leak: doctor --report")
def idle_afterwards(subject: Subject) -> str:
    """No request runs or waits, the KV cache is free."""
    names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    end = time.monotonic() + IDLE_S
    while any(left := [sum(subject.metrics(f"vllm:{name}").values()) for name in names]):
        need(time.monotonic() < end, f"0 after {IDLE_S:.0f} s", dict(zip(names, left, strict=True)))
        time.sleep(0.2)
    return "0 running, 0 waiting"


@check("SPARKFORGE_EXTRA_ARGS may choose another; else the wheel lacks the kernel")
def backends(subject: Subject) -> str:
    """The log names those of the profile's `expect`."""
    # as if layers were quantised: vLLM's log shows whether some are
    expected = subject.profile.expectations(("--mxfp4-layers", "any"), subject.options())
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


# -- the command -------------------------------------------------------------------------


@command_options
class Options:
    """Options of ``accept``."""

    target: str | None = None
    """target that the server was built as (default: the one that Compose serves)"""
    url: str | None = None
    """URL of the server (default: Compose's address and port on this machine)"""
    log: Path | None = None
    """file with the server's output, to check backends (default: the log of Compose's container)"""
    long_prompt: PositiveInt = 100_000
    """most tokens of the long prompt (default: 100000)"""
    pins: PinsFile = None
    output: OutputOptions = OutputOptions()


def run(options: Options = Options()) -> int:
    """Check a running server; ServerError if it breaks a promise or does not answer."""
    here = checkout(options.pins)
    variables = composing.seen(here.root / ".env")
    named = (variables.get("COMPOSE_PROFILES") or "").replace(" ", "").split(",")
    likely = "spark" if MACHINES.get(platform.machine()) == "linux/arm64" else "cpu"
    target = options.target or next((one for one in named if one in here.pins.targets), likely)
    profile = profile_of(here.pins, target)
    if options.log is not None and not options.log.is_file():
        raise UsageError(f"--log {options.log}: no such file", "give the server's log")
    place = client.place_of(variables, options.url)
    model, container = client.served_model(place), container_of(place)
    subject = Subject(place, model, profile, container, options.log, options.long_prompt)
    log.heading(f"{model.name} at {place.url}")
    rows = []
    for name in CHECKS:
        rows.append(row := judge(name, subject))
        colour, mark = STATES[row["state"]]
        log.info(f"{mark} {name}  {row['seconds']:.1f} s  {row['seen']}", colour)
        if row["hint"]:
            log.info(f"  hint: {row['hint']}")
    counts = dict.fromkeys(STATES, 0) | Counter(row["state"] for row in rows)
    log.info(", ".join(f"{number} {state}" for state, number in counts.items()))
    when = time.strftime("%Y-%m-%dT%H%M%SZ", time.gmtime())
    report = {
        "target": target,
        "version": __version__,
        "when": when,
        "url": place.url,
        "model": model.name,
        "max_model_len": model.max_len,
        "image": "" if isinstance(container, str) else container["Config"].get("Image", ""),
        "ok": not counts["fail"],
        "counts": counts,
        "checks": rows,
    }
    file = here.root / "dist" / target / "accept" / f"accept-{when}.json"
    write_file(file, f"{json.dumps(report, indent=1)}\n".encode())
    log.info(f"report   {file}")
    log.document({**report, "report": str(file)})
    failed = ", ".join(row["name"] for row in rows if row["state"] == "fail")
    if not failed:
        return 0
    return log.failure(ServerError(f"the server fails checks: {failed}", "follow the hints above"))


def markdown() -> str:
    """Return the table of all checks."""
    rows = [(name, pages.Markdown(f"{read.__doc__}"[:-1])) for name, (_, read) in CHECKS.items()]
    return pages.table(("check", "what has to be true"), rows)
