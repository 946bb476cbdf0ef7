"""`build.py report`: the page of a made-up build, damaged input, and a browser's view of it."""

from __future__ import annotations

import base64
import json
import re
import shutil
import struct
import subprocess
import zlib
from collections.abc import Mapping
from dataclasses import asdict, replace
from html import escape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from sparkforge.cli.main import main
from sparkforge.core.errors import BenchError, UsageError
from sparkforge.inspect.accept import load
from sparkforge.inspect.accept.row import Row
from sparkforge.inspect.bench import pictures
from sparkforge.inspect.bench.result import save
from sparkforge.inspect.report import claims
from tests.support import ROOT, sha256
from tests.unit.inspect.bench_results import ONE, result, samples

WHEEL = b"a wheel"
DEEP = "[" * 100_000
NASTY = '<script>alert("x")</script> & `a|b`'
PROOFS: Mapping[str, Any] = {
    "nvcc": "13.0.88",
    "proofs": [
        {"label": NASTY, "ok": False, "control": False, "kernels": [{}, {}], "compile_seconds": 7.2}
    ],
}


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout whose cpu target was built, as far as the page reads it."""
    for name in ("pins.yaml", "patches", "requirements", "kernels", "docs/claims.yaml"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        (shutil.copytree if (ROOT / name).is_dir() else shutil.copyfile)(ROOT / name, path)
    dist = tmp_path / "dist" / "cpu"
    dist.mkdir(parents=True)
    (dist / "a.whl").write_bytes(WHEEL)
    (dist / "b.whl").write_bytes(b"another one now")
    (dist / "a.whl.sigstore.json").write_text("{}")
    digests = {"a.whl": sha256(WHEEL), "b.whl": sha256(b"b"), "gone.whl": sha256(b"c")}
    times = {
        "wheel": {"state": "made", "seconds": 3.0},
        NASTY: {"state": "in the store", "seconds": 6},
    }
    receipt = {
        "schema": 1,
        "target": "cpu",
        "sparkforge": "9.9",
        "platform": "linux/amd64",
        "pins_sha256": sha256((ROOT / "pins.yaml").read_bytes()),
        "files": digests,
        "items": [
            {
                "stage": "wheels",
                "label": label,
                "key": sha256(label.encode()),
                "inputs": {},
                "outputs": {},
            }
            for label in times
        ],
        "run": {"machine": "x86_64", "python": "3.11.7", "seconds": 12.4, "items": times},
    }
    parts = [
        {"name": NASTY, "type": "library", "version": "1"},
        {"name": "debian", "type": "operating-system"},
    ]
    (dist / "receipt.json").write_text(json.dumps(receipt))
    (dist / "sbom.cdx.json").write_text(json.dumps({"components": parts}))
    return tmp_path


def report(checkout: Path, *words: str) -> int:
    return main(["report", "--target", "cpu", "--pins", str(checkout / "pins.yaml"), *words])


def page_of(checkout: Path) -> str:
    assert report(checkout) == 0
    return (checkout / "dist" / "cpu" / "report.html").read_text()


class Reader(HTMLParser):
    """Collects elements, and the text of each row."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.rows: list[str] = []
        self._open = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag == "tr":
            self.rows.append("")
            self._open = True

    def handle_data(self, data: str) -> None:
        if self._open:
            self.rows[-1] += f"{data} "

    def handle_endtag(self, tag: str) -> None:
        if tag == "tr":
            self._open = False

    def row(self, start: str) -> str:
        """Return the row that begins with a text, its white space made plain."""
        (found,) = [
            row for row in (" ".join(row.split()) for row in self.rows) if row.startswith(start)
        ]
        return found


def test_the_page_shows_the_build(checkout: Path) -> None:
    (checkout / "dist" / "proofs").mkdir()
    (checkout / "dist" / "proofs" / "report.json").write_text(json.dumps(PROOFS))
    page = page_of(checkout)
    reader = Reader()
    reader.feed(page)
    assert reader.row("a.whl") == f"a.whl {sha256(WHEEL)} as built, signature beside it"
    assert reader.row("b.whl").endswith("changed")
    assert reader.row("gone.whl").endswith("missing")
    assert reader.row("wheels wheel") == f"wheels wheel {sha256(b'wheel')[:12]} made 3.0"
    assert re.search(r"width: 50\.0%.*width: 100\.0%", page, re.DOTALL)
    assert reader.row(f"{NASTY} 2 7 s failed")
    # all of vLLM's patches, and none of FlashInfer's, which the cpu target has not
    patches = len((ROOT / "patches" / "vllm" / "series").read_text().split())
    assert f"<b>{patches}</b><span>patches</span>" in page
    assert "flashinfer</h3>" not in page
    assert "1 × library, 1 × operating-system" in page
    assert "pins.yaml has changed" not in page


