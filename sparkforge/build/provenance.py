"""The provenance of a build: a SLSA v1 predicate in an in-toto statement.

A statement is not signed when it is made: ``build.py sign`` does that (docs/supply-chain.md). It
holds no time of day: data of the run is in the receipt, under ``run``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

from sparkforge import __version__
from sparkforge.build.context import Context
from sparkforge.build.executor import Build
from sparkforge.build.packs.names import LOCK
from sparkforge.build.results import EnvironmentResult
from sparkforge.core import git
from sparkforge.core.hashing import sha256_file
from sparkforge.pins.pins import Provider, Upstream
from sparkforge.pins.types import UNKNOWN

STATEMENT = "https://in-toto.io/Statement/v1"
PREDICATE = "https://slsa.dev/provenance/v1"
# names, not places: nothing is fetched from there
BUILD_TYPE = "https://sparkforge.example/build/v1"
BUILDER = "https://sparkforge.example/build.py"


def statement(
    context: Context, build: Build, subjects: Mapping[str, str], third_party: Iterable[Path] = ()
) -> dict[str, Any]:
    """Return the statement as JSON values.

    Args:
        subjects: sha256 of each thing that was made, by its name.
        third_party: the other verified wheels that went in.
    """
    product = build.results.step(build.graph.product)
    external: dict[str, Any] = {
        "target": context.target_name,
        "platform": context.platform,
        "pins": {"sha256": sha256_file(context.pins_path)},
    }
    if context.wheels == "compile":
        external["wheels"] = context.wheels
    if context.pack:
        external["pack"] = list(context.pack)
    if product is not None:
        virtual = isinstance(product.artefact.result, EnvironmentResult)
        external["bakes"] = "environment" if virtual else "image"
        if context.base is not None:
            external["base"] = context.base.reference
    dependencies = [
        *_checkout(context.root),
        *_upstreams(context, build),
        *_plugin(build),
        *_compilers(context, build),
        *_builders(context, build),
        *(_file(path.name, sha256_file(path)) for path in sorted(third_party)),
    ]
    if product is not None and context.base is not None:
        digest = context.base.digest.removeprefix("sha256:")
        dependencies.append({"name": "base image", "digest": {"sha256": digest}})
    return {
        "_type": STATEMENT,
        "subject": [
            {"name": name, "digest": {"sha256": value}} for name, value in sorted(subjects.items())
        ],
        "predicateType": PREDICATE,
        "predicate": {
            "buildDefinition": {
                "buildType": BUILD_TYPE,
                "externalParameters": external,
                "internalParameters": {
                    step.item.label: step.artefact.key for step in build.results
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
    return [
        {
            "name": "sparkforge",
            "digest": {"gitCommit": commit},
            "annotations": {"clean": not changed},
        }
    ]


def _upstreams(context: Context, build: Build) -> list[dict[str, Any]]:
    graph, results = build.graph, build.results
    result: list[dict[str, Any]] = []
    for wheel, plan in context.target.wheels.items():
        if results.step(graph.wheels[wheel]) is None:
            continue  # the build ended behind the plugin's
        release = context.pins.upstream(wheel).files[plan.files[context.platform]]
        result.append(_file(release.file, release.sha256))
        for name in context.layers(wheel):
            upstream = context.upstream(name)
            series = results.step(graph.series.get(name))
            if series is not None:
                tree = {"patchedTree": series.artefact.result.tree}
                provider = results.of(graph.sources[name]).provider
                result.append(_source(name, provider, upstream, tree))
            result += [
                {"name": f"patches/{name}/{patch.name}", "digest": {"sha256": patch.sha256}}
                for patch in context.series_of(name).patches
            ]
    return result


def _plugin(build: Build) -> list[dict[str, Any]]:
    """Return the files of the checkout that our plugin's wheel is made from."""
    if build.graph.kernels is None or build.graph.plugin is None:
        return []
    files = {**build.graph.kernels.inputs["sources"], **build.graph.plugin.inputs["package"]}
    return [{"name": name, "digest": {"sha256": sha256}} for name, sha256 in files.items()]


def _compilers(context: Context, build: Build) -> list[dict[str, Any]]:
    """Return the locks of the compilers of the machine code in wheels."""
    plugin = context.pins.plugin
    locks = sorted(
        (set() if plugin is None else {plugin.requirements})
        | (set() if build.graph.pack is None else {LOCK})
    )
    return [
        {"name": lock, "digest": {"sha256": sha256_file(context.root / lock)}} for lock in locks
    ]


def _builders(context: Context, build: Build) -> list[dict[str, Any]]:
    """Return the builder images of compiled wheels, and the external sources of their builds."""
    if context.wheels != "compile":
        return []
    lock = context.target.builder[context.platform]
    result: list[dict[str, Any]] = [
        {"name": lock, "digest": {"sha256": sha256_file(context.root / lock)}}
    ]
    for name, item in build.graph.externals.items():
        external = build.results.of(item)
        upstream, _, key = name.partition("/")
        url = context.pins.upstream(upstream).externals[key].git
        result.append(
            {
                "name": name,
                "uri": f"git+{url}",
                "digest": {"gitCommit": external.commit},
            }
        )
    return result


def _source(
    name: str, provider: Provider, upstream: Upstream, notes: Mapping[str, str]
) -> dict[str, Any]:
    """Return the source that was read: the commit, or the release file instead of it."""
    if provider == "git" or upstream.source_file is None:
        return {
            "name": name,
            "uri": f"git+{upstream.git}@refs/tags/{upstream.tag}",
            "digest": {"gitCommit": upstream.commit},
            "annotations": dict(notes),
        }
    file = upstream.files[upstream.source_file]
    if upstream.commit is None:
        origin = {"standsFor": f"git+{upstream.git}@refs/tags/{upstream.tag}", "commit": UNKNOWN}
    else:
        origin = {"standsFor": f"git+{upstream.git}@{upstream.commit}"}
    return {**_file(file.file, file.sha256), "annotations": {**origin, **notes}}


def _file(name: str, sha256: str) -> dict[str, Any]:
    """Return a file of the package index, without the address that this machine used."""
    return {
        "name": name,
        "uri": f"pkg:generic/{quote(name)}?checksum=sha256:{sha256}",
        "digest": {"sha256": sha256},
    }
