"""Which backends did vLLM really choose? Read from its own words while it loads.

vLLM falls back without an error where a backend that was asked for does not fit, and a wheel or a
driver that lacks a kernel shows as a slow server. Its log is the only place where all processes say
what they chose; the sentences are those of vLLM 0.31.0, and tests/patches/test_profiles.py fails
when they are no longer in its source.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

SENTENCES: Mapping[str, tuple[re.Pattern[str], ...]] = {
    "moe": (re.compile(r"\] Using '([A-Z0-9_]+)' Mxfp4 MoE backend\."),),
    "attention": (
        # named in the options, and chosen by vLLM
        re.compile(r"\[cuda\.py:\d+\] Using (?:AttentionBackendEnum\.)?([A-Z0-9_]+) backend\."),
        re.compile(r"\[cuda\.py:\d+\] Using ([A-Z0-9_]+) attention backend out of"),
    ),
    # dense layers in MX formats: the kernel's class, e.g. MarlinMxFp4LinearKernel
    "linear": (re.compile(r"\] Using (\w+?)M[xX][fF][pP][48]\w*Kernel for MXFP[48] GEMM"),),
}
"""By kind, what vLLM says; the first group, in capitals, is the backend's name."""


@dataclass
class Watch:
    """Holds vLLM's lines against what is expected.

    Attributes:
        expected: the backend's name in vLLM's log, by kind; kinds without one are noted only.
        seen: what was read so far.
    """

    expected: Mapping[str, str]
    seen: dict[str, set[str]] = field(default_factory=dict)

    def feed(self, line: str) -> str | None:
        """Take a line; returns what is wrong with it, or None."""
        for kind, patterns in SENTENCES.items():
            for pattern in patterns:
                if (match := pattern.search(line)) is None:
                    continue
                name = match[1].upper()
                self.seen.setdefault(kind, set()).add(name)
                wanted = self.expected.get(kind)
                if wanted is not None and name != wanted:
                    return f"vLLM chose the {kind} backend {name}; the profile says {wanted}"
        return None

    def missing(self) -> list[str]:
        """Say of which expected backends there was no word; to be asked when the server is up."""
        return [
            f"vLLM did not say which {kind} backend it uses; the profile says {wanted}"
            " (its lines of level INFO are needed: VLLM_LOGGING_LEVEL)"
            for kind, wanted in self.expected.items()
            if kind not in self.seen
        ]
