"""The smoke test: the build serves, and the unpatched release refuses or answers the same.

Virtual environments and images get the same checks, as a ``Server``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import requests

from sparkforge.build.results import Answer, ReleaseProof, SmokeResult
from sparkforge.core import plain
from sparkforge.core.errors import ServerError
from sparkforge.core.log import counted, log
from sparkforge.runtime.servers import MODEL_NAME, Server, complete, tail, wait_ready

READY_TIMEOUT_S = 300.0
_REQUEST_TIMEOUT_S = 120.0
_PROMPT = "The forge is hot, the spark is small, and every byte is counted once."
_TOKENS = 24
_DIED = "died unexpectedly (exit code: "  # SIGILL
STOCK_ERROR = "NotImplementedError: No MXFP4 MoE backend supports the deployment configuration"
# Token ids; the first is the first forward of a server. After each of them the tiny model's next
# token leads by 1.5 logits or more in float32, so rounding decides nothing.
PROMPTS: tuple[tuple[int, ...], ...] = (
    (5,),
    (33,),
    tuple(b"hammer"),
    tuple(b"every byte counts"),
    tuple(_PROMPT.encode()),
)
TOLERANCE = 0.1
"""Between log-probabilities of one token from two servers that compute in BF16. Measured: with AVX2
those of ``PROMPTS`` are within 0.0043 of the float32 reference; in that reference, weights that are
moved at random by up to 2**-8 of themselves (BF16's step) move them by at most 0.04 in 12 draws."""


def exercise(
    start: Callable[[], AbstractContextManager[Server]], timeout_s: float = READY_TIMEOUT_S
) -> SmokeResult:
    """Start the patched server, check that it keeps to the OpenAI API, and stop it.

    Raises:
        ServerError: an answer is wrong; the message says which, and how.
    """
    with start() as server:
        ready = wait_ready(server, timeout_s)
        log.info(f"ready after {ready:.1f} s")
        answers = tuple(_answer(server, prompt) for prompt in PROMPTS)
        names = [entry["id"] for entry in _models(server)["data"]]
        first, seconds = _complete(server)
        again, _ = _complete(server)
        streamed, streamed_usage = _stream(server)
        choice, usage = first["choices"][0], first["usage"]
        tokens = choice["token_ids"]
        # the tiny model's tokens are bytes, so counts are known without its tokenizer
        counts = (len(_PROMPT.encode()), _TOKENS, len(_PROMPT.encode()) + _TOKENS)
        for found, wanted, what in (
            (names, [MODEL_NAME], "models"),
            (again["choices"][0]["token_ids"], tokens, "a second completion at temperature 0"),
            (streamed, tokens, "the streamed completion"),
            (len(tokens), _TOKENS, "number of tokens"),
            (_counts(usage), counts, "usage"),
            (_counts(streamed_usage or {}), counts, "usage of the streamed completion"),
            (_status(server, model="no-such-model"), requests.codes.not_found, "a wrong model"),
            (_status(server, max_tokens=-1), requests.codes.bad_request, "a bad request"),
        ):
            _expect(found == wanted, f"{what}: {found} instead of {wanted}", server)
        log.info(f"completions: {_TOKENS} tokens in {seconds:.2f} s, the same streamed and again")
        stopped = server.stop()
        _expect(not stopped.stragglers, "the server left processes running", server)
        _expect(stopped.exit_code == 0, f"exit code {stopped.exit_code} after SIGTERM", server)
        log.info(f"stopped cleanly in {stopped.seconds:.1f} s")
    return SmokeResult(
        ready_s=round(ready, 2),
        completion_s=round(seconds, 3),
        tokens=usage["completion_tokens"],
        text=ascii(choice["text"]),
        stop_s=round(stopped.seconds, 2),
        answers=answers,
    )


def check_release(
    start: Callable[[], AbstractContextManager[Server]],
    start_hidden: Callable[[], AbstractContextManager[Server]] | None,
    answers: Sequence[Answer],
    timeout_s: float = READY_TIMEOUT_S,
) -> ReleaseProof:
    """Start the unpatched release on the same checkpoint: it refuses, or answers the same.

    Args:
        start_hidden: starts it without the instruction set that it has a backend of its own for;
            None on a machine without that set, where it has to refuse.
        answers: of the patched server to ``PROMPTS``.

    Raises:
        ServerError: it serves where it has no backend (then the patch is needless), it answers
            something else, or it fails in another way.
    """
    with start() as server:
        # an image has no compiler, and without one the release does not ask for AMX's tiles
        if refusal := _refusal(server, timeout_s, *(() if start_hidden is None else (_DIED,))):
            log.info(f"the unpatched release fails as expected: {refusal}")
            return ReleaseProof("refused", refusal)
        if start_hidden is None:
            msg = "the unpatched release serves this checkpoint: the patch is not needed here"
            raise ServerError(msg, "see the patch's Drop-when")
        difference = _compare(server, answers)
    log.info(
        f"the unpatched release serves the checkpoint on its own backend: {len(answers)} prompts,"
        f" the same first tokens, log-probabilities within {difference:.3f}"
    )
    with start_hidden() as server:
        if (refusal := _refusal(server, timeout_s)) is None:
            msg = "the unpatched release also serves this checkpoint with AMX hidden"
            raise ServerError(msg, "see the patch's Drop-when")
    log.info(f"with AMX hidden from that process it fails: {refusal}")
    return ReleaseProof("compared", refusal, hidden="amx", difference=round(difference, 4))


def _refusal(server: Server, timeout_s: float, *others: str) -> str | None:
    """Return the words with which a server refuses the checkpoint; None: it is ready."""
    try:
        wait_ready(server, timeout_s)
    except ServerError as error:
        if server.exited() is None:
            raise
        output = server.output()
        if known := next((words for words in (STOCK_ERROR, *others) if words in output), None):
            return known
        msg = f"the unpatched release fails, but not with {STOCK_ERROR}:\n{tail(server)}"
        raise ServerError(msg, "see the patch's Drop-when") from error
    return None


def _compare(server: Server, answers: Sequence[Answer]) -> float:
    """Return the largest difference of log-probabilities from ``answers``."""
    largest = 0.0
    # The longest first: on a CPU with AMX the release dies where the first forward has one token.
    asked = sorted(zip(PROMPTS, answers, strict=True), key=lambda pair: -len(pair[0]))
    for prompt, ours in asked:
        theirs = _answer(server, prompt)
        difference = abs(theirs.logprob - ours.logprob)
        _expect(
            theirs.token == ours.token and difference <= TOLERANCE,
            f"the release answers {list(prompt)} with {theirs}, the patched server with {ours}",
            server,
        )
        largest = max(largest, difference)
    return largest


def _body(**more: Any) -> dict[str, Any]:
    return {
        "model": MODEL_NAME,
        "prompt": _PROMPT,
        "max_tokens": _TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        **more,
    }


def _counts(usage: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(usage.get(f"{kind}_tokens") for kind in ("prompt", "completion", "total"))


def _models(server: Server) -> Any:
    try:
        reply = requests.get(f"{server.url}/v1/models", timeout=_REQUEST_TIMEOUT_S)
        reply.raise_for_status()
        return reply.json()
    except requests.RequestException as error:
        raise ServerError(f"/v1/models: {error}\n{tail(server)}") from error


def _post(server: Server, **more: Any) -> requests.Response:
    body = _body(**more)
    reply = complete(server, body, _REQUEST_TIMEOUT_S)
    tokens = counted(len(body["prompt"]), "token")
    _expect(reply.ok, f"a prompt of {tokens}: {reply.status_code} {reply.text[:300]}", server)
    return reply


def _complete(server: Server) -> tuple[Any, float]:
    reply = _post(server)
    return reply.json(), reply.elapsed.total_seconds()


def _answer(server: Server, prompt: Sequence[int]) -> Answer:
    choice = _post(server, prompt=list(prompt), max_tokens=1, logprobs=1).json()["choices"][0]
    (token,), (logprob,) = choice["token_ids"], choice["logprobs"]["token_logprobs"]
    return Answer(token, logprob)


def _stream(server: Server) -> tuple[list[int], Any]:
    """Return the token ids and the usage of a streamed completion."""
    ids: list[int] = []
    usage, done = None, False
    body = _body(stream=True, stream_options={"include_usage": True})
    with complete(server, body, _REQUEST_TIMEOUT_S, stream=True) as reply:
        _expect(reply.ok, f"streaming: {reply.status_code}", server)
        for line in reply.iter_lines():
            if line == b"data: [DONE]":
                done = True
            elif line.startswith(b"data: "):
                event = plain.json_of(line.removeprefix(b"data: "))
                usage = event.get("usage") or usage
                ids += [token for choice in event["choices"] for token in choice["token_ids"] or ()]
    _expect(done, "the stream ended without [DONE]", server)
    return ids, usage


def _status(server: Server, **wrong: Any) -> int:
    """Return the status of the answer to a wrong request."""
    return complete(server, _body(**wrong), _REQUEST_TIMEOUT_S).status_code


def _expect(truth: bool, otherwise: str, server: Server) -> None:
    if not truth:
        msg = f"{otherwise}; end of the server log:\n{tail(server, 8)}"
        raise ServerError(msg, "run it again: build.py smoke --target NAME")
