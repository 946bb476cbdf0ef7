"""`build.py report`: the page of a made-up build, damaged input, and claims of docs/status.md."""

import html
import json
import re
from pathlib import Path

import pytest

from sparkforge.check import accept
from sparkforge.check import report as page
from sparkforge.cli.main import main
from sparkforge.core import plain
from sparkforge.core.errors import UsageError
from tests.support import ROOT, linked_checkout, sha256

WHEEL = b"a wheel"
NASTY = '<script>alert("x")</script> & `a|b`'


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout whose cpu target was built, as far as the page reads it."""
    folder = linked_checkout(tmp_path / "checkout")
    dist = folder / "dist" / "cpu"
    (dist / "accept").mkdir(parents=True)
    (dist / "a.whl").write_bytes(WHEEL)
    (dist / "b.whl").write_bytes(b"another one now")
    digests = {"a.whl": sha256(WHEEL), "b.whl": sha256(b"b"), "gone.whl": sha256(b"c")}
    item = {"stage": "wheels", "label": NASTY, "key": "f" * 64, "inputs": {}, "outputs": {}}
    smoke = {**item, "stage": "smoke", "label": "smoke"}
    times = {NASTY: {"state": "made", "seconds": 3.0}}
    receipt = {
        "schema": 1,
        "target": "cpu",
        "sparkforge": "9.9",
        "platform": "linux/amd64",
        "pins_sha256": sha256((ROOT / "pins.yaml").read_bytes()),
        "files": digests,
        "items": [item, smoke],
        "run": {"machine": "x86_64", "python": "3.11.7", "seconds": 12.4, "items": times},
    }
    (dist / "receipt.json").write_text(json.dumps(receipt))
    return folder


def report(checkout: Path) -> int:
    return main(["report", "--target", "cpu", "--pins", str(checkout / "pins.yaml")])


def accepted(state: str, seen: str) -> str:
    """Return a file of accept with one check."""
    row = accept.Checked("chat", state, 1.5, seen, "")
    whom = ("cpu", "9.9", "now", "http://127.0.0.1:1/v1", "m", 4096, "")
    return json.dumps(plain.as_json(accept.Report(*whom, state != "fail", {state: 1}, (row,))))


def test_page_shows_the_build_and_the_newest_results(checkout: Path) -> None:
    folder = checkout / "dist" / "cpu"
    for when, state in (("2026-11-22", "fail"), ("2026-11-23", "ok")):
        text = accepted(state, f"{when} {NASTY}")
        (folder / "accept" / f"accept-{when}.json").write_text(text)
    (folder / "bench" / "run").mkdir(parents=True)
    identity = {"machine": "aarch64; 20 cores", "model": "m", "profile": "", "tool": "t 1"}
    tests = {"identity": identity, "tests": {f"{NASTY} tok/s": [60.0, 61.0, 62.0]}, "short": {}}
    (folder / "bench" / "run" / "result.json").write_text(json.dumps(tests))
    with (checkout / "pins.yaml").open("a") as file:
        file.write("# changed\n")
    assert report(checkout) == 0
    page = (folder / "report.html").read_text()
    assert not re.search(r"<(script|link|iframe|img)|(src|href)=", page)
    text = " ".join(html.unescape(re.sub("<[^>]+>", " ", page)).split())
    # all of vLLM's patches, and none of FlashInfer's, which the cpu target has not
    patches = len((ROOT / "patches" / "vllm" / "series").read_text().split())
    for words in (
        f"a.whl {sha256(WHEEL)} unchanged",
        f"b.whl {sha256(b'b')} missing or changed",
        f"gone.whl {sha256(b'c')} missing or changed",
        "2 of 3 files missing or changed · smoke test passed · accept 1/1 · bench reliable",
        f"wheels {NASTY} made 3.0",
        f"{patches} patches of vllm",
        f"chat ok 2026-11-23 {NASTY}",
        f"{NASTY} tok/s 61.00 60.00 62.00 3",
        "aarch64; 20 cores · m · t 1",
        "pins.yaml has changed since this build",
    ):
        assert words in text
    assert "patches of flashinfer" not in text
    assert "2026-11-22" not in text


@pytest.mark.parametrize(
    ("state", "runs", "short", "verdict", "colour"),
    [
        ("ok", (60, 61, 62), {}, "accept 1/1 · bench reliable", ""),
        ("ok", (60, 61), {}, "accept 1/1 · bench unreliable: less than three runs", "open"),
        ("ok", (60, 61, 90), {}, "bench unreliable: runs differ by 49%", "open"),
        ("ok", (60, 61, 62), {"a": 3}, "bench unreliable: answers ended early", "open"),
        ("not checked", (60, 61, 62), {}, "accept 0/1, 1 not checked · bench reliable", ""),
        ("fail", (60, 61, 62), {}, "accept 0/1, 1 failed · bench reliable", "bad"),
        ("", (), {}, "smoke test passed · accept not run · bench not run", "open"),
    ],
)
def test_verdict(
    checkout: Path, state: str, runs: tuple[float, ...], short: object, verdict: str, colour: str
) -> None:
    folder = checkout / "dist" / "cpu"
    receipt = json.loads((folder / "receipt.json").read_text())
    (folder / "receipt.json").write_text(json.dumps({**receipt, "files": {}}))
    if state:
        (folder / "accept" / "accept-1.json").write_text(accepted(state, "x"))
    if runs:
        (folder / "bench" / "run").mkdir(parents=True)
        result = {"identity": {}, "tests": {"a: decode, tok/s": runs}, "short": short}
        (folder / "bench" / "run" / "result.json").write_text(json.dumps(result))
    assert report(checkout) == 0
    (banner,) = re.findall(
        r'<p class="banner ?(\w*)">(.*?)</p>', (folder / "report.html").read_text(), re.DOTALL
    )
    assert banner[0] == colour
    assert verdict in " ".join(banner[1].split())


@pytest.mark.parametrize(
    ("name", "content"),
    [("receipt.json", '{"schema": 1, "sparkforge": 1}'), ("accept/accept-1.json", "[1]")],
)
def test_damaged_input_is_one_error(
    checkout: Path, capsys: pytest.CaptureFixture[str], name: str, content: str
) -> None:
    (checkout / "dist" / "cpu" / name).write_text(content)
    assert report(checkout) == UsageError.exit_code
    error = capsys.readouterr().err
    assert name.partition("/")[0] in error
    assert "hint: " in error


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("- area: A\n  claims: [{claim: b, machines: {x86: maybe}, tested: c}]\n", "machines.x86"),
        ("a: [", ""),
    ],
    ids=["unknown level", "no YAML"],
)
def test_wrong_claim_is_named(tmp_path: Path, text: str, place: str) -> None:
    (tmp_path / "claims.yaml").write_text(text)
    with pytest.raises(UsageError) as caught:
        page.status(tmp_path / "status.md")
    assert "claims.yaml: " in caught.value.what
    assert place in caught.value.what
