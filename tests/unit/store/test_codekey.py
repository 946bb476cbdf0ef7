"""Keys hold the code that makes the thing: every module of an item's imports, found by reading."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sparkforge.build.compile.externals import external_item
from sparkforge.build.context import Context
from sparkforge.build.graph import graph_of
from sparkforge.build.item import Item
from sparkforge.build.packs import compiling, recipe, toolchain, units
from sparkforge.build.stages import image
from sparkforge.build.stages.trial import trial_item
from sparkforge.runtime.engine import BaseImage
from sparkforge.store import codekey
from sparkforge.store.artefact import Artefact
from sparkforge.store.codekey import PASSED_OVER, closure, code_of
from sparkforge.store.store import Store
from sparkforge.wheels import intake
from tests.codecopy import CodeCopy
from tests.results import context_of
from tests.support import ROOT, make_wheel, sha256
from tests.unit.test_architecture import MODULES, imports

BASE = BaseImage("base", "sha256:" + "b" * 64)


@pytest.fixture(scope="module")
def context() -> Context:
    return context_of("cpu", base=BASE)


def makers(context: Context) -> dict[str, str]:
    """Return of each kind of item the module that makes it, whose code is in its key."""
    graph = graph_of(context)
    assert graph.smoke is not None and graph.kernels is not None and graph.plugin is not None
    made: dict[str, Item[Any]] = {item.stage: item for item in graph.until("wheelhouse")}
    made["kernels"], made["plugin"] = graph.kernels, graph.plugin
    made["environment"], made["smoke"] = graph.product, graph.smoke
    made["compiled"] = graph_of(replace(context, wheels="compile")).wheels["vllm"]
    (made["builder"],) = (item for item in made["compiled"].needs if item.stage == "builder")
    external = next(iter(context.pins.upstream("vllm").externals))
    made["external"] = external_item(context, "vllm", external)
    pack = graph_of(context_of("spark")).pack
    assert pack is not None
    made["pack"], made["preflight checkpoint"] = pack, trial_item()
    for kind, item in made.items():
        assert item.inputs["code"] == code_of(item.make.__module__), kind
    parts = image.Parts(graph.wheels, graph.plugin, graph.pack, graph.wheelhouse, trial_item())
    of_image = image.image_inputs(context, parts, BASE)
    assert of_image["code"] == code_of(image.__name__)
    found = {kind: item.make.__module__ for kind, item in made.items()}
    # whose item is an engine's, or that have no item (below)
    return {
        **found,
        "image": image.__name__,
        "modules of a pack": recipe.__name__,
        "intake": intake.__name__,
    }


def wanted(module: str) -> set[str]:
    """Return what decides what a module makes, by the syntax trees of all that it imports."""
    found: set[tuple[str, ...]] = set()
    waiting = [tuple(module.split("."))]
    while waiting:
        name = waiting.pop()
        packages = {(*name[:end], "__init__") for end in range(2, len(name))} & set(MODULES)
        found |= packages
        if name not in found and ".".join(name[1:]) not in PASSED_OVER:
            found.add(name)
            waiting += imports(MODULES[name]) if name in MODULES else []
    return {"/".join(name[1:]) + ".py" for name in found if len(name) > 1}


COMPILED_WITH = {
    "build/packs/same_place.sh",
    "build/packs/include/cublasLt.h",
    "build/packs/include/cublas_v2.h",
}
# read as files by the module of a kind, or one that it imports
BESIDE = {
    "kernels": {"build/nvrtc.py"},
    "pack": {"build/packs/describe.py", "build/packs/shim.py", *COMPILED_WITH},
    "modules of a pack": COMPILED_WITH,
    "smoke": {"runtime/isamask/sitecustomize.py"},
}


def test_a_line_in_any_module_that_makes_an_item_changes_its_key(
    context: Context, code: CodeCopy
) -> None:
    kinds = makers(context)
    before = {kind: code_of(module) for kind, module in kinds.items()}
    changed: dict[str, set[str]] = {kind: set() for kind in kinds}
    for path in sorted(path for path in code.root.rglob("*") if path.is_file()):
        text = path.read_bytes()
        path.write_bytes(text + b"changed = 1\n")
        codekey._digest.cache_clear()
        for kind, module in kinds.items():
            if code_of(module) != before[kind]:
                changed[kind].add(path.relative_to(code.root).as_posix())
        path.write_bytes(text)
    assert len(kinds) == 16
    for kind, module in kinds.items():
        beside = BESIDE.get(kind, set())
        if kind == "image":
            beside = {path for path in changed[kind] if path.startswith("serving/")}
        assert changed[kind] == wanted(module) | beside, kind


def test_each_kind_holds_what_decides_its_bytes_and_nothing_of_later_stages() -> None:
    files = {
        kind: {path.relative_to(ROOT / "sparkforge").as_posix() for path in closure(module)}
        for kind, module in {
            "wheels": "sparkforge.build.stages.wheels",
            "compiled": "sparkforge.build.compile.items",
            "image": "sparkforge.build.stages.image",
            "smoke": "sparkforge.build.stages.smoke",
        }.items()
    }
    # which files a wheel gets, and where they go
    assert {"core/git.py", "pins/pins.py", "build/stages/wheels.py", "wheels/overlay.py"} <= files[
        "wheels"
    ]
    for kind in ("wheels", "compiled"):
        assert not files[kind] & {"build/image.py", "build/smoke.py", "serving/steps.py"}, kind
    assert "build/smoke.py" not in files["image"]
    assert {"build/smoke.py", "build/launcher.py", "checkpoints/tiny.py"} <= files["smoke"]


def test_a_module_that_moves_is_found_where_it_is(code: CodeCopy) -> None:
    copy = code.root
    before = code_of("sparkforge.build.stages.wheels")
    (copy / "wheels" / "newname.py").write_bytes((copy / "wheels" / "overlay.py").read_bytes())
    (copy / "wheels" / "overlay.py").unlink()
    for path in copy.rglob("*.py"):
        text = path.read_text().replace("wheels import overlay", "wheels import newname as overlay")
        path.write_text(text)
    code.read_again()
    assert copy / "wheels" / "newname.py" in closure("sparkforge.build.stages.wheels")
    assert code_of("sparkforge.build.stages.wheels") != before


@pytest.mark.parametrize("module", sorted(".".join(name) for name in MODULES))
def test_imports_are_read_as_the_syntax_tree_has_them(module: str) -> None:
    path = MODULES[tuple(module.split("."))]
    files = {MODULES[one] for one in imports(path) if one in MODULES}
    read = set(map(Path, codekey._needs(str(path))))
    assert files <= read
    # beyond them: the packages that modules are in, and files that are read and not imported
    beyond = {one for one in read - files if one.name != "__init__.py"}
    assert all(
        one.name in path.read_text() or one.parent.name in path.read_text() for one in beyond
    )


def test_what_is_passed_over_is_there_and_has_a_reason() -> None:
    assert all(
        (ROOT / "sparkforge" / f"{name.replace('.', '/')}.py").is_file() for name in PASSED_OVER
    )
    assert all(PASSED_OVER.values())


@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler here")
def test_what_compiles_a_module_is_in_its_key_and_no_more(
    store: Store, code: CodeCopy, tmp_path: Path
) -> None:
    host = toolchain.Host("g++", "this one")
    tree = tmp_path / "tree"
    tree.mkdir()
    (tree / "a.cpp").write_text("int one() { return 1; }\n")
    recipe.stubs(host, tree / "stubs")
    module = units.Described("one", (), False, (units.Unit("a.cpp", ("-fPIC",)),))
    request = compiling.Request(store, tree, {}, "12.1f", "nvcc", host, 1)

    def made() -> tuple[Artefact[Any], Artefact[Any]]:
        objects = compiling.compile_units(request, [module])
        return objects[module.units[0]], compiling.link(request, module, objects)

    before = made()
    others = ("compiling", "toolchain", "units", "modules", "command", "wheel")
    code.change(*(f"build/packs/{other}.py" for other in others))
    assert made() == before
    code.change("build/packs/recipe.py")
    for one, old in zip(made(), before, strict=True):
        assert (one.key != old.key, one.result.sha256) == (True, old.result.sha256)


def test_a_release_wheel_is_checked_again_by_other_code(
    store: Store, code: CodeCopy, tmp_path: Path
) -> None:
    wheel = make_wheel(tmp_path)

    def checks() -> int:
        intake.take(store, wheel, sha256(wheel.read_bytes()))
        return len(list(store.root.glob("artefacts/intake/*")))

    assert (checks(), checks()) == (1, 1)
    code.change("wheels/archive.py")
    assert checks() == 2
