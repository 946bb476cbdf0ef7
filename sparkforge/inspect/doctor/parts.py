"""The parts of a report about a first run on a user's machine.

Each part is a text, or the reason for its absence. A failed part does not affect others.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sparkforge import __version__
from sparkforge.build import receipt
from sparkforge.core import plain
from sparkforge.core.log import log
from sparkforge.core.run import Glimpse, glimpse
from sparkforge.inspect.doctor import chats
from sparkforge.inspect.doctor.masking import INSTEAD, is_secret_name
from sparkforge.runtime import client
from sparkforge.runtime.client import Place
from sparkforge.serving import memory

_ASK_S = 20.0
_LOG_S = 60.0
_MOST = 4 << 20  # limit in bytes for a complete file
_TAIL_LINES = 5000
_KERNEL = re.compile(r"nvrm|xid|nvidia|out of memory|oom[-_ ]|hung task|mce:", re.I)
_CLOCKS_EVERY_S = 2
_CLOCKS = (
    "timestamp,clocks.sm,clocks.mem,clocks.max.sm,power.draw,temperature.gpu,utilization.gpu,"
    "clocks_event_reasons.active"
)
_CGROUP = (
    "cd /sys/fs/cgroup && for f in memory.current memory.peak memory.max memory.swap.max"
    ' memory.events memory.stat; do echo "== $f"; cat "$f"; done'
)
_CACHES = "du -xsk /var/cache/sparkforge/* /tmp /dev/shm; df -k /var/cache/sparkforge"


@dataclass(frozen=True)
class Part:
    """A file of the archive."""

    file: str
    """Its name in the archive."""
    what: str
    text: str = ""
    problem: str = ""
    """Reason why it is incomplete or missing, or ""."""


@dataclass(frozen=True)
class Container:
    """The newest container of Compose's service."""

    id: str
    state: str
    image: str


@dataclass(frozen=True)
class Run:
    """Subject of a report."""

    root: Path
    target: str
    """Its name; also Compose's service."""
    container: Container | None
    """Of Compose, or None."""
    place: Place


def find_container(target: str) -> Container | None:
    """Return Compose's newest container of a service, or None."""
    label = f"label=com.docker.compose.service={target}"
    fields = "{{.ID}}\t{{.State}}\t{{.Image}}"
    listing = ("docker", "ps", "--all", "--no-trunc", "--filter", label, "--format", fields)
    seen = glimpse(*listing, timeout_s=_ASK_S)
    row = seen.out.partition("\n")[0].split("\t")
    return Container(*row) if seen.code == 0 and len(row) == 3 else None


def collect(run: Run, *, ask: bool) -> Iterator[Part]:
    """Yield the parts in order; chats come before the log is read.

    Args:
        ask: include chats with the server.
    """
    yield _checkout(run.root)
    yield _file(
        receipt.NAME,
        "receipt of the build: sources, results, time per stage",
        run.root / "dist" / run.target / receipt.NAME,
        f"python3 build.py --target {run.target}",
    )
    yield _file(
        "build.log",
        "output of the build",
        run.root / "build.log",
        f"python3 build.py --target {run.target} 2>&1 | tee build.log",
    )
    yield _text("kernel.log", "kernel messages about GPU and memory", _kernel())
    if ask:
        yield from _chats(run.place)
    yield from _of_container(run)


def _checkout(root: Path) -> Part:
    def git(*words: str) -> str:
        return glimpse("git", "-C", str(root), *words, timeout_s=_ASK_S).out.strip()

    lines = [
        f"sparkforge {__version__}",
        f"commit {git('rev-parse', 'HEAD') or 'unknown'}",
        git("status", "--short", "--untracked-files=no") or "no file changed",
    ]
    return Part("checkout.txt", "version, commit and changed files", "\n".join(lines) + "\n")


def _file(name: str, what: str, path: Path, remedy: str) -> Part:
    try:
        with path.open("rb") as file:
            data = file.read(_MOST)
            more = bool(file.read(1))
    except OSError as error:
        return Part(name, what, problem=f"{path.name}: {error.strerror}; {remedy} creates it")
    problem = f"only the first {_MOST >> 20} MiB" if more else ""
    return Part(name, what, data.decode(errors="replace"), problem)


def _text(name: str, what: str, seen: Glimpse) -> Part:
    """Return a part with a program's output."""
    if seen.code == 0:
        return Part(name, what, seen.out)
    first = seen.err.strip().partition("\n")[0][:200]
    return Part(name, what, seen.out, seen.problem or first or f"exit code {seen.code}")


def _kernel() -> Glimpse:
    seen = glimpse("journalctl", "-k", "-b", "-o", "short-iso", "--no-pager", timeout_s=_ASK_S)
    # without permission, journalctl succeeds with an empty output
    if not seen.out.strip() or "No journal files" in seen.err:
        seen = glimpse("dmesg", "--ctime", timeout_s=_ASK_S)
    lines = [line for line in seen.out.splitlines() if _KERNEL.search(line)]
    return Glimpse(seen.code, "\n".join([*lines, ""]), seen.err, seen.problem)


