"""Doctor's checks on recordings (none is of a Spark: they follow public reports); its archive."""

import getpass
import json
import socket
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from sparkforge.check import accept
from sparkforge.check.bench import command as bench
from sparkforge.check.doctor import command
from sparkforge.check.doctor.checks import CHECKS, Finding, Machine, Want, judge, want_of
from sparkforge.cli import main
from sparkforge.core.errors import ServerError
from sparkforge.pins import pins
from sparkforge.serving.cluster import NCCL, ROLE, VARIABLE
from tests import readings
from tests.openai_server import KEY as SERVER_KEY
from tests.openai_server import serving
from tests.readings import Recorded
from tests.support import ROOT, linked_checkout

MODEL = pins.load(ROOT / "pins.yaml").models["gpt-oss-120b"]
SNAPSHOT = f"/hf/hub/models--openai--gpt-oss-120b/snapshots/{MODEL.revision}"
MADE_UP = readings.load(readings.FOLDER / "made-up-spark.json")
SPARK: Mapping[str, Any] = MADE_UP["readings"]
SMI, CAP = "$ nvidia-smi -q -x", "$ nvidia-smi --query-gpu=compute_cap --format=csv,noheader"
INFO, ENGINE = (
    "$ docker info --format '{{json .}}'",
    "$ docker version --format '{{.Server.Version}}'",
)
NONE = {f"exists {SNAPSHOT}": False}


def target(name: str) -> Want:
    return want_of(pins.load(ROOT / "pins.yaml"), name)


def recorded(*changed: Mapping[str, Any]) -> Machine:
    """Return a machine on which all is well, but for changed readings."""
    return Recorded({name: value for one in (SPARK, *changed) for name, value in one.items()})


def found(seen: Machine, want: Want | None = None) -> dict[str, Finding]:
    """Return the findings by check, of several the one that is not ok."""
    findings = judge(seen, want or target("spark"))
    return {each.name: each for each in sorted(findings, key=lambda each: each.state != "ok")}


def out(text: str, code: int | None = 0, problem: str = "") -> dict[str, Any]:
    return {"code": code, "out": text, "err": "", "problem": problem}


def smi(old: str, new: str) -> dict[str, Any]:
    text = SPARK[SMI]["out"]
    assert old in text
    return {SMI: out(text.replace(old, new))}


def acl(text: str) -> dict[str, Any]:
    return {"$ getfacl -n /hf": out(f"# owner: 0\nuser::rwx\n{text}\n")}


def memory(total: int = 119, available: int = 110) -> Any:
    """Return a /proc/meminfo; sizes in GiB."""
    gib = 1 << 20
    return {"/proc/meminfo": f"MemTotal: {total * gib} kB\nMemAvailable: {available * gib} kB\n"}


def test_spark_without_problems() -> None:
    findings = found(recorded())
    assert {finding.state for finding in findings.values()} == {"ok"}
    assert set(findings) == set(CHECKS) - {"pair"}  # it serves alone


