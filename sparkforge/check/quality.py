"""`build.py bench quality`: the effect of quantised dense layers on what a model says.

The model is served unchanged, and once for each choice of --mxfp4-layers. The unchanged model
continues every prompt of quality.json. Each server scores those tokens, with the true ones before
them (teacher-forced), and its next-token distributions are compared with the unchanged model's.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

from cyclopts.types import NonNegativeFloat, PositiveInt

from sparkforge.build import publish, serve
from sparkforge.build.graph import last_build
from sparkforge.build.options import (
    Behind,
    OutputOptions,
    ServerOptions,
    VariantOptions,
    command_options,
)
from sparkforge.build.smoke import SMOKE_ARGUMENTS, SMOKE_VARIABLES
from sparkforge.check import roofline
from sparkforge.check.bench import command
from sparkforge.core.disk import sha256_file, write_file
from sparkforge.core.errors import CheckError, ServerError, UsageError
from sparkforge.core.log import log
from sparkforge.runtime.client import COMPLETIONS, Place, post
from sparkforge.runtime.servers import MODEL_NAME, Launch
from sparkforge.serving.options import redacted
from sparkforge.sources.project import Project, ProjectOptions

_LAYERS = ("qkv", "o", "lm_head", "qkv,o,lm_head")
_TOP = 256  # likeliest tokens of each distribution; the rest of the vocabulary counts as one
_SMALLEST = 1e-6  # probability; a smaller remainder is rounding of the others

Start = Callable[[Sequence[str]], AbstractContextManager[Place]]
Logprobs = Mapping[int, float]
"""Natural logarithms of the probabilities of the likeliest tokens, by token id."""


@command_options
class QualityOptions:
    target: str
    """target to measure"""
    model: Path | None = None
    """checkpoint to measure (default: a tiny test model)"""
    layers: tuple[str, ...] = _LAYERS
    """--mxfp4-layers value to measure; may be repeated (default: qkv, o, lm_head, and all three)"""
    max_kl: NonNegativeFloat | None = None
    """limit of the mean KL divergence of the next token, in nats (default: none, figures only)"""
    tokens: PositiveInt = 64
    """tokens per continuation (default: 64)"""
    arguments: Behind = ()
    project: ProjectOptions = ProjectOptions()
    output: OutputOptions = OutputOptions()
    variant: VariantOptions = VariantOptions()
    server: ServerOptions = ServerOptions()


def measure_quality(options: QualityOptions) -> int:
    """Measure the effect of --mxfp4-layers on answers; CheckError if it is too large."""
    for layers in options.layers:
        roofline.parse_layers(layers)  # checked here, not by a server after the first has run
    project = Project.open(options.project)
    build = last_build(project, options.target, options.variant, options.server, options.arguments)
    context = build.context
    arguments: tuple[str, ...] = build.tools.arguments
    variables: Mapping[str, str] = {}
    if options.model is not None:
        model = serve.checkpoint(options.model)
    elif context.target.smoke is not None:
        model = publish.tiny_model(context.dist)
        arguments, variables = (*SMOKE_ARGUMENTS, *arguments), SMOKE_VARIABLES
    else:
        msg = f"target {context.target_name} has no checkpoint"
        raise UsageError(msg, "give one with --model DIR")
    build.run("image")
    gpus = context.target.cuda_arch is not None
    launch = Launch(model, context.serve, arguments, variables, build.tools.port, gpus)
    data = json.loads(Path(__file__).with_name("quality.json").read_text(encoding="utf-8"))
    prompts = [data["template"].replace("{text}", one) for one in data["prompts"]]
    with context.store.temporary("quality") as work:

        def start(more: Sequence[str]) -> AbstractContextManager[Place]:
            one = replace(launch, arguments=(*arguments, *more))
            return command.started(build, build.graph.product.artefact, one, work)

        found = run(start, options.layers, options.tokens, prompts)
    document = {
        "target": context.target_name,
        "release": context.release,
        "pins": sha256_file(context.pins_path),
        "model": str(model),
        "options": redacted((*context.serve, *build.tools.arguments)),
        "layers": found,
    }
    file = command.new_folder(context.dist, "quality") / "quality.json"
    write_file(file, f"{json.dumps(document, indent=1, sort_keys=True)}\n".encode())
    log.document(document)
    fields = ("mean_kl", "agreement", "covered")
    rows = [(name, *(f"{one[field]:.5f}" for field in fields)) for name, one in found.items()]
    log.table([("layers", *fields), *rows])
    log.info(f"result   {file}")
    limit = math.inf if options.max_kl is None else options.max_kl
    if not (beyond := [name for name, one in found.items() if one["mean_kl"] > limit]):
        return 0
    msg = f"mean KL above {limit:g}: {'; '.join(beyond)}"
    return log.failure(CheckError(msg, "use more precision (KIND=mxfp8) or omit those layers"))


def run(
    start: Start, layers: Sequence[str], tokens: int, prompts: Sequence[str]
) -> dict[str, dict[str, Any]]:
    """Serve, score and compare the choices of layers; ``start`` takes further arguments.

    Only continuations are compared: the model was not trained to write a user's text.
    """
    common = ("--max-logprobs", str(_TOP))
    with log.step("unchanged"), start(common) as place:
        written = [_ask(place, prompt=p, max_tokens=tokens, ignore_eos=True) for p in prompts]
        texts = [(one["prompt_token_ids"], one["token_ids"]) for one in written]
        reference = [one for text in texts for one in _score(place, *text)]
    found = {}
    for name in layers:
        with log.step(name), start((*common, "--mxfp4-layers", name)) as place:
            seen = [one for text in texts for one in _score(place, *text)]
            found[name] = measured(reference, seen)
    return found


def _ask(place: Place, **body: Any) -> Any:
    body = {"model": MODEL_NAME, "temperature": 0, "return_token_ids": True, **body}
    try:
        return post(place, COMPLETIONS, body).json()["choices"][0]
    except (OSError, ValueError) as error:
        raise ServerError(f"/v1/completions: {error}") from error


def _score(place: Place, prompt: list[int], written: list[int]) -> list[Logprobs]:
    """Return the distribution of every written token after those before it."""
    answer = _ask(place, prompt=[*prompt, *written], max_tokens=1, prompt_logprobs=_TOP)
    return [
        {int(token): entry["logprob"] for token, entry in position.items()}
        for position in answer["prompt_logprobs"][len(prompt) :]
    ]


def divergence(reference: Logprobs, other: Logprobs) -> tuple[float, float]:
    """Return a lower bound of one position's divergence in nats, and the probability it covers.

    Tokens that not both servers return are merged to one, which can only lose divergence.
    """
    shared = reference.keys() & other.keys()
    covered = sum(math.exp(reference[token]) for token in shared)
    both = sum(math.exp(reference[t]) * (reference[t] - other[t]) for t in shared)
    rest, left = 1 - covered, 1 - sum(math.exp(other[token]) for token in shared)
    merged = rest * math.log(rest / max(left, _SMALLEST)) if rest > _SMALLEST else 0.0
    return max(both + merged, 0.0), min(covered, 1.0)


def measured(reference: Sequence[Logprobs], seen: Sequence[Logprobs]) -> dict[str, Any]:
    """Compare one server's distributions with the unchanged model's.

    Returns ``mean_kl`` in nats, a lower bound; ``agreement``: share of positions with the same
    likeliest token; ``covered``: mean probability of the tokens that both returned (near one, the
    bound is close); and the number of ``positions``.
    """
    pairs = list(zip(reference, seen, strict=True))
    kls, covered = zip(*(divergence(p, q) for p, q in pairs), strict=True)
    same = fmean(max(p, key=p.__getitem__) == max(q, key=q.__getitem__) for p, q in pairs)
    found = {"mean_kl": fmean(kls), "agreement": same, "covered": fmean(covered)}
    return {**found, "positions": len(pairs)}
