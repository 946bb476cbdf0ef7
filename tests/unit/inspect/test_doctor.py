"""Doctor's probes on readings. None is a recording of a Spark: they are written after reports."""

from __future__ import annotations

import dataclasses
import json
import struct
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from sparkforge.core.run import Glimpse, glimpse
from sparkforge.inspect.doctor import checkpoint, command, machine, reading, storage
from sparkforge.inspect.doctor.checkpoint import Checkpoint
from sparkforge.inspect.doctor.finding import CHECKS, Finding
from sparkforge.inspect.doctor.reading import Disk, Disks, PathState, Readings
from sparkforge.inspect.doctor.rights import Rights
from sparkforge.inspect.doctor.wanted import Wanted, wanted
from sparkforge.pins import pins
from sparkforge.serving import devices, memory
from sparkforge.serving.checkpoint import Shard
from sparkforge.serving.memory import Reading
from tests.support import PATIENCE_S, ROOT

GIB_KIB = 1 << 20
SMI = """<?xml version="1.0" ?>
<!DOCTYPE nvidia_smi_log SYSTEM "nvsmi_device_v12.dtd">
<nvidia_smi_log>
 <driver_version>{driver}</driver_version><cuda_version>{cuda}</cuda_version>
 <gpu id="0000000F:01:00.0">
  <product_name>NVIDIA GB10</product_name>
  <fb_memory_usage><total>{memory}</total><used>{memory}</used></fb_memory_usage>
  <utilization><gpu_util>{load} %</gpu_util></utilization>
  <clocks><sm_clock>{clock}</sm_clock></clocks>
  <max_clocks><sm_clock>3003 MHz</sm_clock></max_clocks>
  <clocks_event_reasons>
   <clocks_event_reason_gpu_idle>Active</clocks_event_reason_gpu_idle>
   <clocks_event_reason_hw_power_brake_slowdown>{brake}</clocks_event_reason_hw_power_brake_slowdown>
  </clocks_event_reasons>
  <processes>{processes}</processes>
 </gpu>
</nvidia_smi_log>
"""


def smi(**changes: str) -> Glimpse:
    values = {
        "driver": "580.95.05",
        "cuda": "13.0",
        "memory": "N/A",
        "load": "96",
        "clock": "2411 MHz",
        "brake": "Not Active",
        "processes": "",
    }
    return Glimpse(0, SMI.format(**{**values, **changes}))


def meminfo(total: int = 119, available: int = 110, free: int = 100, swap: int = 0) -> str:
    """Return a /proc/meminfo; sizes in GiB, ``swap``: of 16, how many are used."""
    return (
        f"MemTotal: {total * GIB_KIB} kB\nMemFree: {free * GIB_KIB} kB\n"
        f"MemAvailable: {available * GIB_KIB} kB\nCached: {(available - free) * GIB_KIB} kB\n"
        f"SwapTotal: {16 * GIB_KIB} kB\nSwapFree: {(16 - swap) * GIB_KIB} kB\n"
    )


INFO: dict[str, Any] = {"ServerVersion": "28.5.1", "Runtimes": {"runc": {}, "nvidia": {}}}
CHECKPOINT = Checkpoint(
    hub="/hub",
    revisions=("b5",),
    folder="/hub/s",
    config=True,
    shards={"a.safetensors": Shard(9, 9)},
)