@pytest.mark.parametrize(
    ("change", "name", "state", "fragment"),
    [
        # GPU: hangs, fails, prints garbage, another card, an old driver
        ({SMI: out("", None, "nvidia-smi did not finish")}, "gpu", "error", "did not finish"),
        ({SMI: out("NVIDIA-SMI has failed", 9)}, "gpu", "error", "NVIDIA-SMI has failed"),
        ({CAP: out("9.0\n")}, "gpu", "error", "is for 12.1"),
        (smi("13.0", "12.8"), "driver", "error", "CUDA is 13.0"),
        (smi("13.0", "N/A"), "driver", "not checked", "CUDA N/A"),
        (smi("2411 MHz", "702 MHz"), "clocks", "error", "702 MHz, at most 3003 MHz"),
        (smi("96 %", "0 %"), "clocks", "not checked", "while it serves"),
        (smi("Not Active", "Active"), "clocks", "warning", "hw_power_brake_slowdown"),
        # memory
        (memory(available=60), "memory", "error", "the model needs 75"),
        # disks: store, image and model need 30, 35 and 65 GB
        ({"disk /store": [3, 10**9]}, "disk", "error", "1 GB free"),
        ({"disk /store": [3, 9 * 10**9]}, "disk", "warning", "needs 30"),
        ({"disk /hf": [2, 9], **NONE}, "disk", "error", "needs 65"),
        # the model, and the rights of the container's user
        (NONE, "model", "warning", "Compose downloads 65.2 GB into /hf"),
        ({"variables": {}}, "model", "warning", "volume sparkforge-models"),
        (acl("user:10001:rwx\t#effective:r--"), "model-rights", "error", "in /hf"),
        (acl("user:10002:rwx\ngroup::rwx\nother::r-x"), "model-rights", "warning", "r-x in /hf"),
        ({"$ getfacl -n /hf": out("# owner: 10001\nuser::rwx\n")}, "model-rights", "ok", ""),
        ({"exists /hf": False}, "model-rights", "error", "does not exist"),
        # engine
        ({ENGINE: out("", None, "docker is not on the PATH")}, "engine", "error", "PATH"),
        ({ENGINE: out("20.10.24\n")}, "engine", "error", "older than 25.0"),
        ({INFO: out("{}")}, "container-toolkit", "warning", "no runtime nvidia"),
        # machine
        ({"machine": "x86_64"}, "machine", "error", "linux/arm64"),
        ({"$ git --version": out("git version 2.20.1")}, "git", "error", "2.20.1"),
        ({"$ g++ --version": None}, "compiler", "error", "g++"),
    ],
)
def test_problem_of_one_machine(
    change: dict[str, Any], name: str, state: str, fragment: str
) -> None:
    finding = found(recorded(change))[name]
    assert (finding.state, fragment in finding.seen) == (state, True), finding
    assert finding.hint or state in ("ok", "not checked")


PAIR = {
    "variables": {ROLE: "head", VARIABLE: "192.168.100.1,192.168.100.2,enp1s0f0np0"},
    "/sys/class/net/enp1s0f0np0/operstate": "up\n",
    "/sys/class/net/enp1s0f0np0/mtu": "9000\n",
    "/sf/requirements/spark-linux-arm64.txt": "nvidia-nccl-cu13==2.99.0 \\\n",
    "kernel": "6.17.0-1032-nvidia",
}


@pytest.mark.parametrize(
    ("change", "state", "fragment"),
    [
        ({}, "ok", "NCCL 2.99.0 is locked, kernel 6.17"),
        ({"variables": {ROLE: "head"}}, "error", "SPARKFORGE_CLUSTER is ''"),
        ({"/sys/class/net/enp1s0f0np0/operstate": "down"}, "error", "enp1s0f0np0: down"),
        ({"/sys/class/net/enp1s0f0np0/mtu": "1500"}, "warning", "mtu 1500"),
        ({"kernel": "7.0.0-1019-nvidia"}, "warning", "boot it with kho=off"),
        ({"kernel": "7.0.0-1019-nvidia", "/proc/cmdline": "ro kho=off"}, "ok", "7.0.0-1019"),
        ({"/sf/requirements/spark-linux-arm64.txt": f"{NCCL}==2.30.7 "}, "warning", "nccl#2393"),
    ],
)
def test_one_of_a_pair(change: dict[str, Any], state: str, fragment: str) -> None:
    findings = [one for one in judge(recorded(PAIR, change), target("spark")) if one.name == "pair"]
    assert any(one.state == state and fragment in one.seen for one in findings), findings
    assert state != "ok" or {one.state for one in findings} == {"ok"}


@pytest.mark.parametrize("text", ["", "\x00\xff", "null", "[1, 2]", "<a><b/></a>"])
@pytest.mark.parametrize("name", ["cpu", "spark"])
def test_garbage_ends_no_check(text: str, name: str) -> None:
    garbage = {
        key: out(text) if key.startswith("$") else text
        for key in SPARK
        if key.startswith(("$", "/"))
    }
    platform = {"machine": "aarch64" if name == "spark" else "x86_64"}
    for finding in judge(recorded(garbage, platform), target(name)):
        assert "the check failed" not in finding.seen


