"""Doctor's checks on recordings. None is of a Spark: they are written after public reports."""

from __future__ import annotations

import json
import os
import struct
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from sparkforge.check.doctor import check, command, model
from sparkforge.check.doctor.check import Check, Finding, compare, judge, ok
from sparkforge.check.doctor.readings import Machine, load
from sparkforge.check.doctor.wanted import Wanted, wanted
from sparkforge.pins import pins
from sparkforge.serving import devices
from tests.support import ROOT

DATA = ROOT / "tests" / "data"
SPARK: Mapping[str, Any] = json.loads((DATA / "doctor-spark.json").read_text())
PAIR: Mapping[str, Any] = {**SPARK, **json.loads((DATA / "doctor-pair.json").read_text())}
SMI, CAP = "$ nvidia-smi -q -x", "$ nvidia-smi --query-gpu=compute_cap --format=csv,noheader"
INFO, BUILDX = "$ docker info --format '{{json .}}'", "$ docker buildx version"
COMPOSE, CTK = "$ docker compose version --short", "$ nvidia-ctk --version"
TIME = "$ timedatectl show --property NTPSynchronized --value"
PING, RDMA = "$ ping -M do -s 8972 -c 1 -W 2 192.168.100.1", "$ rdma -j link"
LINK = "/sys/class/net/enp1s0f0np0"
NO = {"exists": True, "writable": False, "folder": False}
NONE = {"revisions": ["f" * 40]}
ACL = "u:10001:rwX,d:u:10001:rwX,d:u:$(id -u):rwX"


def target(name: str) -> Wanted:
    return wanted(pins.load(ROOT / "pins.yaml"), name)


def recorded(*changed: Mapping[str, Any], base: Mapping[str, Any] = SPARK) -> Machine:
    """Return a machine on which all is well, but for changed readings."""
    whole = dict(base)
    for change in changed:
        whole |= change
    return Machine(Path("/no"), Path("/no"), whole)


def found(seen: Machine, want: Wanted | None = None) -> dict[str, Finding]:
    """Return the findings by check, of several the one that is not ok."""
    findings = judge(seen, want or target("spark"))
    return {each.name: each for each in sorted(findings, key=lambda each: each.state != "ok")}


def out(text: str, code: int | None = 0, problem: str = "") -> dict[str, Any]:
    return {"code": code, "out": text, "err": "", "problem": problem}


def smi(old: str, new: str) -> dict[str, Any]:
    text = SPARK[SMI]["out"]
    assert old in text
    return {SMI: out(text.replace(old, new))}


def variables(**changes: str) -> dict[str, Any]:
    return {"variables": {**SPARK["variables"], **changes}}


def memory(total: int = 119, available: int = 110, free: int = 100, swap: int = 0) -> Any:
    """Return a /proc/meminfo; sizes in GiB, ``swap``: of 16, how many are used."""
    gib = 1 << 20
    return {
        "/proc/meminfo": f"MemTotal: {total * gib} kB\nMemFree: {free * gib} kB\n"
        f"MemAvailable: {available * gib} kB\nSwapTotal: {16 * gib} kB\n"
        f"SwapFree: {(16 - swap) * gib} kB\n"
    }


def test_spark_without_problems() -> None:
    findings = found(recorded())
    assert {finding.state for finding in findings.values()} == {"ok"}
    concerned = {one.name for one in check.CHECKS if "pair" not in one.needs}
    assert set(findings) == concerned - {"instructions"}


def test_pair_without_problems() -> None:
    findings = found(recorded(base=PAIR))
    assert {finding.state for finding in findings.values()} == {"ok"}
    assert "NCCL_IB_HCA=rocep1s0f0" in findings["rdma"].hint