def spark(**changes: Any) -> Readings:
    """A Spark on which all is well, but for ``changes``: program or file names, or a field's."""
    programs = {
        "nvidia-smi": smi(),
        "compute-cap": Glimpse(0, "NVIDIA GB10, 12.1\n"),
        "docker": Glimpse(0, json.dumps(INFO)),
        "buildx": Glimpse(0, "github.com/x v0.29.1\n"),
        "compose": Glimpse(0, "2.40.3\n"),
        "nvidia-ctk": Glimpse(0, "NVIDIA … version 1.18.0\n"),
        "git": Glimpse(0, "git version 2.43.0\n"),
        "g++": Glimpse(0, "g++ (Ubuntu 13.3.0-6ubuntu2~24.04) 13.3.0\n"),
    }
    files = {"/proc/meminfo": meminfo(), "/etc/os-release": 'PRETTY_NAME="Ubuntu 24.04.3 LTS"\n'}
    for name in [*changes]:
        if name.replace("_", "-") in programs:
            programs[name.replace("_", "-")] = changes.pop(name)
        elif name == "mem":
            files["/proc/meminfo"] = changes.pop(name)
    there = PathState(exists=True, readable=True, writable=True, folder=False)
    plain: dict[str, Any] = {
        "files": files,
        "programs": programs,
        "facts": {
            "machine": "aarch64",
            "kernel": "6.14",
            "page_size": "4096",
            "python": "3.12.3",
            "docker_socket": "/run/docker.sock",
            "pythons": "3.12",
        },
        "paths": {
            **dict.fromkeys((*reading.DEVICES, "/run/docker.sock"), there),
            "/store": dataclasses.replace(there, folder=True),
        },
        "disks": Disks(
            store=Disk("/store", 900 << 30, 1 << 40),
            model=Disk("/hub", 900 << 30, 1 << 40),
            checkpoint=CHECKPOINT,
            rights=Rights(exists=True),
        ),
        "variables": {"SPARKFORGE_HF_CACHE": "/hf"},
    }
    return dataclasses.replace(Readings(**plain), **changes)


@pytest.fixture(scope="module")
def want() -> Wanted:
    return wanted(pins.load(ROOT / "pins.yaml"), "spark")


def found(seen: Readings, want: Wanted) -> dict[str, Finding]:
    return {one.name: one for one in command.judge(seen, want, command.PROBES)}


def test_a_spark_on_which_all_is_well(want: Wanted) -> None:
    findings = found(spark(), want)
    assert set(findings) == set(CHECKS) - {"instructions", "model-disk", "doctor"} - CLUSTER
    assert {one.name for one in findings.values() if one.state != "ok"} == {"firmware"}


@pytest.mark.parametrize(
    ("flags", "moe_backend", "state", "fragments"),
    [
        ("avx2", "bf16_dequant", "ok", ("avx2; ", "_C_AVX2", "bf16_dequant", "vector kernels")),
        ("avx2 avx512f", "bf16_dequant", "ok", ("avx512; ", "_C_AVX512", "vector kernels")),
        ("avx2 avx512f avx512_bf16", "bf16_dequant", "ok", ("avx512_bf16; ", "_C, ", "vector")),
        (
            "avx2 avx512f avx512_bf16 amx_tile",
            "bf16_dequant",
            "ok",
            ("amx; ", "_C, ", "AMX kernels", "--moe-backend auto keeps them in MXFP4"),
        ),
        ("avx2 avx512f avx512_bf16 amx_tile", "auto", "ok", ("auto (MXFP4 experts, AMX kernels)",)),
        ("avx2", "auto", "ok", ("no backend for MXFP4 experts",)),
        ("sse4_2 avx", "bf16_dequant", "fail", ("no AVX2",)),
        ("asimd bf16 sve", "bf16_dequant", "ok", ("neon; vLLM loads _C, ", "NEON kernels")),
    ],
)
def test_a_cpu_s_instruction_set_and_backend_are_named(
    flags: str, moe_backend: str, state: str, fragments: tuple[str, ...]
) -> None:
    want = wanted(pins.load(ROOT / "pins.yaml"), "cpu")
    assert want.moe_backend == "bf16_dequant"
    want = dataclasses.replace(want, moe_backend=moe_backend)
    arm = flags.startswith("asimd")
    text = f"{'Features' if arm else 'flags'}\t\t: fp {flags}\n"
    facts = {**FACTS, "machine": "aarch64" if arm else "x86_64"}
    (finding,) = machine.instructions(spark(files={"/proc/cpuinfo": text}, facts=facts), want)
    assert finding.state == state
    for fragment in fragments:
        assert fragment in finding.seen


