"""`doctor --report`: what is collected on a stand-in for a machine, and what is masked."""

from __future__ import annotations

import io
import json
import zipfile
from pathlib import Path

import pytest

from sparkforge.check.doctor import archive
from sparkforge.check.doctor.masking import mask_of
from sparkforge.cli import main
from sparkforge.core.errors import CheckError
from tests.support import linked_checkout

KEY, TOKEN, SERIAL, AUTH = "our-key", "hf_" + "a1B2" * 8, "1423924012345", "bWU6c2VjcmV0"
DOCKER = f"""#!/bin/sh
case "$1" in
ps) echo c0ffee;;
inspect) echo '{{"state": {{"Health": {{"Status": "healthy"}}}}}}';;
logs) echo '2026-01-02T00:00:02Z second'; echo '2026-01-02T00:00:01Z a key {KEY}' >&2;;
exec) echo 'no such program' >&2; exit 127;;
info) echo '{{"HttpProxy": "http://me:hunter2@proxy:80"}}';;
*) exit 1;;
esac
"""


def zipped(name: str, text: str) -> bytes:
    raw = io.BytesIO()
    with zipfile.ZipFile(raw, "w") as made:
        made.writestr(name, text)
    return raw.getvalue()


@pytest.fixture
def project(tmp_path: Path, isolated: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout's folder with a docker on the PATH that has one container."""
    folder = linked_checkout(tmp_path / "checkout")
    bin_ = tmp_path / "bin"
    bin_.mkdir()
    for name, script in {
        "docker": DOCKER,
        "journalctl": "#!/bin/sh\necho 'NVRM: Xid 79'\necho 'usb: a mouse'\n",
        "nvidia-smi": f"#!/bin/sh\necho '<serial>{SERIAL}</serial>'\n",
    }.items():
        (bin_ / name).write_text(script)
        (bin_ / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{bin_}:/usr/bin:/bin")
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setenv("DOCKER_AUTH_CONFIG", f'{{"auth": "{AUTH}"}}')
    monkeypatch.setenv("SPARKFORGE_EXTRA_ARGS", f"--hf-token {AUTH} --port 1")
    monkeypatch.chdir(tmp_path)
    return folder


def doctor(project: Path, *words: str) -> int:
    where = ("--pins", str(project / "pins.yaml"), "--store", str(project / "store"))
    return main.main(["doctor", "--target", "rtx", *where, *words])


def test_archive_is_complete_and_masked(project: Path, tmp_path: Path) -> None:
    (project / "key").write_text(f"{KEY}\n")
    (project / ".env").write_text(f"SPARKFORGE_API_KEY_FILE={project / 'key'}\n")
    (project / "build.log").write_text(f"fetched https://me:hunter2@example.org/x by {Path.home()}")
    assert doctor(project, "--report") == 0
    with zipfile.ZipFile(next(tmp_path.glob("*.zip"))) as opened:
        found = {name: opened.read(name).decode() for name in opened.namelist()}
    lines = found["container.log"].splitlines()
    assert [line[18:20] for line in lines] == ["1Z", "2Z"]  # two streams, in the order of time
    assert found["kernel.log"] == "NVRM: Xid 79"
    assert json.loads(found["container.json"])["state"]["Health"] == {"Status": "healthy"}
    assert json.loads(found["findings.json"])["target"] == "rtx"
    assert "commit" in found["checkout.txt"] or "not a git repository" in found["checkout.txt"]
    assert found["memory.txt"] == "no such program\n"
    for text in found.values():
        for secret in (KEY, TOKEN, "hunter2", SERIAL, AUTH, str(Path.home())):
            assert secret not in text


def test_readings_of_an_archive_are_judged(
    project: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert doctor(project, "--report", "--json") == 0
    document = json.loads(capsys.readouterr().out)
    file = document["report"]["file"]
    assert doctor(project, "--readings", file, "--json") == CheckError.exit_code
    again = json.loads(capsys.readouterr().out)
    names = {finding["name"]: finding["state"] for finding in document["findings"]}
    assert {finding["name"]: finding["state"] for finding in again["findings"]} == names


@pytest.mark.parametrize(
    "data",
    [b"junk", zipped("other.json", "{}"), zipped(archive.READINGS, "[]"), b"\xff", b""],
    ids=["junk", "no readings", "empty readings", "not text", "empty"],
)
def test_file_without_readings_is_refused(project: Path, tmp_path: Path, data: bytes) -> None:
    (tmp_path / "r.zip").write_bytes(data)
    assert doctor(project, "--readings", "r.zip") == 2


PEM = "-----BEGIN PRIVATE KEY-----\nSECRET\n-----END PRIVATE KEY-----"


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("http://bob:SECRET@proxy:80/x", "proxy:80/x"),
        ("http://bob:SEC/SECRET@proxy:80/x", "proxy:80/x"),
        ("Authorization: Bearer SECRET.123 end", " end"),
        ("--hf-token=SECRET VLLM_API_KEY=SECRET x=1", "x=1"),
        ("--hf-token SECRET --port 8000", "--port 8000"),
        ("--api-key SECRET SECRET --port 8000", "--port 8000"),
        ('["--api-key", "SECRET", "--port"]', '"--port"]'),
        ("token: SECRET\npassword: SECRET\nX-Api-Key: SECRET\nend", "end"),
        ("{'token': 'SECRET', 'port': 8000}", "'port': 8000}"),
        ('{"api_key": "SEC SECRET\\"SECRET", "tokens": 5}', '"tokens": 5}'),
        (json.dumps({"log": json.dumps({"hf_token": "SECRET", "port": 1})}), 'port\\": 1'),
        ("MY_CREDENTIAL=SECRET api-key=SECRET;", "MY_CREDENTIAL="),
        (f"nvapi-{'SECRET' * 4} glpat-{'SECRET' * 4} gho_{'SECRET' * 4} end", " end"),
        (f"{PEM} end", " end"),
        (json.dumps({"key": PEM, "port": 1}), '"port": 1}'),
        ("-----BEGIN PRIVATE KEY-----\nSECRET cut off", ""),
        ("value of-a-variable-SECRET here", " here"),
        ("GPU-01234567-89ab-cdef-0123-456789abcdef", "GPU-***"),
        ("<uuid>SECRET</uuid><serial>SECRET</serial>", "</serial>"),
        ("/home/bob/models, bobby, bob@spark-7", "~/models, bobby, USER@HOST"),
        ("link aa:bb:cc:dd:ee:0f", "link xx:xx:xx:xx:xx:xx"),
        ("short k3y here, k3yring", "here, k3yring"),
        ("tokenizer=o200k max_tokens=16 true", "tokenizer=o200k max_tokens=16 true"),
    ],
)
def test_secrets_are_masked(text: str, kept: str) -> None:
    variables = {"MY_SECRET": "of-a-variable-SECRET", "A_TOKEN": "true", "PATH": "/usr/bin"}
    mask = mask_of(variables, ["k3y"], Path("/home/bob"), "bob", "spark-7.lan")
    masked = mask.text(text)
    assert "SECRET" not in masked
    assert "k3y " not in masked
    assert kept in masked


def test_masked_documents_stay_documents() -> None:
    mask = mask_of({"X_TOKEN": "1234"}, (), Path("/home/bob"), "bob", "h")
    tree = {"HF_TOKEN": "SECRET", "size": 1234, "list": ["1234", None], "log": "token: SECRET"}
    assert mask.tree(tree) == {
        "HF_TOKEN": "***",
        "size": 1234,
        "list": ["***", None],
        "log": "token: ***",
    }
