"""What is served, an image or a virtual environment: its parts, and its smoke test."""

from __future__ import annotations

import hashlib
import json
import platform
import re
import shlex
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparkforge.build import cached
from sparkforge.build.cached import Cached, undamaged
from sparkforge.build.context import UNPATCHED, WHEELS, Context, Tools
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
from sparkforge.build.stages.thirdparty import wheelhouse_item
from sparkforge.build.stages.wheels import hashed, overlay_item
from sparkforge.core.disk import code_digest, key_of, sha256_file
from sparkforge.core.errors import BuildError
from sparkforge.core.log import log
from sparkforge.pins.types import MACHINES
from sparkforge.runtime import environment, isa
from sparkforge.runtime.engine import BaseImage, Engine, build_image, docker
from sparkforge.sources.download import Fetches
from sparkforge.store.store import Artefact, code_of

if TYPE_CHECKING:
    from sparkforge.build.graph import Graph

ARCHIVE = "image.oci.tar"
SHARE, PROGRAMS, VENV = "opt/sparkforge/share", "opt/sparkforge/bin", "opt/sparkforge/venv"
"""Folders in the image: data, our programs, and the Python environment."""
# lines of serving/image_build.py
_WRONG = re.compile(r"the image (?:lacks|cannot import|has /).*\S")
KEY_LABEL, SBOM_LABEL = "org.sparkforge.key", "org.sparkforge.sbom"
TARGET_LABEL = "org.sparkforge.target"
VERSION_LABEL = "org.opencontainers.image.version"
PACK_LABEL = "org.sparkforge.pack.modules"
"""FlashInfer's modules in the image, named as in pins.yaml or --pack."""
PACK_JOINT = ", "
RECIPE = (
    "Dockerfile",
    "scripts/entrypoint.py",
    "scripts/healthcheck.py",
    "sparkforge/__init__.py",
    *sorted(
        f"sparkforge/serving/{file.name}"
        for file in (Path(__file__).parents[1] / "serving").iterdir()
        if file.suffix in (".py", ".j2")
    ),
)
"""The files of the checkout that go into the image."""
NOTE = "inputs.json"
"""A file of the image's share folder: its inputs and those of its parts, by label."""
_UNCOMPARED = {
    *("wheels", "wheelhouse", "labels"),  # of the image: its parts, which are there themselves
    "sources",  # a choice of the build, not of the checkout
    "host",  # of the machine that compiled a pack
}


def environment_item(
    context: Context,
    wheels: Sequence[Cached[OwnWheel]],
    house: Cached[WheelhouseResult],
    label: str = "environment",
    stage: str = "image",
) -> Cached[EnvironmentResult]:
    """Return the environment with these wheels and those of a wheelhouse."""
    version, kind = context.target.python, EnvironmentResult
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

    needs = (*wheels, house)
    return Cached(stage, label, inputs, kind, make, needs, valid=stands, fetches=fetches)


def unpatched(context: Context) -> Artefact[EnvironmentResult]:
    """Return the release without our series, in a virtual environment; made where missing."""
    wheels = [overlay_item(context, name, None) for name in context.target.wheels]
    label = f"environment ({UNPATCHED})"
    item = environment_item(context, wheels, wheelhouse_item(context), label, "smoke")
    cached.run(context, cached.ordered([item]))
    return item.artefact


def repository(target: str) -> str:
    """Return the repository of a target's images: their name before the colon."""
    return f"sparkforge/{target}"


def labels(context: Context, base: BaseImage) -> dict[str, str]:
    """Return the labels with an image's sources, from pins and series alone."""
    moment = datetime.fromtimestamp(context.epoch, UTC)
    result = {
        "org.opencontainers.image.title": f"sparkforge-{context.target_name}",
        VERSION_LABEL: context.release,
        "org.opencontainers.image.description": context.target.summary,
        "org.opencontainers.image.created": moment.strftime("%Y-%m-%dT%H:%M:%SZ"),
        "org.opencontainers.image.base.digest": base.digest,
        TARGET_LABEL: context.target_name,
    }
    if apt := context.apt(base.digest):
        result["org.sparkforge.apt.snapshot"] = apt.snapshot
    if context.pack:
        result[PACK_LABEL] = PACK_JOINT.join(context.pack)
    for name in [layer for wheel in context.target.wheels for layer in context.layers(wheel)]:
        upstream = context.pins.upstream(name)
        # the recorded trees, not the tree of this build: both kinds of source give the same image,
        # and each build was compared with the record of its kind
        facts = {
            "repository": upstream.git,
            "tag": upstream.tag,
            "commit": upstream.commit_or_unknown,
            "series": context.series_of(name).sha256,
            **{f"tree.{kind}": record.tree for kind, record in upstream.patched.items()},
        }
        result |= {f"org.sparkforge.{name}.{key}": value for key, value in facts.items()}
    return result


