"""``build.py accept``: checks of a running server, as its clients see it.

The questions suit the real model and the tiny one with fixed replies (checkpoints/chat.py): its
tool is ``weather``, its schema has an integer ``temperature``, and "Answer in JSON" asks for that.
Words are checked only if the profile has ``answers``, so with the real weights.
"""

import json
import re
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Event
from typing import Any

from cyclopts.types import PositiveInt

from sparkforge import __version__
from sparkforge.build import composing
from sparkforge.build.options import CheckoutOptions, command_options
from sparkforge.check import agents
from sparkforge.check.subject import (
    TOOLS,
    WEATHER,
    Subject,
    Unmet,
    Unseen,
    container_of,
    need,
    shown,
)
from sparkforge.core import pages, plain
from sparkforge.core.disk import write_file
from sparkforge.core.errors import ServerError, UsageError
from sparkforge.core.log import log
from sparkforge.core.run import in_parallel
from sparkforge.runtime import client
from sparkforge.runtime.client import Place, Said
from sparkforge.serving.profile import Watch
from sparkforge.sources.project import checkout

_STATES = {"ok": ("32", "✓"), "fail": ("31;1", "✗"), "not checked": ("2", "·")}
IDLE_S = 60.0
"""Time for the gauges to reach 0: the engine handles an abort between two steps."""
_FEW = 5  # tokens: less than the shortest answer, whose frame alone has that many
_LINE_TOKENS = 8  # minimum for a line of the long text; 14 by o200k's vocabulary
_RESERVE = 600  # tokens for the answer to the long prompt, and for the frame of messages
_SUM, _RESULT, _WORD, _DEGREES = "What is 17 + 25?", r"(?<!\d)42(?!\d)", "kingfisher", 21
_SCHEMA: dict[str, Any] = {"type": "object", "properties": {"temperature": {"type": "integer"}}}
_SCHEMA |= {"required": ["temperature"], "additionalProperties": False}
_IN_JSON = f"In Paris it is {_DEGREES} degrees. How warm is Paris? Answer in JSON with temperature."
_PARSER = "see --reasoning-parser and --tool-call-parser in the server's log (docs/serving.md)"


# -- the checks --------------------------------------------------------------------------


def _word(subject: Subject, pattern: str, text: str) -> None:
    right = not subject.profile.answers or re.search(pattern, text.lower())
    need(right, f"{pattern} in the answer", text)


def _whole(subject: Subject, said: Said) -> None:
    need(said.reasoning or said.content, "reasoning and content (vllm#37030)", "neither")
    need(said.content.strip(), "content", f"reasoning alone: {said.reasoning}")
    need("<|" not in said.content + said.reasoning, "no token of Harmony", said.content)
    _word(subject, _RESULT, said.content)
    need(said.finish == "stop", "finish_reason stop", said.finish)


def chat(subject: Subject) -> str:
    """Reasoning and content apart, without Harmony's tokens; with real weights: 42."""
    said = subject.chat(_SUM, reasoning_effort="medium")
    _whole(subject, said)
    need(said.reasoning.strip(), "reasoning of its own", f"content alone: {said.content}")
    need(said.reasoning.strip() not in said.content, "content without reasoning", said.content)
    need(said.tokens > 0, "tokens in usage", said.tokens)
    return f"{shown(said.content)} ({said.tokens} tokens)"


def streamed_chat(subject: Subject) -> str:
    """Pieces, `[DONE]`, usage, reasoning before content."""
    said = subject.chat(_SUM, stream=True)
    _whole(subject, said)
    need(said.complete, "[DONE] at the end", "the end of the stream")
    # vLLM joins tokens that wait for its front end: on a busy machine, a tiny model's whole answer
    pieces = len(said.moments)
    need(pieces > 1 or not subject.profile.answers, "more than one piece", pieces)
    need(said.tokens > 0, "usage at the end", "none")
    need(not said.reasoning_last, "reasoning before content", "content first")
    return f"{pieces} pieces, {said.tokens} tokens"


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


def tool_call(subject: Subject) -> str:
    """A call, also streamed; its result is answered."""
    back = _called(subject, subject.chat([WEATHER], tools=TOOLS))
    _called(subject, subject.chat([WEATHER], tools=TOOLS, stream=True))
    (call,) = back["tool_calls"]
    result = {"role": "tool", "tool_call_id": call["id"], "content": f'{{"degrees": {_DEGREES}}}'}
    said = subject.chat([WEATHER, back, result], tools=TOOLS)
    need(said.content.strip(), "content after the tool's result", said.reasoning)
    _word(subject, str(_DEGREES), said.content)
    return f"{call['function']['arguments']}; then {shown(said.content)}"