def _chats(place: Place) -> Iterator[Part]:
    what = "questions, answers, tokens per second: alone, eight at once, a tool, a long prompt"
    try:
        model = client.model_of(place)
    except (OSError, ValueError) as error:
        why = "no server answers" if isinstance(error, ConnectionError) else str(error)
        yield Part("chats.json", what, problem=f"{place.url}: {why}")
        return
    with _clocks() as clocks:
        found = list(chats.ask_all(place, model))
    wrong = [chat for chat in found if chat.problem]
    problem = f"{len(wrong)} of {len(found)}: {wrong[0].problem}" if wrong else ""
    document = {"model": asdict(model), "chats": [asdict(chat) for chat in found]}
    yield Part("chats.json", what, json.dumps(document, indent=1) + "\n", problem)
    yield _text("clocks.csv", "GPU clocks, power and temperature during the chats", clocks[0])


@contextmanager
def _clocks() -> Iterator[list[Glimpse]]:
    """Sample the GPU every 2 s; the list has the samples afterwards."""
    found: list[Glimpse] = []
    over = threading.Event()

    def sample() -> None:
        rows: list[str] = []
        while True:
            seen = glimpse("nvidia-smi", f"--query-gpu={_CLOCKS}", "--format=csv", timeout_s=_ASK_S)
            rows += seen.out.splitlines()[1 if rows else 0 :]
            if seen.code != 0 or over.wait(_CLOCKS_EVERY_S):
                found.append(Glimpse(seen.code, "\n".join([*rows, ""]), seen.err, seen.problem))
                return

    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    try:
        yield found
    finally:
        over.set()
        thread.join(_ASK_S + 5)
        if not found:
            found.append(Glimpse(None, problem="nvidia-smi does not answer"))


def _of_container(run: Run) -> Iterator[Part]:
    box = run.container
    if box is None:
        what = "log, memory and state of the server"
        yield Part(
            "container.log",
            what,
            problem=(
                f"Compose has no container of {run.target}: docker compose --profile {run.target}"
                " up -d"
            ),
        )
        return
    log.info("log and memory of the container")
    seen = glimpse("docker", "image", "inspect", box.image, timeout_s=_ASK_S)
    yield _json("image.json", "image: digest, tags, size, labels", seen, _image)
    seen = glimpse("docker", "inspect", box.id, timeout_s=_ASK_S)
    yield _json("container.json", "container: state, checks, limits, variables", seen, _container)
    whole = _log(box.id)
    yield whole
    if whole.problem:
        yield _log(box.id, "container-end.log", "--tail", str(_TAIL_LINES))
    lines = [line for line in whole.text.splitlines() if memory.PREFIX in line]
    yield Part(
        "moments.txt",
        "memory at each stage of the start",
        "\n".join([*lines, ""]),
        "" if lines else "the log has no such line",
    )
    inside = {
        "cgroup.txt": ("memory that counts towards the container's limit", _CGROUP),
        "caches.txt": ("sizes of model and compiled kernels", _CACHES),
        "device.txt": (
            "the GPU as seen in the container",
            "/opt/sparkforge/venv/bin/python -I -c 'import sys;"
            ' sys.path.insert(0, "/opt/sparkforge/bin"); from sparkforge.serving import devices;'
            ' print("capabilities", devices.capabilities());'
            ' print("bytes of unified memory, as CUDA counts them", devices.unified_bytes())\'',
        ),
    }
    for name, (what, script) in inside.items():
        if box.state == "running":
            yield _text(
                name, what, glimpse("docker", "exec", box.id, "sh", "-c", script, timeout_s=_LOG_S)
            )
        else:
            yield Part(name, what, problem=f"the container is {box.state}, not running")


def _log(container: str, name: str = "container.log", *options: str) -> Part:
    seen = glimpse(
        "docker", "logs", "--timestamps", *options, container, timeout_s=_LOG_S, limit=_MOST
    )
    # two streams; sorted by the time at the start of each line
    rows = sorted([*seen.out.splitlines(), *seen.err.splitlines()])
    problem = "" if seen.code == 0 else seen.problem or "docker logs failed"
    return Part(name, "the container's log", "\n".join([*rows, ""]), problem)


def _json(name: str, what: str, seen: Glimpse, pick: Callable[[Any], Any]) -> Part:
    """Return a part with some of the fields that ``docker inspect`` prints."""
    if seen.code != 0:
        return _text(name, what, seen)
    try:
        found = pick(plain.json_of(seen.out)[0])
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        return Part(name, what, problem=f"unexpected answer from docker: {error!r}")
    return Part(name, what, json.dumps(found, indent=1) + "\n")


def _image(inspected: Any) -> Any:
    names = ("Id", "RepoTags", "RepoDigests", "Created", "Size", "Architecture", "Os")
    return {
        **{name: inspected.get(name) for name in names},
        "Labels": (inspected.get("Config") or {}).get("Labels"),
    }


def _container(inspected: Any) -> Any:
    host = (
        "Memory",
        "MemorySwap",
        "ShmSize",
        "RestartPolicy",
        "PidsLimit",
        "Ulimits",
        "Tmpfs",
        "DeviceRequests",
        "ReadonlyRootfs",
        "Runtime",
        "NetworkMode",
    )
    pairs = (text.partition("=") for text in (inspected.get("Config") or {}).get("Env") or [])
    return {
        **{name: inspected.get(name) for name in ("Image", "Created", "RestartCount", "State")},
        "HostConfig": {name: (inspected.get("HostConfig") or {}).get(name) for name in host},
        "Env": {name: INSTEAD if is_secret_name(name) else value for name, _, value in pairs},
    }
