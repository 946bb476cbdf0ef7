"""A work tree of the small project, and git in it as a developer runs it."""

import json
import os
import signal
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from sparkforge.cli import main
from tests.project import Project
from tests.support import BODY, EPOCH, write_files


@dataclass
class Tree:
    """A work tree, and git in it as a developer runs it."""

    project: Project
    path: Path
    told: pytest.CaptureFixture[str]

    def git(self, *args: str, stdin: bytes | None = None, check: bool = True) -> str:
        env = {
            **os.environ,
            "GIT_AUTHOR_NAME": "Ada",
            "GIT_AUTHOR_EMAIL": "ada@example.invalid",
            "GIT_COMMITTER_NAME": "Ada",
            "GIT_COMMITTER_EMAIL": "ada@example.invalid",
            "GIT_AUTHOR_DATE": f"{EPOCH} +0200",
            "GIT_EDITOR": "true",
        }
        done = subprocess.run(
            ["git", "-C", self.path, *args], env=env, input=stdin, check=False, capture_output=True
        )
        assert done.returncode == 0 or not check, done.stderr
        return done.stdout.decode(errors="surrogateescape").strip()

    def write(self, files: Mapping[str, bytes | None]) -> None:
        write_files(self.path, files)
        self.git("add", "--all", "--force")

    def commit(self, files: Mapping[str, bytes | None], subject: str, body: str = BODY) -> str:
        self.write(files)
        text = f"{subject}\n\n{body}".encode(errors="surrogateescape")
        self.git("commit", "--quiet", "--allow-empty", "--cleanup=verbatim", "-F", "-", stdin=text)
        return self.git("rev-parse", "HEAD")

    def amend(self, files: Mapping[str, bytes | None], *more: str) -> None:
        self.write(files)
        self.git("commit", "--quiet", "--amend", "--no-edit", "--cleanup=verbatim", *more)

    def run(self, *words: str, code: int = 0) -> tuple[str, str]:
        """Run one command in this process, which is faster than in one of its own."""
        self.told.readouterr()
        assert main.main(self.project.command(*words)[3:]) == code, self.told.readouterr()
        return self.told.readouterr()

    def export(self, *words: str) -> Any:
        out, _ = self.run("patches", "export", str(self.path), "--json", *words)
        return json.loads(out)

    def refused(self, fragment: str = "", *words: str, code: int = 6) -> None:
        """An export is refused and changes nothing."""
        before = snapshot(self.project.root)
        _, err = self.run("patches", "export", str(self.path), *words, code=code)
        assert fragment in err
        assert snapshot(self.project.root) == before


def snapshot(root: Path) -> dict[str, tuple[bytes, int]]:
    """Return content and date of every file of a checkout."""
    return {
        str(path.relative_to(root)): (path.read_bytes(), path.stat().st_mtime_ns)
        for path in root.rglob("*")
        if path.is_file() and ".sparkforge" not in path.parts
    }


def contents(root: Path) -> dict[str, bytes]:
    return {name: data for name, (data, _) in snapshot(root).items()}


@contextmanager
def work_tree(project: Project, folder: Path, told: pytest.CaptureFixture[str]) -> Iterator[Tree]:
    """Make a work tree of the project's series, which is recorded."""
    made = Tree(project, folder, told)
    before = {number: signal.getsignal(number) for number in main._ENDING}
    made.run("pins", "record")
    made.run("patches", "apply", "demo", str(made.path))
    yield made
    for number, handler in before.items():
        signal.signal(number, handler)
