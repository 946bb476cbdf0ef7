"""The image of a target, in the engine."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sparkforge.build import image
from sparkforge.build.context import WHEELS, Context, Item, Results, wheels_of
from sparkforge.build.receipt import SBOM
from sparkforge.build.stages.trial import trial_item
from sparkforge.core.hashing import key_of
from sparkforge.runtime.engine import BaseImage
from sparkforge.sources.download import Fetches
from sparkforge.store.codekey import code_of


def needs(context: Context) -> list[dict[str, str]]:
    """Return what the image has to have at last, as ``serving/needs.py`` reads it."""
    return [one.model_dump(exclude_none=True) for one in context.target.needs]


def image_inputs(
    context: Context, wheels: Sequence[Item], house: Item, base: BaseImage
) -> Mapping[str, Any]:
    """Return what an image is made from."""
    return {
        "wheels": {item.label: item.key for item in wheels},
        "wheelhouse": house.key,
        "base": base.digest,
        "python": context.target.python,
        "platform": context.platform,
        "system_packages": list(context.target.system_packages),
        "needs": needs(context),
        "serve": list(context.target.serve),
        "profile": context.profile,
        "preflight": trial_item().key,
        "epoch": context.epoch,
        "release": context.release,
        "labels": image.labels(context, base),
        "recipe": image.recipe_digest(context.root),
        "code": code_of(__name__),
    }


def parts(
    context: Context, wheels: Sequence[Item], house: Item, base: BaseImage
) -> dict[str, Mapping[str, Any]]:
    """Return the inputs of an image's parts and of the image itself, by label.

    They lie in the image, too, so that ``verify IMAGE`` can say what differs. Nothing in them
    depends on the machine: not where sources came from, nor how they were fetched.
    """
    inputs = {item.label: item.inputs for item in [*wheels, house, trial_item()]}
    return {**inputs, "image": image_inputs(context, wheels, house, base)}


def image_item(context: Context, wheels: Sequence[Item], house: Item) -> Item:
    """Return the image that has these wheels, and beside them those of a wheelhouse."""
    assert context.engine is not None and context.base is not None
    engine, base = context.engine, context.base
    request = image.Request(
        root=context.root,
        target=context.target_name,
        base=base,
        python=context.target.python,
        platform=context.platform,
        epoch=context.epoch,
        system_packages=context.target.system_packages,
        serve=context.target.serve,
        profile=context.profile,
        ca_bundle=context.ca_bundle,
        release=context.release,
        lock=context.lock,
        needs=tuple(needs(context)),
        cold=context.cold,
        builder=context.builder,
    )
    inputs = image_inputs(context, wheels, house, base)

    def make(folder: Path, results: Results) -> Mapping[str, Any]:
        # not needed by a build in which nothing changed
        from sparkforge.build import sbom
        from sparkforge.serving.preflight import NAME

        third_party = results[house.label].path / WHEELS
        outputs = {name: results[f"wheel {name}"].outputs for name in context.target.wheels}
        bill = sbom.document(context, outputs, third_party=third_party, base=base)
        made_of = parts(context, wheels, house, base)
        note = json.dumps(
            {"target": context.target_name, "items": made_of}, indent=1, sort_keys=True
        )
        share = {SBOM: bill, image.INPUTS: f"{note}\n".encode()}
        checkpoint = results[trial_item().label].path / NAME
        share |= {f"{NAME}/{one.name}": one.read_bytes() for one in checkpoint.iterdir()}
        labels = {
            **inputs["labels"],
            image.KEY_LABEL: key_of(inputs),
            image.SBOM_LABEL: hashlib.sha256(bill).hexdigest(),
        }
        ours = wheels_of(wheels, results)
        return image.bake(engine, request, ours, third_party, share, labels, folder)

    return Item(
        "image",
        "image",
        inputs,
        make,
        valid=lambda artefact: engine.has_image(str(artefact.outputs["tag"])),
        fetches=lambda: Fetches(unknown=("base image and system packages",)),
    )
