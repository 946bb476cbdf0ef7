"""What a compile does: decided from pins.yaml, and its script."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sparkforge.build.stages import natives
from sparkforge.core.errors import BuildError, MachineError
from sparkforge.pins import pins
from sparkforge.pins.types import Native
from sparkforge.runtime.engine import BaseImage
from tests import forked
from tests.results import build_of
from tests.support import ROOT

PINS = pins.load(ROOT / "pins.yaml")
VLLM = PINS.upstream("vllm")
BOTH = ["_C_stable_libtorch", "_moe_C_stable_libtorch"]


def changed(*paths: str, device: str = "cuda", trailer: str = "") -> tuple[Native, ...]:
    """Return what is compiled for a patch of some files, with a trailer ``Native``."""
    entries = [SimpleNamespace(path=path) for path in paths]
    targets = (trailer,) if trailer else ()
    patch = SimpleNamespace(name="a.patch", entries=entries, natives=targets)
    series: Any = SimpleNamespace(patches=[patch])
    return natives.changed("vllm", VLLM, series, device)


@pytest.mark.parametrize(
    ("paths", "device", "targets"),
    [
        (("vllm/envs.py", "tests/test_envs.py"), "cuda", []),
        (("vllm/envs.py", "csrc/fs_io.cpp"), "cuda", ["fs_io_C"]),
        # a shared header may be part of both large extensions
        (("csrc/dispatch_utils.h",), "cuda", BOTH),
        (("csrc/topk.cu",), "cpu", []),
    ],
)
def test_native_files_follow_from_the_patched_sources(
    paths: tuple[str, ...], device: str, targets: list[str]
) -> None:
    found = changed(*paths, device=device)
    assert [native.target for native in found] == targets


@pytest.mark.parametrize(
    ("path", "device"),
    [("csrc/cpu/utils.cpp", "cpu"), ("rust/src/main.rs", "cuda"), ("setup.py", "cuda")],
)
def test_blocked_or_unknown_source_is_refused(path: str, device: str) -> None:
    with pytest.raises(BuildError, match=r"a\.patch"):
        changed(path, device=device)


def test_trailer_names_the_targets_of_a_build_rule() -> None:
    (found,) = changed("CMakeLists.txt", trailer="_moe_C_stable_libtorch")
    assert found.target == "_moe_C_stable_libtorch"
    # the trailer says "none", or the target is for another device
    assert changed("CMakeLists.txt") == ()
    assert changed("CMakeLists.txt", device="cpu", trailer="_moe_C_stable_libtorch") == ()
    with pytest.raises(BuildError, match=r"a\.patch.*_C_typo"):
        changed("CMakeLists.txt", trailer="_C_typo")


def test_wheel_is_made_of_script_and_externals() -> None:
    built = build_of("spark", base=BaseImage("base", "sha256:1"), wheels="compile")
    vllm = built.graph.wheels["vllm"]
    lines = vllm.inputs["script"].splitlines()
    for name, external in VLLM.externals.items():
        assert f"export {external.redirect}=/build/externals/{name}" in lines
        assert f"external vllm/{name}" in {item.label for item in vllm.needs}
    assert "export TORCH_CUDA_ARCH_LIST=12.1f" in lines
    assert "export NVCC_APPEND_FLAGS='-objtemp --frandom-seed=1'" in lines
    assert f"export SOURCE_DATE_EPOCH={PINS.release.source_date_epoch}" in lines
    assert any(line.startswith("cmake --build /build/cmake/cuda") for line in lines)
    assert lines[-1].endswith("--component _moe_C_stable_libtorch")
    for name in ("flashinfer", "triton"):  # overlays
        assert "script" not in built.graph.wheels[name].inputs
    empty = natives.script(VLLM, changed("csrc/fs_io.cpp"), None, 1, {})
    assert "cmake --build /build/cmake/empty --target fs_io_C" in empty


def test_compile_without_an_engine_is_refused(tmp_path: Path) -> None:
    env = {**os.environ, "DOCKER_HOST": "unix:///nowhere/docker.sock"}
    words = ("--target", "cpu", "--wheels", "compile", "--store", str(tmp_path))
    code, _, err = forked.run([*words, "--until", "wheels"], ROOT, env)
    assert code == MachineError.exit_code, err
