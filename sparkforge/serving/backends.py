"""The server's output: passed on to the container's log, and searched for backends and deaths.

vLLM falls back without an error where a requested backend does not fit, so a wheel or driver
without a kernel gives a slow server. Only its log has the choices of all processes. The sentences
are those of vLLM 0.31.0; tests/patches/test_profiles.py fails when its source no longer has them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

SENTENCES: Mapping[str, tuple[re.Pattern[str], ...]] = {
    "moe": (re.compile(r"\] Using '([A-Z0-9_]+)' Mxfp4 MoE backend\."),),
    "attention": (
        # named in the options; chosen by vLLM
        re.compile(r"\[cuda\.py:\d+\] Using (?:AttentionBackendEnum\.)?([A-Z0-9_]+) backend\."),
        re.compile(r"\[cuda\.py:\d+\] Using ([A-Z0-9_]+) attention backend out of"),
    ),
    # dense layers in MX formats: the kernel's class, e.g. MarlinMxFp4LinearKernel
    "linear": (re.compile(r"\] Using (\w+?)M[xX][fF][pP][48]\w*Kernel for MXFP[48] GEMM"),),
    # few rows of the experts, with Marlin as MoE backend
    "experts": (
        re.compile(r"\] (Decode) kernels are used for MXFP4 experts "),
        # chosen, and then found wrong by their self-check: vLLM warns, and serves with Marlin
        re.compile(r"\] (Decode) kernels for MXFP4 experts are switched off\."),
        re.compile(r"\] Decode kernels are (not used) for MXFP4 experts: "),
        re.compile(r"\] Decode kernels are (off): "),
    ),
}
"""Log lines by kind; the first group, in capitals, is the backend's name, or stands for one."""
_STANDS_FOR: Mapping[str, str] = {"NOT USED": "MARLIN", "OFF": "MARLIN"}


@dataclass
class Watch:
    """Compares vLLM's log with the expected backends."""

    expected: Mapping[str, str]
    """The backend's name in the log, by kind; other kinds are not checked."""
    seen: dict[str, set[str]] = field(default_factory=dict)
    """Names read so far, by kind."""

    def feed(self, line: str) -> str | None:
        """Read a line; returns a problem, or None."""
        for kind, patterns in SENTENCES.items():
            for pattern in patterns:
                if (match := pattern.search(line)) is None:
                    continue
                name = _STANDS_FOR.get(match[1].upper(), match[1].upper())
                self.seen.setdefault(kind, set()).add(name)
                wanted = self.expected.get(kind)
                if wanted is not None and name != wanted:
                    return f"vLLM chose the {kind} backend {name}; the profile says {wanted}"
        return None

    def missing(self) -> list[str]:
        """Return a problem for each expected backend that the log does not name.

        Call it when the server is up.
        """
        return [
            f"vLLM did not say which {kind} backend it uses; the profile says {wanted}"
            " (its lines of level INFO are needed: VLLM_LOGGING_LEVEL)"
            for kind, wanted in self.expected.items()
            if kind not in self.seen
        ]


_LINE_LIMIT = 1 << 16  # bytes of a line that are searched
# vLLM 0.31.0, of a worker and of an engine; sometimes it has None instead of the code
_DIED = re.compile(rb"died (?:unexpectedly \(exit code: |with exit code )(-?\d{1,3})\b")


@dataclass
class Output:
    """Copies the server's output to stdout."""

    watch: Watch
    """Finds the backends."""
    problems: list[str] = field(default_factory=list)
    """Of backends, not logged yet."""
    died: int | None = None
    """End of the first engine process that vLLM reports: an exit code, or a signal's number below
    zero."""

    def copy(self, source: int) -> None:
        """Copy until the end of a file descriptor."""
        rest = b""
        while chunk := os.read(source, 1 << 16):
            view = memoryview(chunk)
            while view:
                view = view[os.write(1, view) :]
            *lines, rest = (rest + chunk).split(b"\n")
            rest = rest[-_LINE_LIMIT:]
            for line in lines:
                if problem := self.watch.feed(line[:_LINE_LIMIT].decode(errors="replace")):
                    self.problems.append(problem)
                if self.died is None and (match := _DIED.search(line[:_LINE_LIMIT])) is not None:
                    self.died = int(match[1])
        if rest:
            os.write(1, b"\n")  # the last line is not terminated, and ours follow
