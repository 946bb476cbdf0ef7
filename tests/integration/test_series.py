"""Series ↔ commits on real repositories: exact or refused, and the same for every user."""

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from sparkforge.core import git
from sparkforge.core.errors import IntegrityError, SeriesError
from sparkforge.pins import pins
from sparkforge.pins.pins import Recorded, Upstream
from sparkforge.series import lint, series
from sparkforge.series.series import Series
from sparkforge.sources.sources import Source
from sparkforge.store.store import Store
from tests.integration.test_export_settings import (
    ALONE,
    FUNCTIONS,
    TOGETHER,
    VARIABLES,
    write_hooks,
)
from tests.support import BODY, ROOT, Repo

TEXT = "".join(f"line {i}\n" for i in range(1, 41)).encode()
FILES: Mapping[str, bytes] = {
    "pkg/mod.py": TEXT,
    "pkg/crlf.py": TEXT.replace(b"\n", b"\r\n"),
    "run.sh": b"#!/bin/sh\n",
    "pkg/with space.py": TEXT,
}


@dataclass
class Workshop:
    """A pinned source, a working repository to make patches in, and a folder for them."""

    store: Store
    repo: Repo
    base: str
    patches: Path

    @property
    def source(self) -> Source:
        bare = self.store.git_path("demo")
        if not git.has_commit(bare, self.base):
            with self.store.lock("git-demo"):
                git.init_bare(bare)
                git.fetch_commit(bare, str(self.repo.path), self.base)
                git.git(bare, "update-ref", "refs/pins/x", self.base)
        tree = git.git(bare, "rev-parse", f"{self.base}^{{tree}}")
        return Source("demo", "release", bare, self.base, tree, "a test")

    def patch(self, subject: str, files: Mapping[str, bytes | None], body: str = BODY) -> Path:
        """Commit a change and export it behind the others; returns the patch file."""
        self.repo.commit(files, f"{subject}\n\n{body}")
        return self.exported()

    def exported(self) -> Path:
        name, data = series.export(self.repo.path, "HEAD~1", "HEAD")[0]
        (self.patches / name).write_bytes(data)
        with (self.patches / "series").open("a") as listing:
            listing.write(f"{name}\n")
        return self.patches / name

    def read(self) -> Series:
        return series.read(self.patches)


@pytest.fixture
def shop(tmp_path: Path, store: Store) -> Workshop:
    repo = Repo(tmp_path / "work")
    base = repo.commit(dict(FILES))
    patches = tmp_path / "patches" / "demo"
    patches.mkdir(parents=True)
    return Workshop(store, repo, base, patches)


def applied_as_worked(shop: Workshop) -> series.Patched:
    """Apply, twice; the tree must be that of the work."""
    applied = series.apply(shop.store, shop.read(), shop.source)
    for again in (False, True):
        assert series.apply(shop.store, shop.read(), shop.source, again=again) == applied
    assert applied.tree == shop.repo("rev-parse", "HEAD^{tree}")
    assert list((shop.store.root / "tmp").glob("*")) == []
    assert git.git(shop.source.repo, "worktree", "list", "--porcelain").count("worktree ") == 1
    return applied


def refused(shop: Workshop, fragment: str | None = None) -> None:
    """It is refused with exit code 6, at every attempt."""
    for _ in range(2):
        with pytest.raises(SeriesError, match=fragment) as caught:
            series.apply(shop.store, shop.read(), shop.source)
        assert caught.value.exit_code == 6
    assert list((shop.store.root / "tmp").glob("*")) == []


def edited(old: bytes, new: bytes, data: bytes = TEXT) -> bytes:
    assert data.count(old) == 1
    return data.replace(old, new)


TWENTY = edited(b"line 20\n", b"twenty\n")


# -- what applies ------------------------------------------------------------------


@pytest.mark.parametrize(
    "files",
    [
        {"pkg/mod.py": TWENTY},
        {"pkg/new.py": b"x = 1\n"},
        {"pkg/mod.py": None},
        {"pkg/mod.py": None, "pkg/moved.py": TEXT},
        {"pkg/crlf.py": FILES["pkg/crlf.py"].replace(b"line 3\r\n", b"line three\r\n")},
        {"pkg/mod.py": TEXT + b"no newline at the end"},
        {"pkg/mod.py": TEXT + b"trailing space \n\t \n\n\n"},
        {"pkg/with space.py": b"short\n", "a b/c d.py": b"new\n"},
        {"pkg/mod.py": TEXT + b"diff --git a/x b/x\n--- a/x\n+++ b/x\n@@ -1 +1 @@\n-- \nFrom me\n"},
    ],
)
def test_a_change_applies_as_it_was_made(shop: Workshop, files: Mapping[str, bytes | None]) -> None:
    path = shop.patch("Change some files of the package", files)
    patched = applied_as_worked(shop)
    assert patched.touched == dict.fromkeys(files, path.name)
    assert patched.commit != shop.base


