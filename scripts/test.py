#!/usr/bin/env python3
"""Run all checks that this machine can: lint, types, unit, integration, patches, the whole build.

Makes its own environment (.venv-dev, hash-locked). Runs every step even after a failure.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from build import ensure_environment  # noqa: E402
from sparkforge.serving import memory  # noqa: E402

_BASE_IMAGE = "localhost/sparkforge/base:bookworm"
_DRIVER = ROOT / "tests" / "e2e" / "driver.py"
_NIGHTLY = "tests/e2e/nightly"  # what changes seldom and takes long: .github/workflows/nightly.yml
_ARM64_BASE = "localhost/sparkforge/base:bookworm-arm64"
_SHELL_SCRIPTS = [*sorted(str(path) for path in (ROOT / "scripts").glob("*.sh")), ".ci/run"]
# By file, or by the groups of a folder's conftest.py: tests that share fixtures stay in one worker.
_BY_FILE = ("--dist", "loadfile", "--no-loadscope-reorder")
_BY_GROUP = ("--dist", "loadgroup", "--no-loadscope-reorder")
# memory for a worker in each lane: some tests fill 3 GB
_WORKERS_GIB = 6.0
# no cache: two runs at once would write the same one
# short: CI keeps the end of what is printed, and there the names of the failed tests have to be
_PYTEST = ("--durations=15", "-p", "no:cacheprovider", "--force-short-summary")
# what needs no patch of vLLM
_STOCK = [
    *("stock", "plugin", "bf16_dequant", "mxfp4_layers", "decode_parts", "decode_kernels"),
    *("decode_half", "decode_rotary", "decode_row_major"),
]


class Steps:
    """Runs steps, remembers which failed and how long each took."""

    def __init__(self, env: dict[str, str]) -> None:
        self.env = env
        self.images: dict[str, str] = {}
        """What tests that make images need beside ``env``: the engine, the bases."""
        self.rows: list[tuple[str, bool, float]] = []
        self._apart = False
        self._printing = threading.Lock()

    def run(self, name: str, *command: str | Path, images: bool = False) -> bool:
        """Run one step, with what makes images if it does; returns whether it succeeded."""
        apart, start = self._apart, time.monotonic()
        with self._printing:
            print(f"\n-- {name}: started" if apart else f"\n== {name}", flush=True)
        done = subprocess.run(
            command,
            cwd=ROOT,
            env={**self.env, **(self.images if images else {})},
            check=False,
            stdout=subprocess.PIPE if apart else None,
            stderr=subprocess.STDOUT if apart else None,
        )
        ok = done.returncode == 0
        with self._printing:
            self.rows.append((name, ok, time.monotonic() - start))
            if apart:
                print(f"\n== {name}\n{done.stdout.decode(errors='replace')}", end="", flush=True)
        return ok

    def at_once(self, *lanes: Sequence[Callable[[], None]]) -> None:
        """Run lanes of steps, two at a time; what a step prints comes at its end."""
        self._apart = len(lanes) > 1
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda lane: [part() for part in lane], lanes))
        self._apart = False

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
    steps.run("generated pages", *build, "docs", "--check")


def main() -> int:
    """Run the steps that the options name; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    stock = "the plugin alone, with a release of vLLM (default: the newest)"
    parser.add_argument("--fast", action="store_true", help="lint, types, unit, integration")
    parser.add_argument(
        "--with-engine", action="store_true", help="and images, in an engine (root)"
    )
    parser.add_argument("--stock", nargs="?", const="", metavar="VERSION", help=stock)
    parser.add_argument("--lint", action="store_true", help="lint and types alone")
    parser.add_argument("--setup", action="store_true", help="only make the environment")
    parser.add_argument("files", nargs="*", metavar="FILE", help="these test files alone")
    options = parser.parse_args()
    python = ensure_environment(ROOT / ".venv-dev", ROOT / "requirements" / "dev.txt")
    bin_ = python.parent
    if options.setup:
        return 0
    steps = Steps({**os.environ, "PATH": f"{bin_}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)})
    steps.env.pop("PYTHONDONTWRITEBYTECODE", None)  # byte code makes every start faster
    # at least two: most tests wait for a process or a server
    room = int(memory.read().room / memory.GIB / _WORKERS_GIB)
    workers = max(2, min(len(os.sched_getaffinity(0)), room))
    # folders of our own: pytest's default is shared by all runs of a user, and it fails where an
    # earlier run left a file that it cannot delete (a mount, say)
    with tempfile.TemporaryDirectory(prefix="sparkforge-test-") as scratch, ExitStack() as stack:
        steps.env["PATH"] += "" if options.lint else haproxy(Path(scratch))

        def pytest(*words: str | Path, count: int = workers) -> tuple[str | Path, ...]:
            """Return a command that runs tests, in a folder of its own."""
            folder = tempfile.mkdtemp(dir=scratch)
            options = ("-n", str(count), "--basetemp", f"{folder}/pytest")
            return (python, "-m", "pytest", *_PYTEST, *options, *words)

        def plugin() -> None:
            folder, version = f"{scratch}/stock", [options.stock] if options.stock else []
            steps.env["SPARKFORGE_TEST_STOCK"] = folder
            if steps.run("stock", python, "-m", "tests.patches.stock", folder, *version):
                tests = [f"tests/patches/test_{name}.py" for name in _STOCK]
                steps.run("plugin", *pytest(*_BY_GROUP, *tests))

        def quick() -> None:
            lint(steps, bin_)
            # in this order: the files that take longest come first, so that no worker ends alone
            folders = ("tests/integration", "tests/unit")
            steps.run("unit and integration", *pytest(*_BY_FILE, *folders))

        def patches() -> None:
            check = (sys.executable, "build.py", "patches", "check")
            steps.run("patch lint and exact application", *check)
            steps.run("patches", *pytest(*_BY_GROUP, "tests/patches"))

        def builds() -> None:
            tests = options.files or ["tests/e2e", f"--ignore={_NIGHTLY}"]
            if not options.with_engine:
                steps.run("whole build", *pytest(*_BY_GROUP, *tests))
                return
            bases(steps, stack)
            if "SPARKFORGE_TEST_BASE" in steps.images:
                # One more where memory holds it: this is the longest step, and half of it waits for
                # health checks, the engine or an emulated process.
                words = pytest(*_BY_GROUP, *tests, count=max(workers, min(workers + 1, room)))
                steps.run("whole build, with image", *words, images=True)

        # Two lanes: most tests wait for a server or a container, and what one lane waits, the other
        # computes. The tests that fill most memory come first, when the patches' have not begun.
        if options.lint:
            lint(steps, bin_)
        elif options.files and options.with_engine:
            builds()
        elif options.files:
            steps.run("tests", *pytest(*_BY_FILE, *options.files))
        elif options.stock is not None:
            plugin()
        elif options.fast:
            steps.at_once((quick,))
        elif options.with_engine:
            steps.at_once((builds,), (quick, patches))
        else:
            steps.at_once((patches,), (quick, builds))
    return steps.finish()


def haproxy(folder: Path) -> str:
    """Return what PATH needs for a haproxy: where there is none, a folder with Debian's."""
    if shutil.which("haproxy", path=f"{os.environ['PATH']}:/usr/sbin"):
        return ":/usr/sbin"
    if subprocess.run([ROOT / "scripts" / "haproxy.sh", folder], check=False).returncode:
        print("\n== left out: tests with HAProxy, which this machine lacks, as said above")
        return ""
    return f":{folder}/bin"


def bases(steps: Steps, stack: ExitStack) -> None:
    """Start an engine that runs until ``stack`` is closed, and build the base of the images."""
    scripts = ROOT / "scripts"
    # before the engine starts: it looks once what runs here, and who gives containers a GPU
    arm64 = steps.run("emulation of arm64", scripts / "emulate.sh", "arm64")
    folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="engine-"))
    driver = Path(folder) / "driver"
    if arm64 and steps.run("made-up driver of a Spark", sys.executable, _DRIVER, driver):
        steps.images["SPARKFORGE_TEST_DRIVER"] = str(driver)
    stack.callback(lambda: subprocess.run([scripts / "engine.sh", "stop", folder], check=True))
    started = subprocess.run(
        [scripts / "engine.sh", "start", folder],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        env={**os.environ, "PATH": f"{driver / 'bin'}:{os.environ['PATH']}"},
    )
    for line in started.stdout.splitlines():
        name, _, value = line.removeprefix("export ").partition("=")
        steps.images[name] = value
    make = scripts / "make-base.sh"

    def base(variable: str, image: str, *words: str) -> None:
        if steps.run(f"base {image}", make, *words, image, images=True):
            steps.images[variable] = image

    with ThreadPoolExecutor(2) as pool:  # each waits for the mirror, then for the other's disk
        made = [pool.submit(base, "SPARKFORGE_TEST_BASE", _BASE_IMAGE)]
        if arm64:
            words = ("--arch", "arm64")
            made.append(pool.submit(base, "SPARKFORGE_TEST_ARM64_BASE", _ARM64_BASE, *words))
    for one in made:
        one.result()


if __name__ == "__main__":
    sys.exit(main())
