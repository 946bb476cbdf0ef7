"""SBOM and provenance of the real pins: valid by their formats' own definitions."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from google.protobuf.json_format import ParseDict
from in_toto_attestation.predicates.provenance.v1 import provenance_pb2
from in_toto_attestation.v1 import statement_pb2
from in_toto_attestation.v1.statement import Statement

from sparkforge.build import cached, image, provenance, sbom
from sparkforge.build.context import Context
from sparkforge.build.graph import Build, graph_of
from sparkforge.build.results import (
    ImageResult,
    PackResult,
    PluginResult,
    SeriesResult,
    SourceResult,
    WheelResult,
)
from sparkforge.build.sbom import SystemPackage
from sparkforge.check.verify import command
from sparkforge.core.errors import BuildError
from sparkforge.pins.pins import Provider
from sparkforge.runtime.engine import BaseImage
from tests.results import build_of, context_of, reached
from tests.support import ROOT, make_wheel, sha256

BASE = BaseImage("base", f"sha256:{'5' * 64}")
SPARK_WHEELS = {
    name: WheelResult(f"{name}-1.0+spark.1-py3-none-any.whl", digit * 64, "1.0+spark.1")
    for name, digit in (("vllm", "1"), ("flashinfer", "2"), ("triton", "3"))
}
PACK = PackResult(
    "flashinfer_jit_cache-1.0+spark.1-py3-none-linux_aarch64.whl",
    *("4" * 64, "1.0+spark.1"),
    modules={"sampling": "5" * 64},
    units=3,
)
PLUGIN = PluginResult(
    "vllm_sparkforge-1.0-py3-none-any.whl", "6" * 64, "1.0", {"own/sm_90a.cubin": "7" * 64}
)
SYSTEM = (SystemPackage("debian", "libc6", "2.36-9+deb12u10", "amd64"),)


def context(target: str = "spark") -> Context:
    return context_of(target)


@pytest.mark.parametrize("target", ["spark", "rtx", "cpu"])
def test_no_wheel_of_another_platform_is_fetched(target: str) -> None:
    here = context(target)
    todo = {item.label: item for item in graph_of(here).until("wheels")}
    installed = {file for item in todo.values() if item.stage == "wheels" for file in item.download}
    for name in [layer for wheel in here.target.wheels for layer in here.layers(wheel)]:
        (file,) = todo[f"source {name}"].download
        assert file in installed or file.file.endswith(".tar.gz"), name
        assert todo[f"source {name}"].inputs["release_file"] == file.sha256
    steps = cached.plan(here, list(todo.values()))
    sdists = {file for item in todo.values() for file in item.download if file.file.endswith(".gz")}
    compiler = sum(step.download for step in steps if step.stage == "kernels")
    assert compiler > 0
    files = sum(file.size for file in installed | sdists)
    assert cached.total(steps)["known"] == files + compiler


def of_spark(**more: Any) -> Any:
    return json.loads(sbom.document(context(), SPARK_WHEELS, **more))


def component(document: Any, ref: str) -> Any:
    return next(one for one in document["components"] if one["bom-ref"] == ref)


def properties(one: Any) -> dict[str, str]:
    return {item["name"]: item["value"] for item in one["properties"]}


def test_sbom_is_valid_cyclonedx() -> None:
    text = sbom.document(context(), SPARK_WHEELS, base=BASE, system=SYSTEM).decode()
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(text) is None
    # the validator does refuse
    broken = text.replace('"libc6"', "6")
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(broken) is not None


def test_sbom_has_plugin_and_pack() -> None:
    text = sbom.document(context(), SPARK_WHEELS, PLUGIN, PACK, base=BASE)
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(text.decode()) is None
    own = component(json.loads(text), sbom.PACK)
    assert own["name"] == "flashinfer-jit-cache"
    assert own["hashes"][0]["content"] == PACK.sha256
    assert properties(own)["sparkforge:module:sampling"] == f"compiled {'5' * 64}"
    count = len((ROOT / "patches" / "flashinfer" / "series").read_text().splitlines())
    assert own["pedigree"]["notes"].startswith(f"{count} patch(es)")
    own = component(json.loads(text), sbom.PLUGIN)
    assert (own["name"], own["version"]) == ("vllm-sparkforge", "1.0")
    assert properties(own)["sparkforge:kernels:own/sm_90a.cubin"] == f"compiled {'7' * 64}"
    assert not {sbom.PACK, sbom.PLUGIN} & {one["bom-ref"] for one in of_spark()["components"]}


@pytest.mark.parametrize("upstream", ["vllm", "flashinfer", "triton"])
def test_pedigree_has_every_patch_in_order(upstream: str) -> None:
    own = component(of_spark(), f"own-{upstream}")
    patches = context().series_of(upstream).patches
    assert patches
    texts = [patch["diff"]["text"]["content"] for patch in own["pedigree"]["patches"]]
    assert sorted(texts) == sorted(patch.path.read_text() for patch in patches)
    source = next(one for one in own["pedigree"]["ancestors"] if one["bom-ref"].startswith("sour"))
    numbered = {
        name: value
        for name, value in properties(source).items()
        if name.startswith("sparkforge:patch:")
    }
    assert [numbered[name].split()[:2] for name in sorted(numbered)] == [
        [patch.name, f"sha256:{patch.sha256}"] for patch in patches
    ]
    pinned = context().pins.upstream(upstream)
    commits = [one["uid"] for one in own["pedigree"].get("commits", [])]
    assert commits == ([] if pinned.commit is None else [pinned.commit])
    assert properties(source)["sparkforge:patched-tree:release"] == pinned.patched["release"].tree
    release = next(
        one for one in own["pedigree"]["ancestors"] if one["bom-ref"].startswith("release-")
    )
    plan = context().target.wheels[upstream]
    assert release["hashes"][0]["content"] == pinned.files[plan.files["linux/arm64"]].sha256


def test_a_carried_package_has_its_patches() -> None:
    (carried,) = component(of_spark(), "own-vllm")["components"]
    assert carried["name"] == "triton-kernels"
    assert len(carried["pedigree"]["patches"]) == len(context().series_of("triton-kernels").patches)
    assert carried["purl"].endswith("#python/triton_kernels")


def test_sbom_is_reproducible() -> None:
    code = (
        "import sys; from tests.unit.build.test_supply_chain import *;"
        "sys.stdout.buffer.write(sbom.document(context(), SPARK_WHEELS, base=BASE, system=SYSTEM))"
    )
    seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"  # not the one of this process
    env = {**os.environ, "PYTHONHASHSEED": seed, "TZ": f"UTC+{seed}"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, check=True
    )
    assert done.stdout == sbom.document(context(), SPARK_WHEELS, base=BASE, system=SYSTEM)
    assert json.loads(done.stdout)["serialNumber"] != of_spark()["serialNumber"]


def test_third_party_wheels_have_hashes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    house = tmp_path / "house"
    inside = make_wheel(house, "anyio", "9.0", {"anyio/__init__.py": b""})
    make_wheel(house, "uv", "1.0", {"uv/__init__.py": b""})
    lock = tmp_path / "lock.txt"
    lock.write_text(f"anyio==9.0 --hash=sha256:{'0' * 64}\n")
    monkeypatch.setattr(Context, "lock", lock)
    found = of_spark(third_party=house)
    wheels = [one for one in found["components"] if one["bom-ref"].startswith("wheel-")]
    assert [one["purl"] for one in wheels] == ["pkg:pypi/anyio@9.0"]
    assert wheels[0]["hashes"][0]["content"] == sha256(inside.read_bytes())
    inside.write_bytes(b"no zip")
    with pytest.raises(BuildError, match=r"anyio-9\.0"):
        of_spark(third_party=house)


def test_system_packages() -> None:
    status = (
        "Package: libc6\nStatus: install ok installed\nArchitecture: amd64\nVersion: 2.36-9\n"
        "Description: libraries\n Version: 1 of a line that is not a field\n\n"
        "Package: gone\nStatus: deinstall ok config-files\nArchitecture: amd64\nVersion: 1\n\n"
        "Package: adduser\nStatus: install ok installed\nArchitecture: all\nVersion: 3.134\n"
    )
    found = sbom.dpkg_packages(status, 'NAME="Debian"\nID=debian\n')
    assert found == [
        SystemPackage("debian", "adduser", "3.134", "all"),
        SystemPackage("debian", "libc6", "2.36-9", "amd64"),
    ]
    purls = [one.get("purl") for one in of_spark(system=found)["components"]]
    assert "pkg:deb/debian/libc6@2.36-9?arch=amd64" in purls


def test_labels() -> None:
    labels = image.labels(context(), BASE)
    pinned = context().pins.upstream("triton-kernels")
    assert labels["org.sparkforge.triton-kernels.commit"] == pinned.commit
    assert labels["org.sparkforge.triton-kernels.tree.release"] == pinned.patched["release"].tree
    assert labels["org.sparkforge.vllm.series"] == context().series_of("vllm").sha256
    assert labels["org.opencontainers.image.version"] == context().release
    assert labels["org.opencontainers.image.created"] == "2026-11-21T00:00:00Z"
    assert labels["org.opencontainers.image.base.digest"] == BASE.digest
    assert not any(str(ROOT) in value for value in labels.values())


def test_build_context_is_the_recipe() -> None:
    kept = [
        line[1:]
        for line in (ROOT / ".dockerignore").read_text().splitlines()
        if line.startswith("!")
    ]
    let_in = {str(path.relative_to(ROOT)) for pattern in kept for path in ROOT.glob(pattern)}
    assert let_in == {name for name in image.RECIPE if name != "Dockerfile"}


def built(provider: Provider = "release", **more: Any) -> Build:
    build = build_of("spark", base=BASE, **more)
    graph = build.graph
    source = SourceResult(provider, "a" * 40, "b" * 40, "here")
    series = SeriesResult("a" * 40, "c" * 40, "d" * 40, {})
    made = ImageResult("x:1", "sha256:1", None, BASE.reference, ())
    tree = graph.trees["vllm"]
    assert tree.series is not None
    reached(tree.source, source)
    reached(tree.series, series)
    for name, wheel in SPARK_WHEELS.items():
        reached(graph.wheels[name], wheel)
    reached(graph.product, made)
    return build


def test_provenance_is_valid_slsa(
    tmp_path: Path,
) -> None:
    wheel = make_wheel(tmp_path, "anyio", "9.0", {"anyio/__init__.py": b""})
    made = provenance.statement(built(), {"x.whl": "9" * 64}, [wheel])
    text = json.loads(json.dumps(made))
    predicate = text["predicate"]
    # an unknown field is an error, so this holds every name in statement and predicate
    Statement.copy_from_pb(ParseDict(text, statement_pb2.Statement())).validate()
    parsed = ParseDict(predicate, provenance_pb2.Provenance())
    assert parsed.build_definition.build_type == provenance.BUILD_TYPE
    assert parsed.run_details.builder.id == provenance.BUILDER

    names = {one["name"]: one for one in predicate["buildDefinition"]["resolvedDependencies"]}
    pinned = context().pins
    vllm = pinned.upstream("vllm")
    # the release file was read and not the commit, so it is what is named
    sdist = names[vllm.files["sdist"].file]
    assert sdist["digest"]["sha256"] == vllm.files["sdist"].sha256
    assert sdist["annotations"] == {
        "standsFor": f"git+{vllm.git}@refs/tags/{vllm.tag}",
        "commit": "unknown",
        "patchedTree": "d" * 40,
    }
    assert "vllm" not in names
    assert names["base image"]["digest"]["sha256"] == "5" * 64
    assert names["anyio-9.0-py3-none-any.whl"]["digest"]["sha256"] == sha256(wheel.read_bytes())
    release = pinned.upstream("vllm").files["cuda-arm64"]
    assert names[release.file]["digest"]["sha256"] == release.sha256
    source = "kernels/csrc/kernels.cu"
    assert names[source]["digest"]["sha256"] == sha256((ROOT / source).read_bytes())
    for upstream in ("vllm", "triton-kernels", "flashinfer", "triton"):
        for patch in context().series_of(upstream).patches:
            assert names[f"patches/{upstream}/{patch.name}"]["digest"]["sha256"] == patch.sha256


def test_a_git_source_is_a_commit(tmp_path: Path) -> None:
    here = context()
    known = here.pins.upstream("vllm").model_copy(update={"commit": "e" * 40})
    upstreams = {**here.pins.upstreams, "vllm": known}
    pins = here.pins.model_copy(update={"upstreams": upstreams})
    made = provenance.statement(built("git", pins=pins), {"x.whl": "9" * 64})
    found = made["predicate"]["buildDefinition"]["resolvedDependencies"]
    (vllm,) = [one for one in found if one["name"] == "vllm"]
    assert vllm["digest"] == {"gitCommit": "e" * 40}
    assert vllm["annotations"] == {"patchedTree": "d" * 40}
    assert context().pins.upstream("vllm").files["sdist"].file not in {x["name"] for x in found}


def test_provenance_names_the_checkouts_commit(tmp_path: Path) -> None:
    def names(root: Path) -> list[Any]:
        made = provenance._checkout(root)
        return [(one["digest"]["gitCommit"], one["annotations"]["clean"]) for one in made]

    assert names(tmp_path) == []
    for words in (
        ["init", "-q"],
        [
            *("-c", "user.name=x", "-c", "user.email=x@x.invalid", "commit", "-qm", "x"),
            "--allow-empty",
        ],
    ):
        subprocess.run(["git", "-C", tmp_path, *words], check=True)
    head = subprocess.run(
        ["git", "-C", tmp_path, "rev-parse", "HEAD"], capture_output=True, text=True, check=True
    ).stdout.strip()
    assert names(tmp_path) == [(head, True)]
    (tmp_path / "new").touch()
    assert names(tmp_path) == [(head, False)]
    (tmp_path / "below").mkdir()
    assert names(tmp_path / "below") == []  # another project's repository around it


def test_verify_copies_all_inputs() -> None:
    for name in (*image.RECIPE, ".dockerignore"):
        assert any(Path(name).is_relative_to(one) for one in command.inputs(context().pins)), name
