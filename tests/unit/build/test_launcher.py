"""The servers of a build: their command, and the unpatched release made of a patched image."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from sparkforge.build import launcher as module
from sparkforge.build.context import Serving
from sparkforge.build.launcher import Launcher, from_environment, of_release
from sparkforge.build.results import ImageResult, WheelResult
from sparkforge.core import git
from sparkforge.core.errors import UsageError
from sparkforge.runtime import servers
from sparkforge.sources.sources import Source
from sparkforge.store.store import Store
from tests.results import artefact, context_of


def source(store: Store, upstream: str, files: Mapping[str, bytes]) -> Source:
    """Make the source of an upstream."""
    repo = store.git_path(upstream)
    git.init_bare(repo)
    commit = git.import_tree(
        repo,
        [git.TreeFile(path, "100644", data) for path, data in files.items()],
        ref="refs/x",
        message="x",
        author="A <a@example.invalid>",
        epoch=0,
    )
    return Source(upstream, "release", repo, commit, commit, "here")


def test_files_come_from_their_own_place(store: Store, tmp_path: Path) -> None:
    """Of a folder in a folder, and of an upstream in another one's wheel.

    FlashInfer's csrc/ lies in its wheel below flashinfer/, which has a place of its own.
    triton-kernels lies in vLLM's wheel, below vllm/.
    """
    context = context_of("spark", store=store)
    sources = {
        "flashinfer": source(store, "flashinfer", {"flashinfer/a.py": b"1", "csrc/b.cu": b"2"}),
        "vllm": source(store, "vllm", {"vllm/a.py": b"3"}),
        "triton-kernels": source(
            store, "triton-kernels", {"python/triton_kernels/triton_kernels/a.py": b"4"}
        ),
    }
    replaced = {
        "flashinfer": ("flashinfer/a.py", "flashinfer/data/csrc/b.cu"),
        "vllm": ("vllm/a.py", "vllm/third_party/triton_kernels/a.py"),
        "triton": (),
    }
    wheels = {
        name: WheelResult("x.whl", "0" * 64, "1", replaced=members)
        for name, members in replaced.items()
    }
    assert wheels.keys() == context.target.wheels.keys()
    product = artefact(ImageResult("x:1", "sha256:1", None, "base", ()))
    launcher = Launcher(context, None, Serving(), product, None, wheels, sources, tmp_path)
    restored = launcher.originals(tmp_path)
    assert {member: path.read_text() for member, path in restored.items()} == {
        "flashinfer/a.py": "1",
        "flashinfer/data/csrc/b.cu": "2",
        "vllm/a.py": "3",
        "vllm/third_party/triton_kernels/a.py": "4",
    }


def started(
    monkeypatch: pytest.MonkeyPatch, folder: Path, options: list[str], *arguments: str
) -> list[str]:
    """Return what an environment's ``vllm serve`` gets after its address."""
    commands: list[list[str]] = []
    monkeypatch.setattr(servers, "from_command", lambda command, *_: commands.append(command))
    from_environment(folder, servers.Launch(folder, options, arguments), folder, folder)
    (command,) = commands
    assert command[command.index("serve") + 1] == str(folder)
    return command[command.index("--served-model-name") + 2 :]


def test_a_server_gets_our_options_as_the_plugin_reads_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    options = ["--moe-backend", "bf16_dequant", "--enforce-eager", "--mxfp4-layers", "qkv,o"]
    assert started(monkeypatch, tmp_path, options, "--moe-backend=auto", "--mxfp4_layers=o") == [
        "--enforce-eager",
        "--moe-backend=auto",
        '--additional-config={"sparkforge":{"mxfp4_layers":"o"}}',
    ]
    assert started(monkeypatch, tmp_path, of_release(options)) == ["--enforce-eager"]
    with pytest.raises(UsageError, match="no JSON object") as refusal:
        started(monkeypatch, tmp_path, options, "--additional-config", "[]")
    assert refusal.value.remedy


def test_only_the_release_is_told_to_load_no_plugin(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The image has our plugin in both."""
    told: list[Mapping[str, str]] = []

    def start(*given: Any) -> Any:
        told.append(given[2].variables)
        return nullcontext()

    monkeypatch.setattr(module, "start_server", start)
    monkeypatch.setattr(module, "make_tiny_gpt_oss", Path.mkdir)
    product = artefact(ImageResult("x:1", "sha256:1", None, "base", ()))
    context = context_of("cpu", store=store)
    launcher = Launcher(context, None, Serving(), product, None, {}, {}, tmp_path)
    for started in (launcher.patched, launcher.unpatched, launcher.unpatched_without_amx):
        with started():
            pass
    assert [variables.get("VLLM_PLUGINS") for variables in told] == [None, "", ""]
