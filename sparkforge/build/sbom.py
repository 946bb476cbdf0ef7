"""The SBOM of a build, in CycloneDX 1.6 JSON.

Each of our wheels carries its pedigree: the release wheel and the upstream commit that it descends
from, and every patch in full. The same inputs give the same bytes on every machine: the time is
the release's, the serial number is made from the content, and lists are sorted.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
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
from sparkforge.core.disk import sha256_file
from sparkforge.core.errors import BuildError
from sparkforge.pins.pins import Upstream
from sparkforge.pins.types import UNKNOWN
from sparkforge.series import patchfile
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


def dpkg_packages(status: str, os_release: str) -> list[SystemPackage]:
    """Return the packages that ``/var/lib/dpkg/status`` lists as installed.

    Args:
        os_release: text of ``/etc/os-release``, which names the distribution.
    """
    lines = (line.partition("=") for line in os_release.splitlines())
    distribution = {key: value.strip("\"'") for key, _, value in lines}.get("ID", "linux")
    result = []
    for paragraph in status.split("\n\n"):
        fields = dict(
            line.split(": ", 1)
            for line in paragraph.splitlines()
            if ": " in line and not line.startswith(" ")
        )
        if fields.get("Status", "").endswith(" installed"):
            name, version, architecture = (
                fields[key] for key in ("Package", "Version", "Architecture")
            )
            result.append(SystemPackage(distribution, name, version, architecture))
    return sorted(result, key=lambda package: (package.name, package.architecture))


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
    """Return the SBOM of a build, as the bytes of its file.

    Args:
        plugin: for vLLM, with our kernels; None: there is none.
        pack: FlashInfer's modules; None: there are none.
        third_party: folder of the other verified wheels, or None where none were fetched.
        base: of the image; None describes no image.
        system: the distribution's packages in the image, where they are known.

    Raises:
        BuildError: a third-party wheel can't be read.
    """
    parts = [_own(context, name, wheel) for name, wheel in wheels.items()]
    if plugin is not None:
        code = {f"kernels:{file}": f"compiled {sha}" for file, sha in plugin.kernels.items()}
        parts.append(_wheel(plugin.file, plugin.sha256, PLUGIN, code))
    if pack is not None:
        code = {f"module:{name}": f"compiled {sha}" for name, sha in pack.modules.items()}
        part = _wheel(pack.file, pack.sha256, PACK, code)
        source, patches = context.pins.upstream(UPSTREAM), context.series_of(UPSTREAM)
        part.pedigree = _pedigree("pack", source, patches)
        parts.append(part)
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
    name = f"sparkforge-{context.target_name}"
    root = _part(name, context.release, name, {"platform": context.platform})
    root.type = ComponentType.APPLICATION if base is None else ComponentType.CONTAINER
    root.description = context.target.summary
    tool = _part("sparkforge", __version__, "tool-sparkforge")
    tool.type = ComponentType.APPLICATION
    metadata = BomMetaData(
        component=root,
        timestamp=datetime.fromtimestamp(context.epoch, UTC),
        tools=ToolRepository(components=[tool]),
    )
    bom = Bom(components=parts, metadata=metadata, serial_number=uuid.UUID(int=0))
    bom.register_dependency(root, parts)
    for part in parts:
        bom.register_dependency(part, part.components)
    bom.serial_number = uuid.uuid5(_NAMESPACE, JsonV1Dot6(bom).output_as_string(indent=1))
    return (JsonV1Dot6(bom).output_as_string(indent=1) + "\n").encode()


def _own(context: Context, name: str, wheel: WheelResult) -> Component:
    """Return a wheel of ours, which descends from the release wheel and the patched source."""
    upstream = context.pins.upstream(name)
    plan = context.target.wheels[name]
    release = upstream.files[plan.files[context.platform]]
    facts = {} if release.natives is None else {"natives": release.natives.release}
    if isinstance(wheel, CompiledWheelResult):
        facts["wheel"] = "compiled"
        for file, native in wheel.natives.items():
            facts[f"native:{file}"] = f"{native.origin} {native.sha256}"
    own = _wheel(wheel.file, wheel.sha256, f"own-{name}", facts)
    ancestor = _wheel(release.file, release.sha256, f"release-{name}")
    own.pedigree = _pedigree(name, upstream, context.series_of(name), ancestor)
    for carried in plan.carries:  # packages that are part of this wheel
        source = context.pins.upstream(carried)
        part = _part(carried, source.version, f"own-{name}-{carried}")
        part.purl = _source_purl(source)
        part.pedigree = _pedigree(f"{name}-{carried}", source, context.series_of(carried))
        own.components.add(part)
    return own


def _pedigree(
    reference: str, upstream: Upstream, patches: Series, *ancestors: Component
) -> Pedigree:
    # the library sorts patches; these properties have the order in which they apply
    facts = {
        f"patch:{number:03}": f"{one.name} sha256:{one.sha256}"
        for number, one in enumerate(patches.patches, 1)
    }
    facts |= {f"patched-tree:{kind}": record.tree for kind, record in upstream.patched.items()}
    facts["series"] = f"sha256:{patches.sha256}"
    if not upstream.commit:
        facts["commit"] = UNKNOWN
    source = _part(_repository(upstream)[1], upstream.tag, f"source-{reference}", facts)
    source.purl = _source_purl(upstream)
    source.external_references = [
        ExternalReference(type=ExternalReferenceType.VCS, url=XsUri(upstream.git))
    ]
    url = f"{upstream.git.removesuffix('.git')}/commit/{upstream.commit}"
    return Pedigree(
        ancestors=[*ancestors, source],
        commits=[Commit(uid=upstream.commit, url=XsUri(url))] if upstream.commit else [],
        patches=[_patch(patch) for patch in patches.patches],
        notes=f"{len(patches.patches)} patch(es) on {upstream.tag}",
    )


def _patch(patch: patchfile.Patch) -> Patch:
    backport = patch.trailers.get("Upstream-Status", "").startswith("Backport")
    kind = PatchClassification.BACKPORT if backport else PatchClassification.UNOFFICIAL
    text = AttachedText(content=patch.path.read_text(encoding="utf-8"), content_type="text/x-diff")
    return Patch(type=kind, diff=Diff(text=text))


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


def _wheel(
    file: str, sha256: str, reference: str = "", facts: Mapping[str, str] | None = None
) -> Component:
    name, version, _, _ = parse_wheel_filename(file)
    part = _part(name, str(version), reference or f"wheel-{name}", {"file": file, **(facts or {})})
    part.purl = PackageURL("pypi", None, name, str(version))
    part.hashes = [_sha256(sha256)]
    return part


def _part(
    name: str, version: str, reference: str, facts: Mapping[str, str] | None = None
) -> Component:
    """Return a component with properties of ours."""
    properties = [
        Property(name=f"sparkforge:{key}", value=value) for key, value in (facts or {}).items()
    ]
    return Component(
        type=ComponentType.LIBRARY,
        name=name,
        version=version,
        bom_ref=reference,
        properties=properties,
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
        raise BuildError(msg, "run build.py clean, then build again") from None
    return None if stated is None else str(stated).strip()


def _base(context: Context, digest: str) -> Component:
    pinned = context.pins.images.get(context.target.base or "")
    known = pinned is not None and digest in (pinned.index, *pinned.platforms.values())
    repository = pinned.repository if pinned is not None and known else None
    name = repository.rpartition("/")[2] if repository else "base-image"
    where = {"repository_url": repository} if repository else None
    part = _part(repository or name, digest, "base")
    part.type = ComponentType.CONTAINER
    part.purl = PackageURL("oci", None, name, digest, where)
    part.hashes = [_sha256(digest.removeprefix("sha256:"))]
    return part


def _system(package: SystemPackage) -> Component:
    part = _part(package.name, package.version, f"deb-{package.name}-{package.architecture}")
    where = {"arch": package.architecture}
    part.purl = PackageURL("deb", package.distribution, package.name, package.version, where)
    return part


def _sha256(value: str) -> HashType:
    return HashType(alg=HashAlgorithm.SHA_256, content=value)
