"""The SBOM of a build, in CycloneDX 1.6 JSON, and its provenance.

Each of our wheels carries its pedigree: the release wheel and the upstream commit that it descends
from, and every patch in full. The same inputs give the same bytes on every machine.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlsplit

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

from sparkforge import __version__
from sparkforge.build.cached import result_of
from sparkforge.build.context import Context
from sparkforge.build.packs.modules import UPSTREAM
from sparkforge.build.results import (
    CompiledWheelResult,
    PackResult,
    PluginResult,
    WheelResult,
)
from sparkforge.core import git
from sparkforge.core.disk import sha256_file
from sparkforge.pins.pins import Upstream
from sparkforge.sources.wheelhouse import read_lock

if TYPE_CHECKING:
    from sparkforge.build.graph import Build
    from sparkforge.runtime.engine import BaseImage, Engine

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
    context: Context,
    wheels: Mapping[str, WheelResult],
    plugin: PluginResult | None = None,
    pack: PackResult | None = None,
    *,
    third_party: Path | None = None,
    base: BaseImage | None = None,
    system: Sequence[str] = (),
) -> bytes:
    """Return the SBOM of a build, as the bytes of its file; without a base it is of no image.

    ``third_party`` is the folder of the other verified wheels; ``system`` has the distribution's
    packages, each as ``DISTRIBUTION NAME VERSION ARCHITECTURE``.
    """
    parts = [_own(context, name, wheel) for name, wheel in wheels.items()]
    if plugin is not None:
        code = {f"kernels:{file}": f"compiled {sha}" for file, sha in plugin.kernels.items()}
        parts.append(_wheel(plugin.file, plugin.sha256, PLUGIN, code))
    if pack is not None:
        code = {f"module:{name}": f"compiled {sha}" for name, sha in pack.modules.items()}
        part = _wheel(pack.file, pack.sha256, PACK, code)
        part.pedigree = _pedigree(context, UPSTREAM, PACK)
        parts.append(part)
    if third_party is not None:
        wanted = {item.name for item in read_lock(context.lock)}  # other tools stay out
        for path in sorted(third_party.glob("*.whl")):
            package = canonicalize_name(parse_wheel_filename(path.name)[0])
            if package in wanted:
                parts.append(_wheel(path.name, sha256_file(path), f"wheel-{package}"))
    if base is not None:
        purl = PackageURL("oci", None, "base-image", base.digest)
        sha256 = base.digest.removeprefix("sha256:")
        parts.append(_part("base-image", base.digest, "base", purl=purl, sha256=sha256))
    for line in system:
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
    upstream, plan = context.pins.upstream(name), context.target.wheels[name]
    release = upstream.files[plan.files[context.platform]]
    facts = {} if release.natives is None else {"natives": release.natives.release}
    if isinstance(wheel, CompiledWheelResult):
        facts["wheel"] = "compiled"
    own = _wheel(wheel.file, wheel.sha256, f"own-{name}", facts)
    ancestor = _wheel(release.file, release.sha256, f"release-{name}")
    own.pedigree = _pedigree(context, name, name, ancestor)
    for carried in plan.carries:  # packages that are part of this wheel
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


# -- provenance --------------------------------------------------------------------------------

# names, not places: nothing is fetched from there
BUILD_TYPE = "https://sparkforge.example/build/v1"
BUILDER = "https://sparkforge.example/build.py"


def statement(
    build: Build, subjects: Mapping[str, str], third_party: Iterable[Path] = ()
) -> dict[str, Any]:
    """Return the provenance, a SLSA v1 predicate in an in-toto statement, as JSON values.

    It holds no time of day: data of the run is in the receipt, under ``run``.

    Args:
        subjects: sha256 of each thing that was made, by its name.
        third_party: the other verified wheels that went in.
    """
    context, product, base = build.context, result_of(build.graph.product), build.tools.base
    external: dict[str, Any] = {
        "target": context.target_name,
        "platform": context.platform,
        "pins": {"sha256": sha256_file(context.pins_path)},
        "wheels": context.wheels,
        "pack": list(context.pack),
    }
    dependencies = [
        *checkout_commit(context.root),
        *_upstreams(build),
        *(_file(path.name, sha256_file(path)) for path in sorted(third_party)),
    ]
    if base is not None and product is not None:
        external["base"] = base.reference
        dependencies.append(_named("base image", base.digest.removeprefix("sha256:")))
    definition = {
        "buildType": BUILD_TYPE,
        "externalParameters": external,
        "resolvedDependencies": dependencies,
    }
    builder = {"id": BUILDER, "version": {"sparkforge": __version__}}
    return {
        "_type": "https://in-toto.io/Statement/v1",
        "subject": [_named(name, sha256) for name, sha256 in sorted(subjects.items())],
        "predicateType": "https://slsa.dev/provenance/v1",
        "predicate": {"buildDefinition": definition, "runDetails": {"builder": builder}},
    }


def checkout_commit(root: Path) -> list[dict[str, Any]]:
    """Return the commit of this checkout, and whether files differ from it; [] outside git."""
    commit = git.head(root)
    if not commit:
        return []  # an unpacked archive: pins, series and recipe are named by their hashes
    clean = not git.git(root, "status", "--porcelain", "--untracked-files=normal")
    digest = {"gitCommit": commit}
    return [{"name": "sparkforge", "digest": digest, "annotations": {"clean": clean}}]


def _upstreams(build: Build) -> Iterator[dict[str, Any]]:
    """Yield the release wheels, the sources and the patches of our wheels."""
    graph, context = build.graph, build.context
    for wheel, plan in context.target.wheels.items():
        if graph.wheels[wheel].found is None:
            continue  # the build ended behind the plugin's
        release = context.pins.upstream(wheel).files[plan.files[context.platform]]
        yield _file(release.file, release.sha256)
        for name in context.layers(wheel):
            if (read := result_of(graph.trees[name].source)) is not None:
                one = context.upstream(name)
                uri = f"git+{one.git}@refs/tags/{one.tag}"
                if read.provider == "git" or one.source_file is None:
                    yield {"name": name, "uri": uri, "digest": {"gitCommit": one.commit}}
                else:  # its release file was read instead
                    file, known = one.files[one.source_file], one.commit_or_unknown
                    notes = {"standsFor": uri, "commit": known}
                    yield {**_file(file.file, file.sha256), "annotations": notes}
            for patch in context.series_of(name).patches:
                yield _named(f"patches/{name}/{patch.name}", patch.sha256)


def _file(name: str, sha256: str) -> dict[str, Any]:
    """Return a file of the package index, without the address that this machine used."""
    uri = f"pkg:generic/{quote(name)}?checksum=sha256:{sha256}"
    return {**_named(name, sha256), "uri": uri}


def _named(name: str, sha256: str) -> dict[str, Any]:
    return {"name": name, "digest": {"sha256": sha256}}
