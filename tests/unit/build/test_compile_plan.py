"""What a compile would do: decided from pins.yaml, and the command lines of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sparkforge.build.compile import natives
from sparkforge.build.compile.recipe import arch_list
from sparkforge.build.compile.running import Progress, cost, excerpt
from sparkforge.core.errors import CompileError
from sparkforge.pins import pins
from tests import forked
from tests.support import ROOT

PINS = pins.load(ROOT / "pins.yaml")
VLLM = PINS.upstream("vllm")


def decided(*paths: str, device: str = "cuda", native: str = "patched") -> natives.Decision:
    return natives.decide("vllm", VLLM, dict.fromkeys(paths, "a.patch"), native, device)


def test_python_alone_compiles_nothing() -> None:
    made = decided("vllm/envs.py", "tests/test_envs.py")
    assert (made.everything, made.compiled, made.fetches) == (False, (), False)


def test_a_source_compiles_what_it_goes_into_and_nothing_else() -> None:
    made = decided("vllm/envs.py", "csrc/fs_io.cpp")
    assert [one.file for one in made.compiled] == ["vllm/fs_io_C.abi3.so"]
    assert not made.fetches


def test_a_shared_header_compiles_all_that_may_include_it() -> None:
    made = decided("csrc/dispatch_utils.h")
    assert [one.target for one in made.compiled] == ["_C_stable_libtorch", "_moe_C_stable_libtorch"]
    assert made.fetches


def test_a_source_for_another_device_compiles_nothing() -> None:
    assert decided("csrc/topk.cu", device="cpu").compiled == ()


@pytest.mark.parametrize(
    ("path", "device", "words"),
    [
        ("csrc/cpu/utils.cpp", "cpu", "oneDNN"),
        ("rust/src/main.rs", "cuda", "does not say what is built from it"),
        ("setup.py", "cuda", "does not say what is built from it"),
    ],
)
def test_what_cannot_be_compiled_is_refused_with_the_patch(
    path: str, device: str, words: str
) -> None:
    with pytest.raises(CompileError, match=words) as error:
        decided(path, device=device)
    assert "a.patch" in error.value.what
    assert error.value.remedy


def test_a_changed_rule_of_compiling_compiles_the_targets_that_its_patch_names() -> None:
    touched = {"CMakeLists.txt": "b.patch"}
    named = {"_moe_C_stable_libtorch": "b.patch"}
    made = natives.decide("vllm", VLLM, touched, "patched", "cuda", named)
    assert [one.target for one in made.compiled] == ["_moe_C_stable_libtorch"]
    # its trailer says "none", or the target is for another device
    assert natives.decide("vllm", VLLM, touched, "patched", "cuda").compiled == ()
    assert natives.decide("vllm", VLLM, touched, "patched", "cpu", named).compiled == ()
    with pytest.raises(CompileError, match=r"b\.patch: its trailer Native names _C_typo"):
        natives.decide("vllm", VLLM, touched, "patched", "cuda", {"_C_typo": "b.patch"})


def test_all_is_refused_where_something_is_pinned_by_no_sha() -> None:
    with pytest.raises(CompileError, match="oneDNN"):
        decided(device="cpu", native="all")
    triton = PINS.upstream("triton")
    with pytest.raises(CompileError, match=r"triton \S+ cannot be compiled"):
        natives.decide("triton", triton, {}, "all", "cuda")


def test_every_native_file_of_the_release_is_accounted_for() -> None:
    released = [
        "vllm/_C_stable_libtorch.abi3.so",
        "vllm/vllm-rs",
        "vllm/third_party/x/y.py",
        "vllm/cumem_allocator.abi3.so",
        "vllm/new.so",
        "vllm/envs.py",
    ]
    taken, lost = natives.missing(VLLM, released, ["vllm/envs.py"], everything=False)
    assert (taken, lost) == (
        sorted(set(released) - {"vllm/new.so", "vllm/envs.py"}),
        ["vllm/new.so"],
    )
    made = ["vllm/envs.py", "vllm/_C_stable_libtorch.abi3.so"]
    assert natives.missing(VLLM, released, made, everything=True) == (["vllm/vllm-rs"], [])


@pytest.mark.parametrize(
    ("arch", "listed"), [("12.1", "12.1f"), ("12.0", "12.0f"), ("9.0", "9.0"), (None, None)]
)
def test_no_plain_architecture_where_it_would_give_a_trap(
    arch: str | None, listed: str | None
) -> None:
    assert arch_list(arch) == listed


def plan(*words: str, code: int = 0) -> Any:
    """Dry-run of this checkout; the engine of the machine, if any, is out of reach."""
    env = {**os.environ, "DOCKER_HOST": "unix:///nowhere/docker.sock"}
    fixed = ("build", "--wheels", "compile", "--dry-run", "--until", "wheels", "--json")
    found, out, err = forked.run([*fixed, *words], ROOT, env)
    assert found == code, err
    assert "Traceback" not in err
    return json.loads(out)


def commands(document: Any, label: str) -> list[str]:
    (found,) = (step["commands"] for step in document["plan"] if step["label"] == label)
    return list(found)


def environment(command: str) -> dict[str, str]:
    import shlex

    words = shlex.split(command)
    pairs = [words[i + 1] for i, word in enumerate(words) if word == "--env"]
    return dict(pair.split("=", 1) for pair in pairs)


def test_the_spark_s_python_is_built_alone_and_without_a_network(tmp_path: Path) -> None:
    document = plan("--target", "spark", "--store", str(tmp_path))
    *native, command = commands(document, "wheel vllm")
    assert native  # the series changes how some are compiled: the next test
    for words in (
        *("--network none", "--pull never", "--read-only"),
        *("--cap-drop ALL", "no-new-privileges", "umask 022", "pip wheel", "--no-index"),
        "--no-build-isolation",
    ):
        assert words in command
    said = environment(command)
    assert said["VLLM_TARGET_DEVICE"] == "empty"
    assert said["SETUPTOOLS_SCM_PRETEND_VERSION"] == VLLM.version
    assert said["SOURCE_DATE_EPOCH"] == str(PINS.release.source_date_epoch)
    (command,) = commands(document, "wheel flashinfer")
    assert environment(command)["FLASHINFER_BUILD_NO_PIP"] == "1"
    (note,) = commands(document, "wheel triton")
    assert note.startswith("# triton is overlaid, not compiled: ")


def test_a_comma_in_the_store_s_path_is_no_field_of_its_own(tmp_path: Path) -> None:
    place = tmp_path / "a, b"
    *_, command = commands(plan("--target", "spark", "--store", str(place)), "wheel vllm")
    assert f'"source={place}/ccache",target=/build/ccache' in command


def only_vllm(tmp_path: Path) -> list[str]:
    """A checkout whose spark target has vLLM alone: Triton can't be compiled."""
    import shutil

    for name in ("patches", "requirements", "kernels", "Dockerfile"):
        (tmp_path / name).symlink_to(ROOT / name)
    text = (ROOT / "pins.yaml").read_text()
    head, spark = text.split("\n  spark:\n", 1)
    ours, rest = spark.split("\n  rtx:\n", 1)
    first = ours.index("      flashinfer:\n")
    ours = ours[:first] + ours[ours.index("    requirements:") :]
    ours = ours.replace("    pack: [default]", "    pack: []")
    (tmp_path / "pins.yaml").write_text(f"{head}\n  spark:\n{ours}\n  rtx:\n{rest}")
    shutil.rmtree(tmp_path / "store", ignore_errors=True)
    return [
        "--target",
        "spark",
        "--pins",
        str(tmp_path / "pins.yaml"),
        "--store",
        str(tmp_path / "store"),
    ]


