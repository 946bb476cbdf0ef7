"""FlashInfer's modules of an image: what the log and the server are told."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from sparkforge.build.packs import modules
from sparkforge.serving import launch, packed
from sparkforge.serving.devices import Capability
from sparkforge.serving.document import Document, DocumentError
from sparkforge.serving.errors import StartError
from sparkforge.serving.packed import Pack

PACK = Pack("sm121f", tuple(one.name for one in modules.chosen("default")))


@pytest.fixture
def nvcc(tmp_path: Path) -> Path:
    home = tmp_path / "cuda"
    (home / "bin").mkdir(parents=True)
    for name in ("nvcc", "g++"):
        (home / "bin" / name).touch(mode=0o755)
    return home


def told(
    pack: Pack | None, devices: Sequence[Capability], environment: dict[str, str]
) -> tuple[dict[str, str], str]:
    lines: list[str] = []
    found = packed.variables(pack, devices, environment, lines.append)
    return found, "\n".join(lines)


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
    found, said = told(PACK, [(12, 1)], {"CUDA_HOME": str(nvcc), "PATH": f"{nvcc}/gcc"})
    assert found == {"VLLM_HAS_FLASHINFER_CUBIN": "1"}
    assert told(PACK, [(12, 1)], {"PATH": f"{nvcc}/bin:{nvcc}/gcc"}) == ({}, said)
    assert said == (
        "FlashInfer has modules for sm121f (sampling 1, prefill 2, decode 2), and compiles others"
        " at their first use"
    )


def test_without_nvcc_flashinfer_is_used_and_compiles_nothing() -> None:
    no_nvcc = {"CUDA_HOME": "/no/such/cuda", "PATH": "/nowhere"}
    found, said = told(PACK, [(12, 1)], no_nvcc)
    assert found == {"VLLM_HAS_FLASHINFER_CUBIN": "1", "FLASHINFER_DISABLE_JIT": "1"}
    assert said.endswith(", and compiles no other")
    own = {"FLASHINFER_DISABLE_JIT": "", "VLLM_HAS_FLASHINFER_CUBIN": "0"}
    assert told(PACK, [(12, 1)], {**no_nvcc, **own})[0] == {}


def test_a_pack_for_another_device_is_named_and_not_relied_on(nvcc: Path) -> None:
    found, said = told(PACK, [(12, 1), (12, 0)], {"PATH": f"{nvcc}/bin"})
    assert found == {}
    assert said.startswith("warning: FlashInfer's modules in this image are for sm121f, not for")
    assert said.endswith("12.0: they are compiled here, which takes minutes")
    found, said = told(PACK, [(9, 0)], {"CUDA_HOME": "/no/such/cuda"})
    assert found == {}
    assert said.endswith("so vLLM cannot use FlashInfer")


def test_nvcc_alone_compiles_nothing(nvcc: Path) -> None:
    (nvcc / "bin" / "g++").unlink()
    assert "FLASHINFER_DISABLE_JIT" in told(PACK, [(12, 1)], {"PATH": f"{nvcc}/bin"})[0]


FLASHINFER = ("--attention-backend", "FLASHINFER", "--kv-cache-dtype", "auto")
NO_COMPILER = {"CUDA_HOME": "/no/such/cuda", "PATH": "/nowhere"}


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
    packed.check(PACK, [(12, 1)], line, {"PATH": f"{nvcc}/bin"})  # compiles it
    if words is None:
        packed.check(PACK, [(12, 1)], line, NO_COMPILER)
        return
    with pytest.raises(StartError, match=f"^{words}: this image lacks"):
        packed.check(PACK, [(12, 1)], line, NO_COMPILER)


@pytest.mark.parametrize("module", [one for one in modules.MODULES if one.needs])
def test_a_pack_with_the_modules_of_an_option_is_enough_for_it(module: modules.Module) -> None:
    names = tuple(one.name for one in modules.MODULES if one.needs in ("", module.needs))
    packed.check(
        Pack("sm121f", names), [(12, 1)], [*FLASHINFER, *module.needs.split()], NO_COMPILER
    )
    with pytest.raises(StartError):
        packed.check(PACK, [(12, 1)], [*FLASHINFER, *module.needs.split()], NO_COMPILER)


def test_without_a_pack_and_compilers_only_another_attention_is_served() -> None:
    with pytest.raises(StartError, match="this image has no modules of FlashInfer"):
        packed.check(None, [(12, 1)], FLASHINFER, NO_COMPILER)
    packed.check(None, [(12, 1)], ["--attention-backend", "TRITON_ATTN"], NO_COMPILER)


def test_without_a_pack_nothing_changes() -> None:
    assert told(None, [(12, 1)], {"CUDA_HOME": "/no/such/cuda"}) == ({}, "")


def test_the_manifest_of_the_wheel_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = importlib.machinery.ModuleSpec(packed.PACKAGE, None, is_package=True)
    spec.submodule_search_locations = [str(tmp_path)]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    assert packed.installed() is None  # upstream's has no manifest
    manifest = tmp_path / "manifest.json"
    manifest.write_text(json.dumps({"architecture": "sm120f", "modules": [{"name": "sampling"}]}))
    assert packed.installed() == Pack("sm120f", ("sampling",))
    manifest.write_text(json.dumps({"architecture": "sm120f", "modules": [7]}))
    with pytest.raises(StartError, match="build the image again"):
        launch._packed([], {}, strict=True)


@pytest.mark.parametrize("modules", ["x", [None], [{}], [{"name": 1}]])
def test_a_manifest_of_another_form_is_refused(modules: object) -> None:
    with pytest.raises(DocumentError):
        Pack.of(Document("m", {"architecture": "sm120f", "modules": modules}))
