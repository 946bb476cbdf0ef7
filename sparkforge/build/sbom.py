"""The bill of materials of a build, in CycloneDX 1.6 JSON.

Each of our wheels carries its pedigree: the release wheel and the upstream commit that it descends
from, and every patch in full. The same inputs give the same bytes on every machine: the time is
the release's, the serial number is made from the content, and lists are sorted.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from email.parser import BytesHeaderParser
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit
from zipfile import BadZipFile, ZipFile

from cyclonedx.model import (
    AttachedText,
    ExternalReference,
    ExternalReferenceType,
    HashAlgorithm,
    HashType,
    Property,
    XsUri,
)
from cyclonedx.model.bom import Bom, BomMetaData
from cyclonedx.model.component import (
    Commit,
    Component,
    ComponentType,
    Diff,
    Patch,
    PatchClassification,
    Pedigree,
)
from cyclonedx.model.license import LicenseExpression
from cyclonedx.model.tool import ToolRepository
from cyclonedx.output.json import JsonV1Dot6
from packageurl import PackageURL
from packaging.utils import canonicalize_name, parse_wheel_filename

from sparkforge import __version__
from sparkforge.build.context import Context
from sparkforge.build.packs.names import UPSTREAM
from sparkforge.build.results import CompiledWheelResult, PackResult, PluginResult, WheelResult
from sparkforge.core.errors import WheelError
from sparkforge.core.hashing import sha256_file
from sparkforge.pins.pins import Upstream
from sparkforge.pins.types import UNKNOWN
from sparkforge.series.series import Series
from sparkforge.sources.wheelhouse import read_lock

if TYPE_CHECKING:
    from sparkforge.runtime.engine import BaseImage, Engine

FILE = "sparkforge:file"
"""Property with the file name of a wheel."""
PLUGIN, PACK = "own-plugin", "own-pack"
"""References of the wheels of our plugin, and of FlashInfer's modules."""
_NAMESPACE = uuid.UUID("6f0f3f1e-6a0c-5f0e-9d5b-0b2f3e0c7a11")  # any fixed one: ours


@dataclass(frozen=True)
class SystemPackage:
    """One package of the image's distribution, as its own database names it."""

    distribution: str
    name: str
    version: str
    architecture: str


def system(engine: Engine, image_id: str) -> list[str]:
    """Return the distribution's packages in an image, each as its fields in one line."""
    status = engine.read_file(image_id, "/var/lib/dpkg/status").decode(errors="replace")
    release = engine.read_file(image_id, "/usr/lib/os-release").decode(errors="replace")
    return [
        f"{package.distribution} {package.name} {package.version} {package.architecture}"
        for package in dpkg_packages(status, release)
    ]


def document(
    context: Context,
    wheels: Mapping[str, WheelResult],
    plugin: PluginResult | None = None,
    pack: PackResult | None = None,
    *,
    third_party: Path | None = None,
    base: BaseImage | None = None,
    system: Sequence[SystemPackage] = (),
) -> bytes:
    """Return the bill of materials of a build, as the bytes of its file.

    Args:
        plugin: for vLLM, with our kernels; None: there is none.
        pack: FlashInfer's modules; None: there are none.
        third_party: folder of the other verified wheels, or None where none were fetched.
        base: of the image; None describes no image.
        system: the distribution's packages in the image, where they are known.

    Raises:
        WheelError: a third-party wheel can't be read.
    """
    parts = [_own(context, name, wheel) for name, wheel in wheels.items()]
    if plugin is not None:
        parts.append(_plugin(plugin))
    if pack is not None:
        parts.append(_pack(context, pack))
    if third_party is not None:
        wanted = {item.name for item in read_lock(context.lock)}  # other tools stay out
        parts += [
            _third_party(path)
            for path in sorted(third_party.glob("*.whl"))
            if canonicalize_name(parse_wheel_filename(path.name)[0]) in wanted
        ]
    if base is not None:
        parts.append(_base(context, base.digest))
    parts += [_system(package) for package in system]
    root = Component(
        type=ComponentType.CONTAINER if base is not None else ComponentType.APPLICATION,
        name=f"sparkforge-{context.target_name}",
        version=context.release,
        bom_ref=f"sparkforge-{context.target_name}",
        description=context.target.summary,
        properties=[Property(name="sparkforge:platform", value=context.platform)],
    )
    tool = Component(
        type=ComponentType.APPLICATION,
        name="sparkforge",
        version=__version__,
        bom_ref="tool-sparkforge",
    )
    moment = datetime.fromtimestamp(context.epoch, UTC)
    bom = Bom(
        components=parts,
        metadata=BomMetaData(
            component=root, timestamp=moment, tools=ToolRepository(components=[tool])
        ),
        serial_number=uuid.UUID(int=0),
    )
    bom.register_dependency(root, parts)
    for part in parts:
        bom.register_dependency(part, part.components)
    content = JsonV1Dot6(bom).output_as_string(indent=1)
    bom.serial_number = uuid.uuid5(_NAMESPACE, content)
    return (JsonV1Dot6(bom).output_as_string(indent=1) + "\n").encode()


