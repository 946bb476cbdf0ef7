"""What a build leaves for Compose."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sparkforge import publish


def written(root: Path) -> list[bytes]:
    """Return the lines of .env after a build with an image."""
    context: Any = SimpleNamespace(
        root=root, target_name="cpu", target=SimpleNamespace(smoke=object())
    )
    image: Any = SimpleNamespace(outputs={"tag": "sparkforge/cpu:1"})
    publish.write_env(context, image, root / "dist")
    return (root / ".env").read_bytes().splitlines()


# each was read by Docker Compose 2.26, which gave the folder back
@pytest.mark.parametrize(
    ("name", "start", "end"),
    [
        ("plain-1.0", b"/", b"/plain-1.0/dist/tiny-model"),
        ("my $dir #1", b"'/", b"/my $dir #1/dist/tiny-model'"),
        ("it's", b"'/", b"/it\\'s/dist/tiny-model'"),
    ],
)
def test_the_models_folder_is_what_compose_reads(
    tmp_path: Path, name: str, start: bytes, end: bytes
) -> None:
    (tmp_path / name).mkdir()
    line = written(tmp_path / name)[-1]
    assert line.startswith(b"SPARKFORGE_MODEL_DIR=" + start)
    assert line.endswith(end)


def test_the_users_own_lines_stay_as_they_are(tmp_path: Path) -> None:
    (tmp_path / ".env").write_bytes(b"# caf\xe9\nMINE=\xff\nCOMPOSE_PROFILES=spark\n")
    lines = written(tmp_path)
    assert lines[:3] == [b"# caf\xe9", b"MINE=\xff", b"COMPOSE_PROFILES=cpu"]
    assert written(tmp_path) == lines
