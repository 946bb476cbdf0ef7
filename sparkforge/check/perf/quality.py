"""`build.py bench quality`: the effect of quantised dense layers on a model's answers.

The model is served twice unchanged and once for each choice of --mxfp4-layers. The unchanged model
continues every prompt. Then each server scores those tokens, with the true ones before them
(teacher-forced), and its next-token distributions are compared with those of the unchanged model.
Each server also answers questions with one checkable answer. The prompts and questions are in
quality.json, written for this purpose.

The second server of the unchanged model gets the same requests in the opposite order and several at
once, so that its batches have other shapes. The differences of these two are noise: a choice is
judged by its addition to that.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import Any

from sparkforge.build.graph import Build
from sparkforge.build.launcher import SMOKE_ARGUMENTS, SMOKE_VARIABLES, start_server
from sparkforge.check.perf.losses import Limits, Logprobs, Measured, Report, distance
from sparkforge.core import plain
from sparkforge.core.errors import ServerError, UsageError
from sparkforge.core.log import log
from sparkforge.core.run import in_parallel
from sparkforge.runtime import servers
from sparkforge.runtime.client import COMPLETIONS, Place, post
from sparkforge.runtime.servers import MODEL_NAME, Server, kept_log, tail, wait_ready

DEFAULT_LAYERS = ("qkv", "o", "lm_head", "qkv,o,lm_head")
MATERIAL = Path(__file__).with_name("quality.json")

_LOAD_TIMEOUT_S = 1800.0  # 65 GB from a disk with 100 MB/s: 11 minutes
_ANSWER_TOKENS = 24
_AT_ONCE = 8  # requests to the second server of the unchanged model

Start = Callable[[Sequence[str]], AbstractContextManager[Server]]


@dataclass(frozen=True)
class Plan:
    """The measurement.

    Attributes:
        layers: values of --mxfp4-layers, one server each.
        prompts: number of prompts; None: all.
        questions: number of questions; None: all.
        tokens: of each continuation.
        top: likeliest tokens of each distribution; the rest of the vocabulary counts as one.
    """

    layers: Sequence[str] = DEFAULT_LAYERS
    prompts: int | None = None
    questions: int | None = None
    tokens: int = 64
    top: int = 256


@dataclass(frozen=True)
class Material:
    """Prompts to continue and (question, answer) pairs, in the model's format."""

    prompts: Sequence[str]
    questions: Sequence[tuple[str, str]]

    @classmethod
    def load(cls, plan: Plan, path: Path = MATERIAL) -> Material:
        """Read the plan's part of quality.json."""
        data = plain.json_of(path.read_text(encoding="utf-8"))
        template: str = data["template"]
        questions = data["questions"][: plan.questions]
        return cls(
            [template.replace("{text}", text) for text in data["prompts"][: plan.prompts]],
            [(template.replace("{text}", one["question"]), one["answer"]) for one in questions],
        )


@dataclass(frozen=True)
class Text:
    """A prompt with the unchanged model's continuation, as token ids.

    Only the continuation is compared, since the model was not trained to write a user's text.
    """

    prompt: Sequence[int]
    written: Sequence[int]


@dataclass(frozen=True)
class Seen:
    """Results of one server: the distribution of each text's written tokens, and answers."""

    scored: Sequence[Sequence[Logprobs]]
    answers: Sequence[str]


def is_right(reply: str, answer: str) -> bool:
    """Return whether the first line with text has the answer as a separate word."""
    line = re.sub(r"[*`_$\\]|(?<=\d),(?=\d{3})", "", reply).strip().partition("\n")[0].lower()
    return re.search(rf"(?<![\w.:]){re.escape(answer.lower())}(?![\w:]|\.\d)", line) is not None


def _ask(server: Server, **body: Any) -> Any:
    body = {"model": MODEL_NAME, "temperature": 0, "return_token_ids": True, **body}
    try:
        return post(Place(f"{server.url}/v1"), COMPLETIONS, body).json()["choices"][0]
    except (OSError, ValueError) as error:
        msg = f"/v1/completions: {error}\n{tail(server, 8)}"
        raise ServerError(msg, "see the server's output") from error


def _continue(server: Server, prompt: str, tokens: int) -> Text:
    choice = _ask(server, prompt=prompt, max_tokens=tokens, ignore_eos=True)
    return Text(choice["prompt_token_ids"], choice["token_ids"])


