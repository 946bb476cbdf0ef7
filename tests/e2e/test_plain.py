"""The Dockerfile's stage plain: a base without what NVIDIA published, here of made-up packages."""

import json
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import ROOT

from .mirror import deb
from .served import docker

NVIDIA, OTHERS = "cudatools <cudatools@nvidia.com>", "NVIDIA Maintainers <who@example.invalid>"
PACKAGES = {
    # name: maintainer, other fields, file
    "made-up-nvcc": (NVIDIA, "Depends: made-up-gcc", "usr/local/cuda-13.0/bin/nvcc"),
    "made-up-nccl": (OTHERS, "Origin: NVIDIA", "usr/lib/libmade-up.so"),  # held
    "made-up-keyring": (NVIDIA, "", "etc/apt/sources.list.d/made-up-cuda.list"),
    "made-up-gcc": (OTHERS, "Depends: made-up-cpp", "usr/bin/gcc"),  # by apt, for nvcc
    "made-up-cpp": (OTHERS, "", "usr/bin/cpp"),  # by apt, for gcc
    "made-up-tool": (  # a user's own
        *(OTHERS, "Origin: somebody\nRecommends: made-up-gcc\nSuggests: made-up-cpp"),
        "usr/bin/made-up-tool",
    ),
}
RECIPE = """\
FROM {base}
COPY *.deb /debs/
RUN dpkg --install /debs/*.deb && rm -r /debs && apt-mark hold made-up-nccl && \\
    apt-mark auto made-up-gcc made-up-cpp && ln -s cuda-13.0 /usr/local/cuda && \\
    mkdir /opt/nvidia && touch /opt/nvidia/entrypoint.sh && \\
    echo /usr/local/nvidia/lib >/etc/ld.so.conf.d/nvidia.conf && \\
    echo '# nvidia.com' >/etc/apt/sources.list.d/other.list
"""
APT = ("/var/lib/apt/extended_states", "/var/log/apt", "/var/cache/apt/")
# type, mode, owner, path and the target of a link
LOOK = r"find / -xdev -path /dev -prune -o -path /sys -prune -o -printf '%y %m %U:%G %p %l\n'"


def bake(*words: str | Path) -> None:
    subprocess.run(["docker", "buildx", "build", "--provenance=false", *words], check=True)


@pytest.fixture(scope="module")
def cuda(base_image: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The base with made-up packages of NVIDIA."""
    folder = tmp_path_factory.mktemp("cuda")
    for name, package in PACKAGES.items():
        deb(folder, name, *package)
    (folder / "Dockerfile").write_text(RECIPE.format(base=base_image))
    tag = "sparkforge-test/made-up-cuda:1"
    bake("--load", "--tag", tag, folder)
    yield tag
    docker("image", "rm", tag)


def plain(base: str, tag: str, archive: Path) -> str:
    """Build stage plain, without a cache, and load it; returns its digest."""
    bake(
        *("--no-cache", "--target", "plain", "--build-arg", f"BASE={base}"),
        *("--build-arg", "SOURCE_DATE_EPOCH=1700000000", "--file", ROOT / "Dockerfile"),
        *("--output", f"type=oci,dest={archive},name={tag},rewrite-timestamp=true", ROOT),
    )
    with tarfile.open(archive) as opened:
        index = opened.extractfile("index.json")
        assert index is not None
        (manifest,) = json.load(index)["manifests"]
    docker("load", "--input", str(archive))
    return str(manifest["digest"])


def files(image: str) -> dict[str, str]:
    """Return the files of an image by path, with type, mode, owner and target."""
    lines = docker("run", "--rm", "--network", "none", image, "sh", "-c", LOOK).splitlines()
    found = {}
    for line in lines:
        kind, mode, owner, path = line.split(" ", 3)
        if not path.startswith("/proc"):
            found[path.rstrip()] = f"{kind} {mode} {owner}"
    return found


def test_all_of_nvidia_goes_and_what_only_that_needed_and_nothing_else(
    cuda: str, base_image: str, tmp_path: Path
) -> None:
    tag = "sparkforge-test/plain:1"
    first = plain(cuda, tag, tmp_path / "first.tar")
    try:
        ours, before = files(tag), files(base_image)
        assert len(json.loads(docker("inspect", tag))[0]["RootFS"]["Layers"]) == 1
    finally:
        docker("image", "rm", tag)
    changed = {path for path in before.keys() | ours.keys() if before.get(path) != ours.get(path)}
    assert "/usr/bin/made-up-tool" in changed
    known = (*APT, "/usr/bin/made-up-tool", "/var/lib/dpkg/info/made-up-tool.")
    assert [path for path in changed if not path.startswith(known)] == []

    # the bytes follow from the base
    assert plain(cuda, tag, tmp_path / "second.tar") == first
    docker("image", "rm", tag)
