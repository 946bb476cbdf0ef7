"""Wheels → image."""

import json
import platform
import re
import shlex
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

from sparkforge.build.context import Context, Tools
from sparkforge.build.results import ImageArchiveResult, ImageResult
from sparkforge.core import plain
from sparkforge.core.disk import code_digest
from sparkforge.core.errors import BuildError
from sparkforge.core.log import log
from sparkforge.pins.types import MACHINES
from sparkforge.runtime.engine import BaseImage, build_image, docker

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
        if wrong:
            hint = "use another base, or edit system_packages, build_packages or absent of"
            hint += f" targets.{context.target_name}"
        raise BuildError("\n".join(wrong) or error.what, hint) from None
    digest: str | None = plain.json_of(metadata.read_text()).get("containerimage.digest")
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
