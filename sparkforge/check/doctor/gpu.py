"""Checks of GPU and driver, by nvidia-smi.

No GB10 was available. Public reports show nvidia-smi's memory as N/A or "Not Supported", and the
clocks of a machine after a power fault. So every value may be missing, which is never a fault.
"""

from __future__ import annotations

import re
from xml.etree import ElementTree as ET

from sparkforge.check.doctor.check import Finding, Found, check, error, ok, unknown, warning
from sparkforge.check.doctor.host import UPGRADE
from sparkforge.check.doctor.readings import Machine, first_line
from sparkforge.check.doctor.wanted import Wanted
from sparkforge.core.run import Glimpse

_DEVICES = ("/dev/nvidia0", "/dev/nvidiactl", "/dev/nvidia-uvm")
# Reports of Sparks after a power fault: permanently 500 to 850 of 3003 MHz at full load, without a
# reason for a slow-down (eugr/spark-vllm-docker 255, 334; NVIDIA/dgx-spark-playbooks 97, 116).
_STUCK_MHZ = 900
_BUSY_PERCENT = 50
_SLOWED = ("hw_slowdown", "hw_thermal_slowdown", "hw_power_brake_slowdown", "sw_thermal_slowdown")


@check("gpu", "platform", "gpu")
def gpu(seen: Machine, want: Wanted) -> Found:
    """Kernels are compiled for one compute capability and do not load on another."""
    output = seen.run("nvidia-smi", "-q", "-x")
    tree = tree_of(output)
    if tree is None or tree.find("gpu") is None:
        why = first_line(output)
        if output.code == 0:
            why = "nvidia-smi lists no GPU" if tree is not None else f"not XML: {why!r}"
        hint = "nvidia-smi; sudo dmesg | grep -iE 'nvrm|xid' | tail"
        hint += "   # not installed: sudo apt-get install nvidia-driver-580-open"
        return error(f"{why}; target {want.target} needs a GPU", hint)
    names = [text_of(node, "product_name") or "unnamed" for node in tree.iter("gpu")]
    rows = seen.run("nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader").out.split()
    found = {row for row in rows if re.fullmatch(r"\d+\.\d+", row)}
    text = f"{', '.join(names)}; compute capability {', '.join(sorted(found)) or 'unknown'}"
    if want.cuda_arch in found:
        return ok(text)
    if not found:
        return unknown(text, "nvidia-smi --query-gpu=name,compute_cap --format=csv")
    hint = "python3 build.py pins check; grep -n cuda_arch pins.yaml   # another target?"
    return error(f"{text}; target {want.target} is for {want.cuda_arch}", hint)


@check("driver", "platform", "gpu", alike=("warning", f"{UPGRADE}   # on both"))
def driver(seen: Machine, want: Wanted) -> Found:
    """A container includes CUDA, but not the driver."""
    tree = tree_of(seen.run("nvidia-smi", "-q", "-x"))
    if tree is None:
        return None  # `gpu` reports it
    cuda = text_of(tree, "cuda_version")
    text = f"{text_of(tree, 'driver_version') or 'version unknown'}, CUDA {cuda or 'unknown'}"
    found = re.fullmatch(r"(\d+)\.(\d+)", cuda)
    if found is None:
        return unknown(text, "nvidia-smi")
    if (int(found[1]), int(found[2])) >= want.cuda:
        return ok(text)
    needed = ".".join(map(str, want.cuda))
    return error(f"{text}; the target's CUDA is {needed}", f"{UPGRADE}   # CUDA 13.0: driver 580")


@check("devices", "platform", "gpu")
def devices(seen: Machine, want: Wanted) -> Found:
    """Without nvidia-uvm the first CUDA call fails, though nvidia-smi works."""
    if tree_of(seen.run("nvidia-smi", "-q", "-x")) is None:
        return None
    missing = [path for path in _DEVICES if not seen.access(path).exists]
    hint = "sudo nvidia-modprobe -u -c=0   # or: sudo modprobe nvidia-uvm"
    return warning(f"missing: {', '.join(missing)}", hint) if missing else ok("all present")


@check("clocks", "platform", "gpu")
def clocks(seen: Machine, want: Wanted) -> Found:
    """After a power fault a Spark may stay at 500 to 850 MHz, and is several times slower."""
    tree = tree_of(seen.run("nvidia-smi", "-q", "-x"))
    return [_clock(node) for node in tree.iter("gpu")] if tree is not None else None


def _clock(node: ET.Element) -> Finding:
    now, most, load = _clocks(node)
    text = f"SM {_mhz(now)}, at most {_mhz(most)}, load {load or 0:.0f} %"
    look = "nvidia-smi -q -d CLOCK,PERFORMANCE,POWER,TEMPERATURE"
    busy = load is not None and load >= _BUSY_PERCENT
    if busy and now is not None and now < _STUCK_MHZ:
        hint = "shut down, unplug for a minute, start again   # reports: only this fixes it"
        return error(f"{text}: stuck", hint)
    if slowed := slowed_by(node):
        return warning(f"{text}; throttled by {', '.join(slowed)}", look)
    if busy and now is not None:
        return ok(text)
    return unknown(f"{text}; run doctor while it serves")


def tree_of(output: Glimpse) -> ET.Element | None:
    """Return the output of `nvidia-smi -q -x`; None if it is missing or fails."""
    try:
        return ET.fromstring(output.out) if output.code == 0 else None
    except ET.ParseError:
        return None


def slowed_by(node: ET.Element) -> list[str]:
    """Return the active reasons for a slow-down; the list's name depends on the driver."""
    found = []
    for group in ("clocks_event_reasons", "clocks_throttle_reasons"):
        for reason in node.findall(f"{group}/*"):
            name = re.sub(r"^clocks_(event|throttle)_reason_", "", reason.tag)
            if name in _SLOWED and (reason.text or "").strip() == "Active":
                found.append(name)
    return found


def text_of(node: ET.Element | None, path: str) -> str:
    """Return the text at a path of a node, or ""."""
    found = node.findtext(path) if node is not None else None
    return (found or "").strip()


def _clocks(node: ET.Element) -> list[float | None]:
    """Return the SM clock and its maximum in MHz, and the load in percent."""
    paths = ("clocks/sm_clock", "max_clocks/sm_clock", "utilization/gpu_util")
    found = (re.match(r"(\d+(?:\.\d+)?)\s*(?:MHz|%|$)", text_of(node, path)) for path in paths)
    return [float(each[1]) if each else None for each in found]


def _mhz(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.0f} MHz"
