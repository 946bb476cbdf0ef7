"""The probe of the plugin's option `experts`, and its checkpoints, for tests that share a run."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tests.patches.probing import PROMPT, runner
from tests.reference import TinyCheckpoint

STEPS = "isa,tiles_denied,by_name,auto,starved,damaged,every_value,amx,shapes,memory,policies"
TIMEOUT_S = 1200

# Twelve tokens after this prompt the reference is never in doubt by less than MARGIN logits.
GREEDY_PROMPT = b"flame and " * 10
GREEDY_COUNT = 12
MARGIN = 0.3

# First lines of /proc/self/numa_maps show them so (mpol_to_str in the kernel's mm/mempolicy.c).
POLICIES = {
    "default": [0, 1, 2, 3],
    "interleave:0-1": [0, 1, 2, 3],  # where a node is full, pages come from the others
    "bind:0,2-3": [0, 2, 3],
    "bind=static:2": [2],
    "no NUMA": [0, 1, 2, 3],
}


def make(
    tiny: TinyCheckpoint, folder: Path, variables: Mapping[str, str] | None = None
) -> Callable[[Path, str], Path]:
    """Return a function that runs steps of the probe in an interpreter; see ``runner``."""
    request = {
        "checkpoint": str(tiny.path),
        "experts": "bf16_dequant",
        "damaged": {
            "nan": str(_with_scale(tiny.path, folder / "nan", 0xFF)),
            "overflow": str(_with_scale(tiny.path, folder / "overflow", 0xFE)),
        },
        "prompt": list(PROMPT),
        "greedy_prompt": list(GREEDY_PROMPT),
        "greedy_count": GREEDY_COUNT,
        "available": too_little(tiny),
        "policies": list(POLICIES),
    }
    return runner("probe_logits", request, folder, TIMEOUT_S, variables)


def too_little(tiny: TinyCheckpoint) -> list[int]:
    """Bytes of memory: less than the experts, and one less than experts and KV cache together."""
    return [tiny.bf16_expert_bytes - 1, tiny.bf16_expert_bytes + (1 << 30) - 1]


def read_raw(folder: Path) -> tuple[dict[str, Any], bytes]:
    raw = (folder / "model.safetensors").read_bytes()
    start = 8 + int.from_bytes(raw[:8], "little")
    return json.loads(raw[8:start]), raw[start:]


def write_raw(source: Path, dest: Path, header: dict[str, Any], data: bytes) -> Path:
    """A copy of the checkpoint `source` with other weights."""
    dest.mkdir()
    for file in source.glob("*.json"):
        (dest / file.name).write_bytes(file.read_bytes())
    text = json.dumps(header).encode()
    (dest / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)
    return dest


def _with_scale(source: Path, dest: Path, scale: int) -> Path:
    """A copy in which one block of a down projection has another scale."""
    header, data = read_raw(source)
    entry = header["model.layers.2.mlp.experts.down_proj_scales"]
    start, end = entry["data_offsets"]
    position = start + 5 * (end - start) // entry["shape"][0]  # the first scale of expert 5
    return write_raw(source, dest, header, data[:position] + bytes([scale]) + data[position + 1 :])