CLUSTER = {name for name, check in CHECKS.items() if check.theme == "cluster"}
FULL = dataclasses.replace(CHECKPOINT, shards={"a.safetensors": Shard(9, 12)})
NONE = Checkpoint("/hub", revisions=("0" * 40,), incomplete=("x.incomplete",))


def disks(**changes: Any) -> Disks:
    """Return those of a Spark, but for changes."""
    return dataclasses.replace(spark().disks, **changes)


FACTS = spark().facts
NO = PathState(exists=True, readable=False, writable=False, folder=False)


@pytest.mark.parametrize(
    ("changes", "name", "state", "fragment"),
    [
        # GPU: hangs, fails, prints garbage, another card, an old driver
        (
            {"nvidia_smi": Glimpse(None, problem="nvidia-smi did not finish within 8 s")},
            "gpu",
            "fail",
            "did not finish within 8 s",
        ),
        (
            {"nvidia_smi": Glimpse(9, "NVIDIA-SMI has failed because it couldn't communicate")},
            "gpu",
            "fail",
            "failed with exit code 9: NVIDIA-SMI has failed",
        ),
        ({"nvidia_smi": Glimpse(0, "\x00\x01garbage")}, "gpu", "fail", "not XML"),
        ({"nvidia_smi": Glimpse(0, "<nvidia_smi_log/>")}, "gpu", "fail", "lists no GPU"),
        ({"compute_cap": Glimpse(0, "NVIDIA H200, 9.0\n")}, "gpu", "fail", "is for 12.1"),
        (
            {"compute_cap": Glimpse(2, 'Field "compute_cap" is not a valid field to query.')},
            "gpu",
            "note",
            "unknown",
        ),
        ({"nvidia_smi": smi(driver="570.86", cuda="12.8")}, "driver", "fail", "CUDA is 13.0"),
        ({"nvidia_smi": smi(cuda="N/A")}, "driver", "note", "CUDA N/A"),
        ({"nvidia_smi": smi(memory="Not Supported")}, "gpu-memory", "ok", "not reported"),
        ({"nvidia_smi": smi(processes="<process_info/>")}, "gpu-memory", "warn", "1 processes"),
        # clocks: stuck only at load, low when idle, braked, not told
        ({"nvidia_smi": smi(clock="702 MHz")}, "clocks", "fail", "702 MHz, at most 3003 MHz"),
        ({"nvidia_smi": smi(clock="208 MHz", load="0")}, "clocks", "note", "idle clocks"),
        ({"nvidia_smi": smi(brake="Active")}, "clocks", "warn", "hw_power_brake_slowdown"),
        ({"nvidia_smi": smi(clock="N/A")}, "clocks", "note", "unknown"),
        ({"paths": {}}, "devices", "warn", "/dev/nvidia-uvm"),
        # memory
        ({"mem": meminfo(available=60, free=50)}, "memory", "fail", "the model needs 75"),
        ({"mem": meminfo(total=23, available=20, free=10)}, "memory", "fail", "the model needs 75"),
        ({"mem": meminfo(available=110, free=20)}, "page-cache", "warn", "20.0 GiB free"),
        ({"mem": meminfo(swap=5)}, "swap", "warn", "5.0 of 16.0 GiB used"),
        ({"mem": ""}, "memory", "note", "no memory information"),
        # disks and model
        (
            {"disks": disks(store=Disk("/store", 1 << 30, 1 << 40))},
            "store",
            "fail",
            "1.0 GiB",
        ),
        (
            {"disks": disks(store=Disk("/store", 9 << 30, 1 << 40))},
            "store",
            "warn",
            "an estimate",
        ),
        ({"disks": Disks()}, "store", "fail", "did not answer"),
        ({"paths": {"/store": NO}}, "store", "fail", "not writable"),
        ({"disks": disks(checkpoint=FULL)}, "model", "fail", "9 bytes, its header says 12"),
        ({"disks": disks(checkpoint=NONE)}, "model", "warn", "unfinished downloads"),
        (
            {"disks": disks(checkpoint=NONE), "variables": {"HF_HUB_OFFLINE": "1"}},
            "model",
            "fail",
            "HF_HUB_OFFLINE is set",
        ),
        (
            {"disks": disks(checkpoint=NONE, model=Disk("/hub", 9 << 30, 1 << 40))},
            "model-disk",
            "fail",
            "gpt-oss-120b needs 65",
        ),
        # engine
        ({"paths": {"/run/docker.sock": NO}}, "docker-socket", "fail", "permission denied"),
        ({"docker": Glimpse(None, problem="docker is not on the PATH")}, "engine", "fail", "PATH"),
        (
            {"docker": Glimpse(1, '{"ServerErrors":["Cannot connect"]}')},
            "engine",
            "fail",
            "Cannot connect",
        ),
        ({"docker": Glimpse(0, '{"ServerVersion": "20.10.24"}')}, "engine", "fail", "too old"),
        (
            {
                "docker": Glimpse(0, '{"ServerVersion": "28.5.1", "Runtimes": {"runc": {}}}'),
                "nvidia_ctk": Glimpse(None, problem="no"),
            },
            "container-toolkit",
            "fail",
            "not installed",
        ),
        ({"docker": Glimpse(0, '{"ServerVersion": "28.5.1"}')}, "container-toolkit", "warn", "no"),
        (
            {
                "docker": Glimpse(
                    0,
                    '{"ServerVersion": "28.5.1", "DiscoveredDevices":'
                    ' [{"ID": "nvidia.com/gpu=all"}]}',
                )
            },
            "container-toolkit",
            "ok",
            "CDI",
        ),
        (
            {"buildx": Glimpse(1, "", "docker: 'buildx' is not a docker command.")},
            "buildx",
            "fail",
            "not a docker command",
        ),
        ({"compose": Glimpse(0, "1.29.2\n")}, "compose", "warn", "older than 2.20"),
        ({"variables": {"SPARKFORGE_PORT": "80 00"}}, "port", "fail", "'80 00'"),
        (
            {"variables": {"SPARKFORGE_PROFILE": "fats"}},
            "profile",
            "fail",
            "'fats': no such profile",
        ),
        ({"variables": {"SPARKFORGE_PROFILE": "balanced"}}, "profile", "ok", "balanced"),
        ({"variables": {"SPARKFORGE_PROFILE": "/a/file"}}, "profile", "note", "/a/file"),
        ({"variables": {"SPARKFORGE_PROFILE": ""}}, "profile", "note", "none"),
        # machine
        ({"facts": {**FACTS, "machine": "x86_64"}}, "architecture", "fail", "linux/arm64"),
        ({"facts": {**FACTS, "page_size": "65536"}}, "page-size", "warn", "64 KiB"),
        ({"facts": {**FACTS, "pythons": ""}}, "python", "note", "its image includes it"),
        ({"git": Glimpse(None, problem="git is not on the PATH")}, "git", "fail", "PATH"),
        ({"git": Glimpse(0, "git version 2.20.1")}, "git", "warn", "2.20.1"),
        ({"g++": Glimpse(None, problem="g++ is not on the PATH")}, "compiler", "fail", "PATH"),
        (
            {"variables": {"https_proxy": "http://me:secret@proxy:3128"}},
            "proxies",
            "warn",
            "http://***@proxy:3128",
        ),
        (
            {"variables": {"https_proxy": "http://proxy:3128", "no_proxy": "x,localhost"}},
            "proxies",
            "note",
            "proxy:3128",
        ),
        ({"late": ("disk store",)}, "doctor", "warn", "disk store"),
    ],
)
def test_what_is_wrong_is_found(
    want: Wanted, changes: dict[str, Any], name: str, state: str, fragment: str
) -> None:
    one = found(spark(**dict(changes)), want)[name]
    assert (one.state, fragment in one.seen) == (state, True), one
    assert one.remedy or state in ("ok", "note") or name == "doctor"
    assert "secret" not in one.seen


