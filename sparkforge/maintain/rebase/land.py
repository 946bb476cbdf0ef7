"""What a finished rebase changes in the checkout: all files at once."""

from __future__ import annotations

import re
import shutil
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from sparkforge.core import git, transaction
from sparkforge.core.errors import IntegrityError, PinsError, SeriesError
from sparkforge.maintain.rebase import companions, report
from sparkforge.maintain.rebase.companions import Companion
from sparkforge.maintain.rebase.drive import Rebase
from sparkforge.maintain.rebase.resolutions import Memory
from sparkforge.maintain.rebase.state import Leg, State
from sparkforge.maintain.rebase.verdicts import Verdict
from sparkforge.maintain.rebase.workspace import Workspace
from sparkforge.pins import edit, pins, yamlfile
from sparkforge.pins.pins import Pins, Recorded, Upstream
from sparkforge.pins.yamlfile import Where
from sparkforge.series import docs, lint, series
from sparkforge.series.series import Series


@dataclass(frozen=True)
class Landed:
    """What a rebase left behind.

    Attributes:
        report: the page about it.
        changed: files of the checkout that were written or removed.
        companions: what no longer agrees, and how to fix it.
    """

    report: Path
    changed: tuple[Path, ...]
    companions: tuple[Companion, ...]


def land(rebase: Rebase, state: State) -> Landed:
    """Write pins, series, patches, resolutions, changelog and report together.

    Raises:
        SeriesError, IntegrityError: what the moves gave is no sound series.
    """
    # from the first look at the checkout on: what an export wrote meanwhile would be undone
    with transaction.held(rebase.root):
        return _landed(rebase, state)


def _landed(rebase: Rebase, state: State) -> Landed:
    own = state.legs[0]
    rebase.check_unchanged()
    rebase.check_same(state)
    root = rebase.root
    files: dict[Path, bytes | None] = {}
    recorded: dict[str, Recorded | None] = {}
    chapters = []
    for leg in state.legs:
        fresh = _series(rebase, leg, files)
        recorded[leg.upstream] = _record(rebase, leg, fresh)
        chapters.append(report.Chapter(leg, _range_diff(rebase, leg)))
        memory = rebase.job.memory / leg.upstream
        for path in sorted(memory.glob("*")) if memory.is_dir() else ():
            files[root / "patches" / leg.upstream / Memory.FOLDER / path.name] = path.read_bytes()
    loaded = pins.load(rebase.pins_path)
    place = companions.Place(loaded, root, rebase.store, rebase.access)
    found = companions.disagreements(place, own.goal, own.new, own.old)
    found += companions.unknown(own.upstream, own.goal, state.stated, state.lacking)
    text = _pins_text(rebase.pins_path, loaded, state, recorded, found)
    files[rebase.pins_path] = text.encode()
    after = pins.parse(rebase.pins_path, text)
    files.update(_pages(rebase, after, state, files))
    page = root / "dist" / "rebase" / report.file_name(own)
    files[page] = report.page(state, chapters, found).encode()
    changed = {path: data for path, data in files.items() if _differs(path, data)}
    # the state goes with the change: who is killed behind it has nothing left to go on with
    transaction.change(root, {**changed, rebase.job.file: None})
    rebase.job.remove()
    kept = tuple(one for one in found if not one.values)
    return Landed(page, tuple(path for path in changed if path != page), kept)


def _differs(path: Path, data: bytes | None) -> bool:
    return (path.read_bytes() if path.is_file() else None) != data


# -- the series ----------------------------------------------------------------------------


def _series(rebase: Rebase, leg: Leg, files: dict[Path, bytes | None]) -> Series:
    """Add a leg's new patch files to what is written; returns them as a series set aside."""
    folder = rebase.root / "patches" / leg.upstream
    exported = dict(series.export(rebase.job.tree(leg), leg.new.commit, leg.head))
    for patch in rebase.series_of(leg.upstream).patches:
        files[folder / patch.name] = None
    files.update({folder / name: data for name, data in exported.items()})
    if exported or (folder / "series").exists():
        files[folder / "series"] = series.listing(folder, list(exported))
    aside = rebase.job.folder / "landing" / leg.upstream
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    for name, data in exported.items():
        (aside / name).write_bytes(data)
    (aside / "series").write_text("".join(f"{name}\n" for name in exported))
    fresh = series.read(aside)
    if problems := lint.lint(fresh, rebase.root, leg.goal.paths):
        raise SeriesError("\n".join(problems), "fix the message of that patch")
    return fresh