def test_all_of_the_spark_s_vllm_reads_every_source_from_the_store(tmp_path: Path) -> None:
    document = plan(*only_vllm(tmp_path), "--native", "all", "--jobs", "3")
    (command,) = commands(document, "wheel vllm")
    said = environment(command)
    assert said["VLLM_TARGET_DEVICE"] == "cuda"
    assert said["TORCH_CUDA_ARCH_LIST"] == "12.1f"
    assert said["NVCC_APPEND_FLAGS"] == "-objtemp --frandom-seed=1"
    assert said["MAX_JOBS"] == said["SPARKFORGE_JOBS"] == "3"
    for name, external in VLLM.externals.items():
        assert said[external.redirect] == f"/build/externals/{name}"
    assert said["TRITON_KERNELS_SRC_DIR"] == "/build/externals/triton-kernels"
    labels = [step["label"] for step in document["plan"]]
    assert {f"external vllm/{name}" for name in VLLM.externals} <= set(labels)


def test_all_is_refused_for_a_target_with_triton(tmp_path: Path) -> None:
    document = plan("--target", "spark", "--store", str(tmp_path), "--native", "all", code=7)
    version = PINS.upstream("triton").version
    assert f"triton {version} cannot be compiled" in document["error"]["what"]
    assert "--native patched" in document["error"]["remedy"]


