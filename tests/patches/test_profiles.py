"""Profiles of pins.yaml against vLLM itself: its parser, and that of our plugin, take every option
of every choice, their words are the ones that the check of backends looks for, and vLLM's package
has the pinned Harmony vocabulary.

No patch is tested here; it stands here for the interpreters that are baked for this folder.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from sparkforge.serving import door, launch
from sparkforge.serving import profile as profiles
from sparkforge.serving.options import CONFIG, for_plugin
from sparkforge.serving.profile import Profile, Watch
from tests.patches.checkout import PINS
from tests.patches.probing import ask
from tests.support import ROOT

DOCUMENTS = {
    target.profile: PINS.profile_of(target) for target in PINS.targets.values() if target.profile
}
NAMES = list(DOCUMENTS)
CHOSEN = [(name, choice) for name, document in DOCUMENTS.items() for choice in document["choices"]]
WRONG = {
    "unknown value": ["--moe-backend", "nosuch"],
    "unknown option": ["--nosuch"],
    "unknown parser": ["--tool-call-parser", "nosuch", "--enable-auto-tool-choice"],
    "unknown layers": for_plugin(["--mxfp4-layers", "nosuch"]),
    "unknown option of the plugin": [CONFIG, '{"sparkforge": {"nosuch": 1}}'],
}


@pytest.fixture(scope="module")
def answer(patched_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    options = {
        f"{name} {choice}": for_plugin(
            [
                *launch.serve("m", [])[3:],
                *profiles.pick(Profile.model_validate(DOCUMENTS[name]), choice, "").options(),
                "--gpu-memory-utilization",
                "0.74",
            ]
        )
        for name, choice in CHOSEN
    }
    folder = tmp_path_factory.mktemp("profiles")
    asked = {"options": options, "wrong": WRONG}
    return ask(patched_python, "probe_profiles", asked, folder=folder)


@pytest.mark.parametrize(("name", "choice"), CHOSEN)
def test_vllm_takes_every_option_of_a_profile(answer: Any, name: str, choice: str) -> None:
    found = answer["parsed"][f"{name} {choice}"]
    document = DOCUMENTS[name]
    assert found["address"] == str(door.engine_socket())
    assert found["gpu_memory_utilization"] == 0.74
    told = [key for key in document if key in found]
    assert {key: found[key] for key in told} == {key: document[key] for key in told}
    # keys that are no option of vLLM; a new key must be in one of the two
    ours = {
        "model",
        "choices",
        "choice",
        "memory",
        "evict_page_cache",
        "vocabulary",
        "vocabulary_sha256",
        "expect",
        "on_mismatch",
        "warm_up",
        "answers",
        "cuda_arch",
    }
    assert set(document) - set(told) <= ours
    assert found["mxfp4_layers"] == document["choices"][choice].get("mxfp4_layers")


def test_gpt_oss_gets_its_own_parsers(answer: Any) -> None:
    found = answer["parsed"]["spark-gpt-oss-120b exact"]
    assert found["reasoning_class"] == "GptOssReasoningParser"
    assert found["tool_class"] == "GptOssToolParser"
    assert found["enable_auto_tool_choice"]


@pytest.mark.parametrize("what", WRONG)
def test_the_parser_does_refuse(answer: Any, what: str) -> None:
    assert "nosuch" in answer["refused"][what]


@pytest.mark.parametrize("name", NAMES)
def test_expected_moe_backends_are_named_as_vllm_names_them(answer: Any, name: str) -> None:
    wanted = DOCUMENTS[name]["expect"]["moe"]
    watch = Watch({"moe": wanted})
    line = f"(Worker pid=1) INFO 11-21 07:21:00 [mxfp4.py:878] {answer['moe'][wanted]}"
    assert watch.feed(line) is None
    assert watch.seen == {"moe": {wanted}}


def test_the_plugin_still_says_which_kernels_dense_layers_get(patched_python: Path) -> None:
    """The CPU's are read in a real log, in test_mxfp4_layers.py."""
    folder = _package(patched_python, "vllm_sparkforge")
    source = (folder / "mx/linear.py").read_text()
    for sentence in (
        '"Using %s for %s GEMM"',
        'marlin.__name__.replace("Marlin", "CPU")',
        'name.replace("Marlin", "Decode")',
    ):
        assert sentence in source
    kernels = _package(patched_python, "vllm") / "model_executor/kernels/linear"
    for kind in "48":
        module = kernels / f"mxfp{kind}" / "marlin.py"
        (marlin,) = re.findall(r"^class (\w+Kernel)\(", module.read_text(), re.MULTILINE)
        for kernel in ("CPU", "Marlin", "Decode"):
            watch = Watch({"linear": kernel.upper()})
            name = marlin.replace("Marlin", kernel)
            assert watch.feed(f"[linear.py:184] Using {name} for MXFP{kind} GEMM") is None
            assert watch.seen == {"linear": {kernel.upper()}}


def test_the_plugin_still_says_what_computes_few_rows_of_experts(patched_python: Path) -> None:
    folder = _package(patched_python, "vllm_sparkforge") / "decode"
    for file, sentence, said, name in (
        ("selfcheck.py", '"Decode kernels are used for %s: ', "MXFP4 experts 1 x 2: ", "DECODE"),
        (
            "selfcheck.py",
            '"Decode kernels for %s are switched off. ',
            "MXFP4 experts",
            "DECODE",
        ),
        (
            "experts.py",
            '"Decode kernels are not used for MXFP4 experts: %s."',
            "LoRA is enabled",
            "MARLIN",
        ),
        ("module.py", '"Decode kernels are off: %s."', "they need a CUDA device", "MARLIN"),
    ):
        assert sentence in (folder / file).read_text()
        watch = Watch({"experts": name})
        assert watch.feed(f"[{file}:1] {sentence[1:].replace('%s', said)}") is None
        assert watch.seen == {"experts": {name}}
    assert '        "MXFP4 experts",\n' in (folder / "experts.py").read_text()


def test_vllm_still_says_which_attention_it_chose(patched_python: Path) -> None:
    source = (_package(patched_python, "vllm") / "platforms/cuda.py").read_text()
    assert 'logger.info("Using %s backend.", selected_backend)' in source
    assert '"Using %s attention backend out of potential backends: %s."' in source


def test_the_harmony_vocabulary_is_in_the_package_and_is_the_pinned_one(
    patched_python: Path, tmp_path: Path
) -> None:
    pinned = PINS.vocabularies["harmony"].sha256
    code = "from sparkforge.serving.checkpoint import check_vocabulary as check;"
    code += f" check({pinned!r}); print('same')"
    good = {"PYTHONPATH": str(ROOT), "HOME": str(tmp_path)}
    bad = good | {"TIKTOKEN_ENCODINGS_BASE": str(tmp_path)}
    (tmp_path / "o200k_base.tiktoken").write_text("QQ== 0\n")
    said = subprocess.run(
        [patched_python, "-c", code], env=good, capture_output=True, text=True, check=True
    )
    assert said.stdout == "same\n"
    said = subprocess.run(
        [patched_python, "-c", code], env=bad, capture_output=True, text=True, check=False
    )
    assert said.returncode == 1
    assert "correct TIKTOKEN_ENCODINGS_BASE" in said.stderr
    other = code.replace(pinned, "0" * 64)
    said = subprocess.run(
        [patched_python, "-c", other], env=good, capture_output=True, text=True, check=False
    )
    assert f"has sha256 {pinned}, and pins.yaml says 000" in said.stderr


def _package(python: Path, name: str) -> Path:
    (package,) = python.parent.parent.glob(f"lib/python3*/site-packages/{name}")
    return package