@pytest.mark.parametrize(
    ("change", "name", "state", "fragment"),
    [
        # GPU: hangs, fails, prints garbage, another card, an old driver
        ({SMI: out("", None, "nvidia-smi did not finish")}, "gpu", "error", "did not finish"),
        ({SMI: out("NVIDIA-SMI has failed", 9)}, "gpu", "error", "NVIDIA-SMI has failed"),
        ({SMI: out("\x00\x01garbage")}, "gpu", "error", "not XML"),
        ({SMI: out("<nvidia_smi_log/>")}, "gpu", "error", "lists no GPU"),
        ({CAP: out("9.0\n")}, "gpu", "error", "is for 12.1"),
        ({CAP: out('Field "compute_cap" is not valid', 2)}, "gpu", "not checked", "unknown"),
        (smi("13.0", "12.8"), "driver", "error", "CUDA is 13.0"),
        (smi("13.0", "N/A"), "driver", "not checked", "CUDA N/A"),
        ({"access /dev/nvidia-uvm": None}, "devices", "warning", "/dev/nvidia-uvm"),
        (smi("2411 MHz", "702 MHz"), "clocks", "error", "702 MHz, at most 3003 MHz"),
        (smi("96 %", "0 %"), "clocks", "not checked", "while it serves"),
        (smi("Not Active", "Active"), "clocks", "warning", "hw_power_brake_slowdown"),
        (smi("2411 MHz", "N/A"), "clocks", "not checked", "unknown"),
        # memory
        (memory(available=60, free=50), "memory", "error", "the model needs 75"),
        (memory(total=23, available=20, free=10), "memory", "error", "the model needs 75"),
        ({"/proc/meminfo": ""}, "memory", "not checked", ""),
        (memory(free=20), "page-cache", "warning", "20.0 GiB free"),
        (memory(swap=5), "swap", "warning", "5.0 of 16.0 GiB used"),
        # disks: store, image and model need 30, 35 and 65 GB
        ({"disk /store": {"device": 3, "free": 10**9}}, "disk", "error", "1 GB free"),
        ({"disk /store": {"device": 3, "free": 9 * 10**9}}, "disk", "warning", "needs 30"),
        ({"disk /hf/hub": {"device": 2, "free": 9}, "model": NONE}, "disk", "error", "needs 65"),
        ({"disk /store": None}, "disk", "not checked", "/store is not readable"),
        ({"access /store": NO}, "store", "error", "not writable"),
        # the model, and the rights of the container's user
        ({"model": NONE}, "model", "warning", "there: ffffffffffff"),
        ({"model": NONE, **variables(HF_HUB_OFFLINE="1")}, "model", "error", "HF_HUB_OFFLINE"),
        ({"model": {"folder": "/s", "problems": ["a: missing"]}}, "model", "error", "a: missing"),
        ({"model": {"folder": "/s", "unfinished": 2}}, "model", "warning", "2 unfinished"),
        ({"model": None}, "model", "not checked", "not readable"),
        ({"model rights": {"unreadable": "/hf/x"}}, "model-rights", "error", "cannot read /hf/x"),
        ({"model rights": {"unwritable": "/hf"}}, "model-rights", "warning", "write to /hf"),
        ({"access /hf": None}, "model-rights", "error", "does not exist"),
        # engine
        ({"access /var/run/docker.sock": NO}, "engine", "error", "permission denied"),
        ({INFO: out("", None, "docker is not on the PATH")}, "engine", "error", "PATH"),
        ({INFO: out('{"ServerErrors":["Cannot connect"]}', 1)}, "engine", "error", "Cannot conn"),
        ({INFO: out('{"ServerVersion": "20.10.24"}')}, "engine", "error", "too old"),
        ({INFO: out("{}"), CTK: None}, "container-toolkit", "error", "no runtime nvidia"),
        ({INFO: out("{}")}, "container-toolkit", "warning", "no runtime nvidia"),
        (
            {INFO: out('{"DiscoveredDevices": [{"ID": "nvidia.com/gpu=all"}]}')},
            "container-toolkit",
            "ok",
            "CDI",
        ),
        ({BUILDX: out("no docker command", 1)}, "buildx", "error", "no docker command"),
        ({COMPOSE: out("1.29.2\n")}, "compose", "warning", "older than 2.20"),
        # settings
        (variables(SPARKFORGE_PORT="80 00"), "port", "error", "'80 00'"),
        (variables(SPARKFORGE_PORT="8081"), "port", "warning", "in use"),  # 8000 has no listener
        (variables(SPARKFORGE_PROFILE="fats"), "profile", "error", "'fats'"),
        (variables(SPARKFORGE_PROFILE="/a/file"), "profile", "not checked", "/a/file"),
        # machine
        ({"machine": "x86_64"}, "machine", "error", "linux/arm64"),
        ({"machine": "x86_64"}, "gpu", "not checked", "run doctor on linux/arm64"),
        ({"page size": 65536}, "page-size", "warning", "64 KiB"),
        ({"$ git --version": out("", None, "git is not on the PATH")}, "git", "error", "PATH"),
        ({"$ git --version": out("git version 2.20.1")}, "git", "warning", "2.20.1"),
        ({"$ g++ --version": None}, "compiler", "error", "g++"),
        (variables(https_proxy="http://me:secret@p:1"), "proxies", "warning", "http://***@p:1"),
        (variables(https_proxy="http://p:1", no_proxy="x,localhost"), "proxies", "ok", "p:1"),
        ({TIME: out("no\n")}, "time", "warning", "not synchronised"),
        ({TIME: None}, "time", "not checked", ""),
    ],
)
def test_problem_of_one_machine(
    change: dict[str, Any], name: str, state: str, fragment: str
) -> None:
    finding = found(recorded(change))[name]
    assert (finding.state, fragment in finding.seen) == (state, True), finding
    assert finding.hint or state in ("ok", "not checked")
    assert "secret" not in finding.seen


