"""Checks of one of two machines that serve one model: link, RDMA, NCCL, and image."""

from __future__ import annotations

import re

from sparkforge.build import composing
from sparkforge.check.doctor.check import Found, check, error, ok, warning
from sparkforge.check.doctor.readings import Machine, first_line, json_of
from sparkforge.check.doctor.wanted import Wanted
from sparkforge.serving.cluster import ClusterError, Settings, settings

_JUMBO = 9000
_HEADERS = 28  # of IP and ICMP, which the MTU counts
_FASTEST_MBIT = 200_000  # of a Spark's ports, by NVIDIA's figure
_MTU = f"sudo ip link set INTERFACE mtu {_JUMBO}   # on both; netplan makes it permanent"
_SAME = "docker save IMAGE | ssh OTHER docker load; git rev-parse HEAD   # on both"


@check("link", "pair")
def link(seen: Machine, want: Wanted) -> Found:
    """All traffic between the two machines uses this interface."""
    try:
        mine = settings(seen.variables)
    except ClusterError as why:
        return error(str(why), "ip -br address   # then correct .env")
    assert mine is not None  # the check needs a pair
    name, folder = mine.interface, f"/sys/class/net/{mine.interface}"
    state, mbit = seen.text(f"{folder}/operstate"), _int(seen.text(f"{folder}/speed"))
    if not state:
        return error(f"{name} does not exist", "ip -br address   # then correct .env")
    found = json_of(seen.run("ip", "-j", "address", "show", "dev", name)) or []
    addresses = [each["local"] for one in found for each in one.get("addr_info", ())]
    speed = f"{mbit / 1000:.0f} Gbit/s" if mbit else "speed unknown"
    text = f"{name} {state}, {speed}, {', '.join(addresses) or 'no address'}"
    if mine.own not in addresses:
        hint = f"sudo ip address add {mine.own}/24 dev {name} && sudo ip link set {name} up"
        return error(f"{text}; .env says {mine.own}", hint)
    if state not in ("up", "unknown"):  # unknown: the state of loopback
        return error(text, f"sudo ip link set {name} up   # the cable?")
    if want.cuda_arch and 0 < mbit < _FASTEST_MBIT:
        return warning(f"{text}; a Spark's port has 200", f"ethtool {name}")
    return ok(text)


@check("mtu", "pair", alike=("error", _MTU))
def mtu(seen: Machine, want: Wanted) -> Found:
    """Lost large packets look like a hang; a small MTU costs speed."""
    if (mine := _settings(seen)) is None:
        return None
    size = _int(seen.text(f"/sys/class/net/{mine.interface}/mtu"))
    hint = _MTU.replace("INTERFACE", mine.interface)
    if size < _JUMBO:
        return warning(str(size or "unknown"), hint)
    other = mine.worker if mine.is_head else mine.head
    packet = ("-M", "do", "-s", str(size - _HEADERS))
    output = seen.run("ping", *packet, "-c", "1", "-W", "2", other)
    if output.code in (0, None):  # None: no ping here
        return ok(str(size))
    return error(f"{size}, but no such packet reaches {other}: {first_line(output)}", hint)


@check("rdma", "pair", "gpu")
def rdma(seen: Machine, want: Wanted) -> Found:
    """Without RoCE on the link NCCL uses TCP, or fails."""
    if (mine := _settings(seen)) is None:
        return None
    output = seen.run("rdma", "-j", "link")
    links = [one for one in json_of(output) or [] if one.get("netdev") == mine.interface]
    if not links:
        why = f": {first_line(output)}" if output.code != 0 else ""
        return error(f"no RDMA device on {mine.interface}{why}", "rdma link   # package iproute2")
    name, state = links[0].get("ifname"), links[0].get("state")
    if state != "ACTIVE":
        return error(f"{name} is {state}", "rdma link   # the cable?")
    if seen.kernel.startswith("7.0.0-1019") and "kho=off" not in seen.text("/proc/cmdline"):
        text = f"{name}; reports: kernel {seen.kernel} needs kho=off to register large buffers"
        hint = "sudo sed -i 's/^GRUB_CMDLINE_LINUX=\"/&kho=off /' /etc/default/grub"
        return warning(text, f"{hint} && sudo update-grub && sudo reboot")
    return ok(f"{name} is active", f"NCCL_IB_HCA={name}   # in .env, if NCCL does not find it")


@check("nccl", "pair")
def nccl(seen: Machine, want: Wanted) -> Found:
    """These variables override what the image would choose."""
    if (mine := _settings(seen)) is None:
        return None
    there = {n: v for n, v in sorted(seen.variables.items()) if re.match("NCCL_|GLOO_", n) and v}
    text = " ".join(f"{name}={value}" for name, value in there.items()) or "none set"
    hint = "grep -nE '^(NCCL|GLOO)_' .env; env | grep -E '^(NCCL|GLOO)_'"
    for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        if there.get(name, "").lstrip("=") not in ("", mine.interface):
            return warning(f"{text}: {name} is another interface than {mine.interface}", hint)
    if there.get("NCCL_IB_DISABLE", "0") != "0":
        return warning(f"{text}: NCCL_IB_DISABLE turns RoCE off", hint)
    return ok(text)


@check("image", "pair", alike=("error", _SAME))
def image(seen: Machine, want: Wanted) -> Found:
    """Two versions of vLLM cannot talk to each other; halves of two models give wrong answers."""
    name = seen.variables.get(composing.variable(want.target), "")
    output = seen.run("docker", "image", "inspect", "--format", "{{.Id}}", name)
    model = f"model revision {want.revision[:12] or '-'}"
    if name and output.code == 0:
        return ok(f"{output.out.strip()}, {model}")
    return warning(f"no image, {model}", f"python3 build.py --target {want.target}")


def _settings(seen: Machine) -> Settings | None:
    try:
        return settings(seen.variables)
    except ClusterError:  # `link` reports it
        return None


def _int(text: str) -> int:
    return int(text) if text.isdecimal() else 0