def test_memory_share_follows_what_cuda_counts() -> None:
    """vLLM multiplies what CUDA counts, which need not be MemTotal."""
    shares = {
        found(recorded(memory(available=98), {"unified memory": counted}))["memory"].seen
        for counted in (None, 122 << 30)
    }
    assert len(shares) == 2


def test_one_disk_for_all_has_to_hold_all() -> None:
    change = {f"disk {folder}": [1, 10**11] for folder in ("/store", "/hf", "/var/lib/docker")}
    finding = found(recorded(change, NONE))["disk"]
    assert (finding.state, "needs 130" in finding.seen) == ("warning", True)


def test_instruction_set_of_a_cpu() -> None:
    for flags, state in (("avx2 avx512f", "ok"), ("sse4_2 avx", "error")):
        seen = recorded({"machine": "x86_64", "/proc/cpuinfo": f"flags\t: fp {flags}\n"})
        assert found(seen, target("cpu"))["machine"].state == state


# -- the archive -----------------------------------------------------------------

KEY, TOKEN, SERIAL, AUTH = "our-key", "hf_" + "a1B2" * 8, "1423924012345", "bWU6c2VjcmV0"
DOCKER = f"""#!/bin/sh
case "$1" in
ps) echo c0ffee;;
inspect) case "$*" in
  *--format*) echo '{{"state": {{"Health": {{"Status": "healthy"}}}}}}';;
  *) echo '[{{"Id": "c0ffee", "Config": {{"Labels": {{"com.docker.compose.service": "rtx"}}}}}}]';;
  esac;;
logs) echo '2026-01-02T00:00:02Z second'; echo '2026-01-02T00:00:01Z a key {KEY}' >&2;;
exec) case "$*" in
  *tokenizer.json) echo "$4";;
  *) echo 'no such program' >&2; exit 127;;
  esac;;
info) echo '{{"HttpProxy": "http://me:hunter2@proxy:80"}}';;
*) exit 1;;
esac
"""


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


