"""The whole build, as a user runs it: a fresh clone, build.py in a process of its own."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import requests

from build import ensure_environment
from sparkforge.runtime.servers import free_port
from tests.support import ONE_THREAD, PATIENCE_S, wait_for

if TYPE_CHECKING:
    from .mirror import Mirror
    from .small import Small

os.environ |= ONE_THREAD  # the smoke tests of an image and an environment have the user's

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
Build = Callable[..., Any]
PASSWORD = "the-password-of-this-test"  # of cosign's keys

# Groups in the order that workers take them: the longest first. A worker takes its next one when
# two tests are left, so a short one follows a group of one long test. test_accept and test_dev use
# the image that test_image bakes. A file that is named nowhere is a group, too.
_GROUPS = (
    ("test_spark", "test_upgrade", "test_arm64"),
    ("test_image", "test_cluster"),
    ("test_cpu_build",),
    ("test_accept",),
    ("test_compose",),
    ("test_dev",),
    ("test_compile",),
    ("test_publish", "test_signing", "test_snapshot"),
)


@pytest.hookimpl(tryfirst=True)  # before xdist reads the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Name the group of each test here: --dist loadgroup runs a group in one worker."""
    numbers = {stem: number for number, group in enumerate(_GROUPS) for stem in group}
    ours = [item for item in items if item.path.is_relative_to(HERE)]
    ours.sort(key=lambda item: numbers.get(item.path.stem, len(_GROUPS)))
    for item in ours:
        number = numbers.get(item.path.stem)
        item.add_marker(
            pytest.mark.xdist_group(item.path.stem if number is None else _GROUPS[number][0])
        )
    items[:] = [*(item for item in items if not item.path.is_relative_to(HERE)), *ours]


def pytest_configure(config: pytest.Config) -> None:
    """Refuse workers without groups: two of them would make the same image and network."""
    if config.getoption("dist", "no") not in ("no", "loadgroup"):
        raise pytest.UsageError("tests/e2e runs in several workers only with --dist loadgroup")


def on_base(base: str) -> list[str]:
    """Return build.py's words for a base image, and for a proxy that signs its own certificates."""
    ca = os.environ.get("SPARKFORGE_TEST_CA")
    return ["--base", base, *(["--ca-bundle", ca] if ca else [])]


def cpu_image(base: str) -> list[str]:
    """Return build.py's words for the cpu image."""
    return ["--target", "cpu", "--engine", "docker", *on_base(base)]


def one_thread(checkout: Path) -> None:
    """Give servers that Compose starts from a checkout one thread."""
    override = {"services": {"cpu": {"environment": ONE_THREAD}}}
    (checkout / "docker-compose.override.yml").write_text(json.dumps(override))


def clone(source: Path, folder: Path) -> None:
    """Clone a checkout's commit; what is not committed is not in it.

    The driver's environment comes along: tests/integration/test_bootstrap.py makes one.
    """
    subprocess.run(["git", "clone", "--quiet", source, folder], check=True)
    ensure_environment(ROOT / ".venv", ROOT / "requirements" / "driver.txt")
    shutil.copytree(ROOT / ".venv", folder / ".venv", symlinks=True)


@pytest.fixture(scope="session")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fresh clone of this checkout."""
    folder = tmp_path_factory.mktemp("clone") / "sparkforge"
    clone(ROOT, folder)
    return folder


def _with_json(arguments: tuple[str, ...]) -> list[str]:
    """Put --json before a --, behind which all is the server's."""
    at = arguments.index("--") if "--" in arguments else len(arguments)
    return [*arguments[:at], "--json", *arguments[at:]]


