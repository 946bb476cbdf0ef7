"""Wheels → image."""

import json
import platform
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from sparkforge.build.context import Context, Tools
from sparkforge.build.results import ImageArchiveResult, ImageResult
from sparkforge.core.disk import code_digest
from sparkforge.core.errors import BuildError
from sparkforge.core.log import log
from sparkforge.pins.types import MACHINES
from sparkforge.runtime.engine import BaseImage, Engine, build_image, docker

ARCHIVE = "image.oci.tar"
SHARE, PROGRAMS, VENV = "opt/sparkforge/share", "opt/sparkforge/bin", "opt/sparkforge/venv"
"""Folders in the image: data, our programs, and the Python environment."""
# lines of serving/image_build.py
_WRONG = re.compile(r"the image (?:lacks|cannot import|has /).*\S")
KEY_LABEL, SBOM_LABEL = "org.sparkforge.key", "org.sparkforge.sbom"
TARGET_LABEL = "org.sparkforge.target"
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


@dataclass(frozen=True)
class Contents:
    """The contents of an image: our wheels with their sha256, and files for its share folder."""

    wheels: Mapping[Path, str]
    wheelhouse: Path
    share: Mapping[str, bytes]
    labels: Mapping[str, str]


def repository(target: str) -> str:
    """Return the repository of a target's images: their name before the colon."""
    return f"sparkforge/{target}"


def recipe_digest(root: Path) -> str:
    """Return one digest of the files of ``RECIPE``."""
    return code_digest(*(root / name for name in RECIPE))


def labels(context: Context, base: BaseImage) -> dict[str, str]:
    """Return the labels with an image's sources, from pins and series alone."""
    moment = datetime.fromtimestamp(context.epoch, UTC)
    result = {
        "org.opencontainers.image.title": f"sparkforge-{context.target_name}",
        "org.opencontainers.image.version": context.release,
        "org.opencontainers.image.description": context.target.summary,
        "org.opencontainers.image.created": moment.strftime("%Y-%m-%dT%H:%M:%SZ"),
        "org.opencontainers.image.base.digest": base.digest,
        TARGET_LABEL: context.target_name,
    }
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


def build(
    engine: Engine,
    tools: Tools,
    context: Context,
    base: BaseImage,
    contents: Contents,
    folder: Path,
) -> ImageResult | ImageArchiveResult:
    """Build an image and load it into the engine; a cold one, without cache, stays in a file.

    Its tag begins with the release and ends with the image's id: no other image ever gets it.
    """
    # a name until the id is known, with the key, so that builds at the same time do not collide
    name = repository(context.target_name)
    passing = f"{name}:building-{contents.labels.get(KEY_LABEL, 'alone')[:12]}"
    archive, stored = folder / ARCHIVE, engine.containerd_store
    output: tuple[str, ...] = ("--load", "--tag", passing)
    if stored:
        # into a file: only that exporter sets every file's date, and so gives the same layers
        # twice. gzip would take 147 s for the 3.4 GB of the cpu target, zstd takes 69 s (measured,
        # 2 cores), and dating the files about as long again
        how = f"type=oci,dest={archive},name={passing},rewrite-timestamp=true"
        output = ("--output", f"{how},compression=zstd,compression-level=1,force-compression=true")
    digest = _build(engine, tools, context, base, contents, folder, output)
    if tools.cold:
        return ImageArchiveResult(digest, ARCHIVE)
    from sparkforge.build import sbom  # not needed by a build in which nothing changed

    if stored:
        docker("load", "--input", archive, remedy="see the docker output above", error=BuildError)
        archive.unlink()
    image = engine.client.images.get(passing)
    image_id = str(image.id)
    tag = f"{name}:{context.release}-{image_id.removeprefix('sha256:')[:12]}"
    image.tag(*tag.split(":"))
    engine.client.images.remove(passing)  # the name; the image has another now
    log.info(f"image {tag}")
    return ImageResult(tag, image_id, digest, base.reference, tuple(sbom.system(engine, image_id)))


def _build(
    engine: Engine,
    tools: Tools,
    context: Context,
    base: BaseImage,
    contents: Contents,
    folder: Path,
    output: tuple[str, ...],
) -> str | None:
    """Run the build; returns the digest of the manifest, where the engine's store has one."""
    target, ours = context.target, folder / "wheels"
    ours.mkdir()
    (ours / "requirements.txt").write_bytes(context.lock.read_bytes())
    lines = []
    for wheel, sha256 in contents.wheels.items():
        (ours / wheel.name).hardlink_to(wheel)
        package, version = wheel.name.split("-")[:2]
        lines.append(f"{package}=={version} --hash=sha256:{sha256}\n")
    (ours / "ours.txt").write_text("".join(lines))
    for path, data in contents.share.items():
        (ours / "share" / path).parent.mkdir(parents=True, exist_ok=True)
        (ours / "share" / path).write_bytes(data)
    (ours / "needs.json").write_text(json.dumps(needs(context)))
    if MACHINES.get(platform.machine()) != context.platform:
        (ours / "emulated").touch()
    metadata = folder / "build.json"
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
            labels=dict(sorted(contents.labels.items())),
            contexts={"wheels": ours, "wheelhouse": contents.wheelhouse},
            options=(f"--metadata-file={metadata}", *(["--no-cache"] if tools.cold else [])),
            ca_bundle=tools.ca_bundle,
        )
    except BuildError as error:
        if wrong := list(dict.fromkeys(_WRONG.findall(str(error)))):
            where = f"targets.{context.target_name}"
            remedy = (
                f"use another base, or edit system_packages, build_packages or absent of {where}"
            )
            raise BuildError("\n".join(wrong), remedy) from None
        raise
    digest: str | None = json.loads(metadata.read_text()).get("containerimage.digest")
    return digest