def _score(server: Server, text: Text, top: int) -> list[Logprobs]:
    """Return the distribution of every written token after those before it."""
    whole = [*text.prompt, *text.written]
    entries = _ask(server, prompt=whole, max_tokens=1, prompt_logprobs=top)["prompt_logprobs"]
    if len(entries) != len(whole):
        msg = f"/v1/completions: {len(entries)} logprobs for a prompt of {len(whole)} tokens"
        raise ServerError(msg)
    return [
        {int(token): entry["logprob"] for token, entry in position.items()}
        for position in entries[len(text.prompt) :]
    ]


def _observe(
    server: Server, texts: Sequence[Text], material: Material, top: int, *, mixed: bool = False
) -> Seen:
    """Score the texts and ask the questions.

    Args:
        mixed: from the last to the first and several at once, so that batches have other shapes.
    """
    width = _AT_ONCE if mixed else 1
    turn = -1 if mixed else 1

    def score(text: Text, _: Event) -> list[Logprobs]:
        return _score(server, text, top)

    def ask(pair: tuple[str, str], _: Event) -> str:
        answer: str = _ask(server, prompt=pair[0], max_tokens=_ANSWER_TOKENS)["text"]
        return answer

    scored = []
    for logprobs in in_parallel(score, texts[::turn], width):
        scored.append(logprobs)
        log.progress("scored", len(scored), len(texts), "texts")
    answers = list(in_parallel(ask, material.questions[::turn], width))
    return Seen(scored[::turn], answers[::turn])


def starter(build: Build, model: Path | None, tiny: Path, work: Path) -> Start:
    """Return a function that starts a build's server with further arguments, ready or not."""
    context, serving = build.context, build.serving

    @contextmanager
    def start(arguments: Sequence[str]) -> Iterator[Server]:
        folder = work / str(len(list(work.iterdir())))
        folder.mkdir()
        usual: Sequence[str] = SMOKE_ARGUMENTS if model is None else ()
        launch = servers.Launch(
            tiny if model is None else model,
            context.serve,
            (*usual, *serving.arguments, *arguments),
            SMOKE_VARIABLES if model is None else {},
            serving.port,
            gpus=context.target.cuda_arch is not None,
        )
        product, cache = build.graph.product.artefact, context.store.cache_path("serve")
        started = start_server(build.tools.engine, product, launch, folder, cache)
        with started as server, kept_log(server, context.server_log):
            wait_ready(server, max(serving.ready_timeout_s, _LOAD_TIMEOUT_S))
            yield server

    return start


def run(start: Start, plan: Plan, limits: Limits, material: Material) -> Report:
    """Serve, score and compare.

    A choice of layers that cannot be served is listed in ``failed``; the others still run.

    Raises:
        ServerError: a server of the unchanged model does not start or answer.
        UsageError: there is nothing to measure.
    """
    if not material.prompts or not plan.layers:
        raise UsageError("nothing to compare", "give at least one prompt and one --layers")
    if len(material.prompts) < 2 and None in (limits.max_kl, limits.min_agreement):
        hint = "add --prompts 2 or more, or set --max-kl and --min-agreement"
        raise UsageError("one prompt shows no noise", hint)
    common = ("--max-logprobs", str(plan.top))
    with log.step("unchanged"), start(common) as server:
        texts = [_continue(server, prompt, plan.tokens) for prompt in material.prompts]
        reference = _observe(server, texts, material, plan.top)
    with log.step("unchanged, a second time"), start(common) as server:
        again = _observe(server, texts, material, plan.top, mixed=True)
    layers, failed = {}, {}
    for name in plan.layers:
        try:
            with log.step(name), start((*common, "--mxfp4-layers", name)) as server:
                seen = _observe(server, texts, material, plan.top)
        except ServerError as error:
            failed[name] = error.what
            continue
        layers[name] = measured(texts, reference, seen, material)
    noise = measured(texts, reference, again, material)
    return Report(sum(_right(reference, material)), noise, layers, failed, limits)


def measured(texts: Sequence[Text], reference: Seen, seen: Seen, material: Material) -> Measured:
    """Compare one server's results with the unchanged model's first ones."""
    before, after = _right(reference, material), _right(seen, material)
    pairs = list(zip(before, after, strict=True))
    return Measured(
        **distance([text.written for text in texts], reference.scored, seen.scored),
        right=sum(after),
        lost=pairs.count((True, False)),
        gained=pairs.count((False, True)),
        questions=len(pairs),
        other_answers=sum(a != b for a, b in zip(reference.answers, seen.answers, strict=True)),
    )


def _right(seen: Seen, material: Material) -> list[bool]:
    pairs = zip(seen.answers, material.questions, strict=True)
    return [is_right(reply, answer) for reply, (_, answer) in pairs]