def runner(checkout: Path) -> Build:
    """Return what runs build.py of a clone with --json; it returns the document."""

    def run(*arguments: str, store: Path | None = None, **variables: str) -> Any:
        env = {**os.environ, **variables}
        if store is not None:
            env["SPARKFORGE_STORE"] = str(store)
        done = subprocess.run(
            [sys.executable, checkout / "build.py", *_with_json(arguments)],
            cwd=checkout,
            env=env,
            stdout=subprocess.PIPE,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"build.py {' '.join(arguments)}: exit {done.returncode}"
        return json.loads(done.stdout)

    return run


@pytest.fixture(scope="session")
def build(checkout: Path) -> Build:
    """Run build.py of the clone."""
    return runner(checkout)


@pytest.fixture(scope="session")
def base_image() -> str:
    """The base image that scripts/test.py --with-engine made; without an engine: skip."""
    name = os.environ.get("SPARKFORGE_TEST_BASE")
    if name is None:
        pytest.skip("no engine: scripts/test.py --with-engine (root) starts one")
    return name


@pytest.fixture(scope="session")
def small_spark(tmp_path_factory: pytest.TempPathFactory) -> Small:
    """A clone whose spark image is small; it is for arm64, and emulated."""
    from .small import Small  # it imports this file

    base = os.environ.get("SPARKFORGE_TEST_ARM64_BASE")
    if base is None or platform.machine() != "x86_64":
        pytest.skip("no emulated arm64: scripts/test.py --with-engine (root, amd64)")
    return Small.of(tmp_path_factory.mktemp("small"), base)


@pytest.fixture(scope="session")
def image(build: Build, base_image: str, checkout: Path) -> Any:
    """The cpu image, as the README makes it: what each item of the build gave, by label.

    Its receipt is kept as dist/image-receipt.json: builds without an image come after it. Servers
    that Compose starts later have one thread.
    """
    receipt = build(*cpu_image(base_image), "--force", "smoke")
    dist = checkout / "dist"
    shutil.copy(dist / "cpu" / "receipt.json", dist / "image-receipt.json")
    one_thread(checkout)
    return {one["label"]: one["outputs"] for one in receipt["items"]}


@pytest.fixture(scope="module")
def mirror(base_image: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mirror]:
    """An archive with snapshots, still without any, which builds can reach."""
    from .mirror import Mirror

    running = Mirror(tmp_path_factory.mktemp("mirror"))
    yield running
    running.close()


@pytest.fixture(scope="session")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with cosign.key, cosign.pub and another pair in other/."""
    if shutil.which("cosign") is None:
        pytest.skip("no cosign: scripts/test.py --with-engine (root) brings it")
    folder = tmp_path_factory.mktemp("keys")
    for place in (folder, folder / "other"):
        place.mkdir(exist_ok=True)
        subprocess.run(
            ["cosign", "generate-key-pair"],
            cwd=place,
            check=True,
            capture_output=True,
            env={**os.environ, "COSIGN_PASSWORD": PASSWORD},
        )
    return folder


def answers(url: str) -> bool:
    try:
        requests.get(url, timeout=PATIENCE_S)
    except requests.ConnectionError:
        return False
    return True


@contextmanager
def registry_with(folder: Path, **settings: Any) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """Run a registry of images on a loopback port; its files are in ``data`` of a folder."""
    port = free_port(0)
    document = {
        "version": 0.1,
        "http": {"addr": f"127.0.0.1:{port}"},
        "storage": {"filesystem": {"rootdirectory": str(folder / "data")}},
        **settings,
    }
    (folder / "config.yml").write_text(json.dumps(document))
    with (folder / "log").open("w") as log:
        child = subprocess.Popen(
            ["docker-registry", "serve", folder / "config.yml"], stdout=log, stderr=log
        )
    try:
        wait_for(lambda: answers(f"http://127.0.0.1:{port}/v2/"))
        yield f"127.0.0.1:{port}", child
    finally:
        child.terminate()
        child.wait()


@pytest.fixture(scope="session")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A registry of images on a loopback port."""
    if shutil.which("docker-registry") is None or "SPARKFORGE_TEST_BASE" not in os.environ:
        pytest.skip("no registry: scripts/test.py --with-engine (root) brings one")
    with registry_with(tmp_path_factory.mktemp("registry")) as (address, _):
        yield address
