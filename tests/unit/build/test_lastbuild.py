"""What is known of the last build, and what is not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from sparkforge.build import lastbuild
from sparkforge.build.context import Context
from sparkforge.build.options import VariantOptions
from sparkforge.build.setup import pack_of
from sparkforge.pins.pins import SourcePlan
from sparkforge.runtime.engine import BaseImage
from tests.results import context_of


@pytest.fixture
def context(tmp_path: Path) -> Context:
    return context_of("spark", base=BaseImage("here:1", "sha256:1"), root=tmp_path)


def test_what_is_written_is_read(context: Context) -> None:
    assert lastbuild.read(context.root, "spark") == VariantOptions()
    lastbuild.write(context, image=True, engine="auto")
    assert lastbuild.read(context.root, "spark") == VariantOptions(base="here:1", source="release")
    assert lastbuild.read(context.root, "cpu") == VariantOptions()
    git = context.target.model_copy(update={"source": SourcePlan(provider="git")})
    compiled = replace(context, wheels="compile", target=git)
    lastbuild.write(compiled, image=False, engine="none")
    assert lastbuild.read(context.root, "spark") == VariantOptions(
        engine="none", wheels="compile", source="git"
    )


@pytest.mark.parametrize(
    ("pack", "option"), [(("default",), None), ((), "none"), (("all",), "all")]
)
def test_a_pack_that_is_not_the_target_s_is_kept(
    context: Context, pack: tuple[str, ...], option: str | None
) -> None:
    lastbuild.write(replace(context, pack=pack), image=False, engine="auto")
    found = lastbuild.read(context.root, "spark")
    assert found.pack == option
    assert pack_of(found, context.target) == pack


def test_sources_that_differ_have_no_option(context: Context) -> None:
    mirrored = replace(context.access, mirrors={"vllm": "https://127.0.0.1:9/x.git"})
    lastbuild.write(replace(context, access=mirrored), image=False, engine="auto")
    assert lastbuild.read(context.root, "spark").source is None


def test_a_file_that_says_the_same_is_not_written_again(context: Context) -> None:
    lastbuild.write(context, image=True, engine="auto")
    path = lastbuild.path_of(context.root, "spark")
    before = path.stat().st_ino
    lastbuild.write(context, image=True, engine="auto")
    assert path.stat().st_ino == before


@pytest.mark.parametrize(
    "text",
    [
        "",
        '{"base": "he',
        "[]",
        '{"base": "here:1"}',  # other fields, as of another version
        '{"engine": null, "base": 3, "wheels": null, "native": null, "source": null}',
        '{"engine": "auto", "base": 3, "wheels": null, "native": null, "source": null}',
    ],
)
def test_a_damaged_or_older_file_counts_as_none(context: Context, text: str) -> None:
    lastbuild.write(context, image=True, engine="auto")
    lastbuild.path_of(context.root, "spark").write_text(text)
    assert lastbuild.read(context.root, "spark") == VariantOptions()
