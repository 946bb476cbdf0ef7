"""The unpatched release, made of a patched image: the original files by their path in the wheel."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from sparkforge.build.launcher import Launcher
from sparkforge.build.results import ImageResult, WheelResult
from sparkforge.core import git
from sparkforge.sources.sources import Source
from sparkforge.store.store import Store
from tests.results import artefact, context_of


def test_files_of_a_folder_in_a_folder_come_from_their_own_place(
    store: Store, tmp_path: Path
) -> None:
    """FlashInfer's csrc/ lies in its wheel below flashinfer/, which has a place of its own."""
    repo = store.git_path("flashinfer")
    git.init_bare(repo)
    files = {"flashinfer/a.py": b"1\n", "csrc/b.cu": b"2\n"}
    commit = git.import_tree(
        repo,
        [git.TreeFile(path, "100644", data) for path, data in files.items()],
        ref="refs/x",
        message="x",
        author="A <a@example.invalid>",
        epoch=0,
    )
    context = context_of("spark", store=store)
    members = ["flashinfer/a.py", "flashinfer/data/csrc/b.cu"]
    wheels = {name: WheelResult("x.whl", "0" * 64, "1") for name in context.target.wheels}
    wheels["flashinfer"] = replace(wheels["flashinfer"], replaced=tuple(members))
    sources = {"flashinfer": Source("flashinfer", "release", repo, commit, commit, "here")}
    product = artefact(ImageResult("x:1", "sha256:1", None, "base", ()))
    launcher = Launcher(context, product, None, wheels, sources, tmp_path)
    restored = launcher.originals(tmp_path)
    assert {member: path.read_bytes() for member, path in restored.items()} == dict(
        zip(members, files.values(), strict=True)
    )
