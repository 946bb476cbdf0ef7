"""The provenance of a build: a SLSA v1 predicate in an in-toto statement.

A statement is not signed when it is made: ``build.py release`` does that (docs/trust.md). It
holds no time of day: data of the run is in the receipt, under ``run``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

from sparkforge import __version__
from sparkforge.build.cached import result_of
from sparkforge.build.context import STAGES
from sparkforge.build.graph import Build
from sparkforge.build.packs.names import LOCK
from sparkforge.build.results import EnvironmentResult
from sparkforge.core import git
from sparkforge.core.disk import sha256_file
from sparkforge.pins.pins import Provider, Upstream
from sparkforge.pins.types import UNKNOWN

STATEMENT = "https://in-toto.io/Statement/v1"
PREDICATE = "https://slsa.dev/provenance/v1"
# names, not places: nothing is fetched from there
BUILD_TYPE = "https://sparkforge.example/build/v1"
BUILDER = "https://sparkforge.example/build.py"


def statement(
    build: Build, subjects: Mapping[str, str], third_party: Iterable[Path] = ()
) -> dict[str, Any]:
    """Return the statement as JSON values.

    Args:
        subjects: sha256 of each thing that was made, by its name.
        third_party: the other verified wheels that went in.
    """
    context, product = build.context, build.graph.product.found
    external: dict[str, Any] = {
        "target": context.target_name,
        "platform": context.platform,
        "pins": {"sha256": sha256_file(context.pins_path)},
    }
    if context.wheels == "compile":
        external["wheels"] = context.wheels
    if context.pack:
        external["pack"] = list(context.pack)
    dependencies = [
        *_checkout(context.root),
        *_upstreams(build),
        *(_named(name, sha256) for name, sha256 in _inputs(build).items()),
        *_externals(build),
        *(_file(path.name, sha256_file(path)) for path in sorted(third_party)),
    ]
    if product is not None:
        virtual = isinstance(product.result, EnvironmentResult)
        external["bakes"] = "environment" if virtual else "image"
        if (base := build.tools.base) is not None:
            external["base"] = base.reference
            dependencies.append(_named("base image", base.digest.removeprefix("sha256:")))
    return {
        "_type": STATEMENT,
        "subject": [_named(name, sha256) for name, sha256 in sorted(subjects.items())],
        "predicateType": PREDICATE,
        "predicate": {
            "buildDefinition": {
                "buildType": BUILD_TYPE,
                "externalParameters": external,
                "internalParameters": {
                    item.label: item.key
                    for item in build.graph.until(STAGES[-1])
                    if item.found is not None
                },
                "resolvedDependencies": dependencies,
            },
            "runDetails": {"builder": {"id": BUILDER, "version": {"sparkforge": __version__}}},
        },
    }


def _checkout(root: Path) -> list[dict[str, Any]]:
    """Return the commit of this checkout, and whether files differ from it; [] outside git."""
    commit = git.head(root)
    if not commit:
        return []  # an unpacked archive: pins, series and recipe are named by their hashes
    changed = git.git(root, "status", "--porcelain", "--untracked-files=normal")
    clean = {"clean": not changed}
    return [{"name": "sparkforge", "digest": {"gitCommit": commit}, "annotations": clean}]


def _upstreams(build: Build) -> Iterator[dict[str, Any]]:
    """Yield the release wheels, the sources and the patches of our wheels."""
    graph, context = build.graph, build.context
    for wheel, plan in context.target.wheels.items():
        if graph.wheels[wheel].found is None:
            continue  # the build ended behind the plugin's
        release = context.pins.upstream(wheel).files[plan.files[context.platform]]
        yield _file(release.file, release.sha256)
        for name in context.layers(wheel):
            tree = graph.trees[name]
            if (patched := result_of(tree.series)) is not None:
                provider = tree.source.result.provider
                yield _source(name, provider, context.upstream(name), patched.tree)
            for patch in context.series_of(name).patches:
                yield _named(f"patches/{name}/{patch.name}", patch.sha256)


def _inputs(build: Build) -> dict[str, str]:
    """Return the sources of our plugin's wheel and the locks of compilers: sha256 by name."""
    graph, context = build.graph, build.context
    plugin = context.pins.plugin
    found: dict[str, str] = {}
    if graph.kernels is not None and graph.plugin is not None:
        found |= {**graph.kernels.inputs["sources"], **graph.plugin.inputs["package"]}
    locks = {*([] if plugin is None else [plugin.requirements])}
    locks |= {*([] if graph.pack is None else [LOCK])}
    if context.wheels == "compile":
        locks.add(context.target.builder[context.platform])
    return found | {lock: sha256_file(context.root / lock) for lock in sorted(locks)}


def _externals(build: Build) -> Iterator[dict[str, Any]]:
    """Yield the repositories that the builds of compiled wheels read."""
    for name, item in build.graph.externals.items():
        external = item.result
        upstream, _, key = name.partition("/")
        yield {
            "name": name,
            "uri": f"git+{build.context.pins.upstream(upstream).externals[key].git}",
            "digest": {"gitCommit": external.commit},
        }


def _source(name: str, provider: Provider, upstream: Upstream, tree: str) -> dict[str, Any]:
    """Return the source that was read: the commit, or the release file instead of it."""
    notes = {"patchedTree": tree}
    uri = f"git+{upstream.git}@refs/tags/{upstream.tag}"
    if provider == "git" or upstream.source_file is None:
        digest = {"gitCommit": upstream.commit}
        return {"name": name, "uri": uri, "digest": digest, "annotations": notes}
    file = upstream.files[upstream.source_file]
    if upstream.commit is None:
        notes |= {"standsFor": uri, "commit": UNKNOWN}
    else:
        notes["standsFor"] = f"git+{upstream.git}@{upstream.commit}"
    return {**_file(file.file, file.sha256), "annotations": notes}


def _file(name: str, sha256: str) -> dict[str, Any]:
    """Return a file of the package index, without the address that this machine used."""
    uri = f"pkg:generic/{quote(name)}?checksum=sha256:{sha256}"
    return {**_named(name, sha256), "uri": uri}


def _named(name: str, sha256: str) -> dict[str, Any]:
    return {"name": name, "digest": {"sha256": sha256}}
