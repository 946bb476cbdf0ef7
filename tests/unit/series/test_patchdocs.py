"""docs/patches.md: one row a patch, from its message; stale pages are refused."""

import shutil
from pathlib import Path

import pytest

from sparkforge.cli.main import main
from sparkforge.pins import pins
from sparkforge.series import exporting, series
from tests.support import ROOT


@pytest.fixture(scope="module")
def ours() -> list[series.Series]:
    loaded = pins.load(ROOT / "pins.yaml")
    return [series.read(ROOT / "patches" / name) for name in loaded.upstreams]


def test_every_patch_has_its_row_in_order(ours: list[series.Series]) -> None:
    upstreams = pins.load(ROOT / "pins.yaml").upstreams
    lines = exporting.markdown(ours, upstreams).splitlines()
    rows = [line for line in lines if line.startswith("| [")]
    patches = [(one.upstream, patch) for one in ours for patch in one.patches]
    for row, (upstream, patch) in zip(rows, patches, strict=True):
        assert f"../patches/{upstream}/{patch.name})" in row
        assert row.endswith(f"| `{patch.trailers['Test']}` |")
        assert f"| {patch.trailers['Risk']} |" in row
        # seven borders, none of them out of the patch's own words
        assert row.replace("\\|", "").count("|") == 7
    heads = [f"## {name} {upstream.tag}" for name, upstream in upstreams.items()]
    assert [line for line in lines if line.startswith("## ")] == heads


def test_a_stale_page_is_refused_and_mended(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for name in ("requirements", "kernels", "tests", "docker-compose.yml"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "pins.yaml").write_bytes((ROOT / "pins.yaml").read_bytes())
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    (tmp_path / "docs" / "patches.md").unlink()
    folder = tmp_path / "patches" / "vllm"
    shutil.copytree(ROOT / "patches" / "vllm", folder)
    here = ["docs", "--pins", str(tmp_path / "pins.yaml")]
    assert main([*here, "--check"]) == 3  # there is none yet
    assert main(here) == 0
    assert main([*here, "--check"]) == 0
    last = sorted(folder.glob("*.patch"))[-1]
    last.write_text(last.read_text().replace("\nRisk: ", "\nRisk: build"))
    capsys.readouterr()
    assert main([*here, "--check"]) == 3
    assert "hint: update it: build.py docs" in capsys.readouterr().err
