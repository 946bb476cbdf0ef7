"""The SBOM of the real pins, valid by its format's own definition; labels and recipe."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator

from sparkforge.build import image, sbom
from sparkforge.build.context import Context
from sparkforge.build.graph import inputs_of_image
from sparkforge.build.results import PackResult, PluginResult, WheelhouseResult, WheelResult
from sparkforge.core.errors import StoreError
from sparkforge.release.command import inputs
from sparkforge.runtime.engine import BaseImage
from sparkforge.sources.project import mirrors
from tests.results import context_of, item, reached
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


def graph(**more: Any) -> Any:
    """Return what a build has made: our wheels, and more."""
    empty = {"plugin": None, "pack": None, "house": SimpleNamespace(found=None)}
    wheels = {name: reached(item(wheel), wheel) for name, wheel in WHEELS.items()}
    return SimpleNamespace(**empty | more, wheels=wheels)


def of_spark(packages: Sequence[str] = (), **more: Any) -> Any:
    return json.loads(sbom.document(context(), graph(**more), None, packages))


def component(document: Any, ref: str) -> Any:
    return next(one for one in document["components"] if one["bom-ref"] == ref)


def properties(one: Any) -> dict[str, str]:
    return {item["name"]: item["value"] for item in one["properties"]}


def test_sbom_is_valid_and_has_plugin_and_pack() -> None:
    made = graph(plugin=reached(item(PLUGIN), PLUGIN), pack=reached(item(PACK), PACK))
    text = sbom.document(context(), made, BASE, SYSTEM).decode()
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
        "sys.stdout.buffer.write(sbom.document(context(), graph(), BASE, SYSTEM))"
    )
    seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"  # not the one of this process
    env = {**os.environ, "PYTHONHASHSEED": seed, "TZ": f"UTC+{seed}"}
    again = subprocess.check_output([sys.executable, "-c", code], cwd=ROOT, env=env)
    assert again == sbom.document(context(), graph(), BASE, SYSTEM)
    assert json.loads(again)["serialNumber"] != of_spark()["serialNumber"]


def test_third_party_wheels_have_hashes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    house = tmp_path / "wheels"
    inside = make_wheel(house, "anyio", "9.0", {"anyio/__init__.py": b""})
    make_wheel(house, "uv", "1.0", {"uv/__init__.py": b""})
    lock = tmp_path / "lock.txt"
    lock.write_text(f"anyio==9.0 --hash=sha256:{sha256(inside.read_bytes())}\n")
    monkeypatch.setattr(Context, "lock", lock)
    made = reached(item(WheelhouseResult({})), WheelhouseResult({}), tmp_path)
    components = of_spark(house=made)["components"]
    (wheel,) = [one for one in components if one["bom-ref"].startswith("wheel-")]
    assert wheel["purl"] == "pkg:pypi/anyio@9.0"
    assert wheel["hashes"][0]["content"] == sha256(inside.read_bytes())
    inside.write_bytes(b"")
    with pytest.raises(StoreError, match="anyio"):
        of_spark(house=made)


def test_system_packages() -> None:
    lines = b"installed debian libc6 2.36-9 amd64\nconfig-files debian gone 1 amd64\n"
    engine: Any = SimpleNamespace(run=lambda *_: lines + b"installed debian adduser 3.134 all\n")
    found = sbom.system(engine, "sha256:1")
    assert found == ["debian adduser 3.134 all", "debian libc6 2.36-9 amd64"]
    purls = [one.get("purl") for one in of_spark(found)["components"]]
    assert "pkg:deb/debian/libc6@2.36-9?arch=amd64" in purls


def test_labels() -> None:
    labels = image.labels(context(), BASE)
    pinned = context().pins.upstream("triton-kernels")
    assert labels["org.sparkforge.triton-kernels.tree.release"] == pinned.patched["release"].tree
    assert labels["org.sparkforge.vllm.series"] == context().series_of("vllm").sha256
    assert labels["org.opencontainers.image.base.digest"] == BASE.digest
    assert not any(str(ROOT) in value for value in labels.values())


def test_a_pinned_base_reads_its_archive_of_one_day() -> None:
    here = context()
    pinned = here.pins.images["cuda-devel"]
    base, apt = BaseImage("base", pinned.digest(here.platform)), pinned.apt
    assert apt is not None
    archive = f"@ARCHIVE@/{apt.snapshot}"
    assert here.apt_sources(base.digest).decode().splitlines() == [
        f"deb {archive} {suite} main universe" for suite in apt.suites
    ]
    label = "org.sparkforge.apt.snapshot"
    assert image.labels(here, base)[label] == apt.snapshot
    noted = [inputs_of_image(here, one)["image"]["apt"] for one in (base, BASE)]
    assert noted == [apt.model_dump(mode="json"), None]
    # another base has its own sources
    assert here.apt_sources(BASE.digest) == b"" and label not in image.labels(here, BASE)
    # a mirror has the same moment, and changes no key
    mirrored = mirrors(["apt=http://127.0.0.1:9/copy/"], here.pins)
    there = replace(here, access=replace(here.access, mirrors=mirrored))
    line, *_ = there.apt_sources(base.digest).decode().splitlines()
    assert line.split()[1] == f"http://127.0.0.1:9/copy/{apt.snapshot}"
    assert inputs_of_image(there, base) == inputs_of_image(here, base)


@pytest.mark.parametrize(
    "host", ["archive.example.invalid/ubuntu", "ports.example.invalid/ubuntu-ports/"]
)
@pytest.mark.parametrize(
    "form", ["deb http://{} noble main", "Types: deb\nURIs: http://{}\nSuites: noble"]
)
def test_snapshots_are_on_a_host_beside_the_archives(form: str, host: str) -> None:
    (script,) = re.findall(r"sed -nE '(.*/ubuntu.*)'", (ROOT / "Dockerfile").read_text())
    others = "deb http://security.example.invalid/cuda/repos/ubuntu2404/x86_64/ /"
    found = subprocess.run(
        ["sed", "-nE", script],
        input=f"{form.format(host)}\n{others}\n",
        capture_output=True,
        check=True,
        text=True,
    )
    assert found.stdout == "http://snapshot.example.invalid/ubuntu\n", found.stderr


def test_the_recipe_is_all_that_a_build_reads() -> None:
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    kept = [line[1:] for line in lines if line.startswith("!")]
    let_in = {str(path.relative_to(ROOT)) for pattern in kept for path in ROOT.glob(pattern)}
    assert let_in == {name for name in image.RECIPE if name != "Dockerfile"}
    for name in (*image.RECIPE, ".dockerignore"):
        assert any(Path(name).is_relative_to(one) for one in inputs(context().pins)), name
