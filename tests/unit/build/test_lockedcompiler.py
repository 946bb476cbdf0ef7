"""A compiler from the wheels of a lock, for the machine that compiles."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest

from sparkforge.build.stages.thirdparty import LockedCompiler
from sparkforge.core.errors import MachineError
from sparkforge.sources.download import Fetches
from sparkforge.store.store import Store
from tests.results import context_of
from tests.support import ROOT

NVCC = LockedCompiler(ROOT / "requirements" / "packs.txt", "nvidia-cuda-nvcc")


def test_a_machine_without_the_compiler_is_named(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = context_of("rtx", store=store)
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    assert NVCC.fetches(context) == Fetches()
    with pytest.raises(MachineError, match=r"packs\.txt has no compiler for riscv64") as error:
        NVCC.fill(context, tmp_path / "wheels")
    assert error.value.remedy == "build on a machine with x86_64 or aarch64 or arm64"


def test_each_machine_has_the_compiler_in_full_and_with_sizes(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = context_of("rtx", store=store)
    found = []
    for machine in ("x86_64", "aarch64"):
        monkeypatch.setattr(platform, "machine", lambda machine=machine: machine)
        found.append(NVCC.fetches(context))
        assert not found[-1].unknown
        assert len(found[-1].known) == 8
    assert found[0] != found[1]
    assert NVCC.version() == "13.0.88"
