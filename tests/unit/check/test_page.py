"""`build.py report`: the page of a made-up build, damaged input, and claims of docs/status.md."""

from __future__ import annotations

import html
import json
import re
import shutil
from pathlib import Path

import pytest

from sparkforge.check import report as page
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
    return tmp_path


def report(checkout: Path) -> int:
    return main(["report", "--target", "cpu", "--pins", str(checkout / "pins.yaml")])


def text_of(checkout: Path) -> str:
    """Write the page; returns its text."""
    assert report(checkout) == 0
    page = (checkout / "dist" / "cpu" / "report.html").read_text()
    assert not re.search(r"<(script|link|iframe|img)|(src|href)=", page)
    return " ".join(html.unescape(re.sub("<[^>]+>", " ", page)).split())


def test_page_shows_the_build(checkout: Path) -> None:
    text = text_of(checkout)
    assert f"a.whl {sha256(WHEEL)} unchanged" in text
    assert f"b.whl {sha256(b'b')} changed" in text
    assert f"gone.whl {sha256(b'c')} missing" in text
    assert "2 of 3 files missing or changed" in text
    assert f"wheels {NASTY} {'f' * 12} made 3.0" in text
    # all of vLLM's patches, and none of FlashInfer's, which the cpu target has not
    patches = len((ROOT / "patches" / "vllm" / "series").read_text().split())
    assert f"{patches} patches of vllm" in text
    assert "patches of flashinfer" not in text
    assert "pins.yaml has changed" not in text


def test_page_has_the_newest_results(checkout: Path) -> None:
    folder = checkout / "dist" / "cpu"
    for when, state in (("2026-11-22", "fail"), ("2026-11-23", "ok")):
        row = {"name": "chat", "state": state, "seen": f"{when} {NASTY}"}
        (folder / "accept" / f"accept-{when}.json").write_text(
            json.dumps({"checks": [row], "counts": {state: 1}})
        )
    (folder / "bench" / "run").mkdir(parents=True)
    tests = {"tests": {NASTY: {"decode": [60.0, 61.0]}}}
    (folder / "bench" / "run" / "result.json").write_text(json.dumps(tests))
    text = text_of(checkout)
    assert "accept: 1 ok" in text
    assert f"chat ok 2026-11-23 {NASTY}" in text
    assert "2026-11-22" not in text
    assert f"{NASTY} decode 60.0 61.0" in text


def test_changed_pins_are_named(checkout: Path) -> None:
    path = checkout / "pins.yaml"
    path.write_text(f"{path.read_text()}# changed\n")
    assert "pins.yaml has changed since this build" in text_of(checkout)


@pytest.mark.parametrize(
    ("name", "content", "place"),
    [
        ("receipt.json", None, "receipt.json: "),
        ("receipt.json", '{"schema": 1, "sparkforge": 1}', "receipt.json: "),
        ("accept/accept-1.json", '{"checks": [1]}', "accept"),
    ],
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
        (None, ""),
        ("- area: A\n  claims: []\n", "claims"),
        ("- area: A\n  claims: [{claim: b, machines: {x86: maybe}, tested: c}]\n", "machines.x86"),
        ("a: [", ""),
    ],
    ids=["missing", "empty", "unknown level", "no YAML"],
)
def test_wrong_claim_is_named(tmp_path: Path, text: str | None, place: str) -> None:
    if text is not None:
        (tmp_path / "claims.yaml").write_text(text)
    with pytest.raises(UsageError) as caught:
        page.status(tmp_path / "status.md")
    assert "claims.yaml: " in caught.value.what
    assert place in caught.value.what
