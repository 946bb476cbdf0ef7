"""The image of a target, in the engine."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparkforge.build import image, imagenote
from sparkforge.build.context import WHEELS, Context
from sparkforge.build.imagenote import ImageNote
from sparkforge.build.item import Item, Results, wheels_of
from sparkforge.build.receipt import SBOM
from sparkforge.build.results import (
    CheckpointResult,
    ImageArchiveResult,
    ImageResult,
    OwnWheel,
    PackResult,
    PluginResult,
    WheelhouseResult,
    WheelResult,
)
from sparkforge.build.stages.trial import trial_files
from sparkforge.core.disk import key_of
from sparkforge.runtime.engine import BaseImage, Engine
from sparkforge.sources.download import Fetches
from sparkforge.store.artefact import Artefact
from sparkforge.store.codekey import code_of


def own(
    wheels: Mapping[str, Item[WheelResult]],
    plugin: Item[PluginResult] | None,
    pack: Item[PackResult] | None,
) -> tuple[Item[OwnWheel], ...]:
    """Return the wheels that a build makes: of upstreams, of our plugin, of a pack."""
    return (*wheels.values(), *(item for item in (plugin, pack) if item is not None))


@dataclass(frozen=True)
class Parts:
    """The items of an image.

    Attributes:
        wheels: ours, by the upstream's name.
        plugin: for vLLM, with our kernels.
        pack: FlashInfer's modules, compiled ahead of time.
        house: the other wheels.
        trial: checkpoint of the preflight.
    """

    wheels: Mapping[str, Item[WheelResult]]
    plugin: Item[PluginResult] | None
    pack: Item[PackResult] | None
    house: Item[WheelhouseResult]
    trial: Item[CheckpointResult]

    @property
    def items(self) -> tuple[Item[Any], ...]:
        """All of them, in the order of a plan."""
        return (*self.own, self.house, self.trial)

    @property
    def own(self) -> tuple[Item[OwnWheel], ...]:
        """The wheels that the build makes."""
        return own(self.wheels, self.plugin, self.pack)


def image_inputs(context: Context, parts: Parts, base: BaseImage) -> Mapping[str, Any]:
    """Return the inputs of an image."""
    return {
        "wheels": {item.label: item.key for item in parts.own},
        "wheelhouse": parts.house.key,
        "base": base.digest,
        "python": context.target.python,
        "platform": context.platform,
        "system_packages": list(context.target.system_packages),
        "build_packages": list(context.target.build_packages),
        "absent": list(context.target.absent),
        "needs": image.needs(context),
        "serve": list(context.target.serve),
        "profile": context.profile,
        "preflight": parts.trial.key,
        "epoch": context.epoch,
        "release": context.release,
        "labels": image.labels(context, base),
        "recipe": image.recipe_digest(context.root),
        "code": code_of(__name__),
    }


def note_of(context: Context, parts: Parts, base: BaseImage) -> ImageNote:
    """Return the inputs of an image and its parts, as the image holds them."""
    return ImageNote(
        context.target_name,
        image_inputs(context, parts, base),
        wheels={name: item.inputs for name, item in parts.wheels.items()},
        wheelhouse=parts.house.inputs,
        trial=parts.trial.inputs,
        plugin=None if parts.plugin is None else parts.plugin.inputs,
        pack=None if parts.pack is None else parts.pack.inputs,
    )


def image_item(
    context: Context, engine: Engine, base: BaseImage, parts: Parts
) -> Item[ImageResult | ImageArchiveResult]:
    """Return the image of these parts: in the engine, or in a file if the build is cold."""
    note = note_of(context, parts, base)
    inputs = note.image

    def contents(results: Results) -> image.Contents:
        from sparkforge.build import sbom  # not needed by a build in which nothing changed

        third_party = results.artefact(parts.house).path / WHEELS
        wheels = {name: results.of(item) for name, item in parts.wheels.items()}
        plugin = None if parts.plugin is None else results.of(parts.plugin)
        pack = None if parts.pack is None else results.of(parts.pack)
        document = sbom.document(context, wheels, plugin, pack, third_party=third_party, base=base)
        share = {SBOM: document, imagenote.NAME: note.dumps()}
        if context.profile:
            text = json.dumps(context.profile, indent=2, sort_keys=True)
            share["profile.json"] = f"{text}\n".encode()
        share |= trial_files(results.artefact(parts.trial))
        labels = {
            **inputs["labels"],
            image.KEY_LABEL: key_of(inputs),
            image.SBOM_LABEL: hashlib.sha256(document).hexdigest(),
        }
        ours = wheels_of(parts.own, results)
        return image.Contents(ours, third_party, share, labels)

    def make(folder: Path, results: Results) -> ImageResult | ImageArchiveResult:
        build = image.archive if context.cold else image.build
        return build(engine, context, base, contents(results), folder)

    def valid(artefact: Artefact[ImageResult | ImageArchiveResult]) -> bool:
        made = artefact.result
        return isinstance(made, ImageArchiveResult) or engine.has_image(made.tag)

    return Item(
        "image",
        "image",
        inputs,
        ImageArchiveResult if context.cold else ImageResult,
        make,
        needs=parts.items,
        valid=valid,
        fetches=lambda: Fetches(unknown=("base image and system packages",)),
    )
