# SPDX-License-Identifier: Apache-2.0
"""What the self-checks of an engine's workers found, for the process that has /metrics.

vLLM has no way for a plugin to send something from a worker, so each rank leaves a file, named by
the engine's ``instance_id``, in vLLM's cache.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from vllm import envs

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def _folder() -> Path:
    return Path(envs.VLLM_CACHE_ROOT) / "sparkforge"


def write(config: VllmConfig, found: dict[str, bool]) -> None:
    """Leave what this rank has found so far."""
    path = _folder() / f"{config.instance_id}-{config.parallel_config.rank}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(found), encoding="utf-8")
    temporary.replace(path)


def read(config: VllmConfig) -> dict[str, bool]:
    """Return for each kind whether all ranks of this host use it, and remove the files."""
    found: dict[str, bool] = {}
    for path in _folder().glob(f"{config.instance_id}-*.json"):
        for kind, used in json.loads(path.read_text(encoding="utf-8")).items():
            found[kind] = found.get(kind, True) and used
        path.unlink()
    return found
