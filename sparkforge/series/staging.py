"""Candidates for a series: written to their own folder, checked and applied."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from sparkforge.core.errors import SeriesError
from sparkforge.pins.pins import Pins, Recorded
from sparkforge.pins.types import PathRule
from sparkforge.series import docs, lint, series
from sparkforge.series.series import Series
from sparkforge.sources.sources import Source
from sparkforge.store.store import Store


@dataclass(frozen=True)
class Rules:
    """Rules for the messages and paths of a series."""

    root: Path
    """The checkout with the tests in trailers."""
    paths: Sequence[PathRule]
    """Of the upstream in pins.yaml."""
    hint: str
    """For a problem."""


@dataclass(frozen=True)
class Staged:
    """A valid series in its own folder."""

    series: Series
    recorded: Recorded | None
    """Its record for pins.yaml; None: it is empty."""

    def files(self, folder: Path, old: Series) -> dict[Path, bytes | None]:
        """Return the files of a folder if this replaces its series; None: removed."""
        files: dict[Path, bytes | None] = dict.fromkeys(
            folder / patch.name for patch in old.patches
        )
        files |= {folder / patch.name: patch.path.read_bytes() for patch in self.series.patches}
        names = [patch.name for patch in self.series.patches]
        return files | {folder / "series": series.listing(folder, names) or None}


def stage(
    store: Store,
    folder: Path,
    files: Sequence[tuple[str, bytes]],
    source: Source,
    tree: str,
    *,
    shown: Path | None = None,
    rules: Rules | None = None,
) -> Staged:
    """Write a series to a folder, read, check and apply it.

    Args:
        folder: replaced; named as the upstream.
        shown: the folder that errors name instead.
        rules: None: not checked.

    Raises:
        SeriesError: a patch is malformed or does not apply, or the tree differs.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for name, data in files:
        (folder / name).write_bytes(data)
    (folder / "series").write_text("".join(f"{name}\n" for name, _ in files))
    with _naming(shown or folder, folder):
        fresh = series.read(folder)
        if rules and (problems := lint.lint(fresh, rules.root, rules.paths)):
            raise SeriesError("\n".join(problems), rules.hint)
        patched = series.apply(store, fresh, source)
        if patched.tree != tree:
            series.forget(store, fresh, source)
            msg = f"the patches give tree {patched.tree[:12]}, the commits have {tree[:12]}"
            raise SeriesError(
                msg, "a commit contains a change that a patch cannot express: remove it"
            )
    recorded = Recorded(commit=patched.commit, tree=patched.tree) if fresh.patches else None
    return Staged(fresh, recorded)


@contextmanager
def _naming(shown: Path, folder: Path) -> Iterator[None]:
    """Name one folder instead of another in errors."""
    try:
        yield
    except SeriesError as error:
        raise SeriesError(
            error.what.replace(str(folder), str(shown)),
            error.remedy.replace(str(folder), str(shown)),
        ) from None


def page(root: Path, pins: Pins, fresh: Mapping[str, Series]) -> dict[Path, bytes | None]:
    """Return docs/patches.md with some series replaced; nothing where the checkout has no page."""
    path = root / "docs" / "patches.md"
    if not path.is_file():
        return {}
    every = [fresh.get(name) or series.read(root / "patches" / name) for name in pins.upstreams]
    return {path: docs.page(every, pins.upstreams).encode()}
