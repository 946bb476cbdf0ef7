"""What doctor says: one finding a check, and the list of all checks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

State = Literal["ok", "note", "warn", "fail"]
STATES: tuple[State, ...] = ("ok", "note", "warn", "fail")
"""``fail``: the target would not be built or served; ``warn``: it may go wrong; ``note``: nothing
has to be done, or nothing could be judged."""


@dataclass(frozen=True)
class Finding:
    """What one check found.

    Attributes:
        name: of the check, a key of ``CHECKS``.
        seen: what the machine said.
        remedy: a command to paste, or what to do; empty where all is well.
    """

    name: str
    state: State
    seen: str
    remedy: str = ""

    def as_json(self) -> dict[str, str]:
        """Return what ``--json`` prints of it."""
        check = CHECKS[self.name]
        return {
            "name": self.name, "theme": check.theme, "state": self.state, "seen": self.seen,
            "why": check.why, "remedy": self.remedy,
        }  # fmt: skip


@dataclass(frozen=True)
class Check:
    """One thing that doctor looks at.

    Attributes:
        what: what is read.
        worse: what makes it more than a note.
        why: why it matters.
    """

    theme: str
    what: str
    worse: str
    why: str


def _checks(theme: str, rows: Mapping[str, tuple[str, str, str]]) -> dict[str, Check]:
    return {name: Check(theme, *row) for name, row in rows.items()}


CHECKS: Mapping[str, Check] = {
    **_checks("machine", {
        "architecture": (
            "the kernel's name of the processor", "fail: not one of the target's platforms",
            "an image is baked and served on the platform that it is for; wheels are made anywhere",
        ),
        "instructions": (
            "the CPU's flags, for a target that is served on a CPU",
            "fail: none that vLLM has kernels for",
            "they decide which of vLLM's extensions is loaded, and whether it has MXFP4 experts of"
            " its own (AMX)",
        ),
        "system": (
            "os-release, dgx-release, kernel", "",
            "which DGX OS release and kernel it is decides what a report of a fault means",
        ),
        "firmware": (
            "the DMI names of machine and firmware", "",
            "it is named in reports of power and clock faults; which versions are good is NVIDIA's"
            " to say",
        ),
        "page-size": (
            "size of a memory page", "warn: not 4 KiB",
            "nothing of ours was tried with another; what was built for 4 KiB may refuse 64 KiB",
        ),
        "python": (
            "versions of Python: build.py's own, and the target's",
            "",
            "a plain environment needs the Python that the target's wheels are locked for; where it"
            " is missing, uv fetches one",
        ),
        "git": (
            "git --version", "fail: not there; warn: older than 2.34",
            "sources and series are git commits",
        ),
        "proxies": (
            "http_proxy and its kin, SSL_CERT_FILE",
            "warn: a proxy, and no NO_PROXY for loopback",
            "a proxy must not stand between a client and the server on this machine, and one that"
            " signs its own certificates needs --ca-bundle",
        ),
    }),
    **_checks("gpu", {
        "gpu": (
            "nvidia-smi: what it answers, name and compute capability",
            "fail: it is needed and does not answer, or none has the target's capability",
            "kernels are compiled for one capability and do not load on another",
        ),
        "driver": (
            "driver version and the newest CUDA that it runs", "fail: older than the target's CUDA",
            "a container brings its CUDA along, but not the driver",
        ),
        "devices": (
            "/dev/nvidia0, nvidiactl, nvidia-uvm", "warn: one is missing",
            "without nvidia-uvm the first CUDA call fails, though nvidia-smi works",
        ),
        "gpu-memory": (
            "memory that nvidia-smi reports, and its processes", "warn: processes hold some",
            "on a Spark it reports none (N/A): GPU and host share one memory, and the kernel's own"
            " figures count (see memory)",
        ),
        "clocks": (
            "clock of the SMs, its maximum, load, reasons for a slow-down",
            "fail: at load below 900 MHz; warn: slowed by power or heat",
            "after a power fault Sparks were reported to stay at 500 to 850 MHz: everything works,"
            " several times too slowly",
        ),
    }),
    **_checks("memory", {
        "memory": (
            "MemTotal, MemAvailable and what CUDA counts", "fail: less than the profile's least",
            "the server does not start with less: docs/serving.md, share of memory",
        ),
        "page-cache": (
            "MemFree and Cached", "warn: enough is available, but cached pages hold it",
            "CUDA on unified memory was reported to fail (NV_ERR_NO_MEMORY) before the kernel gives"
            " cached pages up",
        ),
        "swap": (
            "SwapTotal and SwapFree", "warn: more than 1 GiB is swapped out",
            "a machine that swaps while it holds a model in the same memory stands still",
        ),
    }),
    **_checks("disk", {
        "store": (
            "free space and rights of the store's folder", "fail: it can't be written, or 2 GiB"
            " are not free; warn: less than the target takes",
            "downloads, wheels and environments lie there",
        ),
        "model": (
            "the pinned revision's files: index, every shard it names, each shard's own header",
            "fail: a shard is missing or cut short; warn: not here yet, not where Compose looks,"
            " or a download that stopped",
            "a cut shard shows after minutes of loading; a missing one comes over the network at"
            " the first start",
        ),
        "model-rights": (
            "what user 10001 may do with the folder of SPARKFORGE_HF_CACHE, lists of setfacl"
            " included",
            "fail: not there, or something of the model cannot be read; warn: it cannot be written,"
            " and HF_HUB_OFFLINE is not set",
            "the container serves as that user; a download writes, and a start reads",
        ),
        "model-disk": (
            "free space where the model will lie", "fail: less than the model takes",
            "a download that fills the disk ends the server, at every start anew",
        ),
    }),
    **_checks("engine", {
        "docker-socket": (
            "the engine's socket and our rights on it", "fail: no right to use it",
            "docker answers 'permission denied' for everything",
        ),
        "engine": (
            "docker info", "fail: the target needs one and none answers, or it is older than 25",
            "it bakes and runs the image",
        ),
        "buildx": ("docker buildx version", "fail: not there", "it builds the image"),
        "compose": (
            "docker compose version", "warn: not there, or older than 2.20",
            "docker compose up is how the image is served",
        ),
        "container-toolkit": (
            "nvidia-ctk, the engine's runtimes and CDI devices",
            "fail: the engine has no way to give a container the GPU",
            "without it `docker compose up` ends with: could not select device driver nvidia",
        ),
        "port": (
            "what listens on SPARKFORGE_PORT", "warn: taken",
            "the server's port can't be published where another program has it",
        ),
    }),
    **_checks("cluster", {
        "interface": (
            "the interface between the two, its state, speed and address (--cluster)",
            "fail: not there, down, or without the address of .env; warn: below 200 Gbit/s",
            "all that the two halves tell each other goes over it",
        ),
        "mtu": (
            "its MTU on both sides, and whether a packet of that size arrives",
            "fail: they differ, or such packets are lost; warn: below 9000",
            "a lost large packet looks like a hang; small ones cost speed",
        ),
        "rdma": (
            "RDMA devices, their ports and GID tables",
            "fail: no active device on the interface with a RoCE v2 GID of the address",
            "without it NCCL goes over TCP, or not at all",
        ),
        "rdma-kernel": (
            "kernel and its command line", "warn: 7.0.0-1019 without kho=off",
            "that kernel was reported to break the registration of large RDMA buffers",
        ),
        "nccl": (
            "NCCL_* and GLOO_* of .env and environment",
            "warn: another interface or GID than the one above, or RoCE off",
            "they win over what the image would choose",
        ),
        "peer": (
            "whether the other side's doctor answers over TCP",
            "fail: it does not", "the two halves meet in the same way",
        ),
        "same-image": (
            "digest and release of the image on both", "fail: they differ",
            "two versions of vLLM do not understand each other",
        ),
        "same-model": (
            "the pinned revision on both", "fail: they differ",
            "two halves of different weights answer nonsense",
        ),
        "same-driver": (
            "driver and kernel on both", "warn: they differ",
            "such pairs were tried by nobody we know of",
        ),
        "time": (
            "the two clocks (the worker's doctor asks)", "warn: more than 1 s apart",
            "logs of the two sides are read side by side",
        ),
    }),
    **_checks("doctor", {
        "doctor": (
            "doctor itself", "warn: a reading did not come in time, or could not be judged",
            "what is not judged may still be wrong",
        ),
    }),
}  # fmt: skip
