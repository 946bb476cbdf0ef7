# SPDX-License-Identifier: Apache-2.0
"""What a process may still allocate on this host, beyond what vLLM's own functions say."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from vllm.utils.cpu_resource_utils import get_memory_affinity, parse_id_list


def get_cgroup_reclaimable_memory() -> int:
    """Return the page cache, in bytes, that the cgroup could give back.

    Cgroup usage counts cached file pages, so a checkpoint that was just
    downloaded looks like used memory. Returns 0 where it cannot be read.
    """
    for path, prefix in (
        ("/sys/fs/cgroup/memory.stat", ""),
        ("/sys/fs/cgroup/memory/memory.stat", "total_"),
    ):
        keys = {f"{prefix}active_file", f"{prefix}inactive_file"}
        try:
            with Path(path).open() as f:
                stat = dict(line.split() for line in f)
            return sum(int(stat[key]) for key in keys)
        except (OSError, ValueError, KeyError):
            continue
    return 0


def get_allocation_nodes() -> list[int]:
    """Return the memory nodes that this process may allocate on.

    These are the bound ones where the memory policy is a strict binding, else
    all that the process is allowed: interleaving and a preferred node fall back
    to the others.
    """
    if sys.platform == "darwin":
        return [0]

    try:
        # Mappings without a policy of their own show that of the process, e.g.
        # "7f3a5c000000 bind:0-1 anon=3 dirty=3 N0=3 kernelpagesize_kB=4".
        with Path("/proc/self/numa_maps").open() as f:
            policy = f.readline().split()[1]
    except (OSError, IndexError):
        policy = "default"  # a kernel without NUMA
    if match := re.fullmatch(r"bind(?:=[\w|]+)?:([\d,-]+)", policy):
        return parse_id_list(match[1])
    return get_memory_affinity() or [0]