@pytest.mark.parametrize(
    ("change", "name", "state"),
    [
        ({f"{LINK}/operstate": None}, "link", "error"),
        ({f"{LINK}/operstate": "down\n"}, "link", "error"),
        ({"$ ip -j address show dev enp1s0f0np0": out("[]")}, "link", "error"),
        ({f"{LINK}/speed": "10000\n"}, "link", "warning"),
        ({f"{LINK}/speed": "-1\n"}, "link", "ok"),
        ({f"{LINK}/mtu": "1500\n"}, "mtu", "warning"),
        ({PING: out("message too long", 1)}, "mtu", "error"),
        ({RDMA: out("[]")}, "rdma", "error"),
        ({RDMA: out(PAIR[RDMA]["out"].replace("ACTIVE", "DOWN"))}, "rdma", "error"),
        ({"kernel": "7.0.0-1019-nvidia"}, "rdma", "warning"),
        ({"kernel": "7.0.0-1019-nvidia", "/proc/cmdline": "x kho=off"}, "rdma", "ok"),
        (
            {"variables": {**PAIR["variables"], "NCCL_SOCKET_IFNAME": "=enp1s0f0np0"}},
            "nccl",
            "ok",
        ),
        ({"variables": {**PAIR["variables"], "NCCL_SOCKET_IFNAME": "eth0"}}, "nccl", "warning"),
        ({"variables": {**PAIR["variables"], "NCCL_IB_DISABLE": "1"}}, "nccl", "warning"),
        ({"variables": {"SPARKFORGE_CLUSTER_ROLE": "boss"}}, "link", "error"),
    ],
)
def test_problem_of_a_pair(change: dict[str, Any], name: str, state: str) -> None:
    finding = found(recorded(change, base=PAIR))[name]
    assert finding.state == state
    assert finding.hint or state == "ok"


def test_two_machines_are_compared() -> None:
    ours = judge(recorded(base=PAIR), target("spark"))
    assert {finding.state for finding in compare(ours, ours)} == {"ok"}
    image = next(name for name in PAIR if name.startswith("$ docker image"))
    changes: dict[str, tuple[str, dict[str, Any]]] = {
        "same mtu": ("error", {f"{LINK}/mtu": "1500\n"}),
        "same image": ("error", {image: out("sha256:b\n")}),
        "same driver": ("warning", smi("580.95.05", "570.1")),
        "same machine": ("warning", {"kernel": "6.17"}),
    }
    for name, (state, change) in changes.items():
        theirs = judge(recorded(change, base=PAIR), target("spark"))
        (other,) = (finding for finding in compare(ours, theirs) if finding.state != "ok")
        assert (other.name, other.state) == (name, state)


@pytest.mark.parametrize("text", ["", "\x00\xff" * 99, "null", "[1, 2]", "{}", "<a><b/></a>"])
@pytest.mark.parametrize("name", ["cpu", "spark", "rtx"])
def test_garbage_ends_no_check(text: str, name: str) -> None:
    garbage = {
        key: out(text) if key.startswith("$") else text
        for key in SPARK
        if key.startswith(("$", "/"))
    }
    platform = {"machine": "aarch64" if name == "spark" else "x86_64"}
    for finding in judge(recorded(garbage, platform), target(name)):
        assert "the check failed" not in finding.seen