def test_the_page_shows_every_claim_by_machine(checkout: Path) -> None:
    reader = Reader()
    reader.feed(page := page_of(checkout))
    areas = claims.load(ROOT / "docs" / claims.NAME)
    every = [claim for area in areas for claim in area.claims]
    cells = [attributes.get("class", "") for tag, attributes in reader.tags if tag == "td"]
    for level in claims.LEVELS:
        wanted = sum(list(claim.machines.values()).count(level) for claim in every)
        assert cells.count(f"level {level.replace(' ', '-')}") == wanted
    assert "nobody has run it. " in " ".join(page.split())
    assert "`" not in "".join(reader.rows).replace("`a|b`", "")


def test_the_page_is_one_file_without_scripts(checkout: Path) -> None:
    page = page_of(checkout)
    assert escape(NASTY) in page.replace("&#34;", "&quot;")
    reader = Reader()
    reader.feed(page)
    assert {tag for tag, _ in reader.tags}.isdisjoint({"script", "link", "iframe"})
    for _, attributes in reader.tags:
        for name in ("src", "href"):
            if (value := attributes.get(name)) is not None:
                assert value.startswith(("#", "data:"))


def accepted(checkout: Path, when: str, *rows: Row) -> Path:
    """Write a result of accept, as far as the page reads it."""
    folder = checkout / "dist" / "cpu" / "accept"
    folder.mkdir(exist_ok=True)
    checks = [asdict(row) for row in rows]
    found = {"when": when, "url": "http://127.0.0.1:1/v1", "model": "m", "checks": checks}
    file = folder / f"accept-{when}.json"
    file.write_text(json.dumps(found))
    return file


def test_the_page_has_the_newest_result_of_accept(checkout: Path) -> None:
    accepted(checkout, "2026-11-22T160000Z", Row("chat", "ok", 1, "an old one"))
    row = Row("chat", "fail", 1.25, expected="content", got=NASTY, hint="x")
    accepted(checkout, "2026-11-23T160000Z", row)
    page = page_of(checkout)
    assert "Acceptance of m, 2026-11-23T160000Z" in page
    assert "2026-11-22T160000Z" not in page
    assert NASTY not in page
    assert '<td class="bad">fail</td>' in page
    reader = Reader()
    reader.feed(page)
    assert reader.row("chat fail") == f"chat fail 1.2 s expected content, got {NASTY}"
    accepted(checkout, "2026-11-24T160000Z").write_text("{}")
    assert report(checkout) == 2


def test_each_kind_of_accept_has_its_newest_result(checkout: Path) -> None:
    """A load after the checks takes nothing from the page."""
    chat, score = Row("chat", "ok", 1, "42"), Row("accuracy", "ok", 9, "0.6")
    left, fast = Row(load._LEFT.name, "ok", 2, "none"), Row("load: answers", "ok", 60, "many")
    accepted(checkout, "2026-11-20T160000Z", replace(chat, seen="41"), score)
    accepted(checkout, "2026-11-21T160000Z", replace(fast, seen="few"), left)
    accepted(checkout, "2026-11-22T160000Z", chat)
    accepted(checkout, "2026-11-23T160000Z", fast)
    page = page_of(checkout)
    heads = re.findall(r"<h3>(\w+ of m, [^<]*)</h3>", page)
    assert heads == [
        "Load of m, 2026-11-23T160000Z",
        "Acceptance of m, 2026-11-22T160000Z",
        "Accuracy of m, 2026-11-20T160000Z",
    ]
    reader = Reader()
    reader.feed(page)
    assert reader.row("chat ok") == "chat ok 1.0 s 42"
    assert reader.row("accuracy ok") == "accuracy ok 9.0 s 0.6"
    assert reader.row("load: answers") == "load: answers ok 60.0 s many"


def test_the_page_has_the_newest_run_of_bench(checkout: Path) -> None:
    sample = samples(ONE, [40.0, 42.0])
    for run, model in (("mine", "old"), ("20261123-quick/patched", NASTY)):
        found = result(sample, disturbed=("the GPU was hot",))
        found = replace(found, identity=replace(found.identity, model=model))
        save(found, folder := checkout / "dist" / "cpu" / "bench" / run)
        (folder / "decode.svg").write_text("<svg/>")
    page = page_of(checkout)
    assert page.count("Speed of") == 1
    assert f"Speed of {NASTY}" not in page
    assert "Disturbed: the GPU was hot." in page
    assert f"base64,{base64.b64encode(b'<svg/>').decode()}" in page
    reader = Reader()
    reader.feed(page)
    assert reader.row(sample.name).endswith("41.00 1.41 2")
    (folder / "result.json").write_text("{}")
    assert report(checkout) == BenchError.exit_code


