"""Links of all pages lead to a file that git has, and to a heading that it has."""

import re
import subprocess
import tomllib
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.support import ROOT

_FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\(([^()\s]+(?:\([^()\s]*\))?)\)")
_HEADING = re.compile(r"^#{1,6} +(.*?) *#*$", re.MULTILINE)
_NAMED = re.compile(r"\bdocs/[\w-]+\.(?:md|yaml|svg)\b")
_OUTSIDE = ("https://", "http://", "mailto:")


@cache
def tracked() -> frozenset[str]:
    """Return all files that a commit would have."""
    words = ("git", "ls-files", "--cached", "--others", "--exclude-standard")
    listed = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True)
    return frozenset(name for name in listed.stdout.splitlines() if (ROOT / name).exists())


PAGES = sorted(name for name in tracked() if name.endswith(".md") and name[:6] != "tests/")


@cache
def anchors(page: Path) -> frozenset[str]:
    """Return the names that a forge gives the headings of a page."""
    found: set[str] = set()
    times: Counter[str] = Counter()
    for title in _HEADING.findall(_FENCE.sub("", page.read_text())):
        plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", title)  # a link counts by its words
        name = re.sub(r"[^\w\- ]", "", plain.lower()).replace(" ", "-")
        found.add(f"{name}-{times[name]}" if times[name] else name)
        times[name] += 1
    return frozenset(found)


def broken(page: str, text: str) -> Iterator[str]:
    """Yield the links of a page that lead nowhere."""
    for link in _LINK.findall(_FENCE.sub("", text)):
        if link.startswith(_OUTSIDE):
            continue
        name, _, anchor = link.partition("#")
        target = (ROOT / page).parent / name if name else ROOT / page
        resolved = target.resolve()
        known = resolved.is_relative_to(ROOT) and (
            resolved.is_dir() or str(resolved.relative_to(ROOT)) in tracked()
        )
        if not known or (anchor and anchor not in anchors(resolved)):
            yield link


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    assert list(broken(page, (ROOT / page).read_text())) == []


def test_pages_that_code_names_are_there() -> None:
    """Errors, hints and comments send people to pages."""
    wanted = [name for name in tracked() if name.startswith(("sparkforge/", "scripts/"))]
    wanted += ["pins.yaml", "docker-compose.yml", "Dockerfile"]
    lost = {
        f"{name}: {page}"
        for name in wanted
        for page in _NAMED.findall((ROOT / name).read_text(errors="replace"))
        if page not in tracked()
    }
    assert not lost


def test_every_page_is_linked() -> None:
    linked = {
        ((ROOT / page).parent / link.partition("#")[0]).resolve()
        for page in PAGES
        for link in _LINK.findall(_FENCE.sub("", (ROOT / page).read_text()))
    }
    assert [page for page in PAGES if page[:5] == "docs/" and ROOT / page not in linked] == []


def listed(nav: object) -> Iterator[str]:
    """Yield the pages of a site's navigation."""
    for one in nav if isinstance(nav, list) else nav.values() if isinstance(nav, dict) else ():
        if isinstance(one, str):
            yield one
        else:
            yield from listed(one)


def test_the_site_has_every_page() -> None:
    config = tomllib.loads((ROOT / ".github/zensical.toml").read_text())
    wanted = {name.removeprefix("docs/") for name in PAGES if name.count("/") < 3}
    wanted = {name for name in wanted if not name.startswith(("benchmarks/", "."))}
    assert sorted(listed(config["project"]["nav"])) == sorted({*wanted, "index.md"} - {"README.md"})


def test_the_first_screen_is_one() -> None:
    """Why, one table, the call for a report, two quick starts: before any section."""
    before, _, _ = (ROOT / "README.md").read_text().partition("\n## ")
    assert before.count("\n") <= 40
    assert (before.count("\n|---"), before.count("```console")) == (1, 2)
