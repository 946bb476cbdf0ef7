"""Resolutions of conflicts, kept with the series so that every rebase resolves the same.

Two kinds, both small diffs under ``patches/UPSTREAM/.rerere/``:

``ID-….diff``
    git's rerere: a conflict by the hash of its two sides, and the diff from the file with the
    conflict to the file without. It also fits where the lines around differ.
``KEY.whole``
    the moved patch as a whole, by the patch and its conflicts. Written only if a person changed
    more than the files in conflict, or one of them was renamed or deleted. It counts where it
    applies exactly.

git's own cache holds whole files of upstream's; the diffs hold only a person's decisions.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from sparkforge.core import git
from sparkforge.maintain.rebase.workspace import Workspace
from sparkforge.series.patchfile import Patch

_NAME = "resolution"


@dataclass(frozen=True)
class Conflict:
    """A conflict in its original form; a state file keeps it."""

    key: str
    """Digest of the patch and its conflict."""
    files: tuple[str, ...]
    """In conflict."""
    others: str
    """Digest of all other files."""
    lines: tuple[str, ...]
    """rerere's names of the conflicts: complete if there is one for each file."""


class Memory:
    """A folder of remembered resolutions."""

    FOLDER: ClassVar[str] = ".rerere"

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def recall(self, work: Workspace, met: Conflict, head: str) -> bool:
        """Resolve the conflict that the workspace holds, if it was resolved before.

        Args:
            met: as ``conflict`` returns it.

        Returns:
            Whether nothing is left in conflict; if something is, the workspace is as a person
            should find it.
        """
        if not self.folder.is_dir():
            return False
        whole = self.folder / f"{met.key}.whole"
        if whole.is_file() and (tree := _applied(work, whole, head)) is not None:
            work.git("read-tree", "--reset", "-u", tree)
            return True
        for identity, path in _at_hand(work).items():
            resolved = self._resolved(work, identity)
            if resolved is not None:
                (work.path / path).write_bytes(resolved)
                work.git("--literal-pathspecs", "add", "--", path)
        return not work.unmerged()

    def _resolved(self, work: Workspace, identity: str) -> bytes | None:
        """Return a file without its conflict, where a remembered resolution fits."""
        preimage, _ = _images(work, identity)
        # git has just written the file's conflict there, in the form that the diff starts from
        for diff in sorted(self.folder.glob(f"{preimage.parent.name}-*.diff")):
            with work.temporary("recall") as folder:
                shutil.copyfile(preimage, folder / _NAME)
                code, _ = git.attempt(
                    folder,
                    "apply",
                    "--whitespace=nowarn",
                    str(diff.resolve()),
                    env=_nowhere(folder),
                )
                if code == 0:
                    return (folder / _NAME).read_bytes()
        return None

    def learned(
        self, work: Workspace, met: Conflict, head: str, commit: str
    ) -> Mapping[str, bytes]:
        """Return the files to keep of a conflict that a person resolved, by name.

        Call ``work.git("rerere")`` before, while the resolved files are there.
        """
        # where a person changed more than the files in conflict, their lines alone must not
        # resolve it elsewhere: the rest of the answer would silently be missing
        by_lines = len(met.lines) == len(met.files) > 0
        if by_lines and met.others == _digest_of_commit(work, commit, met.files):
            return _line_resolutions(work, met.lines)
        return {f"{met.key}.whole": work.diff(head, commit)}


def conflict(work: Workspace, patch: Patch) -> Conflict:
    """Describe the conflict that the workspace holds."""
    unmerged = work.unmerged()
    files = tuple(file.path for file in unmerged)
    at_hand = _at_hand(work)
    # the lines in conflict, where that is all; they are the same in the next release, too
    sides = sorted(f"{path} {identity}" for identity, path in at_hand.items())
    if len(at_hand) != len(files):
        sides = [f"{file.path} {sorted(file.blobs.items())}" for file in unmerged]
    text = "\n".join([patch.sha256, *sides])
    key = hashlib.sha256(text.encode(errors="surrogateescape"))
    listing = work.git("ls-files", "-s", "-z").split("\0")
    staged = (line.split("\t", 1) for line in listing if line)
    entries = [(path, meta.split(" ")[1]) for meta, path in staged if path not in files]
    return Conflict(key.hexdigest()[:40], files, _digest(entries), tuple(at_hand))


def _digest(entries: list[tuple[str, str]]) -> str:
    text = "\n".join(f"{path} {blob}" for path, blob in sorted(entries))
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()


def _digest_of_commit(work: Workspace, commit: str, but: tuple[str, ...]) -> str:
    listing = work.git("ls-tree", "-r", "-z", commit).split("\0")
    lines = (line.split("\t", 1) for line in listing if line)
    return _digest([(path, meta.split(" ")[2]) for meta, path in lines if path not in but])


def _at_hand(work: Workspace) -> dict[str, str]:
    """Return rerere's names of the conflicts at hand, and the path of each."""
    listing = work.path / ".git" / "MERGE_RR"
    if not listing.is_file():
        return {}
    entries = listing.read_text(errors="surrogateescape").split("\0")
    pairs = (entry.partition("\t") for entry in entries if entry)
    return {identity: path for identity, _, path in pairs}


def _line_resolutions(work: Workspace, identities: Sequence[str]) -> Mapping[str, bytes]:
    """Return the resolutions of these conflicts in git's cache, as diffs."""
    found = {}
    for identity in identities:
        preimage, postimage = _images(work, identity)
        if not (preimage.is_file() and postimage.is_file()):
            continue
        with work.temporary("learn") as folder:
            for side, image in (("a", preimage), ("b", postimage)):
                (folder / side).mkdir()
                shutil.copyfile(image, folder / side / _NAME)
            diff = ("diff", "--no-index", "--no-prefix", "--full-index", "--text")
            _, text = git.attempt(folder, *diff, f"a/{_NAME}", f"b/{_NAME}", env=_nowhere(folder))
        data = text.encode(errors="surrogateescape")
        # two files may meet the same conflict and be resolved in two ways
        digest = hashlib.sha256(data).hexdigest()[:8]
        found[f"{identity.partition('.')[0]}-{digest}.diff"] = data
    return found


def _images(work: Workspace, identity: str) -> tuple[Path, Path]:
    """Return the paths in git's cache of the file with a conflict, and without."""
    name, _, variant = identity.partition(".")
    suffix = f".{variant}" if variant else ""
    cache = work.path / ".git" / "rr-cache" / name
    return cache / f"preimage{suffix}", cache / f"postimage{suffix}"


def _nowhere(folder: Path) -> dict[str, str]:
    """Return the variables that keep git from finding a repository around a folder."""
    return {"GIT_CEILING_DIRECTORIES": str(folder.parent)}


def _applied(work: Workspace, diff: Path, head: str) -> str | None:
    """Return the tree of ``head`` with a diff applied; None where it does not fit."""
    with work.temporary("recall") as folder:
        env = {"GIT_INDEX_FILE": str(folder / "index")}
        work.git("read-tree", head, env=env)
        code, _ = git.attempt(
            work.path, "apply", "--cached", "--whitespace=nowarn", str(diff.resolve()), env=env
        )
        return work.git("write-tree", env=env) if code == 0 else None
