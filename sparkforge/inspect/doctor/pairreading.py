"""Readings for ``doctor --cluster``: interface, RDMA devices, and facts to compare."""

from __future__ import annotations

import resource
from pathlib import Path

from sparkforge.core import plain
from sparkforge.core.run import glimpse
from sparkforge.inspect.doctor.exchange import exchange
from sparkforge.inspect.doctor.pair import Gid, Interface, Pair
from sparkforge.inspect.doctor.reading import Readings
from sparkforge.inspect.doctor.wanted import Wanted
from sparkforge.serving.cluster import Settings

_TIMEOUT_S = 8.0
_HEADERS = 28  # of IP and ICMP, which the MTU counts


def take(mine: Settings, seen: Readings, want: Wanted, wait_s: float) -> Pair:
    """Read this machine's side, and meet the other's doctor."""
    net = interface(mine.interface)
    facts = {"role": mine.role, "mtu": str(net.mtu or ""), **_facts(seen, want)}
    peer = exchange(mine, facts, wait_s)
    jumbo = "" if peer.problem or net.mtu is None else _jumbo(mine, net.mtu)
    return Pair(mine, net, gids(), peer, facts, jumbo, _memlock())


def interface(name: str, sys: Path = Path("/sys")) -> Interface:
    """Return an interface's state; an empty one if it does not exist."""
    folder = sys / "class" / "net" / name
    state = _line(folder / "operstate")
    if not state:
        return Interface()
    output = glimpse("ip", "-j", "address", "show", "dev", name, timeout_s=_TIMEOUT_S)
    try:
        found = plain.json_of(output.out or "[]")
        addresses = tuple(
            address["local"] for link in found for address in link.get("addr_info", ())
        )
    except (ValueError, LookupError, TypeError, AttributeError):
        addresses = ()
    return Interface(state, _int(folder / "mtu"), _int(folder / "speed"), addresses)


def gids(sys: Path = Path("/sys")) -> tuple[Gid, ...]:
    """Return the rows of all RDMA devices' GID tables that are in use."""
    found = []
    for port in sorted(sys.glob("class/infiniband/*/ports/*")):
        device = port.parent.parent.name
        for file in sorted((port / "gids").glob("*"), key=lambda file: int(file.name)):
            gid = _line(file)
            owner = _line(port / "gid_attrs" / "ndevs" / file.name)
            if not gid or not gid.replace("0", "").strip(":") or not owner:
                continue
            kind = _line(port / "gid_attrs" / "types" / file.name)
            found.append(Gid(device, _line(port / "state"), int(file.name), gid, kind, owner))
    return tuple(found)


def _facts(seen: Readings, want: Wanted) -> dict[str, str]:
    name = seen.variables.get(f"SPARKFORGE_IMAGE_{want.target.upper()}", "")
    image = release = ""
    if name:
        label = '{{.Id}} {{index .Config.Labels "org.opencontainers.image.version"}}'
        output = glimpse(
            "docker", "image", "inspect", "--format", label, name, timeout_s=_TIMEOUT_S
        )
        if output.code == 0:
            image, _, release = output.out.strip().partition(" ")
    driver = seen.text("/proc/driver/nvidia/version").partition("\n")[0]
    return {
        "image": image,
        "release": release,
        "driver": driver,
        "kernel": seen.facts.get("kernel", ""),
        "revision": want.model[2] if want.model else "",
    }


def _jumbo(mine: Settings, mtu: int) -> str:
    other = mine.worker if mine.is_head else mine.head
    packet = ("-M", "do", "-s", str(mtu - _HEADERS))
    output = glimpse("ping", *packet, "-c", "1", "-W", "2", other, timeout_s=_TIMEOUT_S)
    if output.code == 0:
        return "ok"
    if output.code is None:  # no ping here: only the MTU itself is judged
        return ""
    return ((output.err + output.out).strip().splitlines() or ["no answer"])[-1]


def _memlock() -> str:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return "all it wants" if soft == resource.RLIM_INFINITY else f"{soft // 1024} KiB"


def _line(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:  # no such file, or EINVAL: an empty row, a link that is down
        return ""


def _int(path: Path) -> int | None:
    text = _line(path)
    return int(text) if text.lstrip("-").isdecimal() else None