def structured_output(subject: Subject) -> str:
    """Content that fits a JSON schema."""
    schema = {"type": "json_schema", "json_schema": {"name": "weather", "schema": _SCHEMA}}
    said = subject.chat(_IN_JSON, response_format=schema).content
    need(json.loads(said) == {"temperature": _DEGREES}, f"the temperature {_DEGREES}", said)
    return shown(said)


def long_prompt(subject: Subject) -> str:
    """An answer to as much as the server takes, at most `--long-prompt`."""
    number = min(subject.long_tokens, subject.model.max_len - _RESERVE) // 16
    need(number >= 4, f"--max-model-len above {_RESERVE + 64}", subject.model.max_len)
    words = [_WORD if at == number // 2 else "heron" for at in range(number)]
    lines = [f"Line {at}: the word is {word}, and nothing else." for at, word in enumerate(words)]
    question = f"Which word is on line {number // 2}? Answer with the word alone."
    said = subject.chat("\n".join([*lines, question]), stream=True)
    whole = said.prompt_tokens >= _LINE_TOKENS * number
    need(whole, f"a prompt of {_LINE_TOKENS * number} tokens or more", said.prompt_tokens)
    need(said.content.strip(), "content", said.reasoning)
    _word(subject, _WORD, said.content)
    return f"{said.prompt_tokens} tokens, first piece after {said.moments[0]:.1f} s"


def limits(subject: Subject) -> str:
    """`max_tokens` ends a chat; 404, 400 and (with a key) 401 for bad requests."""
    said = subject.chat(_SUM, max_tokens=_FEW)
    need(said.tokens == _FEW, f"{_FEW} tokens", said.tokens)
    need(said.finish == "length", "finish_reason length", said.finish)
    place = subject.place
    cases: list[tuple[Place, dict[str, Any], int]]
    cases = [(place, {"model": "no-such-model"}, 404), (place, {"max_tokens": -1}, 400)]
    cases += [(Place(place.url), {}, 401)] if place.key else []
    for where, change, status in cases:
        reply = client.post(where, client.CHAT, subject.body("Hello", **change))
        need(reply.status == status, f"status {status}", f"{reply.status} {reply.text}")
    return f"{_FEW} tokens; {len(cases)} bad requests refused"


def eight_at_once(subject: Subject) -> str:
    """Eight streamed chats, while four clients go away."""
    endless = {"model": subject.model.name, "prompt": "Hello", "stream": True, "ignore_eos": True}
    endless["max_tokens"] = max(1, subject.model.max_len // 2)

    def ask(leaves: bool, _: Event) -> None:
        if not leaves:
            return _whole(subject, subject.chat(_SUM, stream=True))
        stream = client.events(subject.place, client.COMPLETIONS, endless)
        need(next(stream, None) is not None, "a piece before the client leaves", "none")
        return stream.close()

    list(in_parallel(ask, [True] * 4 + [False] * 8, 12))
    return "8 answers, 4 cancelled"


def idle_afterwards(subject: Subject) -> str:
    """No request runs or waits, the KV cache is free."""
    names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    end = time.monotonic() + IDLE_S
    while any(left := [subject.total(name) for name in names]):
        need(time.monotonic() < end, f"0 after {IDLE_S:.0f} s", dict(zip(names, left, strict=True)))
        time.sleep(0.2)
    return "0 running, 0 waiting"


def backends(subject: Subject) -> str:
    """The log names those of the profile's `expect`, but for experts that the trial chose."""
    box, profile = subject.container, subject.profile
    used = re.findall(r"entrypoint: profile .* --moe-backend (\S+)", box.log)[-1:]
    tried = ["--moe-backend"] if used not in ([], [profile.moe_backend]) else []
    # as if layers were quantised: vLLM's log shows whether some are
    expected = profile.expectations(("--mxfp4-layers", "any"), [*subject.options, *tried])
    if box.problem or not expected:
        raise Unseen(box.problem or "the profile expects none")
    watch = Watch(expected)
    wrong = list(filter(None, map(watch.feed, box.log.splitlines())))
    if not watch.seen:
        raise Unseen("the log names no backend (rotated, or VLLM_LOGGING_LEVEL)")
    wrong += [one for one in watch.missing() if "linear" not in one]  # none may be quantised
    need(not wrong, "the profile's backends", "; ".join(wrong))
    return str(watch)


def decode_kernels(subject: Subject) -> str:
    """`/metrics`: each kind passed its self-check."""
    found = subject.metrics("vllm:decode_kernels_in_use")  # none on a CPU
    need(all(found.values()), "every kind in use", found)
    return f"{len(found)} kinds in use"


_HINTS: Mapping[Callable[[Subject], str], str] = {
    chat: "try another --moe-backend; status 400: the cpu target chats only with serve --chat",
    streamed_chat: _PARSER,
    tool_call: _PARSER,
    structured_output: "see xgrammar in the server's log",
    long_prompt: "see the server's log; a lower --max-model-len needs less memory",
    limits: "a proxy in front of the server may change answers",
    eight_at_once: "vllm#37030 showed first with requests at once: try another --moe-backend",
    **agents.HINTS,
    idle_afterwards: "other clients? otherwise requests leak: doctor --report",
    backends: "SPARKFORGE_EXTRA_ARGS may choose another; else the wheel lacks the kernel",
    decode_kernels: "the log has the reason (docs/kernels.md)",
}
CHECKS = {read.__name__.replace("_", " "): (hint, read) for read, hint in _HINTS.items()}
"""The checks by name, in their order, each with the hint for a failure."""


@dataclass(frozen=True)
class Checked:
    """The result of a check; ``hint``: only of one that failed."""

    name: str
    state: str
    seconds: float
    seen: str
    hint: str


@dataclass(frozen=True)
class Report:
    """A whole run, as its file has it."""

    target: str
    version: str
    when: str
    url: str
    model: str
    max_model_len: int
    image: str
    ok: bool
    counts: Mapping[str, int]
    checks: tuple[Checked, ...]


def judge(name: str, subject: Subject) -> Checked:
    """Return the result of a check, whatever the server does."""
    (hint, read), began, state = CHECKS[name], time.monotonic(), "fail"
    try:
        state, seen = "ok", read(subject)
    except Unseen as reason:
        state, seen = "not checked", str(reason)
    except Unmet as why:
        seen = str(why)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as why:
        # no answer, or one of another shape
        seen = f"expected an answer, got {type(why).__name__}: {shown(str(why))}"
    seconds = round(time.monotonic() - began, 2)
    return Checked(name, state, seconds, seen, hint if state == "fail" else "")


# -- the command -------------------------------------------------------------------------


@command_options
class Options(CheckoutOptions):
    target: str | None = None
    """target that the server was built as (default: the one that Compose serves)"""
    url: str | None = None
    """URL of the server (default: Compose's address and port on this machine)"""
    log: Path | None = None
    """file with the server's output, to check backends (default: the log of Compose's container)"""
    long_prompt: PositiveInt = 100_000
    """most tokens of the long prompt (default: 100000)"""


def run(options: Options = Options()) -> int:
    """Check a running server; ServerError if it breaks a promise or does not answer."""
    report, file = judged(options)
    log.document({**plain.as_json(report), "report": str(file)})
    failed = ", ".join(row.name for row in report.checks if row.state == "fail")
    if not failed:
        return 0
    return log.failure(ServerError(f"the server fails checks: {failed}", "follow the hints above"))


def judged(options: Options) -> tuple[Report, Path]:
    """Check a running server; returns the results and their file, or raises ServerError."""
    here = checkout(options.pins)
    variables = composing.seen(here.root / ".env")
    target = options.target or composing.served_target(variables, here.pins)
    profile = here.pins.profile_of(here.pins.target(target))
    if options.log is not None and not options.log.is_file():
        raise UsageError(f"--log {options.log}: no such file", "give the server's log")
    place = client.place_of(variables, options.url)
    model, container = client.served_model(place), container_of(place, variables, target)
    if options.log is not None:
        container = replace(container, log=options.log.read_text(errors="replace"), problem="")
    own = (variables.get("SPARKFORGE_EXTRA_ARGS") or "").split()
    subject = Subject(place, model, profile, container, own, options.long_prompt)
    log.heading(f"{model.name} at {place.url}")
    rows = []
    for name in CHECKS:
        rows.append(row := judge(name, subject))
        colour, mark = _STATES[row.state]
        log.info(f"{mark} {name}  {row.seconds:.1f} s  {row.seen}", colour)
        if row.hint:
            log.info(f"  hint: {row.hint}")
    counts = dict.fromkeys(_STATES, 0) | Counter(row.state for row in rows)
    log.info(", ".join(f"{number} {state}" for state, number in counts.items()))
    when = time.strftime("%Y-%m-%dT%H%M%SZ", time.gmtime())
    whom = (target, __version__, when, place.url, model.name, model.max_len, container.image)
    report = Report(*whom, not counts["fail"], counts, tuple(rows))
    file = here.root / "dist" / target / "accept" / f"accept-{when}.json"
    write_file(file, f"{json.dumps(plain.as_json(report), indent=1)}\n".encode())
    log.info(f"report   {file}")
    return report, file


def markdown() -> str:
    """Return the table of all checks."""
    rows = [(name, pages.Markdown(f"{read.__doc__}"[:-1])) for name, (_, read) in CHECKS.items()]
    return pages.table(("check", "what has to be true"), rows)
