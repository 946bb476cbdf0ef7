"""What a build leaves for Compose."""

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from sparkforge.build import publish
from sparkforge.build.results import ImageResult
from tests.codecopy import CodeCopy


def written(root: Path) -> list[bytes]:
    """Return the lines of .env after a build with an image."""
    context: Any = SimpleNamespace(
        root=root,
        dist=root / "dist",
        target_name="cpu",
        target=SimpleNamespace(smoke=object(), model=None),
        platform="linux/amd64",
    )
    image = ImageResult("sparkforge/cpu:1", "sha256:1", None, "base", ())
    publish.for_compose(context, None, image)
    return (root / ".env").read_bytes().splitlines()


def test_the_users_own_lines_stay_as_they_are(tmp_path: Path) -> None:
    (tmp_path / ".env").write_bytes(b"# caf\xe9\nMINE=\xff\nCOMPOSE_PROFILES=spark\n")
    lines = written(tmp_path)
    assert lines[:3] == [b"# caf\xe9", b"MINE=\xff", b"COMPOSE_PROFILES=cpu"]
    assert written(tmp_path) == lines


def test_a_checkpoint_is_made_again_where_it_is_gone_or_its_code_differs(
    tmp_path: Path, code: CodeCopy
) -> None:
    weights = publish.tiny_model(tmp_path / "dist") / "model.safetensors"
    before = weights.read_bytes()

    def remade() -> bool:
        now = weights.stat().st_mtime_ns if weights.exists() else 0
        publish.tiny_model(tmp_path / "dist")
        assert weights.read_bytes() == before
        return weights.stat().st_mtime_ns != now

    assert not remade()
    (tmp_path / "dist" / ".tiny-model.code").write_text("[")
    assert remade()
    code.change("check/bench/benchy.py")
    assert not remade()
    code.change("checkpoints/tiny.py")
    assert remade()
    shutil.rmtree(weights.parent)
    assert remade()
