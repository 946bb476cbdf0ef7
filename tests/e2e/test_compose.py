"""docker-compose.yml and the Dockerfile on a real engine: rights, secrets, health, restart.

The image is made by the real Dockerfile; only vLLM in it is a stand-in of a few lines (two
processes, as vLLM has), because none of this depends on the model. With vLLM itself: test_image.py.
"""

import json
import os
import signal
import tempfile
import time
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import requests

from sparkforge.build import composing, image
from sparkforge.build.context import Tools
from sparkforge.build.results import ImageResult
from sparkforge.core.disk import sha256_file
from sparkforge.runtime import engine
from sparkforge.sources.project import store_of
from tests.disks import fill, mounted
from tests.results import context_of
from tests.support import PATIENCE_S, ROOT

from . import replicas
from .composed import composed
from .conftest import Build
from .pair import BOTH, Pair
from .replicas import Replicas
from .served import docker, project

STAND_IN = """

def cli():
    if "--headless" in sys.argv:  # the second of two machines: it listens to the first, no more
        print("half", os.getpid(), flush=True)
        signal.pause()
    if "--die-of" in sys.argv:
        os.environ["FAKE_ENGINE_DIES"] = sys.argv[sys.argv.index("--die-of") + 1]
    sys.argv = ["vllm", sys.argv[sys.argv.index("--uds") + 1], "0"]
    main()
"""
KEY = "the-key-of-this-test"
PYTHON = "/opt/sparkforge/venv/bin/python"
DRAIN = """
import socket
with socket.socket(socket.AF_UNIX) as door:
    door.connect("/tmp/sparkforge/inner.admin")
    door.sendall(b"set server vllm/engine state drain\\n")
    door.recv(99)
"""


def stand_in_wheel(folder: Path) -> Path:
    """Write a wheel named vllm, whose program is tests/fake_server.py."""
    path = folder / "vllm-0-py3-none-any.whl"
    info = "vllm-0.dist-info"
    source = (ROOT / "tests/fake_server.py").read_text()
    members = {
        "vllm_stand_in.py": source.partition('if __name__ == "__main__"')[0] + STAND_IN,
        f"{info}/METADATA": "Metadata-Version: 2.1\nName: vllm\nVersion: 0\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/entry_points.txt": "[console_scripts]\nvllm = vllm_stand_in:cli\n",
    }
    members[f"{info}/RECORD"] = "".join(f"{name},,\n" for name in [*members, f"{info}/RECORD"])
    with zipfile.ZipFile(path, "w") as wheel:
        for name, text in members.items():
            wheel.writestr(name, text)
    return path


Bake = Callable[..., str]


# of the image's program: the front door's configuration is a template
PACKAGES = (
    *("jinja2", "markupsafe", "pyyaml", "pydantic", "pydantic_core"),
    *("annotated_types", "typing_extensions", "typing_inspection"),
)


@pytest.fixture(scope="module")
def bake(build: Build, base_image: str, tmp_path_factory: pytest.TempPathFactory) -> Bake:
    """Make the stand-in's image with a profile; returns its tag."""
    folder = tmp_path_factory.mktemp("stand-in")
    receipt = build("--target", "cpu", "--engine", "none", "--until", "wheelhouse")
    (house,) = (one["key"] for one in receipt["items"] if one["label"] == "wheelhouse")
    store = store_of(None).root
    (folder / "house").mkdir()
    lock = ""
    for name in ("uv", *PACKAGES):
        pattern = f"{house[:32]}*/wheels/{name}-*.whl"
        (found,) = (store / "artefacts" / "wheelhouse").glob(pattern)
        (folder / "house" / found.name).write_bytes(found.read_bytes())
        if name != "uv":
            version = found.name.split("-")[1]
            lock += f"{name}=={version} --hash=sha256:{sha256_file(found)}\n"
    (folder / "lock.txt").write_text(lock)
    wheel = stand_in_wheel(folder)
    ours = {wheel: sha256_file(wheel)}

    reached = engine.connect()
    context = context_of("cpu", target_name="stand-in")
    ca = os.environ.get("SPARKFORGE_TEST_CA")
    base = engine.resolve(base_image, reached)
    tools = Tools(reached, base, Path(ca) if ca else None)
    empty = {
        "requirements": {"linux/amd64": str(folder / "lock.txt")},
        "system_packages": (),
        "needs": (),
        "serve": (),
    }
    context = replace(context, target=context.target.model_copy(update=empty))

    def make(**profile: Any) -> str:
        share = {"profile.json": json.dumps(profile).encode()}
        work = Path(tempfile.mkdtemp(dir=folder))
        labels = {image.TARGET_LABEL: "stand-in"}
        made = image.build(context, tools, ours, folder / "house", share, labels, work)
        assert isinstance(made, ImageResult)
        return made.tag

    return make