GARBAGE = ("", "\x00\xff" * 99, "null", "[1, 2]", "{}", '{"ServerVersion": 5}', "<a><b/></a>", "∞")


@pytest.mark.parametrize("text", GARBAGE)
@pytest.mark.parametrize("target", ["cpu", "spark", "rtx"])
def test_no_garbage_ends_a_probe(text: str, target: str) -> None:
    plain = spark()
    seen = dataclasses.replace(
        plain,
        programs={name: Glimpse(0, text, text) for name in plain.programs},
        files=dict.fromkeys((*reading.FILES, "/proc/meminfo"), text),
    )
    findings = found(seen, wanted(pins.load(ROOT / "pins.yaml"), target))
    assert "doctor" not in findings
    assert {"gpu", "engine", "git", "memory"} <= set(findings)


def test_a_probe_that_fails_takes_no_other_with_it(want: Wanted) -> None:
    broken = dataclasses.replace(spark(), facts={**FACTS, "page_size": "large"})
    findings = found(broken, want)
    assert "page_size failed: ValueError" in findings["doctor"].seen
    assert {"git", "clocks", "port"} <= set(findings)


def test_the_share_of_memory_is_the_entrypoint_s(want: Wanted) -> None:
    """vLLM multiplies what CUDA counts, which need not be MemTotal."""
    seen = Reading(119 << 30, 98 << 30)
    shares = set()
    for counted in (None, 122 << 30):
        facts = {**FACTS, "cuda_total": str(counted or "")}
        (finding, *_) = machine.memory_free(spark(mem=meminfo(available=98), facts=facts), want)
        assert want.memory is not None
        share = memory.utilisation(want.memory, seen, counted)
        assert f"vLLM would be given {share:.2f} of all" in finding.seen
        assert ("CUDA counts 122.0" in finding.seen) == (counted is not None)
        shares.add(share)
    assert len(shares) == 2


