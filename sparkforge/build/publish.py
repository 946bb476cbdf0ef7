"""The results of a build for the user: dist/TARGET/ with wheels, bill of materials, provenance,
checksums and receipt, and .env.

dist/ has links to the store and copies of it; deleting it loses nothing.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from sparkforge.build import composing, receipt
from sparkforge.build.context import WHEELS, Context
from sparkforge.build.executor import Build
from sparkforge.build.item import Results, wheel_path
from sparkforge.build.receipt import PROVENANCE, SBOM, SUFFIX, SUMS, Receipt
from sparkforge.build.results import ImageResult
from sparkforge.core import typed
from sparkforge.core.disk import disk_errors, read_json, write_file
from sparkforge.core.hashing import intact, sha256_file
from sparkforge.core.log import human_bytes, log
from sparkforge.pins.types import MACHINES
from sparkforge.runtime import envfile
from sparkforge.store.codekey import code_of

# result of the unpatched release in the smoke test, by ``ReleaseProof.done`` and ``hidden``
_RELEASE = {
    ("refused", ""): "unpatched, it rejects the same checkpoint on this CPU",
    ("refused", "amx"): "unpatched, it rejects the same checkpoint with AMX hidden",
    (
        "compared",
        "amx",
    ): "unpatched, it serves the same checkpoint on its own backend (AMX), with the"
    " same answers, and rejects it with AMX hidden",
}


def publish(context: Context, build: Build, built: Receipt) -> tuple[Path, Receipt]:
    """Put wheels, bill of materials, provenance, SHA256SUMS and receipt.json into dist/<target>/.

    Untouched where it already holds the result of the same items.

    Returns:
        The folder, and the receipt with the published files.
    """
    folder = context.root / "dist" / context.target_name
    with disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    if (image := image_of(build)) is not None:
        for_compose(context, image, folder)  # also after a rollback: a build means the newest
    elif context.target.smoke is not None:
        tiny_model(folder)
    if (before := _standing(context, build, built)) is not None:
        return folder, replace(built, files=before.files)
    wheels = _wheels(build)
    from filelock import FileLock  # not needed by a build in which nothing changed

    with disk_errors(folder), FileLock(folder / ".lock"):
        for old in folder.glob(f"*{SUFFIX}"):
            old.unlink()  # a signature of the earlier files
        files: dict[str, str] = {}
        if wheels:  # a run that stopped before has nothing to say about them
            files = _publish_wheels(context, folder, build, wheels)
        (folder / "server.log").unlink(missing_ok=True)  # of a failure that is fixed
        built = replace(built, files=files)
        text = json.dumps(typed.as_json(built), indent=2, sort_keys=True) + "\n"
        _write(folder / receipt.NAME, text.encode())
    return folder, built


def stands(context: Context, build: Build, built: Receipt) -> bool:
    """Return whether dist/<target>/ has the result of these items, undamaged."""
    return _standing(context, build, built) is not None


def _standing(context: Context, build: Build, built: Receipt) -> Receipt | None:
    """Return the present receipt if dist/<target>/ has the result of these items, undamaged."""
    folder = context.root / "dist" / context.target_name
    before = receipt.load(folder / receipt.NAME)
    if before is None or before.items != built.items:
        return None
    return before if _complete(folder, before.files, _wheels(build)) else None


def reads_damage(build: Build) -> bool:
    """Return whether the third-party wheels, of which a bill has the hashes, are damaged."""
    house = build.results.step(build.graph.wheelhouse)
    return house is not None and not house.made_now and not house.item.sound(house.artefact)


def _complete(folder: Path, files: Mapping[str, str], wheels: Collection[Path]) -> bool:
    """Return whether a folder has all files of its receipt, undamaged."""
    if not wheels:
        return True
    names = {*(wheel.name for wheel in wheels), SBOM, PROVENANCE}
    sums = folder / SUMS
    return (
        names == set(files)
        and sums.is_file()
        and sums.read_bytes() == _sums(files)
        # a wheel that is a link to the store was read just now
        and all(intact(folder / name, sha256) for name, sha256 in files.items())
    )


def _wheels(build: Build) -> dict[Path, str]:
    """Return our wheels, each with its sha256, where the build has reached them."""
    steps = (build.results.step(item) for item in build.graph.own)
    made = [step.artefact for step in steps if step is not None]
    return {wheel_path(artefact): artefact.result.sha256 for artefact in made}


def image_of(build: Build) -> ImageResult | None:
    """Return the image of a build; None where it made none."""
    step = build.results.step(build.graph.product)
    result = None if step is None else step.artefact.result
    return result if isinstance(result, ImageResult) else None


def _publish_wheels(
    context: Context, folder: Path, build: Build, wheels: Mapping[Path, str]
) -> dict[str, str]:
    """Publish wheels, their bill and provenance; returns the sha256 of each file by its name."""
    from sparkforge.build import provenance, sbom  # not needed by a build in which nothing changed

    for old in folder.glob("*.whl"):
        old.unlink()
    files = {}
    for wheel, sha256 in wheels.items():
        link(wheel, folder / wheel.name)
        files[wheel.name] = sha256
    graph, results = build.graph, build.results
    house = results.step(graph.wheelhouse)
    third_party = house.artefact.path / WHEELS if house is not None else None
    image = image_of(build)
    system = image.system if image is not None else ()
    bill = sbom.document(
        context,
        # a build that ended behind the plugin's wheel has no others
        {
            name: step.artefact.result
            for name, item in graph.wheels.items()
            if (step := results.step(item)) is not None
        },
        None if (plugin := results.step(graph.plugin)) is None else plugin.artefact.result,
        None if (packed := results.step(graph.pack)) is None else packed.artefact.result,
        third_party=third_party,
        base=context.base if image is not None else None,
        system=[sbom.SystemPackage(*package.split(" ")) for package in system],
    )
    files[SBOM] = _write(folder / SBOM, bill)
    subjects = dict(files)
    if image is not None:
        name = f"{image.tag}@{context.platform}"
        subjects[name] = (image.digest or image.image_id).removeprefix("sha256:")
    statement = provenance.statement(
        context, build, subjects, third_party.glob("*.whl") if third_party is not None else ()
    )
    text = json.dumps(statement, indent=1, sort_keys=True) + "\n"
    files[PROVENANCE] = _write(folder / PROVENANCE, text.encode())
    _write(folder / SUMS, _sums(files))
    return files


def _sums(files: Mapping[str, str]) -> bytes:
    return "".join(f"{sha256}  {name}\n" for name, sha256 in sorted(files.items())).encode()


def _write(path: Path, data: bytes) -> str:
    """Write a file for everybody to read, whatever the umask; returns its sha256."""
    write_file(path, data)
    path.chmod(0o644)
    return hashlib.sha256(data).hexdigest()


def tiny_model(folder: Path) -> Path:
    """Return the tiny checkpoint below a folder, as ``made`` does."""

    def make(model: Path) -> None:
        from sparkforge.checkpoints.tiny import make_tiny_gpt_oss

        make_tiny_gpt_oss(model)

    return made(folder / "tiny-model", make, "sparkforge.checkpoints.tiny")


@dataclass(frozen=True)
class _Checkpoint:
    """The note next to a checkpoint: the code that made it, and its files."""

    code: str
    files: Mapping[str, str]


def made(model: Path, make: Callable[[Path], object], module: str = "") -> Path:
    """Return a checkpoint's folder; one process at a time.

    It is made where it is missing, or damaged, or was made by other code.

    Args:
        module: whose code makes it; "": that of ``make``.
    """
    note = model.with_name(f".{model.name}.json")
    code = code_of(module or make.__module__)
    if not _is_made(model, note, code):
        from filelock import FileLock

        with disk_errors(model.parent):
            model.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(model.with_name(f".{model.name}.lock")):
                for left in model.parent.glob(f".{model.name}.????????"):  # of a killed process
                    shutil.rmtree(left)
                if not _is_made(model, note, code):
                    _make(model, make)
                    files = {file.name: sha256_file(file) for file in sorted(model.iterdir())}
                    text = json.dumps(asdict(_Checkpoint(code, files)), indent=1)
                    write_file(note, f"{text}\n".encode())
    return model


def _is_made(model: Path, note: Path, code: str) -> bool:
    of = typed.load(_Checkpoint, read_json(note))
    return (
        of is not None
        and of.code == code
        and all(intact(model / name, sha256) for name, sha256 in of.files.items())
    )


def _make(model: Path, make: Callable[[Path], object]) -> None:
    old = model.with_name(f".{model.name}.replaced")
    if model.exists():
        model.rename(old)
    try:
        make(model)
    except OSError:  # another version, which takes no lock, may be faster
        if not model.is_dir():
            raise
    if old.exists():
        shutil.rmtree(old)


def link(source: Path, target: Path) -> None:
    """Link a file, or copy it to another file system."""
    try:
        target.hardlink_to(source)
    except OSError:  # another file system
        shutil.copyfile(source, target)


def for_compose(context: Context, image: ImageResult, folder: Path) -> None:
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
            "SPARKFORGE_MODEL_DIR": str(tiny_model(folder)) if context.target.smoke else "",
        },
    )
    if context.engine is not None:
        composing.keep_models(context.engine, context.target, context.platform)


def summary(context: Context, build: Build, folder: Path, seconds: float) -> None:
    """Print the results, the time of each stage, and the next command."""
    results = build.results
    made = sum(step.made_now for step in results)
    log.heading(f"done in {seconds:.1f} s: {made} built, {len(results) - made} up to date")
    for wheel in _wheels(build):
        log.info(f"wheel    {wheel.name}  {human_bytes(wheel.stat().st_size)}")
    if (image := image_of(build)) is not None:
        log.info(f"image    {image.tag}")
    if (smoke := results.step(build.graph.smoke)) is not None:
        report = smoke.artefact.result
        log.info(
            f"smoke    ready in {report.ready_s} s, {report.tokens} tokens in"
            f" {report.completion_s} s, stopped in {report.stop_s} s"
        )
        if report.release is not None:
            log.info(f"release  {_RELEASE[report.release.done, report.release.hidden]}")
    log.info(f"receipt  {os.path.relpath(folder / receipt.NAME)}")
    if made:
        log.info(f"time     {', '.join(times(results))}")
    served = results.step(build.graph.product) is not None
    log.info(f"next     {next_step(context, served=served)}")


def times(results: Results) -> list[str]:
    """Return the time of each stage that built something, in order."""
    seconds: dict[str, float] = {}
    for step in results:
        if step.made_now:
            stage = step.item.stage
            seconds[stage] = seconds.get(stage, 0.0) + step.artefact.seconds
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
