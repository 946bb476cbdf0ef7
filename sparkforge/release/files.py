"""Files of a release: what serves it without a checkout, and the statement how it was built."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from sparkforge.build import composing
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
    """Return the text of each file.

    Args:
        compose: text of docker-compose.yml.
        images: name by digest of each service's image.
    """
    served = compose_file(compose, release, images)
    recipe = _recipe(pins, images[MAIN])
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


def _recipe(pins: Pins, image: str) -> str:
    """Return the recipe for sparkrun, which downloads the model to a cache of its own."""
    target = pins.target(MAIN)
    model = pins.models[str(target.model)]
    folder = f"models--{model.repository.replace('/', '--')}/snapshots/{{model_revision}}"
    words = (
        "SPARKFORGE_LISTEN={host}:{port}",
        f"SPARKFORGE_MODEL=$HF_HUB_CACHE/{folder}",
        "/opt/sparkforge/venv/bin/python -I /opt/sparkforge/bin/entrypoint.py",
        "--revision {model_revision} --served-model-name {served_model_name}",
    )
    recipe = {
        "recipe_version": "2",
        "description": target.summary,
        "model": model.repository,
        "model_revision": model.revision,
        "runtime": "vllm-distributed",
        "max_nodes": 1,
        "container": image,
        "defaults": {"host": "127.0.0.1", "port": 8000, "served_model_name": model.repository},
        # sparkrun runs bash in the image, as its own user
        "executor_config": {"entrypoint": "", "user": "10001:10001"},
        "command": " ".join(words),
    }
    return yaml.safe_dump(recipe, sort_keys=False, width=100)


def provenance(receipt: Path, job: Mapping[str, str]) -> dict[str, Any]:
    """Return the SLSA v1 predicate of a build in a job of a forge; ``job`` is its environment.

    It has the type and the fields of the forge's own statements about its workflows, and the
    receipt, which names all inputs.
    """
    server = job["GITHUB_SERVER_URL"]
    place, ref = f"{server}/{job['GITHUB_REPOSITORY']}", job["GITHUB_REF"]
    run = f"{place}/actions/runs/{job['GITHUB_RUN_ID']}/attempts/{job['GITHUB_RUN_ATTEMPT']}"
    path = job["GITHUB_WORKFLOW_REF"].removeprefix(f"{job['GITHUB_REPOSITORY']}/").split("@")[0]
    names = ("event_name", "repository_id", "repository_owner_id")
    github = {name: job[f"GITHUB_{name.upper()}"] for name in names}
    github["runner_environment"] = job["RUNNER_ENVIRONMENT"]
    commit = {"uri": f"git+{place}@{ref}", "digest": {"gitCommit": job["GITHUB_SHA"]}}
    return {
        "buildDefinition": {
            "buildType": "https://actions.github.io/buildtypes/workflow/v1",
            "externalParameters": {"workflow": {"ref": ref, "repository": place, "path": path}},
            "internalParameters": {"github": github},
            "resolvedDependencies": [commit],
        },
        "runDetails": {
            "builder": {"id": f"{server}/{job['GITHUB_WORKFLOW_REF']}"},
            "metadata": {"invocationId": run},
            "byproducts": [{"name": receipt.name, "digest": {"sha256": sha256_file(receipt)}}],
        },
    }