def test_a_mode_alone_applies_where_its_file_is(shop: Workshop) -> None:
    first = shop.patch("Add the tool", {"tool": b"x\n"})
    (shop.repo.path / "tool").chmod(0o755)
    last = shop.patch("Make the tool executable", {})
    assert applied_as_worked(shop).touched == {"tool": last.name}
    first.unlink()
    (shop.patches / "series").write_text(f"{last.name}\n")
    refused(shop)


def test_a_module_may_become_a_package_but_not_get_one_beside_it(shop: Workshop) -> None:
    shop.patch("Make a package", {"pkg/mod.py": None, "pkg/mod/__init__.py": TEXT})
    applied_as_worked(shop)
    shop.patch("Add a module", {"pkg/mod.py": b"evil = 1\n"})
    refused(shop, r"demo: Python would import pkg/mod/__init__\.py or pkg/mod\.py, and one")


def test_patches_that_build_on_each_other_apply_in_their_order_alone(shop: Workshop) -> None:
    shop.patch("Change the twentieth line", {"pkg/mod.py": TWENTY})
    last = shop.patch("Change the next line", {"pkg/mod.py": TWENTY.replace(b"line 21", b"next")})
    patched = applied_as_worked(shop)
    assert patched.touched == {"pkg/mod.py": last.name}
    assert git.git(shop.source.repo, "rev-list", "--count", patched.commit) == "3"
    listing = shop.patches / "series"
    listing.write_text("".join(reversed(listing.read_text().splitlines(keepends=True))))
    refused(shop)


@pytest.mark.parametrize(
    ("change", "before"),
    [
        ({"pkg/mod.py": TWENTY}, {"pkg/mod.py": b"a new first line\n" + TEXT}),
        ({"pkg/mod.py": TWENTY}, {"pkg/mod.py": edited(b"line 17\n", b"seventeen\n")}),
        ({"pkg/mod.py": TWENTY}, {"pkg/mod.py": None}),
        ({"pkg/new.py": b"x\n"}, {"pkg/new.py": b"other\n"}),
    ],
    ids=["offset", "fuzz", "no file", "a file"],
)
def test_a_patch_of_another_tree_is_refused(
    shop: Workshop, change: Mapping[str, bytes | None], before: Mapping[str, bytes | None]
) -> None:
    shop.patch("Change the twentieth line", change)
    shop.repo("checkout", "--quiet", shop.base)
    shop.base = shop.repo.commit(before)
    refused(shop)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b"@@ -17,7 +17,7 @@ line 16", b"@@ -17,7 +17,7 @@"),
        (b"Subject: Change", b"Subject: [PATCH] Change"),
        (b"From " + b"0" * 40, b"From " + b"a" * 40),
        (b"\n\ndiff --git", b"\n---\n pkg/mod.py | 2 +-\n\ndiff --git"),
        (b"@@ -17,7 +17,7 @@", b"@@ -18,7 +18,7 @@"),
        (b"+twenty", b"+hacked"),
    ],
)
def test_a_patch_in_other_than_canonical_form_is_refused(
    shop: Workshop, old: bytes, new: bytes
) -> None:
    path = shop.patch("Change a line", {"pkg/mod.py": TWENTY})
    data = path.read_bytes()
    assert data.count(old) == 1
    path.write_bytes(data.replace(old, new))
    refused(shop)


# -- the same for every user -------------------------------------------------------------


def as_user(
    shop: Workshop, name: str, env: Mapping[str, str], monkeypatch: pytest.MonkeyPatch
) -> series.Patched:
    """Apply and export with another user's store and variables."""
    for key, value in env.items():
        monkeypatch.setenv(key, value)
    git.unbind()
    user = replace(shop, store=Store(shop.store.root.parent / name))
    applied = series.apply(user.store, user.read(), user.source)
    exported = series.export(user.source.repo, shop.base, applied.commit)
    assert [data for _, data in exported] == [
        patch.path.read_bytes() for patch in shop.read().patches
    ]
    return applied


