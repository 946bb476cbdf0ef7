"""`build.py bench quality`: the effect of quantised dense layers on a model's answers.

The model is served once unchanged and once for each choice of --mxfp4-layers. The unchanged model
continues every prompt. Then each server scores those tokens, with the true ones before them
(teacher-forced), and its next-token distributions are compared with those of the unchanged model.
Each server also answers questions with one checkable answer. The prompts and questions are in
quality.json, written for this purpose.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sparkforge.build.context import Context
from sparkforge.build.launcher import SMOKE_ARGUMENTS, SMOKE_VARIABLES, start_server
from sparkforge.build.results import Product
from sparkforge.core import plain
from sparkforge.core.errors import SmokeError, UsageError
from sparkforge.core.log import log
from sparkforge.runtime import servers
from sparkforge.runtime.servers import MODEL_NAME, Server, kept_log, tail, wait_ready
from sparkforge.store.artefact import Artefact

DEFAULT_LAYERS = ("qkv", "o", "lm_head", "qkv,o,lm_head")
MATERIAL = Path(__file__).with_name("quality.json")

_REQUEST_TIMEOUT_S = 600.0
_LOAD_TIMEOUT_S = 1800.0  # 65 GB from a disk with 100 MB/s: 11 minutes
_ANSWER_TOKENS = 24
_SMALLEST = 1e-6  # probability; below it a remainder is rounding of the others

Logprobs = Mapping[int, float]
"""Natural logarithms of the probabilities of the likeliest tokens, by token id."""

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
class Limits:
    """Limits of the loss.

    Attributes:
        max_kl: mean divergence of the next token's distribution, in nats.
        min_agreement: share of positions with the same likeliest token.
        max_score_drop: share of all questions.
    """

    max_kl: float
    min_agreement: float
    max_score_drop: float


@dataclass(frozen=True)
class Distance:
    """How far one server's distributions are from another's, over positions.

    Attributes:
        mean_kl: Kullback-Leibler divergence in nats; a lower bound of it, close where ``covered``
            is near one, see ``divergence``.
        p99_kl: the same at the 99th percentile of positions.
        agreement: share of positions with the same likeliest token.
        nll_change: mean change of -log p of the scored token, in nats.
        covered: mean probability of the tokens named by both.
        positions: how many were compared.
    """

    mean_kl: float
    p99_kl: float
    agreement: float
    nll_change: float
    covered: float
    positions: int


@dataclass(frozen=True)
class Material:
    """Prompts to continue and (question, answer) pairs, in the model's format."""

    prompts: Sequence[str]
    questions: Sequence[tuple[str, str]]

    @classmethod
    def load(cls, plan: Plan, path: Path = MATERIAL) -> Material:
        """Read the plan's part of quality.json."""
        data = plain.json_of(path.read_text(encoding="utf-8"))

        def put(text: str) -> str:
            wrapped: str = data["template"].replace("{text}", text)
            return wrapped

        return cls(
            [put(text) for text in data["prompts"][: plan.prompts]],
            [(put(one["question"]), one["answer"]) for one in data["questions"][: plan.questions]],
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
    """Results of one server: the distribution of each written token of each text, and answers."""

    scored: Sequence[Sequence[Logprobs]]
    answers: Sequence[str]


# -- numbers --------------------------------------------------------------------------------


def divergence(reference: Logprobs, other: Logprobs) -> tuple[float, float]:
    """Return a lower bound of one position's divergence in nats, and the probability it covers.

    The servers only return their likeliest tokens. The result is the larger of two bounds. One
    takes all tokens that only one of them returns as one. The other takes each token that only the
    reference returns by itself: the other server's probability of it is at most that of its least
    likely returned token, and at most the rest.
    """
    shared = reference.keys() & other.keys()
    covered = sum(math.exp(reference[token]) for token in shared)
    both = sum(math.exp(reference[t]) * (reference[t] - other[t]) for t in shared)
    left = 1 - sum(math.exp(other[token]) for token in shared)
    as_one = both + _merged(1 - covered, left)
    most = min(math.exp(min(other.values())), 1 - sum(math.exp(q) for q in other.values()))
    log_most = math.log(max(most, _SMALLEST))
    single = sum(math.exp(p) * (p - log_most) for t, p in reference.items() if t not in shared)
    unnamed = 1 - sum(math.exp(p) for p in reference.values())
    return max(as_one, both + single + _merged(unnamed, left), 0.0), min(covered, 1.0)


def _merged(p: float, q: float) -> float:
    """The term of many tokens taken as one, with probabilities p and at most q."""
    return p * math.log(p / max(q, _SMALLEST)) if p > _SMALLEST else 0.0


def distance(
    tokens: Sequence[Sequence[int]],
    reference: Sequence[Sequence[Logprobs]],
    other: Sequence[Sequence[Logprobs]],
) -> Distance:
    """Compare two servers' distributions over the same texts.

    Args:
        tokens: of each text, the scored token at each position.
    """
    kls, covered, same, changes = [], [], 0, 0.0
    for text, ours, theirs in zip(tokens, reference, other, strict=True):
        for token, p, q in zip(text, ours, theirs, strict=True):
            kl, mass = divergence(p, q)
            kls.append(kl)
            covered.append(mass)
            same += max(p, key=p.__getitem__) == max(q, key=q.__getitem__)
            changes += p[token] - q[token]
    count = len(kls)
    return Distance(
        mean_kl=sum(kls) / count,
        p99_kl=sorted(kls)[math.ceil(0.99 * count) - 1],
        agreement=same / count,
        nll_change=changes / count,
        covered=sum(covered) / count,
        positions=count,
    )


def is_right(reply: str, answer: str) -> bool:
    """Return whether the first line with text has the answer as a separate word."""
    plain = re.sub(r"[*`_$\\]|(?<=\d),(?=\d{3})", "", reply).strip()
    line = plain.partition("\n")[0].lower()
    return re.search(rf"(?<![\w.:]){re.escape(answer.lower())}(?![\w:]|\.\d)", line) is not None


def beyond(name: str, result: Mapping[str, Any], base_score: int, limits: Limits) -> list[str]:
    """Return a sentence for each limit that a choice of layers breaks."""
    found = []
    if result["mean_kl"] > limits.max_kl:
        found.append(f"{name}: mean KL {result['mean_kl']:.4f} is over {limits.max_kl:g}")
    if result["agreement"] < limits.min_agreement:
        found.append(
            f"{name}: the top token is the same at {result['agreement']:.3f} of positions, below"
            f" {limits.min_agreement:g}"
        )
    drop = (base_score - result["right"]) / max(result["questions"], 1)
    if drop > limits.max_score_drop:
        found.append(
            f"{name}: {result['right']} right answers instead of {base_score}, a drop of"
            f" {drop:.3f} of all, over {limits.max_score_drop:g}"
        )
    return found


# -- talking to a server -----------------------------------------------------------------------


def _ask(server: Server, **body: Any) -> Any:
    body = {"model": MODEL_NAME, "temperature": 0, "return_token_ids": True, **body}
    reply = servers.complete(server, body, _REQUEST_TIMEOUT_S)
    if not reply.ok:
        msg = f"/v1/completions: {reply.status_code} {reply.text[:300]}\n{tail(server, 8)}"
        raise SmokeError(msg, "see the server's output")
    return reply.json()["choices"][0]


def _continue(server: Server, prompt: str, tokens: int) -> Text:
    choice = _ask(server, prompt=prompt, max_tokens=tokens, ignore_eos=True)
    return Text(choice["prompt_token_ids"], choice["token_ids"])


def _score(server: Server, text: Text, top: int) -> list[Logprobs]:
    """Return the distribution of every written token after those before it."""
    whole = [*text.prompt, *text.written]
    entries = _ask(server, prompt=whole, max_tokens=1, prompt_logprobs=top)["prompt_logprobs"]
    if len(entries) != len(whole):
        msg = f"/v1/completions: {len(entries)} logprobs for a prompt of {len(whole)} tokens"
        raise SmokeError(msg)
    return [
        {int(token): entry["logprob"] for token, entry in one.items()}
        for one in entries[len(text.prompt) :]
    ]


def _observe(server: Server, texts: Sequence[Text], material: Material, top: int) -> Seen:
    scored = []
    for number, text in enumerate(texts):
        scored.append(_score(server, text, top))
        log.progress("scored", number + 1, len(texts), "texts")
    answers = [
        _ask(server, prompt=question, max_tokens=_ANSWER_TOKENS)["text"]
        for question, _ in material.questions
    ]
    return Seen(scored, answers)


def starter(
    context: Context, product: Artefact[Product], model: Path | None, tiny: Path, work: Path
) -> Start:
    """Return what starts a server of a build with further arguments, ready or not."""

    @contextmanager
    def start(arguments: Sequence[str]) -> Iterator[Server]:
        folder = work / str(len(list(work.iterdir())))
        folder.mkdir()
        usual: Sequence[str] = SMOKE_ARGUMENTS if model is None else ()
        launch = servers.Launch(
            tiny if model is None else model,
            context.serve,
            (*usual, *context.arguments, *arguments),
            SMOKE_VARIABLES if model is None else {},
            context.port,
            gpus=context.target.cuda_arch is not None,
        )
        started = start_server(
            context.engine, product, launch, folder, context.store.cache_path("serve")
        )
        with started as server, kept_log(server, context.server_log):
            wait_ready(server, max(context.ready_timeout_s, _LOAD_TIMEOUT_S))
            yield server

    return start


# -- the measurement ----------------------------------------------------------------------------


def run(start: Start, plan: Plan, limits: Limits, material: Material) -> dict[str, Any]:
    """Serve, score and compare; returns the figures as JSON values.

    A choice of layers that cannot be served is listed in ``failed``; the others still run.

    Raises:
        SmokeError: the server of the unchanged model does not start or answer.
        UsageError: there is nothing to measure.
    """
    if not material.prompts or not plan.layers:
        raise UsageError("nothing to compare", "give at least one prompt and one --layers")
    common = ("--max-logprobs", str(plan.top))
    with log.step("unchanged"), start(common) as server:
        texts = [_continue(server, prompt, plan.tokens) for prompt in material.prompts]
        reference = _observe(server, texts, material, plan.top)
        again = [_score(server, text, plan.top) for text in texts]
    tokens = [text.written for text in texts]
    score = _right(reference, material)
    document: dict[str, Any] = {
        "limits": asdict(limits),
        "as_it_is": {
            "right": score,
            "questions": len(material.questions),
            # the effect of the server's own rounding and batching
            "noise": asdict(distance(tokens, reference.scored, again)),
        },
        "layers": {},
        "failed": {},
        "beyond": [],
    }
    for layers in plan.layers:
        try:
            with log.step(layers), start((*common, "--mxfp4-layers", layers)) as server:
                seen = _observe(server, texts, material, plan.top)
        except SmokeError as error:
            document["failed"][layers] = error.what
            continue
        result = {
            **asdict(distance(tokens, reference.scored, seen.scored)),
            "right": _right(seen, material),
            "questions": len(material.questions),
            "other_answers": sum(
                ours != theirs for ours, theirs in zip(reference.answers, seen.answers, strict=True)
            ),
        }
        document["layers"][layers] = result
        document["beyond"] += beyond(layers, result, score, limits)
    return document


def _right(seen: Seen, material: Material) -> int:
    pairs = zip(seen.answers, material.questions, strict=True)
    return sum(is_right(reply, answer) for reply, (_, answer) in pairs)


def table(document: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Return the figures as rows of text, the head first."""
    base = document["as_it_is"]
    rows: list[tuple[str, ...]] = [
        ("layers", "mean KL", "p99 KL", "same token", "NLL", "covered", "right", "changed")
    ]
    for name, one in {"(asked twice)": {**base["noise"], **base}, **document["layers"]}.items():
        rows.append(
            (
                name,
                f"{one['mean_kl']:.5f}",
                f"{one['p99_kl']:.4f}",
                f"{one['agreement']:.4f}",
                f"{one['nll_change']:+.4f}",
                f"{one['covered']:.4f}",
                f"{one['right']}/{one['questions']}",
                str(one.get("other_answers", "")),
            )
        )
    return rows