@pytest.fixture(scope="module")
def stand_in(bake: Bake) -> str:
    return bake(expect={"moe": "MARLIN"})


def check_rights(seen: Any) -> None:
    """Hold a container's inspection against what every service has in common."""
    host = seen["HostConfig"]
    assert host["ReadonlyRootfs"] is True
    assert host["CapDrop"] == ["ALL"]
    assert not host["CapAdd"]
    assert not host["Privileged"]
    assert host["SecurityOpt"] == ["no-new-privileges=true"]
    assert seen["Config"]["User"] == "10001:10001"


def test_the_container_has_no_rights_that_it_does_not_need(stand_in: str, tmp_path: Path) -> None:
    with composed(stand_in, tmp_path) as one:
        one.healthy()
        seen = one.inspect()
        host = seen["HostConfig"]
        check_rights(seen)
        assert host["PidsLimit"] == 4096
        assert host["Memory"] == host["MemorySwap"] == 8 << 30
        assert {bind["HostIp"] for bind in seen["NetworkSettings"]["Ports"]["8000/tcp"]} == {
            "127.0.0.1"
        }
        # what can be written: /tmp and the volume, and nothing that could be run by another user
        write = (
            "for d in / /opt/sparkforge /etc /usr/bin /model; do touch $d/x 2>&1 && echo $d; done"
        )
        refused = docker("exec", one.container, "sh", "-c", f"{write}; touch /tmp/x ~/x && echo ok")
        assert refused.splitlines()[-1] == "ok"
        assert refused.count("Read-only file system") == 5
        mounts = docker("exec", one.container, "cat", "/proc/mounts").splitlines()
        (tmp,) = (line.split()[3].split(",") for line in mounts if line.split()[1] == "/tmp")
        assert {"noexec", "nosuid", "nodev"} <= set(tmp)
        caps = docker("exec", one.container, "sh", "-c", "grep -E '^(Cap|NoNew)' /proc/1/status")
        assert {line.split()[1].strip("0") for line in caps.splitlines()} == {"", "1"}
        reply = requests.post(
            f"http://127.0.0.1:{one.port}/v1/completions", json={}, timeout=PATIENCE_S
        )
        assert reply.json()["usage"]["completion_tokens"] == 1


def test_another_build_takes_no_name_from_the_one_before(stand_in: str, bake: Bake) -> None:
    there = engine.connect()
    other = bake(expect={"moe": "MARLIN"}, warm_up="off")
    try:
        found = composing.on_engine(there, ["stand-in"], {"SPARKFORGE_IMAGE_STAND-IN": stand_in})
        assert [(one.image, one.used) for one in found] == [(other, False), (stand_in, True)]
        assert bake(expect={"moe": "MARLIN"}) == stand_in  # what is the same keeps its name
    finally:
        docker("image", "rm", other)


def test_a_frozen_engine_turns_unhealthy_and_is_started_anew(stand_in: str, tmp_path: Path) -> None:
    with composed(stand_in, tmp_path) as one:
        one.healthy()
        first = one.inspect()["State"]["StartedAt"]
        pid = one.logs().split("engine ")[1].split()[0]
        docker("exec", one.container, "sh", "-c", f"kill -STOP {pid}")
        start = time.monotonic()
        one.wait(lambda seen: seen["State"]["Health"]["Status"] == "unhealthy")
        unhealthy_s = time.monotonic() - start
        one.wait(lambda seen: seen["State"]["StartedAt"] > first)
        print(f"unhealthy after {unhealthy_s:.0f} s, anew after {time.monotonic() - start:.0f} s")
        assert one.inspect()["RestartCount"] == 1
        one.healthy()
        assert "the server hangs: ValueError" in one.logs()


def test_a_killed_server_is_started_anew(stand_in: str, tmp_path: Path) -> None:
    with composed(stand_in, tmp_path) as one:
        one.healthy()
        pid = one.logs().split("engine ")[1].split()[0]
        parent = f"$(cut -d' ' -f4 /proc/{pid}/stat)"
        docker("exec", one.container, "sh", "-c", f"kill -KILL {parent}")
        one.wait(lambda seen: seen["RestartCount"] == 1)
        one.healthy()


