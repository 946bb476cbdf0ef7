"""``doctor --cluster``: probes of one of two machines, and of their differences."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from sparkforge.inspect.doctor.exchange import Peer
from sparkforge.inspect.doctor.finding import Finding
from sparkforge.inspect.doctor.reading import Readings
from sparkforge.serving.cluster import Settings

_JUMBO = 9000
_FASTEST_MBIT = 200_000  # of a Spark's ports, by NVIDIA's figure
_IN_STEP_S = 1.0
_SAME = (
    ("release", "same-image", "the image's release"),
    ("image", "same-image", "the image"),
    ("revision", "same-model", "the model's revision"),
    ("driver", "same-driver", "the driver"),
    ("kernel", "same-driver", "the kernel"),
)


@dataclass(frozen=True)
class Interface:
    """An interface, from /sys/class/net and `ip`."""

    state: str | None = None
    """``up``, ``down``, …; None: no such interface."""
    mtu: int | None = None
    mbit: int | None = None
    """``mtu``, ``mbit``: bytes and Mbit/s; None: unknown."""
    addresses: tuple[str, ...] = ()


@dataclass(frozen=True)
class Gid:
    """One row of an RDMA device's table: its port's state, GID, type, and the interface."""

    device: str
    state: str
    index: int
    gid: str
    kind: str
    interface: str


@dataclass(frozen=True)
class Pair:
    """Readings of one of two machines."""

    mine: Settings
    interface: Interface
    gids: tuple[Gid, ...] = ()
    peer: Peer = field(default_factory=Peer)
    facts: Mapping[str, str] = field(default_factory=dict)
    jumbo: str = ""
    """``ok``, or `ping`'s output for packets as large as the MTU; "" without a test."""
    memlock: str = ""
    """This user's limit for pinned memory, as text."""


def judge(pair: Pair, seen: Readings, *, rdma: bool) -> Iterator[Finding]:
    """Judge a machine of two; ``rdma``: the target's machines speak RoCE."""
    yield from _interface(pair, rdma=rdma)
    if rdma:
        yield _rdma(pair)
        yield _kernel(seen)
    yield _variables(pair, seen)
    yield from _peer(pair)


def _interface(pair: Pair, *, rdma: bool) -> Iterator[Finding]:
    mine, interface = pair.mine, pair.interface
    name = mine.interface
    if interface.state is None:
        yield Finding(
            "interface", "fail", f"{name} does not exist", "ip -br address   # then correct .env"
        )
        return
    speed = (
        f"{interface.mbit / 1000:.0f} Gbit/s"
        if interface.mbit and interface.mbit > 0
        else "speed unknown"
    )
    summary = f"{name} {interface.state}, {speed}, {', '.join(interface.addresses) or 'no address'}"
    if mine.own not in interface.addresses:
        hint = f"sudo ip address add {mine.own}/24 dev {name} && sudo ip link set {name} up"
        yield Finding("interface", "fail", f"{summary}; .env says {mine.own}", hint)
    elif interface.state not in ("up", "unknown"):  # unknown: the state of loopback
        yield Finding("interface", "fail", summary, f"sudo ip link set {name} up   # the cable?")
    elif rdma and interface.mbit and 0 < interface.mbit < _FASTEST_MBIT:
        yield Finding("interface", "warn", f"{summary}; a Spark's port has 200", f"ethtool {name}")
    else:
        yield Finding("interface", "ok", summary)
    mtu = f"sudo ip link set {name} mtu {_JUMBO}   # on both; netplan makes it permanent"
    if interface.mtu is None or interface.mtu < _JUMBO:
        yield Finding("mtu", "warn", f"{interface.mtu or 'unknown'}", mtu)
    elif (theirs := pair.peer.facts.get("mtu", "")) not in ("", str(interface.mtu)):
        yield Finding("mtu", "fail", f"here {interface.mtu}, there {theirs}", mtu)
    elif pair.jumbo not in ("", "ok"):
        yield Finding(
            "mtu",
            "fail",
            f"{interface.mtu}, but packets of that size do not arrive: {pair.jumbo}",
            mtu,
        )
    else:
        tried = (
            ", and a packet of that size arrives" if pair.jumbo else "; not tested: no ping here"
        )
        yield Finding("mtu", "ok", f"{interface.mtu}{tried}")


def _rdma(pair: Pair) -> Finding:
    name, own = pair.mine.interface, pair.mine.own
    look = "rdma link; ls /sys/class/infiniband   # package rdma-core"
    if not pair.gids:
        return Finding("rdma", "fail", "no RDMA device", look)
    there = [gid for gid in pair.gids if gid.interface == name]
    if not there:
        devices = ", ".join(sorted({f"{gid.device} ({gid.interface})" for gid in pair.gids}))
        return Finding("rdma", "fail", f"none on {name}; found {devices}", look)
    fit = [gid for gid in there if gid.kind == "RoCE v2" and _ends_with(gid.gid, own)]
    if not fit:
        text = f"{there[0].device} on {name} has no RoCE v2 GID of {own}"
        return Finding("rdma", "fail", text, f"{look}; sudo ip address add {own}/24 dev {name}")
    gid = fit[0]
    summary = (
        f"{gid.device} on {name}: {gid.state}, GID index {gid.index}; this user may pin"
        f" {pair.memlock or 'an unknown amount'}"
    )
    if "ACTIVE" not in gid.state:
        return Finding("rdma", "fail", summary, f"{look}   # the cable?")
    hint = (
        f"NCCL_IB_HCA={gid.device} NCCL_IB_GID_INDEX={gid.index}"
        "   # add to .env if NCCL does not find it"
    )
    return Finding("rdma", "ok", summary, hint)


