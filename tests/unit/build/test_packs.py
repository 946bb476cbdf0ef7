"""Packs of FlashInfer's modules: the list, the compilers, the wheel."""

import importlib.util
import json
import platform
import shutil
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from sparkforge.build.graph import Build
from sparkforge.build.packs import modules, pack, recipe
from sparkforge.build.packs.modules import MODULES
from sparkforge.build.packs.recipe import Described, Host, Unit
from sparkforge.core.disk import sha256_file
from sparkforge.core.errors import BuildError, CommandError, MachineError, PinsError
from sparkforge.core.run import call
from sparkforge.store.store import Store
from sparkforge.wheels import intake
from tests.results import context_of

ABOUT = {
    "version": "0.7.0.post1+spark.1",
    "architecture": "sm121f",
    "platform": "linux/arm64",
    "commit": "c" * 40,
    "compiler": "nvcc 13.0.88",
    "host": "g++ 12",
}
HOST = Host("g++", "this one")


def names(*chosen: str) -> list[str]:
    return [one.name for one in modules.pinned(chosen)]


def test_pack_takes_sets_and_names() -> None:
    default = names("default")
    assert len(default) == 5 and default == [one.name for one in MODULES if not one.needs]
    assert len(names("all")) == len(MODULES)
    assert names("fused_moe_120", "sampling", "sampling") == ["sampling", "fused_moe_120"]
    with pytest.raises(PinsError, match="nothing"):
        names("default", "nothing")


# -- the compilers -----------------------------------------------------------------------------


def test_pack_without_compiler_is_planned_only(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    context = context_of("spark")
    there = Build(context).graph.pack
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setenv("PATH", "/nowhere")
    item = Build(context).graph.pack
    assert there is not None and item is not None
    assert item.inputs == {**there.inputs, "host": "none on this machine"}
    with pytest.raises(MachineError) as error:
        item.make(tmp_path)
    assert error.value.remedy == "sudo apt-get install g++-aarch64-linux-gnu"


needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler here")


@needs_compiler
def test_newer_libc_than_the_image_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, built = tmp_path / "a.cc", tmp_path / "a.o"
    source.write_text("#include <cstdlib>\nvoid *f() { return std::malloc(1); }\n")
    call("g++", "-c", "-fPIC", source, "-o", built)
    recipe.stubs(HOST, tmp_path / "stubs")
    one = Described("a", (), ())
    recipe.link(tmp_path, HOST, one, [built], tmp_path / "a.so")
    monkeypatch.setattr(recipe, "NEWEST", {"GLIBC": (2, 1), "GLIBCXX": (3,), "CXXABI": (1,)})
    with pytest.raises(BuildError, match="GLIBC_2"):
        recipe.link(tmp_path, HOST, one, [built], tmp_path / "a.so")


@needs_compiler
def test_user_variables_change_no_library(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LD_RUN_PATH", "/of/the/user")
    monkeypatch.setenv("CPATH", str(tmp_path / "own"))
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "a.h").write_text("")
    recipe.stubs(HOST, tmp_path / "stubs")
    (tmp_path / "objects").mkdir()
    (tmp_path / "a.cpp").write_text(
        '#if __has_include("a.h")\n#error seen\n#endif\nint one() { return 1; }\n'
    )
    described = Described("one", (), (Unit("a.cpp", ("-fPIC",)),))
    made = pack.libraries(store, tmp_path, HOST, [described], {}, 1)
    assert b"/of/the/user" not in made["one"].read_bytes()
    (tmp_path / "a.cpp").write_text("int no")
    with pytest.raises(CommandError, match=r"a\.cpp"):
        pack.libraries(store, tmp_path, HOST, [described], {}, 1)


# -- the wheel ---------------------------------------------------------------------------------


def written(folder: Path) -> Path:
    folder.mkdir()
    libraries = {"one": folder / "one.so", "two": folder / "two.so"}
    libraries["one"].write_bytes(b"one")
    libraries["two"].write_bytes(b"two22")
    listed = [modules.Module("one", "", {}), modules.Module("two", "", {}, "--x")]
    described = [Described(name, (), (Unit(name, ()),)) for name in ("one", "two")]
    return folder / pack.write(listed, described, libraries, ABOUT, 1_795_219_200, folder).file


def test_pack_wheel_has_flashinfers_interface(tmp_path: Path) -> None:
    path = written(tmp_path / "a")
    assert path.name == "flashinfer_jit_cache-0.7.0.post1+spark.1-py3-none-linux_aarch64.whl"
    assert path.read_bytes() == written(tmp_path / "b").read_bytes()
    intake.take(Store(tmp_path / "store"), path, sha256_file(path))  # every member, in RECORD
    with zipfile.ZipFile(path) as archive:
        archive.extractall(tmp_path / "site")
    package = tmp_path / "site" / "flashinfer_jit_cache"
    spec = importlib.util.spec_from_file_location("packed", package / "__init__.py")
    assert spec is not None and spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    sys.modules["packed"] = module
    try:
        spec.loader.exec_module(module)
    finally:
        del sys.modules["packed"]
    (provider,) = module.get_jit_cache_providers()
    assert module.__version__ == provider.version == "0.7.0.post1+spark.1"
    assert provider.cuda_architectures == ("sm121f",)
    assert provider.modules == ("one", "two")
    assert (Path(provider.jit_cache_dir) / "two" / "two.so").read_bytes() == b"two22"
    manifest = json.loads((package / "manifest.json").read_text())
    assert [one["needs"] for one in manifest["modules"]] == ["", "--x"]
