"""What is served, an image or a virtual environment; its parts, its smoke test."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparkforge.build import image
from sparkforge.build.cached import Cached, result_of, undamaged
from sparkforge.build.context import WHEELS, Context, Serving, Tools
from sparkforge.build.receipt import SBOM
from sparkforge.build.results import (
    EnvironmentResult,
    FilesResult,
    ImageArchiveResult,
    ImageResult,
    OwnWheel,
    SmokeResult,
    WheelhouseResult,
    all_intact,
)
from sparkforge.build.stages.wheels import hashed
from sparkforge.core.disk import key_of, sha256_file
from sparkforge.runtime import environment, isa
from sparkforge.runtime.engine import BaseImage, Engine
from sparkforge.sources.download import Fetches
from sparkforge.store.store import Artefact, code_of

if TYPE_CHECKING:
    from sparkforge.build.graph import Graph

NOTE = "inputs.json"
"""A file of the image's share folder: its inputs and those of its parts, by label."""
_UNCOMPARED = {
    *("wheels", "wheelhouse", "labels"),  # of the image: its parts, which are there themselves
    "sources",  # a choice of the build, not of the checkout
    "host",  # of the machine that compiled a pack
}


# -- virtual environments ----------------------------------------------------------------


def environment_item(
    context: Context,
    wheels: Sequence[Cached[OwnWheel]],
    house: Cached[WheelhouseResult],
    label: str,
    *,
    release: bool = False,
) -> Cached[EnvironmentResult]:
    """Return the environment with these wheels and those of a wheelhouse.

    ``release``: they are the release's, for the smoke test, which keeps it when it runs again.
    """
    stage, kind = "smoke" if release else "image", EnvironmentResult
    version = context.target.python
    inputs = {
        "wheels": {item.label: item.key for item in wheels},
        "wheelhouse": house.key,
        "python": version,
    }

    def make(folder: Path) -> EnvironmentResult:
        with context.store.unpacked() as unpacked:
            offline = context.access.offline
            environment.install(
                folder,
                list(hashed(wheels)),
                python=environment.ensure_python(context.store, version, offline=offline),
                lock=context.lock,
                wheelhouse=house.path / WHEELS,
                unpacked=unpacked,
                target=context.target_name,
            )
        last = context.store.last(context.target_name, label)
        if last is not None and (before := context.store.find(stage, last["inputs"], kind)):
            environment.share_byte_code(before.path, folder)
        return kind()

    def stands(artefact: Artefact[EnvironmentResult]) -> bool:
        # the interpreter is a link to the system's or the store's, which may be gone
        python = environment.python_path(artefact.path)
        return python.exists() and not environment.changed(artefact.path)

    def fetches() -> Fetches:
        here = environment.find_python(context.store, version) is not None
        return Fetches() if here else Fetches(unknown=(f"Python {version} by uv",))

    return Cached(
        *(stage, label, inputs, kind, make),
        needs=(*wheels, house),
        fetches=fetches,
        valid=stands,
        intermediate=release,
    )


# -- images ------------------------------------------------------------------------------


def trial_item() -> Cached[FilesResult]:
    """Return the checkpoint of the preflight with its answers; the same for every target."""

    def make(folder: Path) -> FilesResult:
        # not needed by a build in which nothing changed
        from sparkforge.checkpoints import trial
        from sparkforge.serving.preflight import NAME

        trial.make(folder / NAME)
        made = (folder / NAME).iterdir()
        return FilesResult({f"{NAME}/{path.name}": sha256_file(path) for path in made})

    return Cached("image", "preflight checkpoint", {}, FilesResult, make, valid=all_intact)


