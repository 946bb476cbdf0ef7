"""`build.py report`: the page of a made-up build, damaged input, and claims of docs/status.md."""

from __future__ import annotations

import json
import shutil
from html.parser import HTMLParser
from pathlib import Path

import pytest

from sparkforge.check.report import claims
from sparkforge.cli.main import main
from sparkforge.core.errors import UsageError
from tests.support import ROOT, sha256

WHEEL = b"a wheel"
NASTY = '<script>alert("x")</script> & `a|b`'


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout whose cpu target was built, as far as the page reads it."""
    for name in ("pins.yaml", "patches", "requirements", "kernels"):
        path = tmp_path / name
        (shutil.copytree if (ROOT / name).is_dir() else shutil.copyfile)(ROOT / name, path)
    dist = tmp_path / "dist" / "cpu"
    (dist / "accept").mkdir(parents=True)
    (dist / "a.whl").write_bytes(WHEEL)
    (dist / "b.whl").write_bytes(b"another one now")
    digests = {"a.whl": sha256(WHEEL), "b.whl": sha256(b"b"), "gone.whl": sha256(b"c")}
    item = {"stage": "wheels", "label": NASTY, "key": "f" * 64, "inputs": {}, "outputs": {}}
    times = {NASTY: {"state": "made", "seconds": 3.0}}
    receipt = {
        "schema": 1,
        "target": "cpu",
        "sparkforge": "9.9",
        "platform": "linux/amd64",
        "pins_sha256": sha256((ROOT / "pins.yaml").read_bytes()),
        "files": digests,
        "items": [item],
        "run": {"machine": "x86_64", "python": "3.11.7", "seconds": 12.4, "items": times},
    }
    (dist / "receipt.json").write_text(json.dumps(receipt))
    sbom = {"components": [{"name": NASTY, "type": "library", "version": "1"}]}
    (dist / "sbom.cdx.json").write_text(json.dumps(sbom))
    return tmp_path


def report(checkout: Path) -> int:
    return main(["report", "--target", "cpu", "--pins", str(checkout / "pins.yaml")])


class Reader(HTMLParser):
    """Collects elements and text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.links: list[str | None] = []
        self.text = ""
        self.feed(page)
        self.text = " ".join(self.text.split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.links += [value for name, value in attrs if name in ("src", "href")]

    def handle_data(self, data: str) -> None:
        self.text += f" {data}"


def page_of(checkout: Path) -> Reader:
    assert report(checkout) == 0
    return Reader((checkout / "dist" / "cpu" / "report.html").read_text())


def test_page_shows_the_build(checkout: Path) -> None:
    page = page_of(checkout)
    assert f"a.whl {sha256(WHEEL)} unchanged" in page.text
    assert f"b.whl {sha256(b'b')} changed" in page.text
    assert f"gone.whl {sha256(b'c')} missing" in page.text
    assert "2 of 3 files missing or changed" in page.text
    assert f"wheels {NASTY} {'f' * 12} made 3.0" in page.text
    # all of vLLM's patches, and none of FlashInfer's, which the cpu target has not
    patches = len((ROOT / "patches" / "vllm" / "series").read_text().split())
    assert f"{patches} patches of vllm" in page.text
    assert "patches of flashinfer" not in page.text
    assert "1 components in the SBOM" in page.text
    assert "pins.yaml has changed" not in page.text
    assert page.tags.isdisjoint({"script", "link", "iframe", "img"})
    assert page.links == []


def test_page_has_the_newest_results(checkout: Path) -> None:
    folder = checkout / "dist" / "cpu"
    for when, state in (("2026-11-22", "fail"), ("2026-11-23", "ok")):
        (folder / "accept" / f"accept-{when}.json").write_text(
            json.dumps({"checks": [{"state": state}, {"state": "ok"}]})
        )
        (folder / "accept" / f"accept-{when}.md").write_text(f"accepted {when} {NASTY}")
    for side in ("patched", "unpatched"):
        (folder / "bench" / "run" / side).mkdir(parents=True)
        (folder / "bench" / "run" / side / "report.md").write_text(f"the speed of {side}")
    page = page_of(checkout)
    assert "accept: 2 ok" in page.text
    assert f"accepted 2026-11-23 {NASTY}" in page.text
    assert "2026-11-22" not in page.text
    assert "the speed of patched" in page.text
    assert "the speed of unpatched" in page.text


def test_changed_pins_are_named(checkout: Path) -> None:
    path = checkout / "pins.yaml"
    path.write_text(f"{path.read_text()}# changed\n")
    assert "pins.yaml has changed since this build" in page_of(checkout).text


@pytest.mark.parametrize(
    ("name", "content", "place"),
    [
        ("receipt.json", None, "receipt.json: "),
        ("receipt.json", "{", "receipt.json: "),
        ("receipt.json", "[" * 100_000, "receipt.json: "),
        ("receipt.json", '{"schema": 1, "sparkforge": 1}', "receipt.json: sparkforge: "),
        ("sbom.cdx.json", '{"components": {}}', "sbom.cdx.json: components: "),
        ("accept/accept-1.json", '{"checks": [1]}', "accept-1.json: checks.0"),
    ],
    ids=range(6),
)
def test_damaged_input_is_one_error(
    checkout: Path, capsys: pytest.CaptureFixture[str], name: str, content: str | None, place: str
) -> None:
    path = checkout / "dist" / "cpu" / name
    path.unlink(missing_ok=True)
    if content is not None:
        path.write_text(content)
    assert report(checkout) == UsageError.exit_code
    error = capsys.readouterr().err
    assert place in error
    assert "hint: " in error


@pytest.mark.parametrize(
    ("text", "place"),
    [
        (None, "claims.yaml"),
        ("- area: A\n  claims: []\n", "claims.yaml:2: [0].claims"),
        (
            "- area: A\n  claims:\n  - claim: b\n    machines: {x86: maybe}\n    tested: c\n",
            "claims.yaml:4: [0].claims[0].machines.x86",
        ),
        ("a: [", "claims.yaml:2: "),
    ],
    ids=["missing", "empty", "unknown level", "no YAML"],
)
def test_wrong_claim_is_named(tmp_path: Path, text: str | None, place: str) -> None:
    if text is not None:
        (tmp_path / "claims.yaml").write_text(text)
    with pytest.raises(UsageError) as caught:
        claims.page(tmp_path / "status.md")
    assert place in caught.value.what
