"""What the image runs: the order of options decides which of two values counts."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

import pytest

ENTRYPOINT = Path(__file__).resolve().parents[2] / "scripts" / "entrypoint.py"


@pytest.fixture
def entrypoint() -> Any:
    spec = importlib.util.spec_from_file_location("entrypoint", ENTRYPOINT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ("--mxfp4-layers qkv,o", ["--mxfp4-layers", "qkv,o"]),
        ("--hf-overrides '{\"a\": 1}'", ["--hf-overrides", '{"a": 1}']),
        ("", []),
        (None, []),
    ],
)
def test_extra_arguments_stand_between_the_targets_and_the_callers(
    monkeypatch: pytest.MonkeyPatch, entrypoint: Any, extra: str | None, words: list[str]
) -> None:
    ran: list[list[str]] = []
    monkeypatch.setattr(os, "execvp", lambda file, command: ran.append(command))
    monkeypatch.setattr(entrypoint.shutil, "which", lambda name: "/usr/bin/c++")
    monkeypatch.setenv("SPARKFORGE_SERVE_ARGS", "--max-model-len 9")
    monkeypatch.delenv("SPARKFORGE_EXTRA_ARGS", raising=False)
    if extra is not None:
        monkeypatch.setenv("SPARKFORGE_EXTRA_ARGS", extra)
    monkeypatch.setenv("SPARKFORGE_MODEL", "some/model")
    for name in ("SPARKFORGE_MODEL_REVISION", "SPARKFORGE_MODEL_NAME", "SPARKFORGE_LISTEN_PORT"):
        monkeypatch.delenv(name, raising=False)
    entrypoint.main(["--max-num-seqs", "4"])
    assert ran == [
        ["vllm", "serve", "some/model", "--port", "8000", "--max-model-len", "9", *words,
         "--max-num-seqs", "4"],
    ]  # fmt: skip
