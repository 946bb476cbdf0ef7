"""SBOM and provenance of the real pins: valid by their formats' own definitions."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from google.protobuf.json_format import ParseDict
from in_toto_attestation.predicates.provenance.v1 import provenance_pb2
from in_toto_attestation.v1 import statement_pb2
from in_toto_attestation.v1.statement import Statement

from sparkforge.build import image, sbom
from sparkforge.build.context import Context
from sparkforge.build.graph import Build
from sparkforge.build.results import (
    ImageResult,
    PackResult,
    PluginResult,
    SeriesResult,
    SourceResult,
    WheelResult,
)
from sparkforge.pins.pins import Provider
from sparkforge.release.command import inputs
from sparkforge.runtime.engine import BaseImage
from tests.results import build_of, context_of, reached
from tests.support import ROOT, make_wheel, sha256

BASE = BaseImage("base", f"sha256:{'5' * 64}")
WHEELS = {
    name: WheelResult(f"{name}-1.0+spark.1-py3-none-any.whl", digit * 64, "1.0+spark.1")
    for name, digit in (("vllm", "1"), ("flashinfer", "2"), ("triton", "3"))
}
PACK = PackResult(
    "flashinfer_jit_cache-1.0+spark.1-py3-none-linux_aarch64.whl",
    *("4" * 64, "1.0+spark.1"),
    modules={"sampling": "5" * 64},
)
PLUGIN = PluginResult(
    "vllm_sparkforge-1.0-py3-none-any.whl", "6" * 64, "1.0", {"own/sm_90a.cubin": "7" * 64}
)
SYSTEM = ("debian libc6 2.36-9+deb12u10 amd64",)


def context(target: str = "spark") -> Context:
    return context_of(target)


def of_spark(**more: Any) -> Any:
    return json.loads(sbom.document(context(), WHEELS, **more))


def component(document: Any, ref: str) -> Any:
    return next(one for one in document["components"] if one["bom-ref"] == ref)


def properties(one: Any) -> dict[str, str]:
    return {item["name"]: item["value"] for item in one["properties"]}


def test_sbom_is_valid_and_has_plugin_and_pack() -> None:
    text = sbom.document(context(), WHEELS, PLUGIN, PACK, base=BASE, system=SYSTEM).decode()
    validator = JsonStrictValidator(SchemaVersion.V1_6)
    assert validator.validate_str(text) is None
    assert validator.validate_str(text.replace('"libc6"', "6")) is not None  # it does refuse
    own = component(json.loads(text), sbom.PACK)
    assert own["hashes"][0]["content"] == PACK.sha256
    assert properties(own)["sparkforge:module:sampling"] == f"compiled {'5' * 64}"
    assert len(own["pedigree"]["patches"]) == len(context().series_of("flashinfer").patches)
    own = component(json.loads(text), sbom.PLUGIN)
    assert (own["name"], own["version"]) == ("vllm-sparkforge", "1.0")
    assert properties(own)["sparkforge:kernels:own/sm_90a.cubin"] == f"compiled {'7' * 64}"
    assert not {sbom.PACK, sbom.PLUGIN} & {one["bom-ref"] for one in of_spark()["components"]}


def test_pedigree_has_every_patch_in_order() -> None:
    pedigree = component(of_spark(), "own-vllm")["pedigree"]
    patches = context().series_of("vllm").patches
    texts = [patch["diff"]["text"]["content"] for patch in pedigree["patches"]]
    assert sorted(texts) == sorted(patch.path.read_text() for patch in patches)
    release, source = sorted(pedigree["ancestors"], key=lambda one: str(one["bom-ref"]))
    facts = properties(source)
    numbered = sorted(name for name in facts if name.startswith("sparkforge:patch:"))
    assert [facts[name].split() for name in numbered] == [
        [patch.name, f"sha256:{patch.sha256}"] for patch in patches
    ]
    pinned = context().pins.upstream("vllm")
    assert facts["sparkforge:patched-tree:release"] == pinned.patched["release"].tree
    plan = context().target.wheels["vllm"]
    assert release["hashes"][0]["content"] == pinned.files[plan.files["linux/arm64"]].sha256


def test_a_carried_package_has_its_patches() -> None:
    (carried,) = component(of_spark(), "own-vllm")["components"]
    assert len(carried["pedigree"]["patches"]) == len(context().series_of("triton-kernels").patches)
    assert carried["purl"].endswith("#python/triton_kernels")


def test_sbom_is_reproducible() -> None:
    code = (
        "import sys; from tests.unit.build.test_supply_chain import *;"
        "sys.stdout.buffer.write(sbom.document(context(), WHEELS, base=BASE, system=SYSTEM))"
    )
    seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"  # not the one of this process
    env = {**os.environ, "PYTHONHASHSEED": seed, "TZ": f"UTC+{seed}"}
    again = subprocess.check_output([sys.executable, "-c", code], cwd=ROOT, env=env)
    assert again == sbom.document(context(), WHEELS, base=BASE, system=SYSTEM)
    assert json.loads(again)["serialNumber"] != of_spark()["serialNumber"]


def test_third_party_wheels_have_hashes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    house = tmp_path / "house"
    inside = make_wheel(house, "anyio", "9.0", {"anyio/__init__.py": b""})
    make_wheel(house, "uv", "1.0", {"uv/__init__.py": b""})
    lock = tmp_path / "lock.txt"
    lock.write_text(f"anyio==9.0 --hash=sha256:{'0' * 64}\n")
    monkeypatch.setattr(Context, "lock", lock)
    components = of_spark(third_party=house)["components"]
    (wheel,) = [one for one in components if one["bom-ref"].startswith("wheel-")]
    assert wheel["purl"] == "pkg:pypi/anyio@9.0"
    assert wheel["hashes"][0]["content"] == sha256(inside.read_bytes())


def test_system_packages() -> None:
    lines = b"installed debian libc6 2.36-9 amd64\nconfig-files debian gone 1 amd64\n"
    engine: Any = SimpleNamespace(run=lambda *_: lines + b"installed debian adduser 3.134 all\n")
    found = sbom.system(engine, "sha256:1")
    assert found == ["debian adduser 3.134 all", "debian libc6 2.36-9 amd64"]
    purls = [one.get("purl") for one in of_spark(system=found)["components"]]
    assert "pkg:deb/debian/libc6@2.36-9?arch=amd64" in purls


def test_labels() -> None:
    labels = image.labels(context(), BASE)
    pinned = context().pins.upstream("triton-kernels")
    assert labels["org.sparkforge.triton-kernels.tree.release"] == pinned.patched["release"].tree
    assert labels["org.sparkforge.vllm.series"] == context().series_of("vllm").sha256
    assert labels["org.opencontainers.image.base.digest"] == BASE.digest
    assert not any(str(ROOT) in value for value in labels.values())


def test_the_recipe_is_all_that_a_build_reads() -> None:
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    kept = [line[1:] for line in lines if line.startswith("!")]
    let_in = {str(path.relative_to(ROOT)) for pattern in kept for path in ROOT.glob(pattern)}
    assert let_in == {name for name in image.RECIPE if name != "Dockerfile"}
    for name in (*image.RECIPE, ".dockerignore"):
        assert any(Path(name).is_relative_to(one) for one in inputs(context().pins)), name


def built(provider: Provider = "release", **more: Any) -> Build:
    build = build_of("spark", base=BASE, **more)
    graph = build.graph
    tree = graph.trees["vllm"]
    assert tree.series is not None
    reached(tree.source, SourceResult(provider, "a" * 40, "b" * 40, "here"))
    reached(tree.series, SeriesResult("a" * 40, "c" * 40, "d" * 40, {}))
    for name, wheel in WHEELS.items():
        reached(graph.wheels[name], wheel)
    reached(graph.product, ImageResult("x:1", "sha256:1", None, BASE.reference, ()))
    return build


def test_provenance_is_valid_slsa(tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path, "anyio", "9.0", {"anyio/__init__.py": b""})
    text = json.loads(json.dumps(sbom.statement(built(), {"x.whl": "9" * 64}, [wheel])))
    predicate = text["predicate"]
    # an unknown field is an error, so this holds every name in statement and predicate
    Statement.copy_from_pb(ParseDict(text, statement_pb2.Statement())).validate()
    parsed = ParseDict(predicate, provenance_pb2.Provenance())
    assert parsed.build_definition.build_type == sbom.BUILD_TYPE
    named = {one["name"]: one for one in predicate["buildDefinition"]["resolvedDependencies"]}
    digests = {name: one["digest"].get("sha256") for name, one in named.items()}
    vllm = context().pins.upstream("vllm")
    # the release file was read and not the commit, so it is what is named
    sdist, release = vllm.files["sdist"], vllm.files["cuda-arm64"]
    assert named[sdist.file]["annotations"]["standsFor"] == f"git+{vllm.git}@refs/tags/{vllm.tag}"
    assert "vllm" not in named
    wanted = {
        sdist.file: sdist.sha256,
        release.file: release.sha256,
        "base image": "5" * 64,
        wheel.name: sha256(wheel.read_bytes()),
        **{
            f"patches/{upstream}/{patch.name}": patch.sha256
            for upstream in ("vllm", "triton-kernels", "flashinfer", "triton")
            for patch in context().series_of(upstream).patches
        },
    }
    assert digests.items() >= wanted.items()
    # a git source is a commit
    pins = context().pins
    known = pins.upstream("vllm").model_copy(update={"commit": "e" * 40})
    upstreams = {**pins.upstreams, "vllm": known}
    build = built("git", pins=pins.model_copy(update={"upstreams": upstreams}))
    made = sbom.statement(build, {"x.whl": "9" * 64})
    found = made["predicate"]["buildDefinition"]["resolvedDependencies"]
    (one,) = [one for one in found if one["name"] == "vllm"]
    assert one["digest"] == {"gitCommit": "e" * 40}
    assert sdist.file not in {one["name"] for one in found}


def test_provenance_names_the_checkouts_commit(tmp_path: Path) -> None:
    assert sbom.checkout_commit(tmp_path) == []
    identity = ("-c", "user.name=x", "-c", "user.email=x@x.invalid")
    for words in (("init", "-q"), (*identity, "commit", "-qm", "x", "--allow-empty")):
        subprocess.run(["git", "-C", tmp_path, *words], check=True)
    (clean,) = sbom.checkout_commit(tmp_path)
    head = subprocess.check_output(["git", "-C", tmp_path, "rev-parse", "HEAD"], text=True)
    assert clean["digest"] == {"gitCommit": head.strip()}
    assert clean["annotations"] == {"clean": True}
    (tmp_path / "new").touch()
    assert sbom.checkout_commit(tmp_path)[0]["annotations"] == {"clean": False}
    (tmp_path / "below").mkdir()
    assert sbom.checkout_commit(tmp_path / "below") == []  # another project's repository around it