def test_cuda_is_asked_for_an_integrated_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for counted, text in ((122 << 30, str(122 << 30)), (None, "")):
        monkeypatch.setattr(devices, "unified_bytes", lambda found=counted: found)
        seen = reading.take(store=tmp_path, model=tmp_path, env_file=tmp_path / ".env")
        assert seen.facts["cuda_total"] == text


def test_readings_come_back_from_a_file() -> None:
    assert Readings.loads(spark().dumps()) == spark()


def test_a_recording_of_an_older_version_is_judged_the_same(want: Wanted) -> None:
    text = json.loads(spark().dumps())
    there = text["disks"]["checkpoint"]
    there |= {"snapshot": "/hub/s", "named": ["a.safetensors", "b.safetensors"]}
    there["shards"] = {"a.safetensors": {"size": 9, "expected": 9}, "b.safetensors": {}}
    there["shards"]["b.safetensors"] = {"problem": "missing"}
    del text["disks"]["rights"], text["late"], text["paths"]["/store"]["folder"]
    findings = found(Readings.loads(json.dumps(text)), want)
    assert findings["store"].state == "ok"
    assert findings["model"].seen.endswith("b.safetensors: missing")
    # of the user's own, without a hub
    del there["hub"], there["snapshot"]
    findings = found(Readings.loads(json.dumps(text)), want)
    assert "/hub/s-anew" in findings["model"].remedy


def test_ports_of_listeners_only() -> None:
    table = (
        "  sl  local_address rem_address   st tx_queue rx_queue\n"
        "   0: 0100007F:1F40 00000000:0000 0A 00000000:00000000 00:00000000\n"
        "   1: 0100007F:1F41 0100007F:C350 01 00000000:00000000 00:00000000\n"
    )
    assert storage.listening(table) == {8000}


# -- a checkpoint on the disk ----------------------------------------------------


