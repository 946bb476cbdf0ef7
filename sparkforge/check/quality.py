"""`build.py bench quality`: the effect of quantised dense layers on what a model says.

The model is served by the profile `exact`, unchanged, and once for each choice of --mxfp4-layers.
The unchanged model continues every prompt of quality.json. Each server scores those tokens, with
the true ones before them (teacher-forced), and its next-token distributions are compared with the
unchanged model's.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

from cyclopts.types import NonNegativeFloat, PositiveInt

from sparkforge.build import publish, serve
from sparkforge.build.graph import last_build
from sparkforge.build.options import ServingOptions, command_options
from sparkforge.build.smoke import SMOKE_ARGUMENTS, SMOKE_VARIABLES
from sparkforge.check import roofline
from sparkforge.check.bench import command
from sparkforge.check.divergence import Logprobs, measured
from sparkforge.core.disk import sha256_file, write_file
from sparkforge.core.errors import CheckError, ServerError, UsageError
from sparkforge.core.log import log
from sparkforge.runtime.client import COMPLETIONS, Place, post
from sparkforge.runtime.servers import MODEL_NAME, Launch
from sparkforge.serving.options import redacted
from sparkforge.serving.profile import VARIABLE
from sparkforge.sources.project import Project

_EXACT = "exact"
_TOP = 256  # likeliest tokens of each distribution; the rest of the vocabulary counts as one

Start = Callable[[Sequence[str]], AbstractContextManager[Place]]


@command_options
class QualityOptions(ServingOptions):
    target: str
    """target to measure"""
    model: Path | None = None
    """checkpoint to measure (default: a tiny test model)"""
    layers: tuple[str, ...] = ()
    """--mxfp4-layers value to measure; may be repeated (default: those of the other profiles)"""
    max_kl: NonNegativeFloat | None = None
    """limit of the mean KL divergence of the next token, in nats (default: none, figures only)"""
    tokens: PositiveInt = 64
    """tokens per continuation (default: 64)"""


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
    exact, variables = serve.chosen(context, _EXACT), {**variables, VARIABLE: _EXACT}
    launch = Launch(model, context.serve_with(exact), arguments, variables, build.tools.port, gpus)
    others = {name: one.mxfp4_layers for name, one in exact.choices.items() if name != _EXACT}
    chosen = options.layers or tuple(filter(None, others.values()))
    data = json.loads(Path(__file__).with_name("quality.json").read_text(encoding="utf-8"))
    prompts = [data["template"].replace("{text}", one) for one in data["prompts"]]
    with context.store.temporary("quality") as work:

        def start(more: Sequence[str]) -> AbstractContextManager[Place]:
            one = replace(launch, arguments=(*arguments, *more))
            return command.started(build, build.graph.product.artefact, one, work)

        found = run(start, chosen, options.tokens, prompts)
    document = {
        "target": context.target_name,
        "release": context.release,
        "pins": sha256_file(context.pins_path),
        "model": str(model),
        "options": redacted((*launch.options, *build.tools.arguments)),
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
    return log.failure(CheckError(msg, "use more precision (KIND=int8) or omit those layers"))


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
