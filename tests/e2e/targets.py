"""A GPU target with few and small wheels, for tests of images."""

import re
from collections.abc import Sequence
from pathlib import Path

from sparkforge.sources.wheelhouse import read_lock
from tests.support import ROOT

# the vocabulary, a library of each of C and Rust, and the one of CUDA that the image links to
SMALL = (
    "oss-harmony",
    "pydantic",
    "pydantic-core",
    "annotated-types",
    "typing-extensions",
    "typing-inspection",
    "msgspec",
    "nvidia-cuda-runtime",
)
_LEFT_OUT = (
    "apache-tvm-ffi, click, cuda-python, cuda-tile, einops, nccl-extensions, nccl4py, ninja, numpy,"
    " nvidia-cudnn-frontend, nvidia-cutlass-dsl, nvidia-ml-py, packaging, requests, tabulate,"
    " torch, tqdm"
)


def small_target(
    checkout: Path,
    name: str,
    platform: str,
    packages: Sequence[str] = SMALL,
    pack: Sequence[str] = (),
) -> Path:
    """Write pins in which a GPU target has few and small wheels; returns their path.

    They lie beside those of the checkout. FlashInfer's overlay is ours, the other wheels are of the
    target's own lock. Debian has no Python 3.12, so the base brings 3.11.

    Args:
        packages: wheels of the lock that the target keeps.
        pack: FlashInfer's modules that are compiled.
    """
    text = (checkout / "pins.yaml").read_text()
    found = re.search(rf"(?m)^  {name}:\n    summary(?:.*\n(?!  \w))*", text)
    assert found is not None
    target = found[0]
    wheels = re.search(r"    wheels:\n(?:      .*\n)+", target)
    assert wheels is not None
    architecture = platform.replace("/", "-")
    target = target.replace(
        wheels[0],
        (
            f"    wheels:\n      flashinfer:\n        files: {{{platform}: wheel}}\n"
            f"        local: spark\n        drop_requires: [{_LEFT_OUT}]\n"
        ),
    )
    for old, new in (
        ("python: 3.12", "python: 3.11"),
        (f"requirements/{name}-{architecture}.txt", f"requirements/small-{architecture}.txt"),
        ("    base: cuda-devel\n", ""),
        ("pack: [default]", f"pack: [{', '.join(pack)}]"),
    ):
        assert target.count(old) == 1, old
        target = target.replace(old, new)
    # what NCCL and Triton need, which are left out
    target = re.sub(r"    (system|build)_packages: .*\n", "", target)
    target, count = re.subn(
        r"    needs:.*\n(?:      .*\n)+",
        (
            "    needs: [{program: dpkg, package: dpkg}, {module: msgspec, package: msgspec},\n"
            "            {library: libcudart.so, package: nvidia-cuda-runtime}]\n"
        ),
        target,
    )
    assert count == 1
    small = checkout / f"small-{architecture}.yaml"
    small.write_text(text[: found.start()] + target + text[found.end() :])
    lock = ROOT / "requirements" / f"{name}-{architecture}.txt"
    locked = {one.name: one for one in read_lock(lock)}
    lines = [
        " \\\n".join(
            [
                locked[package].requirement,
                *(f"    --hash=sha256:{one}" for one in sorted(locked[package].sha256s)),
            ]
        )
        for package in packages
    ]
    (checkout / "requirements" / f"small-{architecture}.txt").write_text("\n".join(lines) + "\n")
    return small
