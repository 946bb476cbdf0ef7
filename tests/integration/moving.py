"""An upstream with a next release, and the command that moves a series to it."""

import contextlib
import hashlib
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparkforge.cli import main
from sparkforge.pins.pins import load
from sparkforge.series import series
from tests.project import Project
from tests.support import BODY, add_project, make_sdist, make_wheel, sha256

STOPPED = 6
OLD, NEW = "1.0", "2.0"
COMMIT = "c0ffee" * 6 + "c0ff"
TEST = "tests/test_it.py::test_it"


def lines(word: str, count: int = 30) -> bytes:
    """Return a file of distinct lines, so that a diff knows where it is."""
    return b"".join(f"{word}_{i} = value_of_{word}({i})\n".encode() for i in range(count))


def with_line(data: bytes, number: int, text: bytes) -> bytes:
    """Return a file with one line replaced."""
    found = data.split(b"\n")
    found[number] = text
    return b"\n".join(found)


@dataclass
class Upstream:
    """The project's upstream, and what its next release is."""

    project: Project
    base: Mapping[str, bytes]

    @property
    def root(self) -> Path:
        return self.project.root

    def series(
        self, patches: Mapping[str, Mapping[str, bytes | None]], tests: Mapping[str, str] = {}
    ) -> None:
        """Write a series on 1.0: by subject, the files that each patch changes, and its test."""
        self.project.repo("checkout", "--quiet", "--detach", "v1.0")
        for subject, files in patches.items():
            body = BODY.replace(TEST, tests.get(subject, TEST))
            self.project.repo.commit(files, f"{subject}\n\n{body}")
        folder = self.project.patches
        for left in folder.glob("*.patch"):
            left.unlink()
        exported = series.export(self.project.repo.path, "v1.0", "HEAD")
        for name, data in exported:
            (folder / name).write_bytes(data)
        (folder / "series").write_text("# in this order\n" + "".join(f"{n}\n" for n, _ in exported))

    def begin_with(self, more: Mapping[str, bytes]) -> str:
        """Have these files in 1.0, too; returns its commit."""
        self.base = {**self.base, **more}
        repo = self.project.repo
        repo("checkout", "--quiet", "-B", "main", "v1.0")
        commit = repo.commit(more, "More files")
        repo("tag", "--force", "v1.0")
        demo = load(self.root / "pins.yaml").upstreams["demo"]
        self.project.edit_pins(str(demo.commit), commit)
        self.release({}, OLD)
        for file in demo.files.values():
            data = (self.root.parent / "release" / file.file).read_bytes()
            pinned = f"sha256: {file.sha256}, size: {file.size}"
            self.project.edit_pins(pinned, f"sha256: {sha256(data)}, size: {len(data)}")
        return commit

    def release(
        self,
        changes: Mapping[str, bytes | None],
        version: str = NEW,
        commit: str = COMMIT,
        requires: Sequence[str] = (),
    ) -> None:
        """Publish a release that differs from 1.0 by these files (None removes one).

        Args:
            commit: what it says that it was made of.
            requires: what its wheel declares.
        """
        files = {**self.base, **changes}
        stated = f"commit_id = 'g{commit}'\n".encode()
        whole = {name: data for name, data in files.items() if data is not None}
        whole["demo/_version.py"] = stated
        folder = self.project.root.parent / "release"
        inside = {name: data for name, data in whole.items() if name.startswith("demo/")}
        make_sdist(folder, "demo", version, whole)
        make_wheel(folder, "demo", version, inside, requires=requires)
        listed = {path.name: path.read_bytes() for path in sorted(folder.iterdir())}
        add_project(self.project.server, "demo", listed)

    def rebase(self, *words: str, code: int = 0) -> Any:
        """Run the command in this process; returns what --json prints."""
        places = ["--pins", str(self.root / "pins.yaml"), "--store", str(self.project.store)]
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            found = main.main(["rebase", *words, "--json", *places])
        text = out.getvalue()
        assert found == code, text
        return json.loads(text) if text else None


def files_of(root: Path) -> dict[str, str]:
    """Return the digest of every file that a rebase may change."""
    return {
        str(path.relative_to(root)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(root.rglob("*"))
        if path.is_file() and path.relative_to(root).parts[0] not in ("dist", ".git", ".sparkforge")
    }
