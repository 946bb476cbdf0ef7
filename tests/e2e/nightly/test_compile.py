"""`--wheels compile` on a real engine: vLLM from its patched tree.

The checkout is a clone whose vLLM series ends with a patch of a native source: vLLM's own CMake
compiles that extension, the others are the release's.
"""

import hashlib
import json
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from sparkforge.core import git
from sparkforge.core.errors import BuildError
from sparkforge.series import series
from sparkforge.sources.project import store_of
from tests.results import context_of
from tests.support import BODY

from ..conftest import clone as clone_of
from ..conftest import on_base
from ..served import docker

FS_IO, FS_IO_SOURCE = "vllm/fs_io_C.abi3.so", "csrc/fs_io.cpp"
# another word in each run: the store would have the wheel of the last one
BEFORE, AFTER = "Filesystem helpers for KV offload", f"Filesystem helpers, ours {uuid4().hex[:8]}"
PATCH = "say-that-fs-io-is-ours.patch"
STORE = store_of(None).root


class Clone:
    """A checkout to compile in."""

    def __init__(self, root: Path, base: str) -> None:
        self.root = root
        self.words = ["--target", "cpu", "--wheels", "compile", *on_base(base)]

    def run(self, *words: str, code: int = 0) -> tuple[str, str]:
        done = subprocess.run(
            [sys.executable, self.root / "build.py", *words, *self.words],
            cwd=self.root,
            capture_output=True,
            text=True,
            timeout=900,
            check=False,
        )
        assert done.returncode == code, f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
        assert "Traceback" not in done.stdout + done.stderr
        return done.stdout, done.stderr

    def patch(self, before: str, after: str) -> None:
        """End vLLM's series with a patch of the native source."""
        folder = self.root / "patches" / "vllm"
        work = self.root.parent / "tree"
        shutil.rmtree(work, ignore_errors=True)
        names = [n for n in (folder / "series").read_text().splitlines() if n != PATCH]
        (folder / "series").write_text("\n".join(names) + "\n")
        (folder / PATCH).unlink(missing_ok=True)
        subprocess.run(
            [sys.executable, "build.py", "patches", "apply", "vllm", work],
            cwd=self.root,
            check=True,
            stdout=subprocess.DEVNULL,
        )
        source = work / FS_IO_SOURCE
        text = source.read_text()
        assert before in text
        source.write_text(text.replace(before, after))
        base = git.git(work, "rev-parse", "HEAD")
        author = {
            "GIT_AUTHOR_NAME": "Ada",
            "GIT_AUTHOR_EMAIL": "ada@example.invalid",
            "GIT_AUTHOR_DATE": "2026-11-21T00:00:00Z",
        }
        git.git(
            work,
            "commit",
            "-qaF",
            "-",
            stdin=f"Say that fs_io is ours\n\n{BODY}".encode(),
            env=author,
        )
        ((name, data),) = series.export(work, base, git.git(work, "rev-parse", "HEAD"))
        assert name == PATCH
        (folder / name).write_bytes(data)
        (folder / "series").write_text("\n".join([*names, name]) + "\n")

    def wheel(self, project: str) -> Path:
        (path,) = (self.root / "dist" / "cpu").glob(f"{project}-*.whl")
        return path


@pytest.fixture(scope="module")
def clone(checkout: Path, base_image: str, tmp_path_factory: pytest.TempPathFactory) -> Clone:
    root = tmp_path_factory.mktemp("compile") / "a clone"
    clone_of(checkout, root)
    pins = root / "pins.yaml"
    text = pins.read_text()
    head, cpu = text.split("\n  cpu:\n", 1)
    # this series is recorded nowhere
    head = "\n".join(
        ln for ln in head.splitlines() if not ln.strip().startswith("release: {commit")
    )
    head = head.replace("    patched:\n", "")
    pins.write_text(f"{head}\n  cpu:\n{cpu}")
    return Clone(root, base_image)