def test_the_page_compares_the_two_sides_of_a_run(checkout: Path) -> None:
    folder = checkout / "dist" / "cpu" / "bench" / "20261123-quick"
    fields = {"session": "one", "rounds": 3}
    release, build = (
        result(samples(ONE, *[[speed + more] for more in (0.0, 0.1, 0.2)]), **fields)
        for speed in (20.0, 40.0)
    )
    release = replace(release, identity=replace(release.identity, origin="release"))
    save(release, folder / "unpatched")
    assert "B / A" not in page_of(checkout)
    save(build, folder / "patched")
    page = page_of(checkout)
    assert "dist/cpu/bench/20261123-quick. A: release; B: build.<" in page
    reader = Reader()
    reader.feed(page)
    (row,) = (one for one in reader.rows if "faster" in one)
    assert row.split()[-7:] == ["20.10", "40.10", "1.995", "1.983", "to", "2.007", "faster"]
    save(replace(build, disturbed=("the GPU was hot",)), folder / "patched")
    assert "not clean: no verdict counts" in page_of(checkout)
    save(replace(build, session="another"), folder / "patched")
    assert "B / A" not in page_of(checkout)


def test_a_build_of_other_pins_is_named(checkout: Path) -> None:
    path = checkout / "pins.yaml"
    path.write_text(f"{path.read_text()}# changed\n")
    assert "pins.yaml has changed since this build" in page_of(checkout)


@pytest.mark.parametrize(
    ("name", "content", "error"),
    [
        (
            "receipt.json",
            None,
            "receipt.json: no such file\n  hint: run build.py --target cpu first",
        ),
        ("receipt.json", "{", "hint: remove it, and run build.py --target cpu again"),
        ("receipt.json", DEEP, "values are nested too deeply"),
        ("receipt.json", '{"schema": 1, "sparkforge": 1}', "receipt.json: sparkforge: "),
        ("sbom.cdx.json", '{"components": {}}', "sbom.cdx.json: components: "),
        ("../proofs/report.json", "{}", "hint: remove it, and run build.py proofs again"),
        ("../../docs/claims.yaml", None, "restore it from git"),
        ("../../docs/claims.yaml", "- area: A\n  claims: []\n", "claims.yaml:2: [0].claims: "),
        ("../../docs/claims.yaml", "a: [", "claims.yaml:2: "),
    ],
    ids=range(9),
)
def test_damaged_input_is_one_error(
    checkout: Path, capsys: pytest.CaptureFixture[str], name: str, content: str | None, error: str
) -> None:
    path = checkout / "dist" / "cpu" / name
    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)
    if content is not None:
        path.write_text(content)
    assert report(checkout) == UsageError.exit_code
    assert error in capsys.readouterr().err


def test_a_level_that_does_not_exist_is_named(tmp_path: Path) -> None:
    text = "- area: A\n  claims:\n  - claim: b\n    machines: {x86: maybe}\n    tested: c\n"
    (tmp_path / claims.NAME).write_text(text)
    with pytest.raises(
        UsageError, match=r"claims\.yaml:4: \[0\]\.claims\[0\]\.machines\.x86: .*'proved'"
    ):
        claims.load(tmp_path / claims.NAME)


# -- in a browser ----------------------------------------------------------------

BROWSERS = ("chromium-headless-shell", "chromium", "google-chrome")
# Reads what a page looks like: texts of too little contrast, elements beyond the right edge, and
# tables of few columns that have to be moved to read them.
# Contrast is that of WCAG 2, level AA: 4.5 for all text.
CHECK = """
const page = document.querySelector("iframe").contentDocument;
const light = c => c.map(v => v / 255)
  .map(v => v <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4)
  .reduce((sum, v, i) => sum + v * [.2126, .7152, .0722][i], 0);
const parts = text => text.match(/[0-9.]+/g).map(Number);
function paper(node) {
  for (; node; node = node.parentElement) {
    const c = parts(page.defaultView.getComputedStyle(node).backgroundColor);
    if (c.length < 4 || c[3] > 0) return c.slice(0, 3);
  }
  return [255, 255, 255];
}
const pale = new Set(), wide = new Set();
let texts = 0;
for (const details of page.querySelectorAll("details")) details.open = true;
for (const box of page.querySelectorAll(".wide"))
  if (box.querySelectorAll("th").length <= 5 && box.scrollWidth > box.clientWidth)
    wide.add(box.querySelector("tr").innerText);
for (const node of page.body.querySelectorAll("*")) {
  const box = node.getBoundingClientRect();
  const edge = page.documentElement.clientWidth + 1;
  if (!node.closest(".wide, figure") && box.right > edge) wide.add(node.tagName);
  if (![...node.childNodes].some(child => child.nodeType == 3 && child.data.trim())) continue;
  texts++;
  const ink = light(parts(page.defaultView.getComputedStyle(node).color).slice(0, 3));
  const back = light(paper(node));
  const ratio = (Math.max(ink, back) + .05) / (Math.min(ink, back) + .05);
  if (ratio < 4.5) pale.add(`${node.tagName}.${node.className} ${ratio.toFixed(2)}`);
}
const result = {texts, pale: [...pale], wide: [...wide], paper: paper(page.body)};
document.querySelector("pre").textContent = JSON.stringify(result);
"""


