"""Files of a release: what serves it without a checkout, and the statement how it was built."""

import re
from collections.abc import Mapping
from pathlib import Path

from sparkforge.build import composing
from sparkforge.core import pages
from sparkforge.core.disk import sha256_file
from sparkforge.core.errors import CheckError
from sparkforge.pins.pins import Pins

COMPOSE, VARIABLES, RECIPE = "compose.yaml", ".env.example", "sparkforge-gpt-oss-120b.yaml"
FILES = (COMPOSE, VARIABLES, RECIPE)
"""The last is a recipe of sparkrun, which takes its name from the file's."""
MAIN = "spark"
"""Target that ``docker compose up`` without a name serves."""
_HEAD = """\
# sparkforge {release}. On a Spark: docker compose up -d --wait
# Another service: docker compose up -d --wait rtx. Variables: .env, which .env.example explains.
# The model takes 65 GB; docker compose down --volumes deletes it.
"""


def files(pins: Pins, compose: str, release: str, images: Mapping[str, str]) -> dict[str, str]:
    """Return the text of each file; sparkrun downloads the model to a cache of its own.

    Args:
        compose: text of docker-compose.yml.
        images: name by digest of each service's image.
    """
    served = compose_file(compose, release, images)
    target, template = pins.target(MAIN), Path(__file__).with_name("recipe.yaml.j2")
    model = pins.models[str(target.model)]
    recipe = pages.render(template, target=target, model=model, image=images[MAIN])
    return {COMPOSE: served, VARIABLES: variables(compose, served), RECIPE: recipe}


def compose_file(compose: str, release: str, images: Mapping[str, str]) -> str:
    """Return docker-compose.yml for images in a registry, without the comments for a checkout."""
    text = re.sub(r"(?m)^ *#.*\n", "", compose)
    changes = [
        (f"    profiles: [{MAIN}]\n", ""),
        ("  pull_policy: never\n", "  pull_policy: missing\n"),
        ("{name: sparkforge-models, external: true}", "{name: sparkforge-models}"),
    ]
    for found in re.finditer(r"(?m)^    image: (.*sparkforge/([\w-]+):not-built-yet.*)$", text):
        if found[2] not in images:
            raise CheckError(f"no image of {found[2]}", "release all targets together")
        changes.append((found[0], f"    image: {images[found[2]]}"))
    for old, new in changes:
        if text.count(old) != 1:
            msg = f"docker-compose.yml has {old.strip()!r} {text.count(old)} times, not once"
            raise CheckError(msg, "sparkforge/release/files.py makes compose.yaml of it")
        text = text.replace(old, new)
    return _HEAD.format(release=release) + text


def variables(compose: str, served: str) -> str:
    """Return .env.example: the variables of ``served``, a compose.yaml, each with its meaning."""
    lines = ["# Copy this file to .env, and set what you need. Every variable has a default."]
    for names, text in composing.variables(compose):
        # a value of .env, or a variable that is passed on
        reads = r"(?m)\$\{%s\b|^ +%s:$"
        used = [name for name in names.split(", ") if re.search(reads % (name, name), served)]
        if used:
            lines += ["", f"# {text}", *(f"#{name}=" for name in used)]
    return "\n".join([*lines, ""])


def provenance(receipt: Path, job: Mapping[str, str]) -> str:
    """Return the SLSA v1 predicate of a build in a job of a forge; ``job`` is its environment.

    It has the type and the fields of the forge's own statements about its workflows, and the
    receipt, which names all inputs.
    """
    known = {name: text for name, text in job.items() if name.isupper()}
    template = Path(__file__).with_name("provenance.json.j2")
    return pages.render(template, receipt=receipt, sha256=sha256_file, **known)