@pytest.fixture(scope="module")
def receipt(clone: Clone) -> Any:
    """The build of a series with a patched native file."""
    clone.patch(BEFORE, AFTER)
    out, _ = clone.run("--until", "wheels", "--json")
    return json.loads(out)


def item(receipt: Any, label: str) -> Any:
    return next(one for one in receipt["items"] if one["label"] == label)


def test_only_the_patched_native_file_is_compiled(receipt: Any, clone: Clone) -> None:
    found = item(receipt, "wheel vllm")["outputs"]["natives"]
    with zipfile.ZipFile(clone.wheel("vllm")) as ours, zipfile.ZipFile(release()) as theirs:
        assert found == {FS_IO: hashlib.sha256(ours.read(FS_IO)).hexdigest()}
        natives = [name for name in theirs.namelist() if name.endswith(".so")]
        assert [one for one in natives if ours.read(one) != theirs.read(one)] == [FS_IO]


def release() -> Path:
    """The pinned wheel; its native files are of an older release than its Python files here."""
    context = context_of("cpu")
    file = context.upstream("vllm").files[context.target.wheels["vllm"].files["linux/amd64"]]
    return STORE / "downloads" / file.sha256 / file.file


def test_compiled_extension_loads(
    receipt: Any, clone: Clone, base_image: str, tmp_path: Path
) -> None:
    """With the torch that it was compiled with."""
    with zipfile.ZipFile(clone.wheel("vllm")) as archive:
        (tmp_path / "fs_io_C.abi3.so").write_bytes(archive.read(FS_IO))
    key = item(receipt, "builder's wheelhouse")["key"]
    house = STORE / "artefacts" / "wheels" / key[:32] / "wheels"
    for wheel in house.glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(tmp_path)
    code = "import torch, fs_io_C as m; print(m.__doc__); print(m.batch_lookup(['/', '/nowhere']))"
    said = docker(
        *("run", "--rm", "--network", "none", "--volume", f"{tmp_path}:/so:ro"),
        *("--workdir", "/so", base_image, "python3", "-c", code),
    )
    assert said == f"{AFTER}\n[True, False]"


def test_python_is_of_the_patched_tree(receipt: Any, clone: Clone) -> None:
    out = item(receipt, "wheel vllm")["outputs"]
    touched = item(receipt, "series vllm")["outputs"]["touched"]
    in_wheel = {path for path in touched if path.startswith("vllm/")}
    assert in_wheel == set(out["replaced"] + out["added"])
    with zipfile.ZipFile(clone.wheel("vllm")) as ours:
        assert ours.read("vllm/_version.py").count(out["version"].encode()) == 1


def test_second_build_is_cached(receipt: Any, clone: Clone) -> None:
    out, _ = clone.run("--until", "wheels", "--json", "--dry-run")
    assert {step["state"] for step in json.loads(out)["plan"]} == {"in the store"}


def test_a_second_cold_build_gives_the_same_bytes(receipt: Any, clone: Clone) -> None:
    out, _ = clone.run("verify", "--until", "wheels", "--json")
    found = json.loads(out)
    assert found["same"]
    assert len(found["results"]) == len({"vllm", "plugin"})


def test_overlay_of_native_patch_is_refused(receipt: Any, clone: Clone) -> None:
    done = subprocess.run(
        [
            *(sys.executable, "build.py", "--target", "cpu", "--engine", "none"),
            *("--until", "wheels", "--wheels", "overlay"),
        ],
        cwd=clone.root,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == BuildError.exit_code
    assert PATCH in done.stderr
    assert "--wheels compile" in done.stderr


def test_failed_compile_shows_the_compilers_error(receipt: Any, clone: Clone) -> None:
    clone.patch("#include <errno.h>", "#include <errno.h>\nint broken = nonsense;")
    _, err = clone.run("--until", "wheels", code=BuildError.exit_code)
    assert "nonsense" in err
    assert "error:" in err
