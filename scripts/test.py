#!/usr/bin/env python3
"""Run all checks: lint, types, unit, integration, patches, the whole build.

    python3 scripts/test.py                  # all that this machine can
    python3 scripts/test.py --fast           # lint, types, unit, integration: a minute or two
    python3 scripts/test.py --with-engine    # as root: a private container engine, too

Makes its own environment (.venv-dev, hash-locked). Runs every step even after a failure, and ends
with an error if one failed.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from build import ensure_environment  # noqa: E402

_BASE_IMAGE = "localhost/sparkforge/base:bookworm"
_ARM64_BASE = "localhost/sparkforge/base:bookworm-arm64"
_SHELL_SCRIPTS = [*sorted(str(path) for path in (ROOT / "scripts").glob("*.sh")), ".ci/run"]
# two workers: most tests wait for a process or a server; not more, since some fill 3 GB of memory.
# By file, or by the groups of a folder's conftest.py: tests that share fixtures stay in one worker.
_BY_FILE = ("-n", "2", "--dist", "loadfile")
# groups in the order of the tests, in which the longest come first
_BY_GROUP = ("-n", "2", "--dist", "loadgroup", "--no-loadscope-reorder")


class Steps:
    """Runs steps, remembers which failed and how long each took."""

    def __init__(self, env: dict[str, str]) -> None:
        self.env = env
        self.rows: list[tuple[str, bool, float]] = []

    def run(self, name: str, *command: str | Path) -> bool:
        """Run one step; returns whether it succeeded."""
        print(f"\n== {name}", flush=True)
        start = time.monotonic()
        code = subprocess.run(command, cwd=ROOT, env=self.env, check=False).returncode
        self.rows.append((name, code == 0, time.monotonic() - start))
        return code == 0

    def together(self, commands: Mapping[str, Sequence[str | Path]]) -> set[str]:
        """Run steps at once, which use a core each; returns the names of those that succeeded."""
        print(f"\n== {', '.join(commands)}", flush=True)
        start = time.monotonic()
        children = {
            name: subprocess.Popen(command, cwd=ROOT, env=self.env)
            for name, command in commands.items()
        }
        done = {name for name, child in children.items() if child.wait() == 0}
        took = time.monotonic() - start
        self.rows += [(name, name in done, took) for name in commands]
        return done

    def finish(self) -> int:
        """Print the table; returns the exit code."""
        print("\n== summary")
        for name, ok, seconds in self.rows:
            print(f"{'ok    ' if ok else 'FAILED'} {seconds:7.1f} s  {name}")
        return 0 if all(ok for _, ok, _ in self.rows) else 1


def lint(steps: Steps, bin_: Path) -> None:
    """Every linter; each is clean or the step fails."""
    python = bin_ / "python"
    # as modules: a script in bin names the folder that the environment was made in
    steps.run("ruff", python, "-m", "ruff", "check", ".")
    steps.run("ruff format", python, "-m", "ruff", "format", "--check", ".")
    steps.run("mypy", python, "-m", "mypy")
    steps.run("shellcheck", bin_ / "shellcheck", *_SHELL_SCRIPTS)
    steps.run("hadolint", bin_ / "hadolint", "Dockerfile", "Dockerfile.dev")
    build = (sys.executable, "build.py")
    steps.run("pins check", *build, "pins", "check")
    steps.run("docs/patches.md", *build, "patches", "docs", "--check")
    steps.run("docs/roofline.md", *build, "roofline", "--target", "spark", "--check")


def main() -> int:
    """Run the steps that the options name; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--fast", action="store_true", help="no download, no server")
    parser.add_argument("--with-engine", action="store_true", help="start a private engine (root)")
    options = parser.parse_args()
    python = ensure_environment(ROOT / ".venv-dev", ROOT / "requirements" / "dev.txt")
    bin_ = python.parent
    steps = Steps({**os.environ, "PATH": f"{bin_}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)})
    steps.env.pop("PYTHONDONTWRITEBYTECODE", None)  # byte code makes every start faster
    lint(steps, bin_)
    # a folder of our own: pytest's default is shared by all runs of a user, and it fails where an
    # earlier run left a file that it cannot delete (a mount, say)
    with tempfile.TemporaryDirectory(prefix="sparkforge-test-") as scratch:
        check(steps, options, (python, "-m", "pytest", "--basetemp", Path(scratch) / "pytest"))
    return steps.finish()


def check(steps: Steps, options: argparse.Namespace, pytest: tuple[str | Path, ...]) -> None:
    """Run the tests, by the command ``pytest``."""
    # in this order: the files that take longest come first, so that no worker ends alone with one
    steps.run("unit and integration", *pytest, *_BY_FILE, "--no-loadscope-reorder",
              "tests/integration", "tests/unit")  # fmt: skip
    if options.fast:
        return
    steps.run("patch lint and exact application", sys.executable, "build.py", "patches", "check")
    steps.run("patches", *pytest, *_BY_GROUP, "tests/patches")
    if shutil.which("nvcc"):
        steps.run("proofs, the smallest set", sys.executable, "build.py", "proofs", "--ci")
    else:
        print("\n== proofs: left out, nvcc (CUDA 13.0) is not on this machine")
    if not options.with_engine:
        steps.run("whole build", *pytest, *_BY_GROUP, "tests/e2e")
        return
    # before the engine starts: it looks once what runs here
    arm64 = steps.run("emulation of arm64", ROOT / "scripts" / "emulate.sh", "arm64")
    with tempfile.TemporaryDirectory(prefix="engine-") as folder:
        engine = ROOT / "scripts" / "engine.sh"
        started = subprocess.run(
            [engine, "start", folder], stdout=subprocess.PIPE, text=True, check=True
        )
        try:
            for line in started.stdout.splitlines():
                name, _, value = line.removeprefix("export ").partition("=")
                steps.env[name] = value
            steps.env["SPARKFORGE_TEST_BASE"] = _BASE_IMAGE
            make_base = ROOT / "scripts" / "make-base.sh"
            bases: dict[str, Sequence[str | Path]] = {"base image": (make_base, _BASE_IMAGE)}
            if arm64:
                bases["arm64 base"] = (make_base, "--arch", "arm64", _ARM64_BASE)
            made = steps.together(bases)
            if "arm64 base" in made:
                steps.env["SPARKFORGE_TEST_ARM64_BASE"] = _ARM64_BASE
            if "base image" in made:
                steps.run("whole build, with image", *pytest, *_BY_GROUP, "tests/e2e")
        finally:
            subprocess.run([engine, "stop", folder], check=True)


if __name__ == "__main__":
    sys.exit(main())
