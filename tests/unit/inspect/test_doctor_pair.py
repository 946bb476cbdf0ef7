"""Doctor's probes of a machine of two, on readings and on a folder that looks like /sys."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from sparkforge.inspect.doctor import pair, pairreading
from sparkforge.inspect.doctor.exchange import Peer
from sparkforge.inspect.doctor.finding import CHECKS, Finding
from sparkforge.inspect.doctor.pair import Gid, Interface, Pair
from sparkforge.inspect.doctor.reading import Readings
from sparkforge.serving.cluster import Settings

NAME, HEAD, WORKER = "enp1s0f0np0", "192.168.100.1", "192.168.100.2"
MINE = Settings("worker", HEAD, WORKER, 29500, NAME)
NET = Interface("up", 9000, 200_000, (WORKER, "fe80::1"))
GID = Gid("rocep1s0f0", "4: ACTIVE", 3, "0000:0000:0000:0000:0000:ffff:c0a8:6402", "RoCE v2", NAME)
FACTS = {
    "role": "worker",
    "release": "1",
    "image": "sha256:a",
    "revision": "b5",
    "driver": "NVRM 580",
    "kernel": "6.14",
}
SEEN = Readings(facts={"kernel": "6.14"})


def sound(**changes: Any) -> Pair:
    peer = Peer({**FACTS, "role": "head"}, 0.02)
    whole = Pair(MINE, NET, (GID,), peer, FACTS, "ok", "all it wants")
    return dataclasses.replace(whole, **changes)


def found(one: Pair, seen: Readings = SEEN) -> dict[str, Finding]:
    return {finding.name: finding for finding in pair.judge(one, seen, rdma=True)}


def test_a_pair_on_which_all_is_well() -> None:
    findings = found(sound())
    assert {one.state for one in findings.values()} == {"ok"}
    assert set(findings) == {name for name, check in CHECKS.items() if check.theme == "cluster"}
    assert "NCCL_IB_HCA=rocep1s0f0 NCCL_IB_GID_INDEX=3" in findings["rdma"].remedy


def gid(**changes: Any) -> tuple[Gid, ...]:
    return (dataclasses.replace(GID, **changes),)


def net(**changes: Any) -> Interface:
    return dataclasses.replace(NET, **changes)


def peer(**changes: str) -> Peer:
    return Peer({**FACTS, **changes}, 0.0)


@pytest.mark.parametrize(
    ("changes", "name", "state", "fragment"),
    [
        ({"interface": Interface()}, "interface", "fail", f"{NAME} does not exist"),
        ({"interface": net(state="down")}, "interface", "fail", "down"),
        ({"interface": net(addresses=("10.0.0.1",))}, "interface", "fail", f".env says {WORKER}"),
        ({"interface": net(mbit=10_000)}, "interface", "warn", "10 Gbit/s"),
        ({"interface": net(mbit=-1)}, "interface", "ok", "speed unknown"),
        ({"interface": net(mtu=1500)}, "mtu", "warn", "1500"),
        ({"jumbo": "ping: local error: message too long"}, "mtu", "fail", "do not arrive"),
        ({"peer": Peer({**FACTS, "mtu": "1500"}, 0.0)}, "mtu", "fail", "here 9000, there 1500"),
        ({"jumbo": ""}, "mtu", "ok", "not tested"),
        ({"gids": ()}, "rdma", "fail", "no RDMA device"),
        ({"gids": gid(interface="enP2p1s0f1np1")}, "rdma", "fail", "found rocep1s0f0"),
        ({"gids": gid(kind="IB/RoCE v1")}, "rdma", "fail", "no RoCE v2 GID"),
        ({"gids": gid(gid="0000:0000:0000:0000:0000:ffff:c0a8:6409")}, "rdma", "fail", "no RoCE"),
        ({"gids": gid(gid="nonsense")}, "rdma", "fail", "no RoCE"),
        ({"gids": gid(state="1: DOWN")}, "rdma", "fail", "1: DOWN"),
        ({"peer": Peer(problem="no doctor of the head within 30 s")}, "peer", "fail", "no doctor"),
        ({"peer": peer(image="sha256:b")}, "same-image", "fail", "here sha256:a, there sha256:b"),
        ({"peer": peer(release="")}, "same-image", "fail", "there none"),
        ({"peer": peer(revision="c6")}, "same-model", "fail", "here b5, there c6"),
        ({"peer": peer(driver="NVRM 570")}, "same-driver", "warn", "NVRM 570"),
        ({"peer": Peer(FACTS, -7.5)}, "time", "warn", "7.500 s apart"),
        (
            {"facts": {**FACTS, "image": "", "release": ""}, "peer": peer(image="", release="")},
            "same-image",
            "note",
            "neither",
        ),
    ],
)
def test_what_is_wrong_with_a_pair_is_found(
    changes: dict[str, Any], name: str, state: str, fragment: str
) -> None:
    one = found(sound(**changes))[name]
    assert (one.state, fragment in one.seen) == (state, True), one
    assert one.remedy or state in ("ok", "note")


@pytest.mark.parametrize(
    ("variables", "state"),
    [
        ({"NCCL_SOCKET_IFNAME": f"={NAME}", "NCCL_IB_GID_INDEX": "3"}, "ok"),
        ({"NCCL_SOCKET_IFNAME": "eth0"}, "warn"),
        ({"GLOO_SOCKET_IFNAME": "lo"}, "warn"),
        ({"NCCL_IB_DISABLE": "1"}, "warn"),
        ({"NCCL_IB_GID_INDEX": "0"}, "warn"),
    ],
)
def test_variables_of_nccl(variables: dict[str, str], state: str) -> None:
    assert found(sound(), dataclasses.replace(SEEN, variables=variables))["nccl"].state == state


@pytest.mark.parametrize(
    ("kernel", "line", "state"),
    [
        ("7.0.0-1019-nvidia", "quiet", "warn"),
        ("7.0.0-1019-nvidia", "x kho=off", "ok"),
        ("6.14.0-1012-nvidia", "quiet", "ok"),
    ],
)
def test_the_kernel_that_was_reported_to_break_rdma(kernel: str, line: str, state: str) -> None:
    seen = Readings(facts={"kernel": kernel}, files={"/proc/cmdline": line})
    assert found(sound(), seen)["rdma-kernel"].state == state


def test_tables_of_gids_and_interfaces_are_read_from_sys(tmp_path: Path) -> None:
    port = tmp_path / "class/infiniband/rocep1s0f0/ports/1"
    rows = {
        "0": ("fe80:0000::1", "IB/RoCE v1"),
        "3": (GID.gid, "RoCE v2"),
        "9": ("0000:0000:0000:0000:0000:0000:0000:0000", ""),
    }
    for index, (value, kind) in rows.items():
        for folder, text in (("gids", value), ("gid_attrs/types", kind), ("gid_attrs/ndevs", NAME)):
            (port / folder).mkdir(parents=True, exist_ok=True)
            (port / folder / index).write_text(f"{text}\n")
    (port / "state").write_text("4: ACTIVE\n")
    assert pairreading.gids(tmp_path)[1] == GID
    assert [one.index for one in pairreading.gids(tmp_path)] == [0, 3]
    assert pairreading.gids(tmp_path / "nowhere") == ()
    here = pairreading.interface("lo")  # this machine's own
    assert here.state is not None
    assert here.mtu is not None
    assert pairreading.interface("no-such-if0") == Interface()