def shard(path: Path, size: int = 100, cut: int = 0) -> None:
    header = json.dumps({"w": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode()
    data = struct.pack("<Q", len(header)) + header + bytes(size)
    path.write_bytes(data[: len(data) - cut])


def checkpoint_in(folder: Path, names: list[str]) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    index = {"weight_map": {f"w{i}": name for i, name in enumerate(names)}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    for name in names:
        shard(folder / name)
    return folder


NAMES = ["model-1.safetensors", "model-2.safetensors"]


def test_a_complete_model_of_the_hubs_cache(want: Wanted, tmp_path: Path) -> None:
    assert want.model is not None
    _, repository, revision = want.model
    folder = checkpoint.folder_of(tmp_path, repository) / "snapshots" / revision
    checkpoint_in(folder, NAMES)
    read = checkpoint.read(tmp_path, repository, revision)
    one = found(spark(disks=disks(checkpoint=read)), want)["model"]
    assert one.state == "ok"
    assert "2 shards" in one.seen
    # another revision is not that one
    folder.rename(folder.with_name("f" * 40))
    read = checkpoint.read(tmp_path, repository, revision)
    one = found(spark(disks=disks(checkpoint=read)), want)["model"]
    assert (one.state, "there: ffffffffffff" in one.seen) == ("warn", True)


@pytest.mark.parametrize(
    ("harm", "fragment"),
    [
        (lambda f: (f / NAMES[1]).unlink(), "model-2.safetensors: missing"),
        (lambda f: shard(f / NAMES[0], cut=1), "bytes, its header says"),
        (lambda f: (f / NAMES[0]).write_bytes(b""), "no safetensors header"),
        (lambda f: (f / NAMES[0]).write_bytes(b"\xff" * 99), "no safetensors header"),
        (lambda f: (f / "config.json").unlink(), "no config.json"),
        (lambda f: (f / "model.safetensors.index.json").write_text("{"), "index.json is damaged"),
        (lambda f: (f / "model.safetensors.index.json").write_text("[]"), "index.json is damaged"),
        (
            lambda f: (f / "model.safetensors.index.json").write_text(
                '{"weight_map": {"w": "../../etc/x.safetensors"}}'
            ),
            "which is no shard",
        ),
    ],
)
def test_an_incomplete_model_is_told(
    want: Wanted, tmp_path: Path, harm: Any, fragment: str
) -> None:
    folder = checkpoint_in(tmp_path / "a model", NAMES)
    harm(folder)
    read = checkpoint.read_folder(folder)
    one = found(spark(disks=disks(checkpoint=read)), want)["model"]
    assert one.state == "fail"
    assert fragment in one.seen
    assert "hf download openai/gpt-oss-120b --revision" in one.remedy


def test_a_folder_of_ones_own_is_not_written_over(want: Wanted, tmp_path: Path) -> None:
    folder = checkpoint_in(tmp_path / "a model", NAMES)
    (folder / NAMES[0]).write_bytes(b"")
    read = checkpoint.read_folder(folder)
    one = found(spark(disks=disks(checkpoint=read)), want)["model"]
    assert f"--local-dir '{folder}-anew'" in one.remedy


def test_a_damaged_file_of_the_hubs_cache_is_fetched_though_it_is_there(
    want: Wanted, tmp_path: Path
) -> None:
    assert want.model is not None
    _, repository, revision = want.model
    folder = checkpoint.folder_of(tmp_path, repository) / "snapshots" / revision
    checkpoint_in(folder, NAMES)

    def remedy() -> str:
        read = checkpoint.read(tmp_path, repository, revision)
        there = disks(checkpoint=read)
        return found(spark(disks=there, variables={}), want)["model"].remedy

    (folder / NAMES[1]).unlink()
    assert remedy() == f"hf download {repository} --revision {revision}"
    for damaged in (b"", struct.pack("<Q", 10) + bytes(10)):
        (folder / NAMES[0]).write_bytes(damaged)
        assert "--force-download" in remedy()
    anew = f"hf download {repository} {NAMES[0]} --revision {revision} --force-download"
    assert remedy() == f"{anew} && hf download {repository} --revision {revision}"


def test_the_remedy_puts_the_model_where_compose_looks(want: Wanted) -> None:
    assert want.model is not None
    fetch = f"hf download {want.model[1]} --revision {want.model[2]}"
    acl = "u:10001:rwX,d:u:10001:rwX,d:u:$(id -u):rwX"
    there = disks(checkpoint=NONE)
    one = found(spark(disks=there), want)["model"]
    assert "downloads 65.2 GB into /hf" in one.seen
    assert one.remedy == f"HF_HOME=/hf {fetch} && setfacl -R -m {acl} /hf"
    one = found(spark(disks=there, variables={}), want)["model"]
    assert "downloads 65.2 GB into its volume sparkforge-models" in one.seen
    assert one.remedy.startswith("python3 build.py model fetch --target spark")
    # a name without a slash is a volume of Compose's
    named = found(spark(disks=there, variables={"SPARKFORGE_HF_CACHE": "other"}), want)["model"]
    assert named.remedy == one.remedy


def test_a_model_that_compose_does_not_see_is_no_model_yet(want: Wanted) -> None:
    there = dataclasses.replace(CHECKPOINT, hub="/home/me/the hub/hub")
    one = found(spark(disks=disks(checkpoint=there), variables={}), want)["model"]
    assert one.state == "warn"
    assert "volume sparkforge-models" in one.seen
    assert "echo SPARKFORGE_HF_CACHE='/home/me/the hub' >>.env" in one.remedy
    # HF_HUB_CACHE: nothing that Compose could mount
    moved = dataclasses.replace(CHECKPOINT, hub="/elsewhere")
    one = found(spark(disks=disks(checkpoint=moved), variables={}), want)["model"]
    assert "model fetch" in one.remedy


def test_the_smaller_model_is_not_65_gb() -> None:
    there = disks(checkpoint=NONE)
    rtx = wanted(pins.load(ROOT / "pins.yaml"), "rtx")
    assert "downloads 13.8 GB" in found(spark(disks=there), rtx)["model"].seen
    assert "65" not in CHECKS["model"].why


def test_a_shim_of_a_version_that_is_not_installed_is_no_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, script in (("3.11", "echo Python 3.11.9"), ("3.12", "exit 127"), ("3.13", "")):
        file = tmp_path / f"python{name}"
        file.write_text(f"#!/bin/sh\n{script}\n")
        file.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/nowhere")
    assert reading._pythons(60) == "3.11"


@pytest.mark.parametrize("text", ["{}", "[]", "null", "7", '{"other": 1}'])
def test_what_is_no_recording_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="readings of a machine"):
        reading.Readings.loads(text)


# -- programs that may be broken, and reading that hangs -------------------------


def test_a_glimpse_waits_no_longer_than_asked_and_leaves_nothing() -> None:
    start = time.monotonic()
    for limit_s in (0.3, 3.0, 30.0):  # a busy machine may take longer to start a shell
        program = "trap '' TERM; echo here; sleep 900 & sleep 900"
        seen = glimpse("sh", "-c", program, timeout_s=limit_s)
        assert seen.problem == f"sh did not finish within {limit_s:.0f} s"
        if seen.out:
            break
    assert time.monotonic() - start < PATIENCE_S
    assert (seen.code, seen.out) == (None, "here\n")


def test_a_glimpse_of_a_flood_is_cut() -> None:
    seen = glimpse("yes", timeout_s=PATIENCE_S, limit=1 << 16)
    assert len(seen.out) == 1 << 16
    assert (seen.code, seen.problem) == (None, "yes writes endless output")


def test_a_glimpse_of_no_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert glimpse("no-such-program", timeout_s=1).problem == "no-such-program is not on the PATH"
    (tmp_path / "broken").write_bytes(b"\x7fELF")
    (tmp_path / "broken").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "broken cannot be started" in glimpse("broken", timeout_s=1).problem
    assert glimpse("/bin/sh", "-c", "echo a; echo b >&2; exit 3", timeout_s=PATIENCE_S) == Glimpse(
        3, "a\n", "b\n"
    )


def test_what_hangs_is_left_behind() -> None:
    def refused() -> None:
        raise PermissionError

    left = threading.Event()
    works = {"late": left.wait, "soon": lambda: 5, "refused": refused}
    assert reading.bounded(works, 0.3) == {"soon": 5}
    left.set()
