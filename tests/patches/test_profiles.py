"""Profiles of pins.yaml against vLLM itself: its parser, and that of our plugin, take every option
of every choice, their words are the ones that the check of backends looks for, and vLLM's package
has the pinned Harmony vocabulary.

No patch is tested here; it stands here for the interpreters that are baked for this folder.
"""

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
    target.profile: PINS.profile_of(target).document()
    for target in PINS.targets.values()
    if target.profile
}
NAMES = list(DOCUMENTS)
CHOSEN = [(name, choice) for name, document in DOCUMENTS.items() for choice in document["choices"]]
WRONG = {
    "unknown value": ["--moe-backend", "nosuch"],
    "unknown option": ["--nosuch"],
    "unknown parser": ["--tool-call-parser", "nosuch", "--enable-auto-tool-choice"],
    "unknown layers": [CONFIG, '{"sparkforge": {"mxfp4_layers": "nosuch"}}'],
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
    assert found["address"] == str(door.folder() / door.ENGINE)
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


def test_what_vllm_and_the_plugin_say_is_what_is_looked_for(patched_python: Path) -> None:
    """Sentences of a GPU, which no server here says; the CPU's are read in real logs."""
    (site,) = patched_python.parent.parent.glob("lib/python3*/site-packages")
    ours, decode = "vllm_sparkforge/mx/linear.py", "vllm_sparkforge/decode"
    for file, sentence, values, field, name in (
        (ours, "Using %s for %s GEMM", ("MarlinMxFp4LinearKernel", "MXFP4"), "linear", "MARLIN"),
        (ours, "Using %s for %s GEMM", ("DecodeMxfp8LinearKernel", "MXFP8"), "linear", "DECODE"),
        (
            f"{decode}/selfcheck.py",
            "Decode kernels are used for %s: ",
            ("MXFP4 experts 1 x 2: ",),
            "experts",
            "DECODE",
        ),
        (f"{decode}/module.py", "Decode kernels are off: %s.", ("why",), "experts", "MARLIN"),
        (
            f"{decode}/selfcheck.py",
            "Decode kernels are not used for %s: they failed their trial.",
            ("MXFP4 experts",),
            "experts",
            "MARLIN",
        ),
        (
            "vllm_sparkforge/model.py",
            "Kernels that failed their trial: %s.",
            ("BF16,INT8",),
            "failed",
            "BF16,INT8",
        ),
    ):
        assert f'"{sentence}' in (site / file).read_text()
        watch = Watch({field: name})
        assert watch.feed(f"[{file}:1] {sentence % values}") is None
        assert watch.seen == {field: {name}}
    loader = "model_executor/model_loader/default_loader"
    times: tuple[tuple[str, str, tuple[int, ...], str], ...] = (
        (
            "v1/worker/gpu_model_runner",
            "Model loading took %s GiB memory and %.6f seconds",
            (1, 2),
            "load",
        ),
        (loader, "Loading weights took %.2f seconds", (2,), "load"),
        (
            "v1/worker/gpu_model_runner",
            "Graph capturing finished in %.0f secs, took %.2f GiB",
            (2, 1),
            "graphs",
        ),
        ("v1/engine/core", "%.2f s (compilation: %.2f s)", (9, 2), "compile"),
    )
    for file, text, numbers, part in times:
        assert f'"{text}"' in (site / f"vllm/{file}.py").read_text()
        watch, lead = Watch({}), "init engine (x) took " * (part == "compile")
        watch.feed(f"[core.py:1] {lead}{text % numbers}")
        assert watch.took_s == {part: 2}
    attention = (site / "vllm/platforms/cuda.py").read_text()
    assert 'logger.info("Using %s backend.", selected_backend)' in attention
    assert '"Using %s attention backend out of potential backends: %s."' in attention


def test_the_harmony_vocabulary_is_in_the_package_and_is_the_pinned_one(
    patched_python: Path, tmp_path: Path
) -> None:
    pinned = PINS.vocabularies["harmony"].sha256
    code = "from sparkforge.serving.checkpoint import check_vocabulary as check;"
    code += f" check({pinned!r}); print('same')"
    good = {"PYTHONPATH": str(ROOT), "HOME": str(tmp_path)}
    said = subprocess.run(
        [patched_python, "-c", code], env=good, capture_output=True, text=True, check=True
    )
    assert said.stdout == "same\n"
    other = code.replace(pinned, "0" * 64)
    said = subprocess.run(
        [patched_python, "-c", other], env=good, capture_output=True, text=True, check=False
    )
    assert f"has sha256 {pinned}, and pins.yaml says 000" in said.stderr
