"""Every series goes onto every release wheel that ships its files: arm64, which the Spark installs,
and amd64, whose Python files must be the same ones."""

import hashlib
import zipfile
from pathlib import Path

import pytest

from sparkforge.wheels import overlay
from tests.patches.checkout import PINS
from tests.patches.trees import layer, release_file

CASES = [
    ("vllm", "cuda-arm64"),
    ("vllm", "cuda-amd64"),
    ("flashinfer", "wheel"),
    ("triton", "cp312-arm64"),
    ("triton", "cp312-amd64"),
]


@pytest.mark.parametrize(("upstream", "file"), CASES)
def test_every_series_goes_onto_every_wheel(upstream: str, file: str, tmp_path: Path) -> None:
    carried = PINS.target("spark").wheels[upstream].carries
    layers = [layer(name) for name in (upstream, *carried)]
    assert all(one.patched.touched for one in layers), "no series, no proof"
    request = overlay.Request(
        wheel=release_file(upstream, file),
        name=None,
        local="spark.1",
        drop_requires=(),
        version_file=PINS.upstream(upstream).version_file,
        epoch=PINS.release.source_date_epoch,
    )
    made = overlay.build(request, layers, tmp_path)
    touched = {path for one in layers for path in one.patched.touched}
    assert len(made.replaced) + len(made.added) + len(made.left_out) == len(touched)
    with zipfile.ZipFile(made.path) as wheel:
        ours = {name: wheel.read(name) for name in (*made.replaced, *made.added)}
    with zipfile.ZipFile(request.wheel) as wheel:
        for name in made.replaced:
            assert wheel.read(name) != ours[name]
    for name, data in ours.items():
        if name.endswith(".py"):
            compile(data, name, "exec")
    made.path.unlink()  # pytest keeps folders of several runs


def test_triton_s_python_files_are_the_same_on_all_platforms() -> None:
    """What lets one platform's wheel stand in for the source of all."""
    found = set()
    for file in ("cp312-arm64", "cp312-amd64", "cp311-amd64"):
        digest = hashlib.sha256()
        with zipfile.ZipFile(release_file("triton", file)) as wheel:
            for name in sorted(wheel.namelist()):
                if name.startswith("triton/") and name.endswith(".py"):
                    digest.update(name.encode() + wheel.read(name))
        found.add(digest.hexdigest())
    assert len(found) == 1
