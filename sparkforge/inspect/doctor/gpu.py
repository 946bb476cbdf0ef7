"""Probes of GPU and driver: output of nvidia-smi → findings.

No GB10 was available. Public reports show nvidia-smi's memory as N/A or "Not Supported", and the
clocks of a machine after a power fault. So every value may be missing, which is never a fault.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from xml.etree import ElementTree as ET

from sparkforge.core.run import Glimpse
from sparkforge.inspect.doctor.finding import Finding
from sparkforge.inspect.doctor.reading import DEVICES, Readings
from sparkforge.inspect.doctor.wanted import Wanted

# Reports of Sparks after a power fault: permanently 500 to 850 of 3003 MHz at full load, without a
# reason for a slow-down (eugr/spark-vllm-docker 255, 334; NVIDIA/dgx-spark-playbooks 97, 116).
STUCK_MHZ = 900
BUSY_PERCENT = 50
_LOW_SHARE = 0.5  # of the highest clock, on any GPU; an estimate far above that fault
_SLOWED = ("hw_slowdown", "hw_thermal_slowdown", "hw_power_brake_slowdown", "sw_thermal_slowdown")


def gpu(seen: Readings, want: Wanted) -> Iterator[Finding]:
    output = seen.output("nvidia-smi")
    tree = tree_of(output)
    if tree is None or tree.find("gpu") is None:
        if not want.gpu and output.code is None and "PATH" in output.problem:
            yield Finding("gpu", "ok", f"no GPU; target {want.target} needs none")
            return
        needed = f"; target {want.target} needs one" if want.gpu else ", and none is needed"
        yield Finding(
            "gpu",
            "fail" if want.gpu else "note",
            f"{_silence(output, tree)}{needed}",
            "nvidia-smi; sudo dmesg | grep -iE 'nvrm|xid' | tail"
            "   # not installed: sudo apt-get install nvidia-driver-580-open",
        )
        return
    yield _capability(seen, want, tree)
    yield from _driver(want, tree)
    yield from _memory(tree)
    yield from _clocks(want, tree)


def devices(seen: Readings, want: Wanted) -> Iterator[Finding]:
    if not want.gpu or tree_of(seen.output("nvidia-smi")) is None:
        return  # the finding about nvidia-smi reports the missing program
    missing = [path for path in DEVICES if not seen.state(path).exists]
    if missing:
        hint = "sudo nvidia-modprobe -u -c=0   # creates them; or: sudo modprobe nvidia-uvm"
        yield Finding("devices", "warn", f"missing: {', '.join(missing)}", hint)
    else:
        yield Finding("devices", "ok", "all present")


def tree_of(output: Glimpse) -> ET.Element | None:
    """Return the output of `nvidia-smi -q -x`; None if it is missing or fails."""
    if output.code != 0:
        return None
    try:
        return ET.fromstring(output.out)
    except ET.ParseError:
        return None


def _silence(output: Glimpse, tree: ET.Element | None) -> str:
    if output.problem:
        return output.problem
    words = (output.out + output.err).strip().splitlines() or ["nothing"]
    if output.code != 0:
        return f"nvidia-smi failed with exit code {output.code}: {words[0][:120]}"
    return "nvidia-smi lists no GPU" if tree is not None else f"not XML: {words[0][:120]!r}"


def _capability(seen: Readings, want: Wanted, tree: ET.Element) -> Finding:
    names = [text_of(node, "product_name") or "unnamed" for node in tree.iter("gpu")]
    rows = [row.rpartition(",") for row in seen.output("compute-cap").out.strip().splitlines()]
    found = {row[2].strip() for row in rows if re.fullmatch(r"\d+\.\d+", row[2].strip())}
    summary = f"{', '.join(names)}; compute capability {', '.join(sorted(found)) or 'unknown'}"
    if not want.gpu or want.cuda_arch in found:
        return Finding("gpu", "ok", summary)
    if not found:
        return Finding(
            "gpu", "note", summary, "nvidia-smi --query-gpu=name,compute_cap --format=csv"
        )
    hint = "python3 build.py pins check; grep -n cuda_arch pins.yaml   # another target?"
    return Finding("gpu", "fail", f"{summary}; target {want.target} is for {want.cuda_arch}", hint)


def _driver(want: Wanted, tree: ET.Element) -> Iterator[Finding]:
    driver, cuda = text_of(tree, "driver_version"), text_of(tree, "cuda_version")
    summary = f"{driver or 'version unknown'}, CUDA {cuda or 'unknown'}"
    found = re.fullmatch(r"(\d+)\.(\d+)", cuda)
    if want.cuda is None or found is None:
        yield Finding("driver", "ok" if want.cuda is None else "note", summary)
    elif (int(found[1]), int(found[2])) >= want.cuda:
        yield Finding("driver", "ok", summary)
    else:
        text = f"{summary}; the target's CUDA is {want.cuda[0]}.{want.cuda[1]}"
        hint = "sudo apt-get update && sudo apt-get full-upgrade   # CUDA 13.0: driver 580"
        yield Finding("driver", "fail", text, hint)


def _memory(tree: ET.Element) -> Iterator[Finding]:
    usages = []
    held = 0
    for node in tree.iter("gpu"):
        usage = node.find("fb_memory_usage")
        total = text_of(usage, "total") if usage is not None else ""
        known = _number(total) is not None
        usages.append(
            f"{text_of(usage, 'used')} of {total} used"
            if known
            else "not reported by nvidia-smi (unified memory)"
        )
        held += len(node.findall("processes/process_info"))
    text = "; ".join(usages)
    if held:
        yield Finding("gpu-memory", "warn", f"{text}; {held} processes use some", "nvidia-smi")
    else:
        yield Finding("gpu-memory", "ok", text)


def _clocks(want: Wanted, tree: ET.Element) -> Iterator[Finding]:
    for node in tree.iter("gpu"):
        now = _number(text_of(node, "clocks/sm_clock"))
        most = _number(text_of(node, "max_clocks/sm_clock"))
        load = _number(text_of(node, "utilization/gpu_util"))
        slowed = slowed_by(node)
        summary = (
            f"SM {_mhz(now)}, at most {_mhz(most)}, load "
            f"{'unknown' if load is None else f'{load:.0f} %'}"
            + (f"; throttled by {', '.join(slowed)}" if slowed else "")
        )
        look = "nvidia-smi -q -d CLOCK,PERFORMANCE,POWER,TEMPERATURE"
        if now is None:
            yield Finding("clocks", "note", summary, look)
        elif load is not None and load >= BUSY_PERCENT and now < STUCK_MHZ:
            hint = (
                "shut down, unplug for a minute, start again   # reports say that a full power"
                " cycle fixes it"
            )
            yield Finding("clocks", "fail", f"{summary}: stuck", hint)
        elif slowed:
            yield Finding("clocks", "warn", summary, look)
        elif load is None or load < BUSY_PERCENT:
            text = f"{summary}; idle clocks prove nothing: run doctor while it serves"
            yield Finding("clocks", "note", text, look)
        else:
            yield Finding("clocks", "ok", summary)


def slowed_by(node: ET.Element) -> list[str]:
    """Return the active reasons for a slow-down; the list's name depends on the driver."""
    found = []
    for group in ("clocks_event_reasons", "clocks_throttle_reasons"):
        for reason in node.findall(f"{group}/*"):
            name = re.sub(r"^clocks_(event|throttle)_reason_", "", reason.tag)
            if name in _SLOWED and (reason.text or "").strip() == "Active":
                found.append(name)
    return found


def low_clock(node: ET.Element) -> str:
    """Return the SM clock of a busy GPU that runs far below its highest; "" for any other."""
    now = _number(text_of(node, "clocks/sm_clock"))
    most = _number(text_of(node, "max_clocks/sm_clock"))
    load = _number(text_of(node, "utilization/gpu_util"))
    if now is None or most is None or load is None or load < BUSY_PERCENT:
        return ""
    return f"{_mhz(now)} of {_mhz(most)}" if now < _LOW_SHARE * most else ""


def text_of(node: ET.Element | None, path: str) -> str:
    """Return the text at a path of a node, or ""."""
    found = node.findtext(path) if node is not None else None
    return (found or "").strip()


def _number(text: str) -> float | None:
    found = re.match(r"(\d+(?:\.\d+)?)\s*(?:MHz|MiB|%|$)", text)
    return float(found[1]) if found else None


def _mhz(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.0f} MHz"


PROBES = (gpu, devices)