def dpkg_packages(status: str, os_release: str) -> list[SystemPackage]:
    """Return the packages that ``/var/lib/dpkg/status`` lists as installed.

    Args:
        os_release: text of ``/etc/os-release``, which names the distribution.
    """
    lines = (line.partition("=") for line in os_release.splitlines())
    system = {key: value.strip("\"'") for key, _, value in lines}.get("ID", "linux")
    result = []
    for paragraph in status.split("\n\n"):
        fields = dict(
            line.split(": ", 1)
            for line in paragraph.splitlines()
            if ": " in line and not line.startswith(" ")
        )
        if fields.get("Status", "").endswith(" installed"):
            result.append(
                SystemPackage(system, fields["Package"], fields["Version"], fields["Architecture"])
            )
    return sorted(result, key=lambda package: (package.name, package.architecture))


# -- our wheels -------------------------------------------------------------------


def _own(context: Context, name: str, wheel: WheelResult) -> Component:
    upstream = context.pins.upstream(name)
    plan = context.target.wheels[name]
    release = upstream.files[plan.files[context.platform]]
    own = _wheel(wheel.file, wheel.sha256, f"own-{name}")
    own.properties = [*own.properties, *_how_made(wheel)]
    if release.natives is not None:
        older = Property(name="sparkforge:natives", value=release.natives.release)
        own.properties = [*own.properties, older]
    ancestor = _wheel(release.file, release.sha256, f"release-{name}")
    own.pedigree = _pedigree(name, upstream, context.series_of(name), [ancestor])
    own.components = [
        _carried(name, carried, context.pins.upstream(carried), context.series_of(carried))
        for carried in plan.carries
    ]
    return own


def _plugin(plugin: PluginResult) -> Component:
    own = _wheel(plugin.file, plugin.sha256, PLUGIN)
    own.properties = [
        *own.properties,
        *(
            Property(name=f"sparkforge:kernels:{file}", value=f"compiled {sha256}")
            for file, sha256 in plugin.kernels.items()
        ),
    ]
    return own


def _pack(context: Context, pack: PackResult) -> Component:
    """Return the wheel of FlashInfer's modules, which descends from its patched source."""
    own = _wheel(pack.file, pack.sha256, PACK)
    own.properties = [
        *own.properties,
        *(
            Property(name=f"sparkforge:module:{name}", value=f"compiled {sha256}")
            for name, sha256 in pack.modules.items()
        ),
    ]
    upstream, patches = context.pins.upstream(UPSTREAM), context.series_of(UPSTREAM)
    own.pedigree = _pedigree("pack", upstream, patches, [])
    return own


def _how_made(wheel: WheelResult) -> list[Property]:
    """Return the properties of a compiled wheel's native files."""
    if not isinstance(wheel, CompiledWheelResult):
        return []
    return [
        Property(name="sparkforge:wheel", value="compiled"),
        *(
            Property(name=f"sparkforge:native:{file}", value=f"{native.origin} {native.sha256}")
            for file, native in wheel.natives.items()
        ),
    ]


def _carried(wheel: str, name: str, upstream: Upstream, patches: Series) -> Component:
    """Return a package that is part of another's wheel."""
    return Component(
        type=ComponentType.LIBRARY,
        name=name,
        version=upstream.version,
        bom_ref=f"own-{wheel}-{name}",
        purl=_source_purl(upstream),
        pedigree=_pedigree(f"{wheel}-{name}", upstream, patches, []),
    )