def test_archive_is_masked(
    project: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (project / "key").write_text(f"{KEY}\n")
    (project / ".env").write_text(f"SPARKFORGE_API_KEY_FILE={project / 'key'}\n")
    (project / "build.log").write_text(f"fetched https://me:hunter2@example.org/x by {Path.home()}")
    assert doctor(project, "--report", "--json") == 0
    document = json.loads(capsys.readouterr().out)
    (path,) = tmp_path.glob("sparkforge-report-*.zip")
    assert document["report"]["file"] == path.name
    with zipfile.ZipFile(path) as opened:
        texts = {name: opened.read(name).decode() for name in opened.namelist()}
    lines = texts["container.log"].splitlines()
    assert [line[18:20] for line in lines] == ["1Z", "2Z"]  # two streams, in the order of time
    assert texts["kernel.log"] == "NVRM: Xid 79\n"
    assert json.loads(texts["container.json"])["state"]["Health"] == {"Status": "healthy"}
    assert json.loads(texts["findings.json"])["target"] == "rtx"
    assert texts["memory.txt"] == "no such program\n"
    for text in texts.values():
        for secret in (KEY, TOKEN, "hunter2", SERIAL, AUTH, str(Path.home())):
            assert secret not in text


def test_readings_of_a_report_are_kept_for_these_tests(project: Path, tmp_path: Path) -> None:
    assert doctor(project, "--report") == 0
    (path,) = tmp_path.glob("sparkforge-report-*.zip")
    kept = readings.keep(path, tmp_path / "kept", "mine")
    assert str(project) not in kept.read_text()
    found = readings.load(kept)
    assert found["target"] == "rtx"
    assert found["readings"]["$ nvidia-smi -q -x"]["out"] == "<serial>***</serial>\n"
    assert replayed(found) == found["findings"] != []


def replayed(found: Any) -> list[list[str]]:
    """Judge a recorded machine; returns names and states of the findings."""
    rows = judge(Recorded(found["readings"]), target(found["target"]))
    return [[one.name, one.state] for one in rows]


@pytest.mark.parametrize("path", sorted(readings.FOLDER.glob("*.json")), ids=lambda path: path.stem)
def test_machines_of_reports_are_judged_as_they_were(path: Path) -> None:
    found = readings.load(path)
    assert replayed(found) == found["findings"] != []


# -- report --all ---------------------------------------------------------------


def report(project: Path) -> int:
    where = ("--pins", str(project / "pins.yaml"), "--store", str(project / "store"))
    return main.main(["report", "--all", "--target", "rtx", "--json", *where])


def test_one_file_has_all_results(
    project: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (project / "key").write_text(f"{SERVER_KEY}\n")
    monkeypatch.setattr(socket, "gethostname", lambda: "spark-7.lan")

    def judged(options: accept.Options) -> tuple[accept.Report, Path]:
        whom = (str(options.target), "9", "now", f"http://{socket.gethostname()}:1", "m", 1, "")
        return accept.Report(*whom, True, {}, ()), tmp_path

    def measured(options: bench.RunOptions) -> dict[str, Any]:
        assert options.model is not None
        tokenizer = (options.model / "tokenizer.json").read_text()
        return {"table": options.table, "tokenizer": tokenizer, "said": f"key={SERVER_KEY}"}

    monkeypatch.setattr(accept, "judged", judged)
    monkeypatch.setattr(bench, "measured", measured)
    with serving() as fake:
        (project / ".env").write_text(
            f"SPARKFORGE_API_KEY_FILE={project / 'key'}\n"
            f"SPARKFORGE_PORT={fake.url.rpartition(':')[2]}\n"
        )
        assert report(project) == 0
        assert fake.answered == 1  # for the clocks
    document = json.loads(capsys.readouterr().out)
    with zipfile.ZipFile(tmp_path / document["file"]) as opened:
        texts = {name: opened.read(name).decode() for name in opened.namelist()}
    assert json.loads(texts["accept.json"])["target"] == "rtx"
    found = json.loads(texts["bench.json"])
    revision = pins.load(ROOT / "pins.yaml").models["gpt-oss-20b"].revision
    assert f"gpt-oss-20b/snapshots/{revision}/tokenizer.json" in found["tokenizer"]
    assert found["table"] == "seeds"
    assert {"readings.json", "findings.json", "container.log"} < set(texts)
    for text in texts.values():
        for secret in (SERVER_KEY, TOKEN, AUTH, SERIAL, str(Path.home()), socket.gethostname()):
            assert secret not in text


def test_a_server_that_does_not_answer_is_in_the_file(
    project: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (project / ".env").write_text("SPARKFORGE_PORT=9\n")
    assert report(project) == ServerError.exit_code
    seen = capsys.readouterr()
    file = json.loads(seen.out)["file"]
    why = "http://127.0.0.1:9/v1/models names no model"
    assert f"error: {file} lacks accept and bench: {why}" in seen.err
    with zipfile.ZipFile(tmp_path / file) as opened:
        assert json.loads(opened.read("error.json"))["exit_code"] == ServerError.exit_code
        assert "accept.json" not in opened.namelist()


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
        ("{'api_key': ['SECRET', 'SECRET'], 'port': 1} api_key=['SECRET']", "'port': 1}"),
        ("token_" * 5000, "token_"),  # in linear time
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
def test_secrets_are_masked(monkeypatch: pytest.MonkeyPatch, text: str, kept: str) -> None:
    values = {"MY_SECRET": "of-a-variable-SECRET", "A_TOKEN": "true", "B_TOKEN": "k3y"}
    monkeypatch.setattr(socket, "gethostname", lambda: "spark-7.lan")
    monkeypatch.setattr(getpass, "getuser", lambda: "bob")
    monkeypatch.setenv("HOME", "/home/bob")
    masked = command.mask_of(values)(text)
    assert "SECRET" not in masked
    assert "k3y " not in masked
    assert kept in masked


def test_masked_documents_stay_documents() -> None:
    tree = {"size": 1234, "list": ["1234", None], "log": 'token: SECRET "quoted"'}
    masked = json.loads(command.masked_json(tree, command.mask_of({"X_TOKEN": "1234"})))
    assert masked == {"size": 1234, "list": ["***", None], "log": 'token: *** "quoted"'}