def _ends_with(gid: str, address: str) -> bool:
    """Return whether a GID is that of an IPv4 address (::ffff:a.b.c.d) or an IPv6 address."""
    try:
        wanted = ipaddress.ip_address(address)
        found = ipaddress.IPv6Address(gid)
    except ValueError:
        return False
    return found.ipv4_mapped == wanted if wanted.version == 4 else found == wanted


def _kernel(seen: Readings) -> Finding:
    kernel = seen.facts.get("kernel", "")
    if not kernel.startswith("7.0.0-1019"):
        return Finding("rdma-kernel", "ok", kernel or "unknown")
    if re.search(r"\bkho=off\b", seen.text("/proc/cmdline")):
        return Finding("rdma-kernel", "ok", f"{kernel}, with kho=off")
    hint = (
        "sudo sed -i 's/^GRUB_CMDLINE_LINUX=\"/&kho=off /' /etc/default/grub"
        " && sudo update-grub && sudo reboot"
    )
    return Finding("rdma-kernel", "warn", f"{kernel} without kho=off", hint)


def _variables(pair: Pair, seen: Readings) -> Finding:
    names = (
        "NCCL_SOCKET_IFNAME",
        "GLOO_SOCKET_IFNAME",
        "NCCL_IB_HCA",
        "NCCL_IB_GID_INDEX",
        "NCCL_IB_DISABLE",
        "NCCL_NET",
        "NCCL_DEBUG",
    )
    there = {name: seen.variables[name] for name in names if seen.variables.get(name)}
    summary = " ".join(f"{name}={value}" for name, value in there.items()) or "none set"
    wrong = []
    for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        value = there.get(name, "").lstrip("=")
        if value and value != pair.mine.interface:
            wrong.append(f"{name} is another interface than {pair.mine.interface}")
    if there.get("NCCL_IB_DISABLE", "0") != "0":
        wrong.append("NCCL_IB_DISABLE turns RoCE off")
    index = there.get("NCCL_IB_GID_INDEX", "")
    fit = [
        gid.index
        for gid in pair.gids
        if gid.interface == pair.mine.interface
        and gid.kind == "RoCE v2"
        and _ends_with(gid.gid, pair.mine.own)
    ]
    if index and fit and index not in map(str, fit):
        wrong.append(f"NCCL_IB_GID_INDEX is {index}, RoCE v2 of {pair.mine.own} is {fit[0]}")
    if wrong:
        hint = "grep -nE '^(NCCL|GLOO)_' .env; env | grep -E '^(NCCL|GLOO)_'"
        return Finding("nccl", "warn", f"{summary}: {'; '.join(wrong)}", hint)
    return Finding("nccl", "ok", summary)


def _peer(pair: Pair) -> Iterator[Finding]:
    mine, peer = pair.mine, pair.peer
    other = mine.worker if mine.is_head else mine.head
    if peer.problem:
        yield Finding(
            "peer",
            "fail",
            f"{other}: {peer.problem}",
            f"ping -c 3 {other}; at the same time there: python3 build.py doctor --cluster",
        )
        return
    yield Finding("peer", "ok", f"{other} answers; it is the {peer.facts.get('role')}")
    told: dict[str, list[str]] = {}
    for fact, name, what in _SAME:
        here, there = pair.facts.get(fact, ""), peer.facts.get(fact, "")
        problems = told.setdefault(name, [])
        if here != there:
            problems.append(f"{what}: here {here or 'none'}, there {there or 'none'}")
    hint = {
        "same-image": "docker save IMAGE | ssh OTHER docker load   # one build for both",
        "same-model": "grep -n REVISION .env docker-compose.yml; git rev-parse HEAD   # on both",
        "same-driver": "sudo apt-get update && sudo apt-get full-upgrade   # on both",
    }
    for name, problems in told.items():
        if problems:
            yield Finding(
                name, "warn" if name == "same-driver" else "fail", "; ".join(problems), hint[name]
            )
            continue
        values = {pair.facts.get(fact, "") for fact, owner, _ in _SAME if owner == name} - {""}
        if values:
            yield Finding(name, "ok", ", ".join(sorted(values)))
        else:
            yield Finding(name, "note", "neither side has one")
    if peer.offset_s is None:
        return  # the worker's doctor measures it
    step = f"{abs(peer.offset_s):.3f} s apart"
    if abs(peer.offset_s) > _IN_STEP_S:
        yield Finding("time", "warn", step, "sudo timedatectl set-ntp true   # on both")
    else:
        yield Finding("time", "ok", step)
