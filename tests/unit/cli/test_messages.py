"""Every message about wrong input, in one snapshot: error, hint and exit code.

After a change of a message: ``pytest tests/unit/cli/test_messages.py --snapshot-update``.
"""

import re
from pathlib import Path

import pytest
from syrupy.assertion import SnapshotAssertion

from sparkforge.cli.main import main
from tests.support import ROOT, linked_checkout

COMMAND_LINES = """\
bild --target cpu
buidl --target cpu
xyzzy
build
build --target cpu --colour
--target cpu --dryrun
--target cpu --until wheel
--target cpu --engine podman
--target cpu --port 70000
--target cpu --port http
--target cpu --dry-run --ready-timeout nan
--target cpu --dry-run --ready-timeout 0
--target cpu --target spark
--target cpu --no-json
--target cpuu
--target sprak --until wheels
--target cpu --engine none --ca-bundle pins.yaml
--target cpu --dry-run --ca-bundle no/such
--target cpu --until wheels --mirror vllm
--target cpu --until wheels --mirror vlm=/x
--target cpu --until wheels --mirror vllm/x=/x
--target cpu --until wheels --mirror apt=/x
--target cpu --until wheels --port 1
--target rtx --dry-run --ready-timeout 9
--target cpu --until wheels -- --mxfp4-layers o
explain --target cpu -- --mxfp4-layers o
explain --target cpu --port 5
serve --chat --model x
serve --target cpu --chat --model x
serve --target rtx --engine none --chat
serve --target cpu --model no/such
serve --target cpu --model /
serve --target cpu --prot=80
rollback
patches lst
patches list vlm
patches list --jsn
patches apply vllm
patches import vllm
patches import vllm no/such
pins chek
pins check --pins no/such
bench quality --target cpu --layers qv
bench quality --target cpu --max-kl x
bench quality --target cpu --tokens 0
bench --target cpu --url http://127.0.0.1:9 --vs unpatched
bench compare a
bench compare no/a no/b
ablate no-such-patch
rebase
rebase vllm --all
rebase vllm --dry-run
rebase vllm --continue --abort
rebase vllm --skip=
rebase vllm --onto release:1 --abort
rebase --all --onto release:1
watch --try --propose x
verify
verify --target cpu --key no/such
release
release --target cpu --push example.org/x
release --target cpu --join example.org/x
release --join example.org/x
proofs --target cpu
packs --target cpu
model fetch --target cpu
bench quality --target cpu --tokens 0
bench quality --target cpu --layers qv
"""
PINS = [
    ("schema: 1", "schema: 2"),
    ("schema: 1", "schema: ["),
    ("schema: 1", "schema: 1\nschema: 1"),
    ("schema: 1", "schema: 1\ncolour: red"),
    ("upstreams:", "upstream:"),
    ("  vllm:\n", "  'a/b':\n"),
    ("sha256: ", "sha256: 0"),
    ("size: ", "size: -"),
    ("git: https://", "git: file://"),
    ("{repo: ", "{repo: /"),
    ("platforms: [linux/arm64]", "platforms: [linux/riscv64]"),
    ("counter: ", "counter: x"),
    ("requirements/spark", "requirements/nothing"),
    ("source_file: ", "source_file: x"),
    ("cuda_arch: ", "cuda_arch: x"),
]


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The same machine everywhere, and nothing of the user's."""
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    monkeypatch.setenv("SPARKFORGE_STORE", str(tmp_path / "store"))
    monkeypatch.chdir(tmp_path)


def told(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """Run a command that has to fail; return what it said, and its exit code."""
    code = main(words)
    said = capsys.readouterr().err
    assert code > 1
    assert said.startswith("error: ")
    assert "Traceback" not in said
    return f"{said.replace(str(Path.cwd()), '')}exit code {code}"


def test_command_lines(
    capsys: pytest.CaptureFixture[str], snapshot: SnapshotAssertion, tmp_path: Path
) -> None:
    said = {line: told(capsys, *line.split()) for line in COMMAND_LINES.splitlines()}
    assert not (tmp_path / "store").exists()
    assert "\n\n".join(f"$ {line}\n{text}" for line, text in said.items()) == snapshot


def counted_from(line: int, text: str) -> str:
    """Return messages with each line of pins.yaml counted from another one."""
    return re.sub(r"(?<=pins\.yaml:)\d+", lambda match: f"{int(match[0]) - line:+}", text)


def test_pins(
    capsys: pytest.CaptureFixture[str], snapshot: SnapshotAssertion, tmp_path: Path
) -> None:
    """Lines are counted from the change: other pins make no other messages."""
    pins = linked_checkout(tmp_path / "checkout") / "pins.yaml"
    right, said = (ROOT / "pins.yaml").read_text(), []
    for old, new in PINS:
        before, found, _ = right.partition(old)
        assert found
        pins.write_text(right.replace(old, new, 1))
        text = told(capsys, "pins", "check", "--pins", str(pins))
        text = counted_from(before.count("\n") + 1, text)
        said.append(f"{old!r} → {new!r}\n{text}")
    assert "\n\n".join(said) == snapshot
