"""Files that change together: what stands in the way, and what somebody tidied up in between."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sparkforge.core import transaction
from sparkforge.core.errors import StoreError


def test_a_folder_in_a_files_place_is_refused_before_anything_changes(tmp_path: Path) -> None:
    first = tmp_path / "first"
    first.write_text("old")
    (tmp_path / "page.md").mkdir()
    with pytest.raises(StoreError, match=r"page\.md: is a folder"), transaction.held(tmp_path):
        transaction.change(tmp_path, {first: b"new", tmp_path / "page.md": b"new"})
    transaction.finish(tmp_path)  # every command does
    assert first.read_text() == "old"


def test_a_file_in_a_folders_place_is_refused(tmp_path: Path) -> None:
    (tmp_path / "docs").write_text("")
    with pytest.raises(StoreError, match="docs: is not a folder"), transaction.held(tmp_path):
        transaction.change(tmp_path, {tmp_path / "docs" / "page.md": b"new"})
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / ".sparkforge").write_text("")
    with (
        pytest.raises(StoreError, match="sparkforge: is not a folder"),
        transaction.held(tmp_path / "other"),
    ):
        pass


def test_a_decided_change_finds_its_new_folder_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fresh = tmp_path / "patches" / ".rerere" / "a.diff"
    replace = Path.replace

    def killed(self: Path, target: Path) -> Path:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", killed)
    with pytest.raises(KeyboardInterrupt), transaction.held(tmp_path):
        transaction.change(tmp_path, {fresh: b"new"})
    monkeypatch.setattr(Path, "replace", replace)
    fresh.parent.rmdir()  # as `git clean -d` does
    transaction.finish(tmp_path)
    assert fresh.read_bytes() == b"new"


@pytest.mark.parametrize("name", ["../outside", "a/../../outside", "/outside"])
def test_a_plan_that_somebody_changed_removes_nothing_outside(tmp_path: Path, name: str) -> None:
    decided = tmp_path / "checkout" / ".sparkforge" / "change"
    decided.mkdir(parents=True)
    (tmp_path / "outside").write_text("mine")
    (decided / "plan.json").write_text(json.dumps([[name, False]]))
    with pytest.raises(StoreError, match="outside the checkout"):
        transaction.finish(tmp_path / "checkout")
    assert (tmp_path / "outside").exists()
