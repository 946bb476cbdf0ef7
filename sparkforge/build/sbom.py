"""The SBOM of a build, in CycloneDX 1.6 JSON.

Each of our wheels carries its pedigree: the release wheel and the upstream commit that it descends
from, and every patch in full. The same inputs give the same bytes on every machine.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from cyclonedx.model import AttachedText, HashAlgorithm, HashType, Property
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
from cyclonedx.output.json import JsonV1Dot6
from packageurl import PackageURL
from packaging.utils import canonicalize_name, parse_wheel_filename

from sparkforge.build.cached import result_of
from sparkforge.build.context import WHEELS, Context
from sparkforge.build.packs.modules import UPSTREAM
from sparkforge.build.results import CompiledWheelResult, WheelResult
from sparkforge.core.disk import sha256_file
from sparkforge.core.errors import StoreError
from sparkforge.pins.pins import Upstream
from sparkforge.runtime.engine import BaseImage, Engine
from sparkforge.sources.wheelhouse import read_lock

if TYPE_CHECKING:
    from sparkforge.build.graph import Graph

PLUGIN, PACK = "own-plugin", "own-pack"
"""References of the wheels of our plugin, and of FlashInfer's modules."""
_NAMESPACE = uuid.UUID("6f0f3f1e-6a0c-5f0e-9d5b-0b2f3e0c7a11")  # any fixed one: ours


# dpkg's database in an image, each package as DISTRIBUTION NAME VERSION ARCHITECTURE
_PACKAGES = (
    ". /usr/lib/os-release; dpkg-query --show --showformat"
    ' "\\${db:Status-Status} $ID \\${Package} \\${Version} \\${Architecture}\n"'
)


def system(engine: Engine, image_id: str) -> list[str]:
    """Return the installed packages of an image's distribution, as ``document`` takes them."""
    lines = engine.run(image_id, "sh", "-c", _PACKAGES).decode().splitlines()
    state = "installed "
    return sorted(line.removeprefix(state) for line in lines if line.startswith(state))


def document(
    context: Context, graph: Graph, base: BaseImage | None = None, packages: Sequence[str] = ()
) -> bytes:
    """Return the SBOM of what was made, as the bytes of its file; without a base it is of no image.

    ``packages`` are the distribution's, each as ``DISTRIBUTION NAME VERSION ARCHITECTURE``.
    """
    # a build that ended behind the plugin's wheel has no others
    made = {name: item.result for name, item in graph.wheels.items() if item.found is not None}
    parts = [_own(context, name, wheel) for name, wheel in made.items()]
    if (plugin := result_of(graph.plugin)) is not None:
        code = {f"kernels:{file}": f"compiled {sha}" for file, sha in plugin.kernels.items()}
        parts.append(_wheel(plugin.file, plugin.sha256, PLUGIN, code))
    if (pack := result_of(graph.pack)) is not None:
        code = {f"module:{name}": f"compiled {sha}" for name, sha in pack.modules.items()}
        part = _wheel(pack.file, pack.sha256, PACK, code)
        part.pedigree = _pedigree(context, UPSTREAM, PACK)
        parts.append(part)
    if graph.house.found is not None:
        locked = read_lock(context.lock)
        names, hashes = {one.name for one in locked}, {sha for one in locked for sha in one.sha256s}
        for path in sorted((graph.house.path / WHEELS).glob("*.whl")):
            package = canonicalize_name(parse_wheel_filename(path.name)[0])
            sha256 = sha256_file(path)
            if package in names and sha256 not in hashes:
                raise StoreError(f"{path}: damaged", "build again with --force wheelhouse")
            if package in names:  # other tools stay out
                parts.append(_wheel(path.name, sha256, f"wheel-{package}"))
    if base is not None:
        purl = PackageURL("oci", None, "base-image", base.digest)
        sha256 = base.digest.removeprefix("sha256:")
        parts.append(_part("base-image", base.digest, "base", purl=purl, sha256=sha256))
    for line in packages:
        distribution, name, version, machine = line.split(" ")
        purl = PackageURL("deb", distribution, name, version, {"arch": machine})
        parts.append(_part(name, version, f"deb-{name}-{machine}", purl=purl))
    name = f"sparkforge-{context.target_name}"
    root = _part(name, context.release, name, {"platform": context.platform})
    root.type = ComponentType.APPLICATION if base is None else ComponentType.CONTAINER
    released = datetime.fromtimestamp(context.epoch, UTC)
    metadata = BomMetaData(component=root, timestamp=released)
    bom = Bom(components=parts, metadata=metadata, serial_number=uuid.UUID(int=0))
    bom.register_dependency(root, parts)
    bom.serial_number = uuid.uuid5(_NAMESPACE, JsonV1Dot6(bom).output_as_string(indent=1))
    return (JsonV1Dot6(bom).output_as_string(indent=1) + "\n").encode()


