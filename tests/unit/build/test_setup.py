"""The options of a target's last build: the defaults of commands that use the result."""

import json
from pathlib import Path
from typing import Any

import pytest

from sparkforge.build import receipt, setup
from sparkforge.build.options import VariantOptions
from sparkforge.build.results import ImageResult
from sparkforge.core import plain
from sparkforge.core.disk import write_file
from sparkforge.pins import pins
from sparkforge.runtime.engine import BaseImage
from tests.results import build_of, reached
from tests.support import ROOT

TARGET = pins.load(ROOT / "pins.yaml").target("spark")


def options_of(engine: str = "auto", *, image: bool = False, **chosen: Any) -> VariantOptions:
    build = build_of("spark", base=BaseImage("here:1", "sha256:1"), **chosen)
    if image:
        reached(build.graph.product, ImageResult("x:1", "sha256:1", None, "base", ()))
    return setup.options_of(build, engine)


def test_options_give_the_same_build_again() -> None:
    assert options_of(image=True) == VariantOptions(base="here:1", source="release")
    assert options_of("none", source="git", wheels="compile") == VariantOptions(
        engine="none", wheels="compile", source="git"
    )


@pytest.mark.parametrize(
    ("pack", "option"), [(("default",), None), ((), "none"), (("all",), "all")]
)
def test_other_pack_is_kept(pack: tuple[str, ...], option: str | None) -> None:
    found = options_of(pack=pack)
    assert found.pack == option
    assert setup.pack_of(found, TARGET) == pack


def test_mirrored_sources_have_no_option() -> None:
    access = build_of("spark").context.access
    mirrored = type(access)(access.index, {"vllm": "https://127.0.0.1:9/x.git"}, offline=True)
    assert options_of(access=mirrored).source is None


@pytest.mark.parametrize("text", [None, "", "[]", '{"run": {"options": {"base": 3}}}'])
def test_last_options_come_from_the_receipt(tmp_path: Path, text: str | None) -> None:
    last = VariantOptions(engine="none", wheels="compile", source="git")
    build = build_of("cpu")
    path = tmp_path / "dist" / "cpu" / receipt.NAME
    whole = json.dumps(plain.as_json(receipt.of(build.context, [], 1.0, last)))
    write_file(path, (whole if text is None else text).encode())
    project: Any = type("Project", (), {"root": tmp_path, "access": build.context.access})
    found = setup.last_variant(project, "cpu", VariantOptions())
    assert found == (VariantOptions() if text is not None else last)
    chosen = VariantOptions(wheels="overlay", base="mine")
    assert setup.last_variant(project, "cpu", chosen).wheels == "overlay"
    assert setup.last_variant(project, "cpu", chosen).base == "mine"
