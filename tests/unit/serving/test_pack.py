"""FlashInfer's modules of an image: what the log and the server are told."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import json
from pathlib import Path

import pytest

from sparkforge.build.packs import modules
from sparkforge.serving import devices
from sparkforge.serving.devices import Capability, Pack
from sparkforge.serving.errors import StartError

NO_COMPILER = {"CUDA_HOME": "/no/such/cuda", "PATH": "/nowhere"}
PACK = Pack("sm121f", tuple(one.name for one in modules.pinned(["default"], "")))


@pytest.fixture
def nvcc(tmp_path: Path) -> Path:
    home = tmp_path / "cuda"
    (home / "bin").mkdir(parents=True)
    for name in ("nvcc", "g++"):
        (home / "bin" / name).touch(mode=0o755)
    return home


@pytest.mark.parametrize(
    ("architecture", "device", "fits"),
    [
        ("sm121f", (12, 1), True),
        ("sm121f", (12, 0), False),
        ("sm120f", (12, 1), True),
        ("sm120f", (10, 0), False),
        ("sm120", (12, 1), True),
        ("sm90a", (9, 0), True),
        ("sm120a", (12, 1), False),
        ("anything", (12, 1), False),
    ],
)
def test_machine_code_loads_by_nvidias_rules(
    architecture: str, device: Capability, fits: bool
) -> None:
    assert Pack(architecture, ()).fits(device) is fits


def test_with_nvcc_other_modules_are_compiled(nvcc: Path) -> None:
    # vLLM looks at the PATH alone
    (nvcc / "gcc").mkdir()
    (nvcc / "bin" / "g++").rename(nvcc / "gcc" / "g++")
    home = {"CUDA_HOME": str(nvcc), "PATH": f"{nvcc}/gcc"}
    found = devices.pack_variables(PACK, [(12, 1)], home)
    assert found == {"VLLM_HAS_FLASHINFER_CUBIN": "1"}
    both = {"PATH": f"{nvcc}/bin:{nvcc}/gcc"}
    assert devices.pack_variables(PACK, [(12, 1)], both) == {}


def test_without_nvcc_flashinfer_compiles_nothing(nvcc: Path) -> None:
    found = devices.pack_variables(PACK, [(12, 1)], NO_COMPILER)
    assert found == {"VLLM_HAS_FLASHINFER_CUBIN": "1", "FLASHINFER_DISABLE_JIT": "1"}
    own = {"FLASHINFER_DISABLE_JIT": "", "VLLM_HAS_FLASHINFER_CUBIN": "0"}
    assert devices.pack_variables(PACK, [(12, 1)], {**NO_COMPILER, **own}) == {}
    (nvcc / "bin" / "g++").unlink()  # nvcc alone compiles nothing
    alone = devices.pack_variables(PACK, [(12, 1)], {"PATH": f"{nvcc}/bin"})
    assert "FLASHINFER_DISABLE_JIT" in alone


def test_a_pack_for_another_device_is_not_used() -> None:
    assert devices.pack_variables(PACK, [(12, 1), (12, 0)], NO_COMPILER) == {}
    assert devices.pack_variables(None, [(12, 1)], NO_COMPILER) == {}


FLASHINFER = ("--attention-backend", "FLASHINFER", "--kv-cache-dtype", "auto")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("", None),
        ("--block-size 16", None),
        ("--block-size 48", None),
        ("--moe-backend marlin", None),
        ("--kv-cache-dtype fp8", "--kv-cache-dtype fp8"),
        (
            "--kv_cache_dtype=fp8_e4m3 --block-size 64",
            "--kv-cache-dtype fp8_e4m3 with --block-size 64",
        ),
        ("--block-size 128", "--block-size 128"),
        ("--speculative-config {}", "--speculative-config"),
        ("--moe-backend flashinfer_cutlass", "--moe-backend flashinfer_cutlass"),
        ("--attention-backend TRITON_ATTN --block-size 128 --kv-cache-dtype fp8", None),
    ],
)
def test_options_that_need_a_module_which_the_pack_lacks_are_named(
    nvcc: Path, options: str, words: str | None
) -> None:
    line = [*FLASHINFER, *options.split()]
    devices.check_pack(PACK, [(12, 1)], line, {"PATH": f"{nvcc}/bin"})  # compiles it
    if words is None:
        devices.check_pack(PACK, [(12, 1)], line, NO_COMPILER)
        return
    with pytest.raises(StartError, match=f"^{words}: this image lacks"):
        devices.check_pack(PACK, [(12, 1)], line, NO_COMPILER)


@pytest.mark.parametrize("module", [one for one in modules.MODULES if one.needs])
def test_a_pack_with_the_modules_of_an_option_is_enough_for_it(module: modules.Module) -> None:
    names = tuple(one.name for one in modules.MODULES if one.needs in ("", module.needs))
    devices.check_pack(
        Pack("sm121f", names), [(12, 1)], [*FLASHINFER, *module.needs.split()], NO_COMPILER
    )
    with pytest.raises(StartError):
        devices.check_pack(PACK, [(12, 1)], [*FLASHINFER, *module.needs.split()], NO_COMPILER)


def test_without_a_pack_and_compilers_only_another_attention_is_served() -> None:
    with pytest.raises(StartError, match="this image has no modules of FlashInfer"):
        devices.check_pack(None, [(12, 1)], FLASHINFER, NO_COMPILER)
    devices.check_pack(None, [(12, 1)], ["--attention-backend", "TRITON_ATTN"], NO_COMPILER)


def test_the_manifest_of_the_wheel_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = importlib.machinery.ModuleSpec(devices.PACKAGE, None, is_package=True)
    spec.submodule_search_locations = [str(tmp_path)]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    assert devices.installed() is None  # upstream's has no manifest
    manifest = tmp_path / "manifest.json"
    manifest.write_text(json.dumps({"architecture": "sm120f", "modules": [{"name": "sampling"}]}))
    assert devices.installed() == Pack("sm120f", ("sampling",))
    manifest.write_text(json.dumps({"architecture": "sm120f", "modules": [7]}))
    with pytest.raises(ValueError, match="manifest"):
        devices.installed()
