"""What an image's build checks, and Triton's module: how it is made, and how a server gets it.

tests/patches/test_triton_driver.py compiles it, and has the real Triton load it.
"""

import json
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from sparkforge.build import image
from sparkforge.build.context import Tools
from sparkforge.core.errors import BuildError, CommandError
from sparkforge.pins import pins
from sparkforge.runtime import engine as engines
from sparkforge.runtime.engine import BaseImage
from sparkforge.serving import image_build
from tests.results import context_of
from tests.support import ROOT

PINS = pins.load(ROOT / "pins.yaml")
GPU = [name for name, one in PINS.targets.items() if one.cuda_arch is not None]


def test_every_gpu_target_has_no_compiler_and_what_its_wheels_need() -> None:
    assert GPU == ["spark", "rtx"]
    for name in GPU:
        there = image.needs(context_of(name))
        absent = {one["absent"] for one in there if "absent" in one}
        assert absent == {"nvcc", "gcc", "g++", "cc", "c++", "clang"}
        named = {value for one in there for key, value in one.items() if key != "package"}
        assert {"libcudart.so", "torch", "triton", "flashinfer"} <= named
        # which the stage that compiles Triton's module needs
        python = f"python{PINS.target(name).python}-dev"
        assert {"gcc", "libc6-dev", python} == set(PINS.target(name).build_packages)


@pytest.mark.parametrize(("name", "place"), [("g++", "bin"), ("nvcc", "bin"), ("nvcc", "cuda/bin")])
def test_a_compiler_is_named_with_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, place: str
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setattr(image_build, "CUDA", str(tmp_path / "cuda" / "bin"))
    program = tmp_path / place / name
    program.parent.mkdir(parents=True, exist_ok=True)
    program.touch(mode=0o755)
    (line,) = image_build.missing([{"absent": "nvcc"}, {"absent": "g++"}])
    assert line == f"the image has {program}, which the target excludes"
    assert image._WRONG.search(line)


def test_the_script_alone_says_all_that_is_missing(tmp_path: Path) -> None:
    said = tmp_path / "needs.json"
    wanted = {"module": "no_such_module", "program": "no-such-program", "file": "/no/such/file"}
    needs = [{kind: name, "package": "p"} for kind, name in wanted.items()]
    said.write_text(json.dumps([*needs, {"module": "json", "package": "python3"}]))
    command: list[str | Path] = [
        *(sys.executable, "-IB", ROOT / "sparkforge/serving/image_build.py", "needs", said)
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.splitlines() == [
        "the image lacks the program no-such-program, of the package p",
        "the image lacks the file /no/such/file, of the package p",
        "the image cannot import no_such_module, of the package p: ModuleNotFoundError: No module"
        " named 'no_such_module'",
    ]
    said.write_text("[]")
    assert subprocess.run(command, capture_output=True, check=True).stderr == b""


def test_a_bake_with_something_wrong_is_one_clear_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    line = "the image has /bin/nvcc, /bin/gcc, which the target excludes"

    def call(*command: str, **options: Any) -> None:
        written = json.loads((tmp_path / "wheels/needs.json").read_text())
        assert written == image.needs(context_of("rtx"))
        assert {"--build-arg=SERVE_FROM=plain", "--target=serve-gpu"} <= set(command)
        raise CommandError(f"docker ended\n    #9 0.412 {line}\n    #9 ERROR: x\n    0.412 {line}")

    monkeypatch.setattr(engines, "call", call)
    engine: Any = type("Engine", (), {"containerd_store": False, "context": "default"})
    with pytest.raises(BuildError) as caught:
        tools = Tools(engine, BaseImage("b", "b"))
        image.build(context_of("rtx"), tools, {}, tmp_path, {}, {}, tmp_path)
    assert caught.value.what == line
    assert "targets.rtx" in str(caught.value.remedy)


MODULE = "cuda_utils.cpython-312-aarch64-linux-gnu.so"


@pytest.fixture
def backend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The installed Triton's folder."""
    folder = tmp_path / "installed" / "triton" / "backends" / "nvidia"
    folder.mkdir(parents=True)
    (folder / "driver.c").write_text("int driver;\n")
    (folder.parent.parent / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path / "installed")
    return folder


@pytest.fixture
def share(tmp_path: Path) -> Path:
    """The image's folder, with a module."""
    module = tmp_path / "share" / "triton" / MODULE
    module.parent.mkdir(parents=True)
    module.write_bytes(b"the image's")
    return tmp_path / "share"


def test_the_module_is_copied_to_where_triton_looks(
    share: Path, backend: Path, tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    variables = {"TRITON_CACHE_DIR": str(cache)}
    chosen = image_build.seed(share, variables, print)
    path = cache / image_build.triton_key(backend, str(share / "triton")) / MODULE
    assert path.read_bytes() == b"the image's"
    assert path.stat().st_mode & 0o777 == 0o644
    assert chosen == {"TRITON_LIBCUDA_PATH": str(share / "triton")}
    own = {**variables, "TRITON_LIBCUDA_PATH": "/own"}
    assert image_build.seed(share, own, print) == {"TRITON_LIBCUDA_PATH": "/own"}
    assert (cache / image_build.triton_key(backend, "/own") / MODULE).exists()


def test_a_source_that_does_not_compile_ends_the_build(tmp_path: Path) -> None:
    ours = tmp_path / "wheels"
    (ours / "share").mkdir(parents=True)
    (ours / "share" / "profile.json").write_text("{}")
    with zipfile.ZipFile(ours / "triton-3.7.1-cp312-cp312-any.whl", "w") as wheel:
        wheel.writestr("triton/backends/nvidia/driver.c", "#error no compiler is called\n")
    image_build.triton(ours, tmp_path / "house", tmp_path / "out")  # no GPU, and no module
    assert not (tmp_path / "out").exists()
    (ours / "share" / "profile.json").write_text('{"cuda_arch": "12.1"}')
    with pytest.raises(SystemExit) as caught:  # by gcc, or since there is none
        image_build.triton(ours, tmp_path / "house", tmp_path / "out")
    assert image._WRONG.search(str(caught.value))  # which build.py shows, with a hint