def test_the_key_is_a_secret(stand_in: str, tmp_path: Path) -> None:
    secret = tmp_path / "key"
    secret.write_text(f"{KEY}\n")
    secret.chmod(0o444)
    options = {"SPARKFORGE_API_KEY_FILE": str(secret), "SPARKFORGE_BIND": "0.0.0.0"}
    with composed(stand_in, tmp_path, **options) as one:
        one.healthy()  # on an open address, since there is a key
        code = "import pathlib,sys;e=[p.read_bytes() for p in pathlib.Path('/proc').glob('[0-9]*/environ')];print(sum(sys.argv[1].encode() in x for x in e))"  # noqa: E501
        assert docker("exec", one.container, PYTHON, "-c", code, KEY) == "0"
        assert KEY not in json.dumps(one.inspect())
        assert KEY not in one.logs()
        assert KEY not in docker("history", "--no-trunc", stand_in)


def test_an_open_address_without_a_key_is_refused(stand_in: str, tmp_path: Path) -> None:
    options = {"SPARKFORGE_BIND": "0.0.0.0", "SPARKFORGE_RESTART": "no"}
    with composed(stand_in, tmp_path, **options) as one:
        one.wait(lambda seen: seen["State"]["Status"] == "exited")
        assert one.inspect()["State"]["ExitCode"] == 78
        assert "error: port published on 0.0.0.0 without an API key" in one.logs()


def test_what_no_restart_changes_is_tried_once_and_told(stand_in: str, tmp_path: Path) -> None:
    with composed(stand_in, tmp_path, SPARKFORGE_BIND="0.0.0.0") as one:
        one.wait(lambda seen: "waiting without a server" in one.logs())
        one.wait(lambda seen: len(seen["State"]["Health"]["Log"]) > 1)
        seen = one.inspect()
        assert (seen["State"]["Status"], seen["RestartCount"]) == ("running", 0)
        said = seen["State"]["Health"]["Log"][-1]["Output"]
        assert said.startswith("unhealthy: waiting without a server: a restart changes nothing")
        one.compose("stop")
        assert one.inspect()["State"]["ExitCode"] == 78


def test_a_first_token_that_kills_the_engine_is_tried_three_times(
    stand_in: str, tmp_path: Path
) -> None:
    with composed(stand_in, tmp_path, SPARKFORGE_EXTRA_ARGS="--die-of SIGILL") as one:
        one.wait(lambda seen: "waiting without a server" in one.logs())
        assert (
            one.inspect()["RestartCount"] == 2
        )  # counted in the volume: /tmp is a new one each time
        assert "start 3 of 3: the last one never became ready" in one.logs()
        # whoever starts it again wants it tried again
        one.compose("restart")
        again = "waiting without a server: 3 starts in a row never became ready"
        one.wait(lambda seen: one.logs().count(again) == 2)


def test_a_full_disk_is_one_error_and_no_start_without_end(stand_in: str, tmp_path: Path) -> None:
    """The disk of the compiled kernels, where failed starts are counted."""
    disk = tmp_path / "disk"
    bound = {"type": "none", "o": "bind", "device": str(disk)}
    more = {"volumes": {"cache-cpu": {"driver": "local", "driver_opts": bound}}}
    with mounted(disk, "-t", "tmpfs", "-o", "size=1m,mode=777", "tmpfs"):
        filler = fill(disk)
        with composed(stand_in, tmp_path, more) as one:
            one.wait(lambda seen: seen["RestartCount"] > 1 and seen["State"]["ExitCode"] == 73)
            assert "error: compiled kernels cannot be stored in " in one.logs()
            assert "No space left on device" in one.logs()
            assert "Traceback" not in one.logs()
            assert "engine" not in one.logs()  # no server was started
            filler.unlink()
            one.healthy()  # by itself
            # one that runs stays well, and starts that fail later are still counted
            fill(disk)
            one.env["SPARKFORGE_EXTRA_ARGS"] = "--die-of SIGILL"
            one.compose("up", "--detach")
            again = "waiting without a server: 3 starts in a row never became ready"
            one.wait(lambda seen: again in one.logs())
            assert one.inspect()["RestartCount"] == 2


