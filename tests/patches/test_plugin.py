"""The plugin beside what is not its own, and its options, in vLLM's own hands.

What the options do is in the tests of each; here is what is said of wrong ones, which of two
counts, and that all else in vLLM is as without the plugin.
"""

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.patches.checkout import ROOT
from tests.patches.forks import known
from tests.patches.probing import TIMEOUT_S, result_of, runner
from tests.reference import TinyCheckpoint

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "torch_dtype": "bfloat16",
    "vocab_size": 128,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
WRONG = {
    '{"mxfp4_layer": "qkv"}': "there is no option 'mxfp4_layer'; known: all_reduce, ",
    '{"mxfp4_layers": 4}': "mxfp4_layers is 4",
    '{"experts": "bf16"}': "experts is 'bf16'; use bf16_dequant",
    '{"decode_kernels": true}': "decode_kernels is True; use auto, on or off",
    '{"all_reduce": "sparknet"}': "there is no all_reduce 'sparknet'; installed: nccl",
    '{"found": "x"}': "found is this plugin's own; omit it",
    '{"off": ["rotary", "nosuch"]}': "use a list of",
    "[]": "additional_config.sparkforge is []; use a JSON object",
}
WRONG_VARIABLES = {
    "{": "VLLM_SPARKFORGE is no JSON",
    '["qkv"]': "VLLM_SPARKFORGE is ['qkv']; use a JSON object",
}


@pytest.fixture(scope="module")
def probe(
    tiny: TinyCheckpoint, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[Path, str], Path]:
    folder = tmp_path_factory.mktemp("plugin")
    (folder / "llama").mkdir()
    (folder / "llama" / "config.json").write_text(json.dumps(LLAMA), encoding="utf-8")
    request = {
        "checkpoint": str(tiny.path),
        "llama": str(folder / "llama"),
        "wrong": list(WRONG),
        "wrong variables": list(WRONG_VARIABLES),
    }
    return runner("probe_plugin", request, folder, TIMEOUT_S)


@pytest.fixture(scope="module")
def on(probe: Callable[[Path, str], Path], patched_python: Path) -> Path:
    return probe(patched_python, "llama,variable,wrong,wrong_at_start,other_vllm")


@pytest.fixture(scope="module")
def off(probe: Callable[[Path, str], Path], patched_python: Path) -> Path:
    return probe(patched_python, "off,llama,gpt_oss")


@pytest.fixture(scope="module")
def said(on: Path) -> dict[str, Any]:
    return result_of(on)


def test_another_model_is_as_without_the_plugin(on: Path, off: Path) -> None:
    ours, upstream = (result_of(out)["llama"] for out in (on, off))
    assert ours["spread"] > 0
    assert ours == upstream
    np.testing.assert_array_equal(np.load(on / "llama.npy"), np.load(off / "llama.npy"))


def test_switched_off_gpt_oss_is_upstream_s(off: Path) -> None:
    found = result_of(off)["gpt_oss"]
    assert found["type"] == "NotImplementedError"
    assert "No MXFP4 MoE backend supports the deployment" in found["message"]
    assert "bf16_dequant" not in found["message"]
    assert all(name.startswith("vllm.") for name in found["modules"])


def test_the_variable_gives_options_and_those_of_the_engine_win(said: dict[str, Any]) -> None:
    found = said["variable"]
    for name, dtype in found["layers"].items():
        eight_bits = name.endswith("attn.o_proj.weight")
        scales = name.endswith("attn.o_proj.weight_scale")
        wanted = "torch.float8_e4m3fn" if eight_bits else "torch.bfloat16"
        assert dtype == ("torch.uint8" if scales else wanted), name
    assert found["experts"] == ["torch.bfloat16"]
    assert found["in the key"] == {"experts": "bf16_dequant", "mxfp4_layers": "o=mxfp8"}


@pytest.mark.parametrize("text", [*WRONG, *WRONG_VARIABLES])
def test_wrong_options_are_one_clear_error(said: dict[str, Any], text: str) -> None:
    found = said["wrong"][text]
    assert found["type"] == "ValueError"
    assert (WRONG | WRONG_VARIABLES)[text] in found["message"]
    assert "\n" not in found["message"]
    assert said["wrong"]["fine"]["type"] is None


def test_a_wrong_variable_ends_the_program_in_one_line(said: dict[str, Any]) -> None:
    message = said["wrong_at_start"]["no JSON"]
    assert message.startswith("vllm-sparkforge: error: VLLM_SPARKFORGE is no JSON")
    assert "\n" not in message
    # and vLLM, which may be asked to refuse variables that it does not know, knows ours
    assert said["wrong_at_start"]["known"] == {"type": None, "message": "", "value": True}


def test_a_model_that_would_ignore_an_option_is_refused(said: dict[str, Any]) -> None:
    found = said["wrong"]["llama"]
    assert found["type"] == "ValueError"
    assert "are for gpt-oss's MXFP4 checkpoints" in found["message"]


def test_a_vllm_that_lacks_something_is_left_alone_and_options_are_refused(
    on: Path, said: dict[str, Any]
) -> None:
    log = (on / "log").read_text(encoding="utf-8")
    assert log.count("vllm-sparkforge is off: this vLLM differs: import of vllm_sparkforge") == 1
    assert log.count("vllm-sparkforge is off: this vLLM has no such function.") == 1
    assert said["other_vllm"]["none"]["type"] is None
    for option in ("experts", "mxfp4_layers", "decode_kernels"):
        found = said["other_vllm"][option]
        assert found["type"] == "ValueError"
        assert "vllm-sparkforge is off: this vLLM differs" in found["message"]


@pytest.mark.parametrize(
    ("name", "sums", "asked"), [("nccl", [3.0, 3.0], []), ("fake", [3.5, 3.0], [8, 2880])]
)
def test_a_named_all_reduce_is_asked_first_in_every_rank(
    patched_python: Path, tmp_path: Path, name: str, sums: list[float], asked: list[int]
) -> None:
    command = (patched_python, "-m", "tests.patches.probes.probe_all_reduce")
    variables = {**os.environ, **known(patched_python), "PYTHONPATH": str(ROOT)}
    variables |= {"VLLM_HOST_IP": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}
    ranks = [
        subprocess.Popen(
            (*command, rank, name, f"file://{tmp_path}/meeting"),
            env={**variables, "VLLM_DIST_IDENT": rank},  # by which vLLM takes no shared memory
            stdout=subprocess.PIPE,
        )
        for rank in ("0", "1")
    ]
    for one in ranks:
        output, _ = one.communicate(timeout=TIMEOUT_S)
        assert json.loads(output.splitlines()[-1]) == [sums, asked]