def test_failing_and_hanging_check_affect_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(seen: Machine, want: Wanted) -> Finding:
        raise ValueError("odd")

    def hangs(seen: Machine, want: Wanted) -> Finding:
        left.wait()
        return ok("late")

    left = threading.Event()
    checks = [Check("a", (), None, fails), Check("b", (), None, hangs)]
    checks.append(Check("c", (), None, lambda seen, want: ok("fine")))
    monkeypatch.setattr(check, "CHECKS", checks)
    findings = {f.name: f for f in judge(recorded(), target("spark"), limit_s=1.0)}
    left.set()
    assert [findings[name].state for name in "abc"] == ["not checked", "not checked", "ok"]
    assert "ValueError: odd" in findings["a"].seen


def test_memory_share_follows_what_cuda_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM multiplies what CUDA counts, which need not be MemTotal."""
    shares = {
        found(recorded(memory(available=98), {"unified memory": counted}))["memory"].seen
        for counted in (None, 122 << 30)
    }
    assert len(shares) == 2
    monkeypatch.setattr(devices, "unified_bytes", lambda: 122 << 30)
    seen = Machine(ROOT, Path("/no"))
    assert seen.value("unified memory", int, devices.unified_bytes) == 122 << 30
    assert seen.recording()["unified memory"] == 122 << 30


def test_one_disk_for_all_has_to_hold_all() -> None:
    one = {f"disk {folder}": {"device": 1, "free": 100 * 10**9} for folder in ("/store", "/hf/hub")}
    change = {**one, "disk /var/lib/docker": one["disk /store"], "model": NONE}
    finding = found(recorded(change))["disk"]
    assert (finding.state, "needs 130" in finding.seen) == ("warning", True)
    # the volume: before a build it certainly lacks the model
    small = {"device": 1, "free": 60 * 10**9}
    change |= {"variables": {}, "disk /store": small, "disk /var/lib/docker": small}
    assert found(recorded(change))["disk"].state == "error"
    change["access /sf/dist/spark/receipt.json"] = {**NO, "writable": True}
    assert found(recorded(change))["disk"].state == "warning"


def test_instruction_set_of_a_cpu() -> None:
    for flags, state in (("avx2 avx512f", "ok"), ("sse4_2 avx", "error")):
        seen = recorded({"machine": "x86_64", "/proc/cpuinfo": f"flags\t: fp {flags}\n"})
        assert found(seen, target("cpu"))["instructions"].state == state


def test_recording_is_judged_like_the_machine(tmp_path: Path) -> None:
    live = Machine(ROOT, tmp_path)
    findings = judge(live, target("cpu"))
    again = Machine(Path("/no"), Path("/no"), load(json.dumps(live.recording())))
    assert judge(again, target("cpu")) == findings


@pytest.mark.parametrize("text", ["{}", "[]", "null", "7", '{"other": 1}', "{"])
def test_text_without_readings_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        load(text)


def test_hints_put_the_model_where_compose_looks() -> None:
    want = target("spark")
    fetch = f"hf download {want.repository} --revision {want.revision}"
    missing = found(recorded({"model": NONE}))["model"]
    assert missing.hint == f"HF_HOME=/hf {fetch} && setfacl -R -m {ACL} /hf"
    assert "65.2 GB into /hf" in missing.seen
    for chosen in ({}, {"SPARKFORGE_HF_CACHE": "other"}):  # Compose's volume, or another one
        finding = found(recorded({"model": NONE, "variables": chosen}))["model"]
        assert finding.hint.startswith("python3 build.py model fetch --target spark")
    home = {"variables": {"HF_HOME": "/home/me/the hub"}}
    finding = found(recorded(home))["model"]
    assert finding.state == "warning"  # complete, but not mounted
    assert "echo SPARKFORGE_HF_CACHE='/home/me/the hub' >>.env" in finding.hint
    finding = found(recorded({"variables": {"HF_HUB_CACHE": "/elsewhere"}}))["model"]
    assert "model fetch" in finding.hint  # Compose could not mount it
    damaged = {"model": {"folder": "/s", "problems": ["x"], "damaged": ["a.safetensors"]}}
    again = fetch.replace(" --revision", " a.safetensors --revision")
    hint = found(recorded(damaged))["model"].hint
    assert hint == f"HF_HOME=/hf {again} --force-download && HF_HOME=/hf {fetch}"


def test_hint_for_rights_keeps_the_owners() -> None:
    folder = variables(SPARKFORGE_HF_CACHE="/my hf")
    change = {**folder, "access /my hf": SPARK["access /hf"], "model rights": {"unreadable": "/x"}}
    hint = found(recorded(change))["model-rights"].hint
    assert hint == f"setfacl -R -m {ACL} '/my hf'"
    assert f"{ACL} ~/.cache/huggingface" in (ROOT / "docs/serving.md").read_text()
    offline = {**variables(HF_HUB_OFFLINE="1"), "model rights": {"unwritable": "/hf"}}
    assert found(recorded(offline))["model-rights"].state == "ok"


# -- a model on the disk ---------------------------------------------------------

REPOSITORY, REVISION = "openai/gpt-oss-120b", "b5"
NAMES = ["model-1.safetensors", "model-2.safetensors"]


def shard(path: Path, size: int = 100, cut: int = 0) -> None:
    header = json.dumps({"w": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode()
    data = struct.pack("<Q", len(header)) + header + bytes(size)
    path.write_bytes(data[: len(data) - cut])


@pytest.fixture
def snapshot(tmp_path: Path) -> Path:
    """A complete model in a hub cache below ``tmp_path``."""
    folder = model.folder_of(tmp_path / "hub", REPOSITORY) / "snapshots" / REVISION
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    index = {"weight_map": {f"w{i}": name for i, name in enumerate(NAMES)}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    for name in NAMES:
        shard(folder / name)
    return folder


def test_complete_model(snapshot: Path, tmp_path: Path) -> None:
    read = model.read(tmp_path / "hub", REPOSITORY, REVISION)
    assert read == model.Checkpoint(str(snapshot), (REVISION,))
    other = model.read(tmp_path / "hub", REPOSITORY, "c6")
    assert other == model.Checkpoint(revisions=(REVISION,))
    assert model.read(tmp_path / "no", REPOSITORY, REVISION) == model.Checkpoint()


@pytest.mark.parametrize(
    ("harm", "damaged"),
    [
        (lambda f: (f / NAMES[1]).unlink(), []),
        (lambda f: shard(f / NAMES[0], cut=1), [NAMES[0]]),
        (lambda f: (f / NAMES[0]).write_bytes(b"\xff" * 99), [NAMES[0]]),
        (lambda f: (f / "config.json").unlink(), []),
        (
            lambda f: (f / "model.safetensors.index.json").write_text(
                '{"weight_map": {"w": "../../etc/x.safetensors"}}'
            ),
            ["model.safetensors.index.json"],
        ),
    ],
    ids=["missing", "cut", "garbage", "no config", "index"],
)
def test_incomplete_model(snapshot: Path, tmp_path: Path, harm: Any, damaged: list[str]) -> None:
    harm(snapshot)
    read = model.read(tmp_path / "hub", REPOSITORY, REVISION)
    assert len(read.problems) == 1
    assert list(read.damaged) == damaged


def test_rights_of_the_container_user(snapshot: Path, tmp_path: Path) -> None:
    for folder, _, files in os.walk(tmp_path):
        Path(folder).chmod(0o755)
        for name in files:
            (Path(folder) / name).chmod(0o644)
    assert model.rights(tmp_path, REPOSITORY) == model.Rights("", str(tmp_path))
    (snapshot / NAMES[0]).chmod(0o600)
    assert model.rights(tmp_path, REPOSITORY).unreadable == str(snapshot / NAMES[0])


# what Linux kept of `setfacl -m u:10001:rwX` on a file of mode 0600, and the same with mask r--
LIST = bytes.fromhex(
    "0200000001000600ffffffff020006001127000004000000ffffffff10000600ffffffff20000000ffffffff"
)


@pytest.mark.parametrize(
    ("acl", "may"), [(LIST, 6), (LIST[:-14] + b"\4" + LIST[-13:], 4), (None, 0)]
)
def test_access_control_lists_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, acl: bytes | None, may: int
) -> None:
    file = tmp_path / "file"
    file.touch()
    file.chmod(0o660)

    def getxattr(path: Path, name: str) -> bytes:
        if acl is None:
            raise OSError
        return acl

    monkeypatch.setattr(os, "getxattr", getxattr)
    assert model.granted(file) == may
    assert model.granted(file, user=file.stat().st_uid) == 6  # the owner has the owner's


def test_every_module_of_checks_is_registered() -> None:
    registered = {one.run.__module__ for one in check.CHECKS}
    assert registered == {module.__name__ for module in command.MODULES}
    assert all(one.run.__doc__ for one in check.CHECKS)