def _record(rebase: Rebase, leg: Leg, fresh: Series) -> Recorded | None:
    """Apply the new series from its files; what comes of it is what pins.yaml records."""
    if not fresh.patches:
        return None
    patched = series.apply(rebase.store, fresh, leg.new)
    tree = git.git(rebase.job.tree(leg), "rev-parse", f"{leg.head}^{{tree}}")
    if patched.tree != tree:
        msg = (
            f"{leg.upstream}: the new patches give tree {patched.tree}, but the rebase gave {tree}"
        )
        raise IntegrityError(msg, "this is a bug in sparkforge; please report it")
    return Recorded(commit=patched.commit, tree=patched.tree)


def _range_diff(rebase: Rebase, leg: Leg) -> str:
    if not leg.moves or leg.head == leg.new.commit:
        return "nothing is left of the series"  # git takes no empty range
    patched = series.apply(rebase.store, rebase.series_of(leg.upstream), leg.old)
    work = Workspace(rebase.job.tree(leg))
    return work.git(
        "range-diff",
        "--no-color",
        "--no-dual-color",
        f"{leg.old.commit}..{patched.commit}",
        f"{leg.new.commit}..{leg.head}",
    )


# -- pins.yaml -----------------------------------------------------------------------------


def _pins_text(
    path: Path,
    loaded: Pins,
    state: State,
    recorded: Mapping[str, Recorded | None],
    found: list[Companion],
) -> str:
    """Return pins.yaml with the new release in it; every other character stays."""
    text = path.read_bytes().decode()
    own = state.legs[0]
    values: dict[Where, str] = {("release", "counter"): str(loaded.release.counter + 1)}
    here: Where = ("upstreams", own.upstream)
    for key in ("tag", "version"):
        values[*here, key] = str(getattr(own.goal, key))
    for name, file in own.goal.files.items():
        for key in ("file", "sha256", "size"):
            values[*here, "files", name, key] = str(getattr(file, key))
    for one in found:
        values.update(one.values)
    try:
        text = yamlfile.replace_scalars(text, values)
    except KeyError as error:
        msg = f"{path.name}: {error.args[0]}: is written on more than one line"
        raise PinsError(msg, "write it KEY: VALUE on one line") from None
    text = edit.with_commit(path, text, own.upstream, own.goal.commit)
    for leg in state.legs:
        text = _with_record(path, text, loaded.upstream(leg.upstream), leg, recorded)
    return text


def _with_record(
    path: Path, text: str, upstream: Upstream, leg: Leg, recorded: Mapping[str, Recorded | None]
) -> str:
    value = recorded[leg.upstream]
    if value is None and not upstream.patched:
        return text
    fresh = {} if value is None else {leg.new.provider: value}
    return edit.with_record(path, text, leg.upstream, fresh)


# -- pages ---------------------------------------------------------------------------------


def _pages(
    rebase: Rebase, after: Pins, state: State, files: Mapping[Path, bytes | None]
) -> dict[Path, bytes]:
    root = rebase.root
    log_page = root / "CHANGELOG.md"
    text = log_page.read_text(encoding="utf-8") if log_page.exists() else "# Changelog\n"
    found = {log_page: changelog(text, state).encode()}
    page = root / "docs" / "patches.md"
    if page.exists():
        aside = {
            leg.upstream: series.read(rebase.job.folder / "landing" / leg.upstream)
            for leg in state.legs
        }
        every = [
            aside.get(name) or series.read(root / "patches" / name) for name in after.upstreams
        ]
        found[page] = docs.page(every, after.upstreams).encode()
    return found


def changelog(text: str, state: State) -> str:
    """Return the changelog with a line about a rebase at the end of its newest section."""
    own = state.legs[0]
    lines = [f"* {own.upstream} {own.pinned['tag']} → {own.goal.tag}: {_counts(state)}."]
    for leg in state.legs:
        for move in leg.moves:
            if move.commit is None:
                why = move.reason or "; ".join(move.detail)
                lines.append(
                    f"  * {leg.upstream}: dropped {move.patch.removesuffix('.patch')}"
                    f" ({move.verdict.value}): {why}"
                )
    sections = [match.start() for match in re.finditer(r"^## ", text, re.MULTILINE)]
    end = sections[1] if len(sections) > 1 else len(text)
    head, tail = text[:end].rstrip("\n"), text[end:]
    between = "\n" if sections and head.splitlines()[-1].startswith(("*", " ")) else "\n\n"
    return head + between + "\n".join(lines) + "\n" + (f"\n{tail}" if tail else "")


# verdicts that stop: what has become a commit all the same, a person made
_RESOLVED = (Verdict.CONFLICT, Verdict.TARGET_DELETED)


def _counts(state: State) -> str:
    counts = Counter(
        "dropped by hand"
        if move.reason is not None
        else "resolved by hand"
        if move.commit and move.verdict in _RESOLVED
        else move.verdict.value
        for leg in state.legs
        for move in leg.moves
    )
    shown = [f"{count} {kind}" for kind, count in counts.items()]
    return f"{sum(counts.values())} patches ({', '.join(shown)})" if counts else "no patches"
