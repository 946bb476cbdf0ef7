"""`--load-format fastsafetensors` of the spark profile, as far as a CPU can tell.

No patch is tested here; it stands here for the interpreters that are baked for this folder. The
cpu target's lock lacks the package (vLLM can use it on CUDA alone), so its x86-64 wheel, which is
among the hashes of the spark target's lock, is put on the path.
"""

import re
from pathlib import Path

from sparkforge.pins import pins
from sparkforge.sources import sources
from tests.patches.checkout import ACCESS, CHECKOUT, store
from tests.patches.probing import TIMEOUT_S, result_of, runner
from tests.patches.trees import unpack
from tests.reference import TinyCheckpoint

WHEEL = pins.ReleaseFile(
    project="fastsafetensors",
    file="fastsafetensors-0.5.0-cp311-cp311-manylinux_2_27_x86_64.manylinux_2_28_x86_64.whl",
    sha256="33081163451a02e1ab80b1ba35459632e584bac79f301413a99fccb3699df426",
    size=2688920,
)


def test_a_model_with_quantised_layers_is_the_same(
    patched_python: Path, tiny: TinyCheckpoint, tmp_path: Path
) -> None:
    lock = (CHECKOUT / "requirements/spark-linux-arm64.txt").read_text()
    (entry,) = re.findall(r"^fastsafetensors==0\.5\.0 (?:.*\n)+?(?=\S)", lock, re.MULTILINE)
    assert f"sha256:{WHEEL.sha256}" in entry
    unpack(sources.fetch_release_file(store(), WHEEL, ACCESS), "", tmp_path / "packages")
    request = {
        "packages": str(tmp_path / "packages"),
        "checkpoint": str(tiny.path),
        "prompt": list(range(40, 60)),
        "layers": "qkv,o,lm_head=mxfp8",
        "devices": ["NVIDIA GB10", "NVIDIA H200"],
    }
    run = runner("probe_fastsafetensors", request, tmp_path, TIMEOUT_S)
    found = result_of(run(patched_python, "logits"))["logits"]
    # one rank: vLLM has no option that asks for less; without /dev/nvidia-fs0 there is no GDS
    asked = {"device": "cuda:0", "nogds": "False", "queue_size": "0"}
    assert found["asked"] == [{**asked, "copier": "NoGdsFileCopier"}]
    assert found["same"]
    assert found["spread"] > 0.1
    # a Spark gets the reader for unified memory, with eight buffers of 16 MiB
    assert found["unified"] == {"NVIDIA GB10": True, "NVIDIA H200": False}
    assert found["pinned"] == 8 << 24