def note_of(context: Context, parts: Graph, base: BaseImage) -> dict[str, Mapping[str, Any]]:
    """Return the inputs of an image and of its parts, by label, as the image holds them."""
    target, trial = context.target, trial_item()
    inputs = {
        "wheels": {item.label: item.key for item in parts.own},
        "wheelhouse": parts.house.key,
        "base": base.digest,
        "platform": context.platform,
        "target": target.model_dump(mode="json"),
        "needs": image.needs(context),
        "profile": context.profile,
        "preflight": trial.key,
        "epoch": context.epoch,
        "release": context.release,
        "labels": image.labels(context, base),
        "recipe": image.recipe_digest(context.root),
        "code": code_of(__name__),
    }
    return {
        "image": inputs,
        **{item.label: item.inputs for item in (*parts.own, parts.house, trial)},
    }


def comparable(note: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the inputs of a note that two builds of a checkout share."""
    return {
        label: {name: value for name, value in inputs.items() if name not in _UNCOMPARED}
        for label, inputs in note.items()
    }


def image_item(
    context: Context, tools: Tools, engine: Engine, base: BaseImage, parts: Graph
) -> Cached[ImageResult | ImageArchiveResult]:
    """Return the image of these parts: in the engine, or in a file if the build is cold."""
    trial, note = trial_item(), note_of(context, parts, base)
    inputs = note["image"]

    def make(folder: Path) -> ImageResult | ImageArchiveResult:
        from sparkforge.build import sbom  # not needed by a build in which nothing changed

        third_party = parts.house.path / WHEELS
        wheels = {name: item.result for name, item in parts.wheels.items()}
        plugin, pack = result_of(parts.plugin), result_of(parts.pack)
        document = sbom.document(context, wheels, plugin, pack, third_party=third_party, base=base)
        share = {SBOM: document, NOTE: _json(note, 1)}
        if context.profile:
            share["profile.json"] = _json(context.profile, 2)
        for name, sha256 in trial.result.files.items():
            share[name] = undamaged(trial.path / name, sha256).read_bytes()
        labels = {
            **inputs["labels"],
            image.KEY_LABEL: key_of(inputs),
            image.SBOM_LABEL: hashlib.sha256(document).hexdigest(),
        }
        contents = image.Contents(hashed(parts.own), third_party, share, labels)
        return image.build(engine, tools, context, base, contents, folder)

    def valid(artefact: Artefact[ImageResult | ImageArchiveResult]) -> bool:
        made = artefact.result
        return isinstance(made, ImageArchiveResult) or engine.image_id(made.tag) is not None

    kind = ImageArchiveResult if tools.cold else ImageResult
    return Cached(
        *("image", "image", inputs, kind, make),
        needs=(*parts.own, parts.house, trial),
        valid=valid,
        fetches=lambda: Fetches(unknown=("base image and system packages",)),
    )


def _json(value: object, indent: int) -> bytes:
    return f"{json.dumps(value, indent=indent, sort_keys=True)}\n".encode()


# -- the smoke test ----------------------------------------------------------------------


def smoke_item(
    context: Context,
    tools: Tools,
    serving: Serving,
    graph: Graph,
    unpatched: Cached[EnvironmentResult] | None,
) -> Cached[SmokeResult]:
    """Return the smoke test of an image or an environment.

    Args:
        unpatched: the release without our series, to compare with; None for an image, whose
            original files are put back, and where nothing is compared.
    """
    inputs = {
        "product": graph.product.key,
        "cpu": isa.here(),
        "kind": "image" if tools.engine is not None else "environment",
        "unpatched": {} if unpatched is None else {unpatched.label: unpatched.key},
        "serve": list(context.serve),
        "arguments": list(serving.arguments),
    }

    def make(folder: Path) -> SmokeResult:
        from sparkforge.build import smoke  # not needed by a build in which nothing changed

        release = None if unpatched is None else unpatched.artefact
        served = (serving, graph.product.artefact, release, graph.wheels, graph.trees)
        return smoke.run(context, tools.engine, *served, folder)

    further = () if unpatched is None else (unpatched,)
    label = "smoke with arguments" if serving.arguments else "smoke"
    needs = (graph.product, *further, *graph.wheels.values())
    return Cached("smoke", label, inputs, SmokeResult, make, needs)
