"""`--load-format fastsafetensors` of the spark profile, as far as a CPU can tell.

No patch is tested here; it stands here for the interpreters that are baked for this folder. The
cpu target's lock lacks the package (vLLM can use it on CUDA alone), so its x86-64 wheel, which is
among the hashes of the spark target's lock, is put on the path.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from sparkforge.checkpoints.tiny import make_tiny_gpt_oss
from sparkforge.pins import pins
from sparkforge.sources import sources
from tests.patches.checkout import ACCESS, CHECKOUT, store
from tests.patches.probing import TIMEOUT_S, runner
from tests.patches.trees import unpack

PROBE = Path(__file__).with_name("probes") / "probe_fastsafetensors.py"
WHEEL = pins.ReleaseFile(
    project="fastsafetensors",
    file="fastsafetensors-0.5.0-cp311-cp311-manylinux_2_27_x86_64.manylinux_2_28_x86_64.whl",
    sha256="33081163451a02e1ab80b1ba35459632e584bac79f301413a99fccb3699df426",
    size=2688920,
)


@pytest.fixture(scope="module")
def result(patched_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("fastsafetensors")
    wheel = sources.fetch_release_file(store(), WHEEL, ACCESS)
    unpack(wheel, "", folder / "packages")
    request = {
        "packages": str(folder / "packages"),
        "checkpoint": str(make_tiny_gpt_oss(folder / "tiny").path),
        "prompt": list(range(40, 60)),
        "layers": "qkv,o,lm_head=mxfp8",
        "devices": ["NVIDIA GB10", "NVIDIA H200"],
    }
    run = runner(PROBE, request, folder, TIMEOUT_S, forked=True)
    out = run(patched_python, "packages,tensors,unified,logits")
    return json.loads((out / "result.json").read_text())


def test_the_wheel_is_the_one_that_the_lock_has() -> None:
    lock = (CHECKOUT / "requirements/spark-linux-arm64.txt").read_text()
    (entry,) = re.findall(r"^fastsafetensors==0\.5\.0 (?:.*\n)+?(?=\S)", lock, re.MULTILINE)
    assert f"sha256:{WHEEL.sha256}" in entry


def test_every_tensor_of_a_checkpoint_is_the_same_to_the_byte(result: Any) -> None:
    found = result["tensors"]
    assert found["same"]
    assert found["count"] > 40
    assert {"torch.uint8", "torch.bfloat16"} <= set(found["types"])


def test_without_its_device_there_is_no_gds_whatever_vllm_asks_for(result: Any) -> None:
    assert not Path("/dev/nvidia-fs0").exists()
    (asked,) = result["tensors"]["asked"]
    # one rank: vLLM has no option that asks for less
    assert asked == {
        "device": "cuda:0",
        "nogds": "False",
        "queue_size": "0",
        "copier": "NoGdsFileCopier",
    }


def test_a_spark_gets_the_reader_for_unified_memory(result: Any) -> None:
    assert result["unified"]["taken"] == {"NVIDIA GB10": True, "NVIDIA H200": False}
    assert result["unified"]["pinned"] == 8 << 24  # bytes: eight buffers of 16 MiB


def test_a_model_with_quantised_layers_is_the_same(result: Any) -> None:
    found = result["logits"]
    assert found["loaders"] == 1
    assert found["same"]
    assert found["shape"][0] == 20
    assert found["spread"] > 0.1
