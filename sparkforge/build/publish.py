"""The results of a build for the user: dist/TARGET/ and .env; deleting dist/ loses nothing."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparkforge.build import composing, receipt
from sparkforge.build.cached import Cached, result_of
from sparkforge.build.context import Context
from sparkforge.build.receipt import SBOM, SUMS, Receipt
from sparkforge.build.results import ImageResult
from sparkforge.build.stages.wheels import hashed
from sparkforge.core import git, plain
from sparkforge.core.disk import disk_errors, write_file
from sparkforge.core.log import human_bytes, log
from sparkforge.runtime.engine import Engine
from sparkforge.store.store import code_of

if TYPE_CHECKING:
    from sparkforge.build.graph import Build


def publish(build: Build, built: Receipt) -> tuple[Path, Receipt]:
    """Put wheels, SBOM, SHA256SUMS and receipt.json into dist/<target>/.

    Files of the same items stay. Returns the folder, and the receipt with the published files.
    """
    context, image = build.context, build.image
    folder, wheels = context.dist, hashed(item for item in build.graph.own if item.found)
    with disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    if image is not None:
        # also after a rollback: a build means the newest
        for_compose(context, build.tools.engine, image)
    elif context.target.smoke is not None:
        tiny_model(folder)
    before = receipt.load(folder / receipt.NAME)
    names = {*(wheel.name for wheel in wheels), *([SBOM] if wheels else [])}
    if before is not None and before.items == built.items and names == set(before.files):
        run = replace(built.run, commit=before.run.commit)
        if before.run.options == run.options and not receipt.problems(folder, before):
            return folder, replace(built, files=before.files, run=run)
    files = {wheel.name: sha256 for wheel, sha256 in wheels.items()}
    with disk_errors(folder), context.store.lock(f"dist-{context.target_name}"):
        if wheels:  # else the run has nothing to say about files
            for old in folder.glob("*.whl"):
                old.unlink()
            for wheel in wheels:
                link(wheel, folder / wheel.name)
            from sparkforge.build import sbom  # not needed by a build in which nothing changed

            on = (None, ()) if image is None else (build.tools.base, image.system)
            document = sbom.document(context, build.graph, *on)
            write_file(folder / SBOM, document)
            files[SBOM] = hashlib.sha256(document).hexdigest()
            write_file(folder / SUMS, receipt.sums(files))
        (folder / "server.log").unlink(missing_ok=True)  # of a failure that is fixed
        commit = git.head(context.root)
        if commit and git.git(context.root, "status", "--porcelain", "--untracked-files=normal"):
            commit = ""  # files differ from it
        run = replace(built.run, commit=commit)
        built = replace(built, files=files, run=run)
        text = json.dumps(plain.as_json(built), indent=1, sort_keys=True)
        write_file(folder / receipt.NAME, f"{text}\n".encode())
    return folder, built


def link(source: Path, target: Path) -> None:
    """Link a file, or copy it to another file system."""
    try:
        target.hardlink_to(source)
    except OSError:  # another file system
        shutil.copyfile(source, target)


def tiny_model(folder: Path) -> Path:
    """Return the tiny checkpoint below a folder."""

    def make(model: Path) -> None:
        from sparkforge.checkpoints.tiny import make_tiny_gpt_oss

        make_tiny_gpt_oss(model)

    return made(folder / "tiny-model", make)


def made(model: Path, make: Callable[[Path], object]) -> Path:
    """Return a checkpoint's folder; made where it is missing, or of other code."""
    note, code = model.with_name(f".{model.name}.code"), code_of(make.__module__)
    if not (model.is_dir() and note.is_file() and note.read_text() == code):
        with disk_errors(model.parent):
            shutil.rmtree(model, ignore_errors=True)
            model.parent.mkdir(parents=True, exist_ok=True)
            make(model)
            write_file(note, code.encode())
    return model


def for_compose(context: Context, engine: Engine | None, image: ImageResult) -> None:
    """Have `docker compose up` serve an image: by .env, and the volume of the models."""
    env_file, name = context.root / ".env", composing.variable(context.target_name)
    before = composing.read(env_file).get(name, image.tag)
    model = str(tiny_model(context.dist)) if context.target.smoke else ""
    chosen = {"COMPOSE_PROFILES": context.target_name, name: image.tag}
    composing.put(env_file, {**chosen, "SPARKFORGE_MODEL_DIR": model})
    if before != image.tag:
        back = f"build.py rollback --target {context.target_name}"
        log.info(f"Compose now uses {image.tag} instead of {before}; to switch back: {back}")
    if engine is not None and context.target.model is not None:
        engine.client.volumes.create(composing.MODELS_VOLUME)


def summary(build: Build, items: Sequence[Cached[Any]], folder: Path, seconds: float) -> None:
    """Print the results and the next command."""
    made = sum(item.made_now for item in items)
    log.heading(f"done in {seconds:.1f} s: {made} built, {len(items) - made} cached")
    for wheel in hashed(item for item in build.graph.own if item.found):
        log.info(f"wheel    {wheel.name}  {human_bytes(wheel.stat().st_size)}")
    if (image := build.image) is not None:
        log.info(f"image    {image.tag}")
    if (report := result_of(build.graph.smoke)) is not None:
        took = f"{report.tokens} tokens in {report.completion_s} s"
        log.info(f"smoke    ready in {report.ready_s} s, {took}, stopped in {report.stop_s} s")
        if report.release:
            log.info("release  unpatched, it rejects the same checkpoint")
    log.info(f"receipt  {os.path.relpath(folder / receipt.NAME)}")
    context, command = build.context, f"python3 build.py --target {build.context.target_name}"
    if build.graph.product.found is not None:
        command = "python3 build.py up"
        if context.target.smoke is not None:
            command = f"python3 build.py serve --target {context.target_name}"
    log.info(f"next     {command}")