@pytest.fixture
def shown(checkout: Path) -> Path:
    """A page with every kind of result."""
    folder = checkout / "dist" / "cpu" / "bench" / "20261123-quick"
    build = result(samples(ONE, [40.0, 40.1], [40.0, 40.2]), session="one", rounds=2)
    build = replace(build, identity=replace(build.identity, model="tiny"))
    release = result(samples(ONE, [20.0, 20.1], [20.0, 20.2]), session="one", rounds=2)
    release = replace(release, identity=replace(build.identity, origin="release"))
    for one in (release, replace(build, disturbed=("the GPU was hot",))):
        pictures.draw(one, folder / one.identity.origin)
        save(one, folder / one.identity.origin)
    long = f"expected {'tokens ' * 30}, got https://127.0.0.1/{'x' * 90}"
    rows = [Row("load: memory", "fail", 600, long), Row("accuracy", "not checked", 1, "no file")]
    accepted(checkout, "2026-11-23T160000Z", Row("chat", "ok", 1, "42"), *rows)
    page_of(checkout)
    return checkout / "dist" / "cpu" / "report.html"


def browse(profile: Path, scheme: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a browser without a window, in a colour scheme."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        pytest.skip("no Chromium on this machine")
    usual = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
    usual += [f"--user-data-dir={profile}", "--enable-logging=stderr"]
    usual += ["--blink-settings=preferredColorScheme=" + {"dark": "0", "light": "1"}[scheme]]
    done = subprocess.run(
        [browser, *usual, *words], check=True, capture_output=True, text=True, timeout=300
    )
    assert "CONSOLE" not in done.stderr
    return done


def pixels(picture: bytes) -> tuple[int, int, bytes, int]:
    """Return width, height, the first pixel (RGB), and how many filtered rows differ, of a PNG."""
    assert picture.startswith(b"\x89PNG\r\n\x1a\n")
    width, height, depth, colour = struct.unpack(">IIBB", picture[16:26])
    assert depth == 8
    data, at = b"", 8
    while at < len(picture):
        length, kind = struct.unpack(">I4s", picture[at : at + 8])
        data += picture[at + 8 : at + 8 + length] if kind == b"IDAT" else b""
        at += 12 + length
    raw = zlib.decompress(data)
    row = 1 + width * {2: 3, 6: 4}[colour]
    # the first pixel is itself with each of PNG's filters; of one colour, each row is like another
    rows = {raw[at : at + row] for at in range(row, len(raw), row)}
    return width, height, raw[1:4], len(rows)


@pytest.mark.parametrize("width", [360, 1280])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_browser_shows_it(shown: Path, tmp_path: Path, width: int, scheme: str) -> None:
    """At a phone's width and a desk's: nothing is cut off, no text is pale, no error."""
    around = tmp_path / "around.html"
    around.write_text(
        f'<!doctype html><iframe style="width: {width}px; height: 900px; border: 0"'
        f' srcdoc="{escape(shown.read_text())}"></iframe><pre></pre>'
        f"<script>onload = () => {{{CHECK}}}</script>"
    )
    done = browse(tmp_path / "profile", scheme, "--dump-dom", around.as_uri())
    found = json.loads(re.findall(r"<pre>(.*?)</pre>", done.stdout, re.DOTALL)[-1])
    assert found["texts"] > 300
    assert (found["pale"], found["wide"]) == ([], [])
    assert (sum(found["paper"]) < 384) == (scheme == "dark")

    picture = tmp_path / "page.png"
    words = (f"--screenshot={picture}", f"--window-size={width},900", "--hide-scrollbars")
    browse(tmp_path / "profile", scheme, *words, shown.as_uri())
    wide, high, corner, rows = pixels(picture.read_bytes())
    assert (wide, high) == (width, 900)
    assert list(corner) == found["paper"]
    assert rows > 200
