"""What each stage of a target is made from, and how: pins and options → items.

Every item's inputs are known before anything runs, because pins.yaml and the patch files say
what the earlier stages will give. So a plan, ``explain`` and a build in which nothing changed
cost only hashing.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from sparkforge import environment, git, series, sources, wheelitems
from sparkforge.context import (
    STAGES,
    UNPATCHED,
    WHEELS,
    Context,
    Item,
    Results,
    source_of,
    wheel_path,
)
from sparkforge.log import log
from sparkforge.pins import Upstream
from sparkforge.receipt import SBOM
from sparkforge.series import Series
from sparkforge.store import code_digest, key_of

_HERE = Path(__file__).parent
# what the smoke test does; a change of it is tested anew
_SMOKE_CODE = ("smoke.py", "servers.py", "launcher.py", "environment.py", "tiny.py")


def items(context: Context, until: str) -> list[Item]:
    """Return what a build consists of, in order, up to and with the stage ``until``."""
    result: list[Item] = []
    wheels: list[Item] = []
    compiles = context.wheels == "compile"
    if compiles:
        from sparkforge.compiling import items as compiling  # not needed by overlays

        result += compiling.builder_items(context, compiling.base_digest(context), wheels)
    for name in context.target.wheels:
        for layer in context.layers(name):
            patches = context.series_of(layer)
            upstream = context.pins.upstream(layer)
            series.check_emptied(patches, upstream)
            if patches.patches or compiles:
                source = _source_item(context, layer, upstream)
                result.append(source)
                if patches.patches:
                    result.append(_series_item(context, layer, upstream, patches, source))
        if compiles:
            result += compiling.external_items(context, name)
        wheels.append(_wheel_item(context, name))
    result += wheels
    house = wheelitems.wheelhouse_item(context)
    result.append(house)
    if context.engine is not None:
        baked = _image_item(context, wheels, house)
        extra: list[Item] = []
    else:
        baked = _environment_item(context, wheels, house, "environment")
        extra = _unpatched_items(context, house)
    result.append(baked)
    if context.target.smoke is not None:
        if context.arguments:  # the proof is about the target as it is
            extra = []
        result += [*extra, _smoke_item(context, baked, extra)]
    last = STAGES.index(until)
    # the sort keeps the order within a stage; sources of all upstreams come first
    ordered = sorted(result, key=lambda item: STAGES.index(item.stage))
    return [item for item in ordered if STAGES.index(item.stage) <= last]


# -- sources and series ------------------------------------------------------------


def _source_item(context: Context, name: str, upstream: Upstream) -> Item:
    plan = context.target.source
    file = upstream.files[upstream.source_file] if upstream.source_file else None
    inputs = {
        "commit": upstream.commit,
        "tag": upstream.tag,
        "provider": "git" if name in context.access.mirrors else plan.provider,
        "fallback": None if name in context.access.mirrors else plan.fallback,
        "release_file": file.sha256 if file else None,
        # where a wheel's files belong
        "paths": [rule.model_dump() for rule in upstream.paths]
        if file and file.file.endswith(".whl")
        else None,
        "code": code_digest(_HERE / "sources.py", _HERE / "git.py"),
    }

    def make(folder: Path, results: Results) -> Mapping[str, Any]:
        source = sources.ensure(context.store, name, upstream, plan, context.access)
        return {"provider": source.provider, "commit": source.commit, "tree": source.tree,
                "origin": source.origin}  # fmt: skip

    repo = context.store.git_path(name)
    return Item(
        "sources", f"source {name}", inputs, make,
        valid=lambda artefact: git.has_commit(repo, artefact.outputs["commit"]),
        download=(file,) if file and inputs["provider"] == "release" else (),
    )  # fmt: skip


def _series_item(
    context: Context, name: str, upstream: Upstream, patches: Series, source_item: Item
) -> Item:
    inputs = {
        "source": dict(source_item.inputs),
        "series": patches.sha256,
        "patches": {patch.name: patch.sha256 for patch in patches.patches},
        "recorded": {kind: record.tree for kind, record in upstream.patched.items()},
        "code": code_digest(*(_HERE / f"{n}.py" for n in ("series", "patchfile", "git"))),
    }

    def make(folder: Path, results: Results) -> Mapping[str, Any]:
        source = source_of(context.store, name, results[source_item.label])
        patched = series.apply_recorded(context.store, patches, source, upstream)
        if source.provider not in upstream.patched:
            log.warning(
                f"{name}: pins.yaml records no patched tree for sources from {source.provider};"
                f" this one is {patched.tree} (build.py pins record)"
            )
        log.info(f"{name}: {len(patches.patches)} patch(es), tree {patched.tree[:12]}")
        return {"commit": patched.commit, "tree": patched.tree, "touched": dict(patched.touched)}

    repo = context.store.git_path(name)
    return Item(
        "series", f"series {name}", inputs, make,
        valid=lambda artefact: git.has_commit(repo, artefact.outputs["commit"]),
    )  # fmt: skip


# -- wheels ------------------------------------------------------------------------------


def _wheel_item(context: Context, name: str, base: str | None = None) -> Item:
    """Return the patched wheel of an upstream, compiled or overlaid as the context asks.

    Args:
        base: digest of the base image; needed where wheels are compiled.
    """
    if context.wheels != "compile":
        return wheelitems.overlay_item(context, name, patched=True)
    from sparkforge.compiling import items as compiling  # not needed by overlays

    if (reason := context.pins.upstream(name).compile.blocked) is None or context.native == "all":
        return compiling.compile_item(context, name, base)
    return wheelitems.overlay_item(context, name, patched=True, note=reason)


# -- environment and image -----------------------------------------------------------


def _environment_item(
    context: Context, wheels: list[Item], house: Item, label: str, stage: str = "image"
) -> Item:
    inputs = {
        "wheels": {item.label: item.key for item in wheels},
        "wheelhouse": house.key,
        "python": context.target.python,
        "code": code_digest(_HERE / "environment.py"),
    }

    def make(folder: Path, results: Results) -> Mapping[str, Any]:
        with context.store.unpacked() as unpacked:
            environment.bake(
                python=context.target.python, lock=context.lock,
                wheelhouse=results[house.label].path / WHEELS,
                unpacked=unpacked, target=context.target_name,
                wheels=[wheel_path(results[item.label]) for item in wheels],
                folder=folder,
            )  # fmt: skip
        return {"kind": "environment"}

    return Item(stage, label, inputs, make)


def _unpatched_items(context: Context, house: Item) -> list[Item]:
    """The release without our series, for the proof that it fails."""
    wheels = [
        wheelitems.overlay_item(context, name, patched=False) for name in context.target.wheels
    ]  # fmt: skip
    label = f"environment ({UNPATCHED})"
    return [*wheels, _environment_item(context, wheels, house, label, stage="smoke")]


def release_items(context: Context) -> list[Item]:
    """What the release without our series consists of, as a plain environment; it comes last."""
    house = wheelitems.wheelhouse_item(context)
    return [house, *_unpatched_items(context, house)]


def made_of(context: Context, base: str) -> dict[str, Mapping[str, Any]]:
    """Return the inputs of an image's parts and of the image itself, by label.

    They lie in the image, too, so that ``verify IMAGE`` can say what differs. Nothing in them
    depends on the machine: not where sources came from, nor how they were fetched.

    Args:
        base: digest of the base image.
    """
    wheels = [_wheel_item(context, name, base) for name in context.target.wheels]
    house = wheelitems.wheelhouse_item(context)
    parts = {item.label: item.inputs for item in [*wheels, house]}
    return {**parts, "image": _image_inputs(context, wheels, house, base)}


def _image_inputs(
    context: Context, wheels: list[Item], house: Item, base: str
) -> Mapping[str, Any]:
    from sparkforge import image

    return {
        "wheels": {item.label: item.key for item in wheels},
        "wheelhouse": house.key,
        "base": base,
        "python": context.target.python,
        "platform": context.platform,
        "system_packages": list(context.target.system_packages),
        "serve": list(context.target.serve),
        "profile": context.profile,
        "epoch": context.epoch,
        "release": context.release,
        "labels": image.labels(context, base),
        "recipe": image.recipe_digest(context.root),
        "code": code_digest(*(_HERE / f"{n}.py" for n in ("image", "sbom"))),
    }


def _image_item(context: Context, wheels: list[Item], house: Item) -> Item:
    from sparkforge import image

    assert context.engine is not None and context.base is not None
    engine = context.engine
    base = engine.identity(context.base)
    request = image.Request(
        root=context.root, target=context.target_name, base=context.base,
        python=context.target.python, platform=context.platform, epoch=context.epoch,
        system_packages=context.target.system_packages, serve=context.target.serve,
        profile=context.profile, ca_bundle=context.ca_bundle, release=context.release,
        lock=context.lock, cold=context.cold, builder=context.builder,
    )  # fmt: skip
    inputs = _image_inputs(context, wheels, house, base)

    def make(folder: Path, results: Results) -> Mapping[str, Any]:
        from sparkforge import sbom

        third_party = results[house.label].path / WHEELS
        outputs = {name: results[f"wheel {name}"].outputs for name in context.target.wheels}
        bill = sbom.document(context, outputs, third_party=third_party, base=base)
        note = json.dumps({"target": context.target_name, "items": made_of(context, base)},
                          indent=1, sort_keys=True)  # fmt: skip
        share = {SBOM: bill, image.INPUTS: f"{note}\n".encode()}
        labels = {
            **inputs["labels"], image.KEY_LABEL: key_of(inputs),
            image.SBOM_LABEL: hashlib.sha256(bill).hexdigest(),
        }  # fmt: skip
        ours = [wheel_path(results[item.label]) for item in wheels]
        return image.bake(engine, request, ours, third_party, share, labels, folder)

    return Item(
        "image", "image", inputs, make,
        valid=lambda artefact: engine.has_image(str(artefact.outputs["image_id"])),
    )  # fmt: skip


# -- smoke -------------------------------------------------------------------------------


def _smoke_item(context: Context, baked: Item, extra: list[Item]) -> Item:
    inputs = {
        "baked": baked.key,
        "kind": "image" if context.engine is not None else "environment",
        "unpatched": {item.label: item.key for item in extra},
        "serve": list(context.serve),
        "arguments": list(context.arguments),
        "code": code_digest(*(_HERE / name for name in _SMOKE_CODE)),
    }

    def make(folder: Path, results: Results) -> Mapping[str, Any]:
        from sparkforge import smoke
        from sparkforge.launcher import Launcher

        launcher = Launcher(context, results, baked.label, folder)
        report = smoke.exercise(launcher.patched, context.ready_timeout_s)
        if context.arguments:
            return report.as_json()
        refusal = smoke.prove_stock_fails(launcher.unpatched, context.ready_timeout_s)
        return replace(report, stock_error=refusal).as_json()

    label = "smoke with arguments" if context.arguments else "smoke"
    return Item("smoke", label, inputs, make)