def needs(context: Context) -> list[dict[str, str]]:
    """Return the requirements and forbidden programs for ``serving/image_build.py``."""
    there = [need.model_dump(exclude_none=True) for need in context.target.needs]
    return [*({"absent": name} for name in context.target.absent), *there]


def trial_item() -> Cached[FilesResult]:
    """Return the checkpoint of the preflight with its answers; the same for every target."""

    def make(folder: Path) -> FilesResult:
        # not needed by a build in which nothing changed
        from sparkforge.checkpoints import tiny
        from sparkforge.serving.preflight import NAME

        tiny.make_trial(folder / NAME)
        made = (folder / NAME).iterdir()
        return FilesResult({f"{NAME}/{path.name}": sha256_file(path) for path in made})

    return Cached("image", "preflight checkpoint", {}, FilesResult, make, valid=all_intact)


def note_of(context: Context, parts: Graph, base: BaseImage) -> dict[str, Mapping[str, Any]]:
    """Return the inputs of an image and of its parts, by label, as the image holds them."""
    target, trial, apt = context.target, trial_item(), context.apt(base.digest)
    inputs = {
        "wheels": {item.label: item.key for item in parts.own},
        "wheelhouse": parts.house.key,
        "base": base.digest,
        "apt": apt and apt.model_dump(mode="json"),
        "platform": context.platform,
        "target": target.model_dump(mode="json"),
        "needs": needs(context),
        "profile": context.serving.document(),
        "preflight": trial.key,
        "epoch": context.epoch,
        "release": context.release,
        "labels": labels(context, base),
        "recipe": code_digest(*(context.root / name for name in RECIPE)),
        "code": code_of(__name__),
    }
    return {"image": inputs} | {
        item.label: item.inputs for item in (*parts.own, parts.house, trial)
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

    def make(folder: Path) -> ImageResult | ImageArchiveResult:
        from sparkforge.build import sbom  # not needed by a build in which nothing changed

        document = sbom.document(context, parts, base)
        share = {SBOM: document, NOTE: _json(note, 1)}
        if context.target.profile is not None:
            share["profile.json"] = _json(context.serving.document(), 2)
        for name, sha256 in trial.result.files.items():
            share[name] = undamaged(trial.path / name, sha256).read_bytes()
        labels = {
            **note["image"]["labels"],
            KEY_LABEL: key_of(note["image"]),
            SBOM_LABEL: hashlib.sha256(document).hexdigest(),
        }
        own, house = hashed(parts.own), parts.house.path / WHEELS
        return build(context, tools, own, house, share, labels, folder)

    def valid(artefact: Artefact[ImageResult | ImageArchiveResult]) -> bool:
        made = artefact.result
        return isinstance(made, ImageArchiveResult) or engine.image_id(made.tag) is not None

    fetches = Fetches(unknown=("base image and system packages",))
    kind, needs = (
        ImageArchiveResult if tools.cold else ImageResult,
        (*parts.own, parts.house, trial),
    )
    what = ("image", "image", note["image"], kind, make, needs)
    return Cached(*what, valid=valid, fetches=lambda: fetches)


def _json(value: object, indent: int) -> bytes:
    return f"{json.dumps(value, indent=indent, sort_keys=True)}\n".encode()


def build(
    context: Context,
    tools: Tools,
    wheels: Mapping[Path, str],
    wheelhouse: Path,
    share: Mapping[str, bytes],
    labels: Mapping[str, str],
    folder: Path,
) -> ImageResult | ImageArchiveResult:
    """Build an image and load it into the engine; a cold one, without cache, stays in a file.

    ``wheels``: ours, with their sha256; ``share``: files of the share folder. The tag begins with
    the release and ends with the image's id: no other image ever gets it.
    """
    target, engine, base, ours = context.target, tools.engine, tools.base, folder / "wheels"
    assert engine is not None and base is not None
    ours.mkdir()
    pins = []
    for wheel, sha256 in wheels.items():
        (ours / wheel.name).hardlink_to(wheel)
        package, version = wheel.name.split("-")[:2]
        pins.append(f"{package}=={version} --hash=sha256:{sha256}\n")
    files = {f"share/{path}": data for path, data in share.items()}
    files |= {"requirements.txt": context.lock.read_bytes(), "ours.txt": "".join(pins).encode()}
    files["sources.list"] = context.apt_sources(base.digest)
    files["needs.json"] = json.dumps(needs(context)).encode()
    if MACHINES.get(platform.machine()) != context.platform:
        files["emulated"] = b""
    for path, data in files.items():
        (ours / path).parent.mkdir(parents=True, exist_ok=True)
        (ours / path).write_bytes(data)
    # a name until the id is known, with the key, so that builds at the same time do not collide
    name = repository(context.target_name)
    passing = f"{name}:building-{labels.get(KEY_LABEL, 'alone')[:12]}"
    archive, metadata = folder / ARCHIVE, folder / "build.json"
    output: tuple[str, ...] = ("--load", "--tag", passing)
    if engine.containerd_store:
        # into a file: only that exporter sets every file's date, and so gives the same layers
        # twice. gzip would take 147 s for the 3.4 GB of the cpu target, zstd takes 69 s (measured,
        # 2 cores), and dating the files about as long again
        how = f"type=oci,dest={archive},name={passing},rewrite-timestamp=true"
        output = ("--output", f"{how},compression=zstd,compression-level=1,force-compression=true")
    try:
        build_image(
            context.root / "Dockerfile",
            context.root,
            engine.context,
            output,
            stage="serve" if target.cuda_arch is None else "serve-gpu",
            platform=context.platform,
            arguments={
                "BASE": base.reference,
                "PYTHON_VERSION": target.python,
                "SOURCE_DATE_EPOCH": str(context.epoch),
                "RELEASE": context.release,
                "SERVE_FROM": "plain" if target.absent else "base",
                "SYSTEM_PACKAGES": " ".join(target.system_packages),
                "BUILD_PACKAGES": " ".join(target.build_packages),
                "SERVE_ARGS": shlex.join(target.serve),
            },
            labels=dict(sorted(labels.items())),
            contexts={"wheels": ours, "wheelhouse": wheelhouse},
            options=(f"--metadata-file={metadata}", *(["--no-cache"] if tools.cold else [])),
            ca_bundle=tools.ca_bundle,
        )
    except BuildError as error:
        wrong = list(dict.fromkeys(_WRONG.findall(str(error))))
        hint = f"{error.remedy}; for a wrong hash: --force wheelhouse"
        if context.apt(base.digest):
            hint += "; without the archive of apt: --mirror apt=URL, or --base"
        if wrong:
            hint = "use another base, or edit system_packages, build_packages or absent of"
            hint += f" targets.{context.target_name}"
        raise BuildError("\n".join(wrong) or error.what, hint) from None
    digest: str | None = json.loads(metadata.read_text()).get("containerimage.digest")
    if tools.cold:
        return ImageArchiveResult(digest, ARCHIVE)
    from sparkforge.build import sbom  # not needed by a build in which nothing changed

    if engine.containerd_store:
        docker("load", "--input", archive, remedy="see the docker output above", error=BuildError)
        archive.unlink()
    image = engine.client.images.get(passing)
    image_id = str(image.id)
    tag = f"{name}:{context.release}-{image_id.removeprefix('sha256:')[:12]}"
    image.tag(*tag.split(":"))
    engine.client.images.remove(passing)  # the name; the image has another now
    log.info(f"image {tag}")
    return ImageResult(tag, image_id, digest, base.reference, tuple(sbom.system(engine, image_id)))


def smoke_item(context: Context, tools: Tools, graph: Graph) -> Cached[SmokeResult]:
    """Return the smoke test of an image or an environment."""
    inputs = {
        "product": graph.product.key,
        "cpu": isa.here(),
        "kind": "image" if tools.engine is not None else "environment",
        "serve": list(context.serve),
        "arguments": list(tools.arguments),
    }

    def make(folder: Path) -> SmokeResult:
        from sparkforge.build import smoke  # not needed by a build in which nothing changed

        return smoke.run(context, tools, graph, folder)

    label = "smoke with arguments" if tools.arguments else "smoke"
    needs = (graph.product, *graph.wheels.values())
    return Cached("smoke", label, inputs, SmokeResult, make, needs)
