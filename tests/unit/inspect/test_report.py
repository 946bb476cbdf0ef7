"""`doctor --report`: what is collected on a stand-in for a machine, and what is left out."""

from __future__ import annotations

import gzip
import json
import re
import tarfile
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from sparkforge.cli import main
from sparkforge.inspect.doctor import chats, reporting
from sparkforge.inspect.doctor.masking import mask_of
from sparkforge.inspect.doctor.parts import Part
from sparkforge.inspect.doctor.reading import Readings
from sparkforge.runtime import client
from tests.support import linked_checkout

KEY = "0123456789abcdef-our-key"
TOKEN = "hf_" + "a1B2" * 8
SERIAL = "1423924012345"
DOCKER = f"""#!/bin/sh
case "$1 $2" in
"ps --all") printf 'c0ffee\\trunning\\tsparkforge/cpu:1\\n';;
"image inspect") echo '[{{"Id": "sha256:ab", "RepoTags": ["sparkforge/cpu:1"], "Size": 7}}]';;
"inspect c0ffee") echo '[{{"RestartCount": 2, "State": {{"Health": {{"Status": "healthy"}}}},
  "HostConfig": {{"Memory": 1024}}, "Config": {{"Env": ["HF_TOKEN={TOKEN}", "MAX_JOBS=4"]}}}}]';;
"logs --timestamps")
  echo '2026-01-02T00:00:02Z memory at first token, GiB: total 119.70'
  echo '2026-01-02T00:00:01Z loading with key {KEY}' >&2;;
"exec c0ffee") case "$5" in *cgroup*) echo '== memory.current'; echo 42;;
  *) echo 'device: no such program' >&2; exit 127;; esac;;
*) echo "unknown: $*" >&2; exit 1;;
esac
"""