def _own(context: Context, name: str, wheel: WheelResult) -> Component:
    """Return a wheel of ours, which descends from the release wheel and the patched source."""
    release = context.release_file(name)
    facts = {} if release.natives is None else {"natives": release.natives.release}
    if isinstance(wheel, CompiledWheelResult):
        facts["wheel"] = "compiled"
    own = _wheel(wheel.file, wheel.sha256, f"own-{name}", facts)
    ancestor = _wheel(release.file, release.sha256, f"release-{name}")
    own.pedigree = _pedigree(context, name, name, ancestor)
    for carried in context.target.wheels[name].carries:  # packages that are part of this wheel
        source = context.pins.upstream(carried)
        part = _part(carried, source.version, f"own-{name}-{carried}", purl=_source(source))
        part.pedigree = _pedigree(context, carried, f"{name}-{carried}")
        own.components.add(part)
    return own


def _pedigree(context: Context, name: str, reference: str, *ancestors: Component) -> Pedigree:
    """Return the source of an upstream and its patches, after other ancestors."""
    upstream, series = context.pins.upstream(name), context.series_of(name)
    # the library sorts patches; these properties have the order in which they apply
    facts = {
        f"patch:{number:03}": f"{one.name} sha256:{one.sha256}"
        for number, one in enumerate(series.patches, 1)
    }
    facts |= {f"patched-tree:{kind}": record.tree for kind, record in upstream.patched.items()}
    facts |= {"series": f"sha256:{series.sha256}", "commit": upstream.commit_or_unknown}
    purl = _source(upstream)
    source = _part(purl.name, upstream.tag, f"source-{reference}", facts, purl=purl)
    texts = (one.path.read_text(encoding="utf-8") for one in series.patches)
    diffs = (Diff(text=AttachedText(content=text)) for text in texts)
    return Pedigree(
        ancestors=[*ancestors, source],
        commits=[Commit(uid=upstream.commit)] if upstream.commit else [],
        patches=[Patch(type=PatchClassification.UNOFFICIAL, diff=diff) for diff in diffs],
    )


def _source(upstream: Upstream) -> PackageURL:
    owner, _, name = urlsplit(upstream.git).path.strip("/").removesuffix(".git").rpartition("/")
    commit, subpath = upstream.commit or upstream.tag, upstream.subdirectory or None
    if urlsplit(upstream.git).hostname == "github.com":
        return PackageURL("github", owner, name, commit, None, subpath)
    where = {"vcs_url": f"git+{upstream.git}@{commit}"}
    return PackageURL("generic", owner or None, name, upstream.version, where, subpath)


def _wheel(
    file: str, sha256: str, reference: str, facts: Mapping[str, str] | None = None
) -> Component:
    name, version, _, _ = parse_wheel_filename(file)
    purl = PackageURL("pypi", None, name, str(version))
    facts = {"file": file, **(facts or {})}
    return _part(name, str(version), reference, facts, purl=purl, sha256=sha256)


def _part(
    name: str,
    version: str,
    reference: str,
    facts: Mapping[str, str] | None = None,
    *,
    purl: PackageURL | None = None,
    sha256: str | None = None,
) -> Component:
    """Return a component with properties of ours."""
    return Component(
        type=ComponentType.LIBRARY,
        name=name,
        version=version,
        bom_ref=reference,
        purl=purl,
        hashes=[HashType(alg=HashAlgorithm.SHA_256, content=sha256)] if sha256 else [],
        properties=[Property(name=f"sparkforge:{k}", value=v) for k, v in (facts or {}).items()],
    )