def _pedigree(
    ref: str, upstream: Upstream, patches: Series, ancestors: Iterable[Component]
) -> Pedigree:
    source = Component(
        type=ComponentType.LIBRARY,
        name=_repository(upstream)[1],
        version=upstream.tag,
        bom_ref=f"source-{ref}",
        purl=_source_purl(upstream),
        external_references=[
            ExternalReference(type=ExternalReferenceType.VCS, url=XsUri(upstream.git))
        ],
        properties=[
            # the library sorts patches; this property has the order in which they apply
            *(
                Property(
                    name=f"sparkforge:patch:{number:03}",
                    value=f"{patch.name} sha256:"
                    f"{patch.sha256} {patch.trailers.get('Risk', '')}".rstrip(),
                )
                for number, patch in enumerate(patches.patches, 1)
            ),
            *(
                Property(name=f"sparkforge:patched-tree:{kind}", value=record.tree)
                for kind, record in upstream.patched.items()
            ),
            Property(name="sparkforge:series", value=f"sha256:{patches.sha256}"),
            *([] if upstream.commit else [Property(name="sparkforge:commit", value=UNKNOWN)]),
        ],
    )
    return Pedigree(
        ancestors=[*ancestors, source],
        commits=[]
        if upstream.commit is None
        else [
            Commit(
                uid=upstream.commit,
                url=XsUri(f"{upstream.git.removesuffix('.git')}/commit/{upstream.commit}"),
            )
        ],
        patches=[
            Patch(
                type=PatchClassification.BACKPORT
                if patch.trailers.get("Upstream-Status", "").startswith("Backport")
                else PatchClassification.UNOFFICIAL,
                diff=Diff(
                    text=AttachedText(
                        content=patch.path.read_text(encoding="utf-8"), content_type="text/x-diff"
                    )
                ),
            )
            for patch in patches.patches
        ],
        notes=f"{len(patches.patches)} patch(es) on {upstream.tag}",
    )


def _repository(upstream: Upstream) -> tuple[str, str]:
    """Return owner and name of an upstream's repository."""
    owner, _, name = urlsplit(upstream.git).path.strip("/").removesuffix(".git").rpartition("/")
    return owner, name


def _source_purl(upstream: Upstream) -> PackageURL:
    owner, name = _repository(upstream)
    subpath = upstream.subdirectory or None
    if urlsplit(upstream.git).hostname == "github.com":
        return PackageURL("github", owner, name, upstream.commit or upstream.tag, None, subpath)
    where = {"vcs_url": f"git+{upstream.git}@{upstream.commit or upstream.tag}"}
    return PackageURL("generic", owner or None, name, upstream.version, where, subpath)


# -- what is not ours -----------------------------------------------------------------


def _wheel(file: str, sha256: str, ref: str = "") -> Component:
    name, version, _, _ = parse_wheel_filename(file)
    return Component(
        type=ComponentType.LIBRARY,
        name=name,
        version=str(version),
        bom_ref=ref or f"wheel-{name}",
        purl=PackageURL("pypi", None, name, str(version)),
        hashes=[_sha256(sha256)],
        properties=[Property(name=FILE, value=file)],
    )


def _third_party(path: Path) -> Component:
    wheel = _wheel(path.name, sha256_file(path))
    if expression := _license(path):
        wheel.licenses = [LicenseExpression(expression)]
    return wheel


def _license(wheel: Path) -> str | None:
    """Return the SPDX expression that a wheel states; older free text is not guessed at."""
    try:
        with ZipFile(wheel) as archive:
            member = next(
                name
                for name in archive.namelist()
                if name.count("/") == 1 and name.endswith(".dist-info/METADATA")
            )
            stated = BytesHeaderParser().parsebytes(archive.read(member))["License-Expression"]
    except (BadZipFile, StopIteration):
        msg = f"{wheel.name}: not a readable wheel"
        raise WheelError(msg, "run build.py clean, then build again") from None
    return None if stated is None else str(stated).strip()


def _base(context: Context, digest: str) -> Component:
    pinned = context.pins.images.get(context.target.base or "")
    known = pinned is not None and digest in (pinned.index, *pinned.platforms.values())
    repository = pinned.repository if pinned is not None and known else None
    name = repository.rpartition("/")[2] if repository else "base-image"
    where = {"repository_url": repository} if repository else None
    return Component(
        type=ComponentType.CONTAINER,
        name=repository or name,
        version=digest,
        bom_ref="base",
        purl=PackageURL("oci", None, name, digest, where),
        hashes=[_sha256(digest.removeprefix("sha256:"))],
    )


def _system(package: SystemPackage) -> Component:
    purl = PackageURL(
        "deb", package.distribution, package.name, package.version, {"arch": package.architecture}
    )
    return Component(
        type=ComponentType.LIBRARY,
        name=package.name,
        version=package.version,
        bom_ref=f"deb-{package.name}-{package.architecture}",
        purl=purl,
    )


def _sha256(value: str) -> HashType:
    return HashType(alg=HashAlgorithm.SHA_256, content=value)
