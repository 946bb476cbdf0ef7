"""Resolutions of conflicts, kept with the series so that every rebase resolves the same.

``patches/UPSTREAM/.rerere/ID-….diff``: git's rerere names a conflict by the hash of its two sides;
the file is the diff from the file with the conflict to the file without. git's own cache holds
whole files of upstream's; the diffs hold only a person's decisions.
"""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from sparkforge.core import git
from sparkforge.maintain.rebase.tree import Tree

FOLDER = ".rerere"
_NAME = "resolution"


def recall(folder: Path, tree: Tree) -> bool:
    """Resolve the conflicts of a tree by the diffs of a folder; returns whether none is left."""
    for identity, path in conflicts(tree).items():
        preimage, _ = _images(tree, identity)
        # git has just written the file's conflict there, in the form that the diff starts from
        for diff in sorted(folder.glob(f"{preimage.parent.name}-*.diff")):
            with _outside(tree) as place:
                shutil.copyfile(preimage, place / _NAME)
                words = ("apply", "--whitespace=nowarn", str(diff.resolve()))
                code, _ = git.attempt(place, *words, env=_alone(place))
                if code == 0:
                    (tree.path / path).write_bytes((place / _NAME).read_bytes())
                    tree.git("--literal-pathspecs", "add", "--", path)
                    break
    return not tree.unmerged()


def learned(tree: Tree, identities: Mapping[str, str]) -> dict[str, bytes]:
    """Return the resolutions in git's cache of some conflicts, as files to keep."""
    found = {}
    for identity in identities:
        images = _images(tree, identity)
        if not all(image.is_file() for image in images):
            continue
        with _outside(tree) as place:
            for side, image in zip("ab", images, strict=True):
                (place / side).mkdir()
                shutil.copyfile(image, place / side / _NAME)
            diff = ("diff", "--no-index", "--no-prefix", "--full-index", "--text")
            _, text = git.attempt(place, *diff, f"a/{_NAME}", f"b/{_NAME}", env=_alone(place))
        data = text.encode(errors="surrogateescape")
        # two files may have the same conflict and be resolved in two ways
        digest = hashlib.sha256(data).hexdigest()[:8]
        found[f"{identity.partition('.')[0]}-{digest}.diff"] = data
    return found


def conflicts(tree: Tree) -> dict[str, str]:
    """Return rerere's names of the conflicts of a tree, and the path of each."""
    listing = tree.path / ".git" / "MERGE_RR"
    if not listing.is_file():
        return {}
    entries = listing.read_text(errors="surrogateescape").split("\0")
    pairs = (entry.partition("\t") for entry in entries if entry)
    return {identity: path for identity, _, path in pairs}


def _images(tree: Tree, identity: str) -> tuple[Path, Path]:
    """Return the paths in git's cache of the file with a conflict, and without."""
    name, _, variant = identity.partition(".")
    suffix = f".{variant}" if variant else ""
    cache = tree.path / ".git" / "rr-cache" / name
    return cache / f"preimage{suffix}", cache / f"postimage{suffix}"


@contextmanager
def _outside(tree: Tree) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="rerere-", dir=tree.path.resolve().parent) as made:
        yield Path(made)


def _alone(folder: Path) -> dict[str, str]:
    """Return the variables that keep git from finding a repository around a folder."""
    return {"GIT_CEILING_DIRECTORIES": str(folder.parent)}