class Hub(BaseHTTPRequestHandler):
    """A server of chats; every third one it answers with nothing in it."""

    asked = 0

    def do_GET(self) -> None:
        self._end(200, json.dumps({"data": [{"id": "gpt", "max_model_len": 4096}]}))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.headers["Authorization"] != f"Bearer {KEY}":
            self._end(401, "{}")
            return
        type(self).asked += 1
        pieces: list[dict[str, Any]] = [
            {"reasoning": "think"},
            {"content": "forty"},
            {"content": "-two"},
        ]
        if "tools" in body:
            pieces = [{"tool_calls": [{"function": {"name": "get_weather"}}]}]
        elif self.asked % 3 == 0:
            pieces = [{"role": "assistant", "content": None}]
        events: list[dict[str, Any]] = [{"choices": [{"delta": piece}]} for piece in pieces]
        events.append({"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 3}})
        self._end(200, "".join(f"data: {json.dumps(one)}\n\n" for one in events) + "data: [DONE]\n")

    def _end(self, status: int, text: str) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def place() -> Iterator[client.Place]:
    Hub.asked = 0
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    yield client.Place(f"http://127.0.0.1:{server.server_address[1]}/v1", KEY)
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def project(tmp_path: Path, isolated: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout's folder with a docker on the PATH that has one container."""
    folder = linked_checkout(tmp_path / "checkout")
    bin_ = tmp_path / "bin"
    bin_.mkdir()
    for name, script in {
        "docker": DOCKER,
        "journalctl": "#!/bin/sh\necho 'NVRM: Xid 79'\necho 'usb: a mouse'\n",
        "nvidia-smi": f"#!/bin/sh\necho 'clocks.sm'; echo '2411 MHz, <serial>{SERIAL}</serial>'\n",
    }.items():
        (bin_ / name).write_text(script)
        (bin_ / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{bin_}:/usr/bin:/bin")
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.chdir(tmp_path)
    return folder


def contents(path: Path) -> dict[str, str]:
    with tarfile.open(path) as archive:
        return {
            Path(one.name).name: data.read().decode()
            for one in archive
            if (data := archive.extractfile(one)) is not None
        }


def report(project: Path, *words: str) -> int:
    where = ("--pins", str(project / "pins.yaml"), "--store", str(project / "store"))
    return main.main(["doctor", "--target", "cpu", *where, *words])


def test_an_archive_holds_what_a_first_run_tells(
    project: Path, place: client.Place, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (project / "key").write_text(f"{KEY}\n")
    port = place.url.split(":")[2].partition("/")[0]
    (project / ".env").write_text(
        f"SPARKFORGE_PORT={port}\nSPARKFORGE_API_KEY_FILE={project / 'key'}\n"
    )
    (project / "build.log").write_text(f"fetched https://me:hunter2@example.org/x by {Path.home()}")
    assert report(project, "--report", "r.tar.gz") == 0
    found = contents(tmp_path / "r.tar.gz")
    asked = json.loads(found["chats.json"])
    kinds = [one["kind"] for one in asked["chats"]]
    assert [kinds.count(kind) for kind in ("alone", "eight at once", "tool", "long")] == [
        10,
        8,
        1,
        1,
    ]
    assert asked["chats"][0]["content"] == "forty-two"
    assert asked["chats"][0]["tokens"] == 3
    empty = [one for one in asked["chats"] if "neither content" in one["problem"]]
    assert len(empty) >= 5
    rows = found["container.log"].splitlines()
    assert [row[18:20] for row in rows] == ["1Z", "2Z"]  # two streams, in the order of time
    assert "memory at first token" in found["moments.txt"]
    assert "loading" not in found["moments.txt"]
    assert "NVRM" in found["kernel.log"]
    assert "mouse" not in found["kernel.log"]
    assert "42" in found["cgroup.txt"]
    assert "2411 MHz" in found["clocks.csv"]
    assert json.loads(found["container.json"])["Env"] == {"HF_TOKEN": "***", "MAX_JOBS": "4"}
    assert "device.txt" not in found
    assert re.search(r"device.txt\t.*missing: device: no such program", found["CONTENTS.txt"])
    assert "receipt.json\t0\t" in found["CONTENTS.txt"]
    for text in found.values():
        for secret in (KEY, TOKEN, "hunter2", SERIAL, str(Path.home())):
            assert secret not in text
    said = capsys.readouterr().out
    assert "chats.json, not complete" in said
    assert KEY not in said


def test_its_readings_are_judged_on_another_machine(
    project: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert report(project, "--report", "r.tar.gz", "--no-chats", "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert document["report"]["file"] == "r.tar.gz"
    assert not [one for one in document["report"]["parts"] if one["file"] == "chats.json"]
    assert report(project, "--readings", "r.tar.gz", "--json") == 0
    again = json.loads(capsys.readouterr().out)
    assert again["findings"] == document["findings"]
    assert report(project, "--report", "r.tar.gz") == 2  # never written over


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"\x1f\x8bjunk", "damaged archive"),
        (reporting.packed([Part("a", "b", "c" * 9999)])[:60], "damaged archive"),
        (reporting.packed([Part("other.json", "", "{}")]), "without readings.json"),
        (gzip.compress(b"no tar at all"), "damaged archive"),
        (reporting.packed([Part(reporting.READINGS, "", "[]")]), "no readings of a machine"),
    ],
    ids=["junk", "cut", "no readings", "no archive", "empty readings"],  # gzip has the time
)
def test_what_is_no_report_is_one_error(
    project: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], data: bytes, words: str
) -> None:
    (tmp_path / "r.tar.gz").write_bytes(data)
    assert report(project, "--readings", "r.tar.gz") == 2
    assert words in capsys.readouterr().err


def test_no_chats_without_a_report_is_refused(project: Path) -> None:
    assert report(project, "--no-chats") == 2


def test_readings_survive_the_archive(tmp_path: Path) -> None:
    seen = Readings(files={"/proc/meminfo": "MemTotal: 1 kB"}, facts={"machine": "aarch64"})
    (tmp_path / "r").write_bytes(reporting.packed([Part(reporting.READINGS, "", seen.dumps())]))
    assert Readings.loads(reporting.readings_in(tmp_path / "r") or "") == seen
    (tmp_path / "plain.json").write_text(seen.dumps())
    assert reporting.readings_in(tmp_path / "plain.json") is None


@pytest.mark.parametrize(
    ("text", "masked"),
    [
        ("http://bob:pw@proxy:80/x", "http://***@proxy:80/x"),
        ("Authorization: Bearer abcdef.123", "Authorization: Bearer ***"),
        ("--hf-token=abc VLLM_API_KEY=zzz x=1", "--hf-token=*** VLLM_API_KEY=*** x=1"),
        ("http://bob:p/w@proxy:80/x", "http://***@proxy:80/x"),
        ("MY_CREDENTIAL=abc api-key=abc", "MY_CREDENTIAL=*** api-key=***"),
        ('{"api_key": "abc", "tokens": 5}', '{"api_key": "***", "tokens": 5}'),
        ("GPU-01234567-89ab-cdef-0123-456789abcdef", "GPU-***"),
        ("<uuid>x</uuid><serial>1</serial>", "<uuid>***</uuid><serial>***</serial>"),
        ("/home/bob/models, bobby, bob@spark-7", "~/models, bobby, USER@HOST"),
        ("value supersecret1 here", "value *** here"),
        ("tokenizer=o200k max_tokens=16", "tokenizer=o200k max_tokens=16"),
        ("link aa:bb:cc:dd:ee:0f", "link xx:xx:xx:xx:xx:xx"),
    ],
)
def test_secrets_and_names_are_left_out(text: str, masked: str) -> None:
    variables = {"MY_SECRET": "supersecret1", "A_TOKEN": "1", "PATH": "/usr/bin"}
    mask = mask_of(variables, (), Path("/home/bob"), "bob", "spark-7.lan")
    assert mask.text(text) == masked


def test_a_long_question_fits_and_has_its_answer() -> None:
    text = chats.long_question(100_000)
    assert text.count("kingfisher") == 1
    assert "Line 1234: the word is kingfisher" in text
    assert len(text.split()) < 100_000
    assert "kingfisher" in chats.long_question(10)