def test_the_rtx_profile_asks_for_one_card_and_keeps_the_rights_of_the_others(
    base_image: str,
) -> None:
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": "GPU-1", "SPARKFORGE_MEMORY_LIMIT": "20g"}
    words = ("--profile", "rtx", "config", "--format", "json")
    shown = docker(*project("rtx"), *words, env=env)
    ((name, service),) = json.loads(shown)["services"].items()
    assert name == "rtx"
    (card,) = service["deploy"]["resources"]["reservations"]["devices"]
    assert (card["driver"], card["device_ids"]) == ("nvidia", ["GPU-1"])
    assert service["mem_limit"] == service["memswap_limit"] == str(20 << 30)
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["ports"][0]["host_ip"] == "127.0.0.1"
    assert service["environment"]["SPARKFORGE_MODEL"].startswith("openai/gpt-oss-20b@")
    sources = {one["target"]: one["source"] for one in service["volumes"]}
    assert sources["/var/cache/sparkforge"] == "cache-rtx"


def test_two_machines_meet_and_are_started_anew_together(stand_in: str, tmp_path: Path) -> None:
    model = tmp_path / "model"  # the folder above it is its owner's alone
    model.mkdir()
    (model / "config.json").write_text("{}")
    pair = Pair(stand_in, model, "10.87.42")
    try:
        pair.up()
        noticed_s, again_s = pair.lose("spark-worker", signal.SIGKILL)
        print(f"head not healthy after {noticed_s:.0f} s, both again after {again_s:.0f} s")
        for name in BOTH:
            check_rights(pair.state(name))
        # the head is stopped on purpose: the worker is left, and waits for it
        pair.compose("stop", "spark-head")
        pair.wait(lambda: not pair.healthy("spark-worker"), PATIENCE_S)
    finally:
        pair.close()


def test_a_replica_that_is_lost_takes_only_its_own_requests_and_comes_back(
    stand_in: str, tmp_path: Path
) -> None:
    key, model = tmp_path / "key", tmp_path / "model"
    key.write_text(KEY)
    key.chmod(0o444)
    model.mkdir()
    (model / "config.json").write_text("{}")
    machines = Replicas(stand_in, model, key, "10.87.43")
    try:
        machines.up()
        check_rights(machines.inspect("router"))
        # on a busy machine both may just have failed a check
        machines.wait(lambda: json.loads(machines.get("/v1/models")).get("authorized") == "none")
        with machines.load() as load:
            machines.wait_for_answers("one", "two")
            assert load.lost == []
            machines.signal("one", "KILL", engine=False)
            machines.wait(lambda: machines.inspect("one")["RestartCount"] == 1)
            machines.wait_for_answers("one", "two")  # it is back
            killed = machines.lost()
            # /health of the one with the frozen engine still says that all is well
            machines.signal("two", "STOP", engine=True)
            start = time.monotonic()
            machines.wait(lambda: machines.get("/health").startswith("1 of 2"))
            noticed_s = time.monotonic() - start
            machines.wait(lambda: machines.inspect("two")["RestartCount"] == 1)
            machines.wait_for_answers("one", "two")
            again_s = time.monotonic() - start
        frozen = machines.lost()[len(killed) :]
        print(f"frozen engine: noticed after {noticed_s:.0f} s, serves after {again_s:.0f} s")
        print(f"lost: {len(killed)} killed, {len(frozen)} frozen; answered: {load.answered}")
        # those that were under way on the server that was lost: it gets no other, and the one that
        # is well loses none
        assert set(killed) <= {machines.names["one"]}, load.lost
        assert set(frozen) <= {machines.names["two"]}, load.lost
        assert max(len(killed), len(frozen)) <= replicas.CLIENTS, load.lost
        # HAProxy leaves out lines that a busy engine does not take from it
        assert len(killed) + len(frozen) <= len(load.lost) <= 2 * replicas.CLIENTS, load.lost
        assert "vllm:generation_tokens_total" in machines.get("/replicas/10.87.43.12:8000/metrics")
        assert "replica=10.87.43.11:8000" in machines.compose("logs", "router")
        # where no server wants new requests, they get them
        for name in replicas.SERVERS:
            machines.compose("exec", name, PYTHON, "-c", DRAIN)
        machines.wait(lambda: machines.get("/health").startswith("0 of 2"))
        assert json.loads(machines.get("/v1/models"))["data"]
    finally:
        machines.close()