def test_a_hostile_user_gets_the_same_commit_and_tree(
    shop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shop.base = shop.repo.commit({"pkg/long.py": FUNCTIONS})
    shop.patch(
        "Change some lines of the \u00fcber package",
        {
            "pkg/long.py": FUNCTIONS.replace(
                b"def f4():\n    x = 1\n    x = 1\n    x = 1\n    x = 1\n",
                b"def f4():\n    x = 1\n    x = 1\n    x = 1\n    x = 2\n",
            ),
            "pkg/crlf.py": FILES["pkg/crlf.py"].replace(b"line 3\r\n", b"line three\r\n"),
            "pkg/ws.py": b"x \n\t\n",
        },
    )
    plain = as_user(shop, "plain", {}, monkeypatch)

    home = tmp_path / "hostile"
    mark = tmp_path / "hook-ran"
    for folder in (home / "hooks", home / "template" / "hooks"):
        write_hooks(folder, mark)
    (home / ".config" / "git").mkdir(parents=True)
    attributes = home / ".config" / "git" / "attributes"
    attributes.write_text("* text eol=crlf whitespace=-all\n*.py diff=evil filter=evil\n")
    config = str(home / ".gitconfig")
    evil = "filter.evil.clean=false filter.evil.smudge=false filter.evil.required=true"
    for setting in f"{ALONE} {TOGETHER} {evil} init.templateDir={home}/template".split():
        key, _, value = setting.partition("=")
        value = {"ATTRIBUTES": str(attributes), "HOOKS": f"{home}/hooks"}.get(value, value)
        shop.repo("config", "--file", config, key, value)
    env = {**VARIABLES, "HOME": str(home), "XDG_CONFIG_HOME": str(home / ".config")}
    env["GIT_TEMPLATE_DIR"] = f"{home}/template"
    hostile = as_user(shop, "hostile-store", env, monkeypatch)
    assert (hostile.commit, hostile.tree) == (plain.commit, plain.tree)
    assert not mark.exists()


def test_what_a_killed_apply_left_does_not_stop_the_next(shop: Workshop) -> None:
    shop.patch("Change a line", {"pkg/mod.py": TWENTY})
    add = ("worktree", "add", "--quiet", "--no-checkout", "--detach")
    with shop.store.temporary("series") as work:
        git.git(shop.source.repo, *add, str(work / "tree"), shop.base)
    applied_as_worked(shop)


# -- exports and records -------------------------------------------------------------------


def test_authors_and_dates_are_the_patchs_own(shop: Workshop) -> None:
    shop.repo.write({"pkg/new.py": b"x\n"})
    shop.repo("add", "--all")
    shop.repo(
        *("commit", "--quiet", "--author", "J\u00fcrgen \u00dc <j@example.invalid>"),
        *("--date", "1600000000 -0330", "-m", f"Add a module\n\n{BODY}"),
    )
    shop.exported()
    applied = series.apply(shop.store, shop.read(), shop.source)
    show = git.git(
        shop.source.repo, "show", "-s", "--date=raw", "--format=%an|%ae|%ad|%cn|%cd", applied.commit
    )
    assert show == (
        "J\u00fcrgen \u00dc|j@example.invalid|1600000000 -0330|sparkforge|1600000000 -0330"
    )
    assert shop.read().patches[0].author == "J\u00fcrgen \u00dc <j@example.invalid>"


def test_a_record_that_differs_is_refused(shop: Workshop) -> None:
    shop.patch("Change a line", {"pkg/mod.py": TWENTY})
    patched = series.apply(shop.store, shop.read(), shop.source)
    right = {"commit": patched.commit, "tree": patched.tree}
    for more, fits in (({}, True), ({"tree": "1" * 40}, False), ({"commit": "1" * 40}, False)):
        record = {shop.source.provider: Recorded.model_validate({**right, **more})}
        upstream = Upstream.model_construct(patched=record)
        with nullcontext() if fits else pytest.raises(IntegrityError):
            series.apply_recorded(shop.store, shop.read(), shop.source, upstream)
    empty = Series("demo", shop.patches)
    with pytest.raises(IntegrityError):
        series.apply_recorded(shop.store, empty, shop.source, upstream)


def test_the_real_series_is_read_and_clean() -> None:
    upstreams = pins.load(ROOT / "pins.yaml").upstreams
    for folder in (ROOT / "patches").iterdir():
        if folder.is_dir():
            read = series.read(folder)
            assert lint.lint(read, ROOT, upstreams[folder.name].paths) == []
