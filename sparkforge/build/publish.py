"""The results of a build for the user: dist/TARGET/ with wheels, SBOM, provenance, checksums and
receipt, and .env.

dist/ has links to the store and copies of it; deleting it loses nothing.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from sparkforge.build import composing, receipt
from sparkforge.build.cached import Cached, result_of
from sparkforge.build.context import WHEELS, Context
from sparkforge.build.graph import Build
from sparkforge.build.receipt import PROVENANCE, SBOM, SUMS, Receipt
from sparkforge.build.results import ImageResult
from sparkforge.build.stages.wheels import hashed
from sparkforge.core import plain
from sparkforge.core.disk import disk_errors, intact, read_json, sha256_file, write_file
from sparkforge.core.log import human_bytes, log
from sparkforge.pins.types import MACHINES
from sparkforge.runtime import envfile
from sparkforge.runtime.engine import Engine
from sparkforge.store.store import code_of


def publish(build: Build, built: Receipt) -> tuple[Path, Receipt]:
    """Put wheels, SBOM, provenance, SHA256SUMS and receipt.json into dist/<target>/.

    Untouched where it already holds the result of the same items.

    Returns:
        The folder, and the receipt with the published files.
    """
    context = build.context
    folder = context.dist
    with disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    if (image := image_of(build)) is not None:
        for_compose(
            context, build.tools.engine, image
        )  # also after a rollback: a build means the newest
    elif context.target.smoke is not None:
        tiny_model(folder)
    if (before := _standing(build, built)) is not None:
        built = replace(built, files=before.files)
        if before.run.options != built.run.options:
            _write_receipt(folder, built)
        return folder, built
    wheels = _wheels(build)
    from filelock import FileLock  # not needed by a build in which nothing changed

    with disk_errors(folder), FileLock(folder / ".lock"):
        # without wheels the run has nothing to say about files
        files = _publish_files(folder, build, wheels) if wheels else {}
        (folder / "server.log").unlink(missing_ok=True)  # of a failure that is fixed
        built = replace(built, files=files)
        _write_receipt(folder, built)
    return folder, built


def _write_receipt(folder: Path, built: Receipt) -> None:
    text = json.dumps(plain.as_json(built), indent=2, sort_keys=True) + "\n"
    _write(folder / receipt.NAME, text.encode())


def stands(build: Build, built: Receipt) -> bool:
    """Return whether dist/<target>/ has the result of these items, undamaged."""
    return _standing(build, built) is not None


def _standing(build: Build, built: Receipt) -> Receipt | None:
    """Return the present receipt if dist/<target>/ has the result of these items, undamaged."""
    folder = build.context.dist
    before = receipt.load(folder / receipt.NAME)
    if before is None or before.items != built.items:
        return None
    wheels = _wheels(build)
    names = {*(wheel.name for wheel in wheels), SBOM, PROVENANCE}
    sound = names == set(before.files) and not receipt.problems(folder, before)
    return before if sound or not wheels else None


def reads_damage(build: Build) -> bool:
    """Return whether the third-party wheels, of which an SBOM has the hashes, are damaged."""
    house = build.graph.house
    return house.found is not None and not house.made_now and not house.sound(house.found)


def _wheels(build: Build) -> dict[Path, str]:
    """Return our wheels, each with its sha256, where the build has reached them."""
    return hashed(item for item in build.graph.own if item.found is not None)


def image_of(build: Build) -> ImageResult | None:
    """Return the image of a build; None where it made none."""
    result = result_of(build.graph.product)
    return result if isinstance(result, ImageResult) else None


def _publish_files(folder: Path, build: Build, wheels: Mapping[Path, str]) -> dict[str, str]:
    """Publish wheels, SBOM and provenance; returns the sha256 of each file by its name."""
    from sparkforge.build import provenance, sbom  # not needed by a build in which nothing changed

    for old in folder.glob("*.whl"):
        old.unlink()
    for wheel in wheels:
        link(wheel, folder / wheel.name)
    files = {wheel.name: sha256 for wheel, sha256 in wheels.items()}
    context, graph, image = build.context, build.graph, image_of(build)
    third_party = None if graph.house.found is None else graph.house.path / WHEELS
    document = sbom.document(
        context,
        # a build that ended behind the plugin's wheel has no others
        {name: item.result for name, item in graph.wheels.items() if item.found is not None},
        result_of(graph.plugin),
        result_of(graph.pack),
        third_party=third_party,
        base=build.tools.base if image is not None else None,
        system=[sbom.SystemPackage(*line.split(" ")) for line in image.system] if image else (),
    )
    files[SBOM] = _write(folder / SBOM, document)
    subjects = dict(files)
    if image is not None:
        name = f"{image.tag}@{context.platform}"
        subjects[name] = (image.digest or image.image_id).removeprefix("sha256:")
    others = third_party.glob("*.whl") if third_party is not None else ()
    statement = provenance.statement(build, subjects, others)
    text = json.dumps(statement, indent=1, sort_keys=True) + "\n"
    files[PROVENANCE] = _write(folder / PROVENANCE, text.encode())
    _write(folder / SUMS, receipt.sums(files))
    return files


def _write(path: Path, data: bytes) -> str:
    """Write a file for everybody to read, whatever the umask; returns its sha256."""
    write_file(path, data)
    path.chmod(0o644)
    return hashlib.sha256(data).hexdigest()


def link(source: Path, target: Path) -> None:
    """Link a file, or copy it to another file system."""
    try:
        target.hardlink_to(source)
    except OSError:  # another file system
        shutil.copyfile(source, target)


# -- checkpoints -------------------------------------------------------------------------


def tiny_model(folder: Path) -> Path:
    """Return the tiny checkpoint below a folder, as ``made`` does."""

    def make(model: Path) -> None:
        from sparkforge.checkpoints.tiny import make_tiny_gpt_oss

        make_tiny_gpt_oss(model)

    return made(folder / "tiny-model", make, "sparkforge.checkpoints.tiny")


def made(model: Path, make: Callable[[Path], object], module: str = "") -> Path:
    """Return a checkpoint's folder; one process at a time.

    It is made where it is missing, or damaged, or was made by other code.

    Args:
        module: whose code makes it; "": that of ``make``.
    """
    note, code = model.with_name(f".{model.name}.json"), code_of(module or make.__module__)
    if not _is_made(model, note, code):
        from filelock import FileLock

        with disk_errors(model.parent):
            model.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(model.with_name(f".{model.name}.lock")):
                if not _is_made(model, note, code):
                    shutil.rmtree(model, ignore_errors=True)
                    make(model)
                    files = {file.name: sha256_file(file) for file in sorted(model.iterdir())}
                    write_file(note, json.dumps({"code": code, "files": files}, indent=1).encode())
    return model


def _is_made(model: Path, note: Path, code: str) -> bool:
    of = read_json(note) or {}
    files = of.get("files")
    return (
        model.is_dir()
        and of.get("code") == code
        and isinstance(files, dict)
        and all(intact(model / name, sha256) for name, sha256 in files.items())
    )


# -- Compose and the end of a build ------------------------------------------------------


def for_compose(context: Context, engine: Engine | None, image: ImageResult) -> None:
    """Have `docker compose up` serve an image: by .env, and the volume of the models.

    Lines that the user added to .env under other names stay as they are.
    """
    tag = image.tag
    env_file = context.root / ".env"
    name = composing.variable(context.target_name)
    if (before := envfile.read(env_file).get(name, tag)) != tag:
        log.info(
            f"Compose now uses {tag} instead of {before}; to switch back:"
            f" build.py rollback --target {context.target_name}"
        )
    envfile.put(
        env_file,
        {
            "COMPOSE_PROFILES": context.target_name,
            name: tag,
            "SPARKFORGE_MODEL_DIR": str(tiny_model(context.dist)) if context.target.smoke else "",
        },
    )
    if engine is not None:
        composing.keep_models(engine, context.target, context.platform)


def summary(build: Build, items: Sequence[Cached[Any]], folder: Path, seconds: float) -> None:
    """Print the results, the time of each stage, and the next command."""
    made = sum(item.made_now for item in items)
    log.heading(f"done in {seconds:.1f} s: {made} built, {len(items) - made} cached")
    for wheel in _wheels(build):
        log.info(f"wheel    {wheel.name}  {human_bytes(wheel.stat().st_size)}")
    if (image := image_of(build)) is not None:
        log.info(f"image    {image.tag}")
    if (report := result_of(build.graph.smoke)) is not None:
        log.info(
            f"smoke    ready in {report.ready_s} s, {report.tokens} tokens in"
            f" {report.completion_s} s, stopped in {report.stop_s} s"
        )
        if report.release is not None:
            hidden = " with AMX hidden" if report.release.hidden else ""
            same = "gives the same answers, and " if report.release.done == "compared" else ""
            log.info(f"release  unpatched, it {same}rejects the same checkpoint{hidden}")
    log.info(f"receipt  {os.path.relpath(folder / receipt.NAME)}")
    if made:
        log.info(f"time     {', '.join(times(items))}")
    served = build.graph.product.found is not None
    log.info(f"next     {next_step(build.context, served=served)}")


def times(items: Iterable[Cached[Any]]) -> list[str]:
    """Return the time of each stage that built something, in order."""
    seconds: dict[str, float] = {}
    for item in items:
        if item.made_now:
            seconds[item.stage] = seconds.get(item.stage, 0.0) + item.artefact.seconds
    return [f"{stage} {took:.1f} s" for stage, took in seconds.items()]


def next_step(context: Context, *, served: bool) -> str:
    """Return the next command after a build.

    Args:
        served: whether there is an image or environment to serve.
    """
    name = context.target_name
    here = MACHINES.get(platform.machine()) == context.platform
    where = "" if here else f"on a machine of {context.platform}: "
    if not served:
        return f"{where}python3 build.py --target {name}"
    if context.target.smoke is not None:
        return f"{where}python3 build.py serve --target {name}"
    model = context.pins.models[context.target.model].repository if context.target.model else ""
    fetches = f"   # the first start downloads {model}" if model else ""
    return f"{where}docker compose up -d{fetches}; run `docker compose ps` until it is healthy"