def test_how_many_compile_at_once_changes_no_key(tmp_path: Path) -> None:
    words = only_vllm(tmp_path)
    keys = [[step["key"] for step in plan(*words, "--jobs", n)["plan"]] for n in ("1", "2")]
    assert keys[0] == keys[1]


def test_native_without_compile_is_a_contradiction() -> None:
    done = subprocess.run(
        [
            *(sys.executable, "-m", "sparkforge", "--target", "cpu", "--native", "all"),
            *("--dry-run", "--engine", "none"),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "--wheels compile" in done.stderr


def test_without_an_engine_the_error_says_what_to_do(tmp_path: Path) -> None:
    env = {**os.environ, "DOCKER_HOST": "unix:///nowhere/docker.sock"}
    for words in ((), ("--engine", "none"), ("--base", "some/image:1")):
        fixed = ("--target", "cpu", "--wheels", "compile", "--until", "wheels")
        code, _, err = forked.run([*fixed, "--store", str(tmp_path), *words], ROOT, env)
        assert code == 8, err
        assert "hint: " in err
        assert "Traceback" not in err


# -- what a failing build says -------------------------------------------------------

NINJA = """\
[1/9] Building CXX object a.o
[2/9] Building CUDA object b.o
FAILED: [code=1] b.o
/usr/bin/ccache nvcc -c b.cu
b.cu(7): error: identifier "nonsense" is undefined
1 error detected in the compilation of "b.cu".
[3/9] Building CXX object c.o
ninja: build stopped: subcommand failed.
Traceback (most recent call last):
"""


def test_a_failure_shows_the_compiler_s_own_words() -> None:
    said = excerpt(NINJA.splitlines())
    assert 'b.cu(7): error: identifier "nonsense" is undefined' in said
    assert "Building" not in said
    assert "Traceback" not in said


def test_errors_far_below_a_failed_line_are_shown() -> None:
    lines = [
        "FAILED: x.o",
        "g++ -c x.cpp",
        *["note: instantiated here"] * 500,
        "x.cpp:1: error: no",
    ]
    assert "x.cpp:1: error: no" in excerpt(lines)
    assert len(excerpt(lines).splitlines()) < 50


def test_without_a_failed_line_the_end_is_shown() -> None:
    assert excerpt([*map(str, range(100)), "ERROR: no"]).endswith("ERROR: no")


def test_the_time_left_comes_from_the_pace_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    progress = Progress("compile x")
    progress.see("[1/101] Building CXX object a.o")
    assert progress.left(100.0, 1, 101) == ""
    assert progress.left(160.0, 11, 101) == ", about 9 min left"
    assert progress.left(600.0, 91, 101) == ", about 56 s left"


def test_what_the_compilers_took_is_said(tmp_path: Path) -> None:
    units = tmp_path / "units.tsv"
    assert cost(units) is None
    units.write_text("9124\t109.65\t115.5\t0\t/build/tree/a b.cu\n110\t0.60\t0.6\t0\t/x/c.cpp\n")
    assert cost(units) == (
        "2 files compiled in 110 s of CPU time; the largest took 8.9 GiB: a b.cu"
    )
