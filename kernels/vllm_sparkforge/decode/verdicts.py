# SPDX-License-Identifier: Apache-2.0
"""What the self-checks of an engine's workers found, for the processes that have /metrics.

vLLM has no way for a plugin to send something from a worker, so each rank leaves a file, named by
the server's ``instance_id``, in vLLM's cache.
"""

from __future__ import annotations

import json
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from vllm import envs
from vllm.logger import init_logger

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger(f"vllm.{__name__}")

_KEPT_S = 24 * 3600
"""How long a file is kept: several processes read it, when their engines are ready."""


def _folder() -> Path:
    return Path(envs.VLLM_CACHE_ROOT) / "sparkforge"


def write(config: VllmConfig, found: dict[str, bool]) -> None:
    """Leave what this rank has found so far; what cannot be written ends no start."""
    parallel, folder = config.parallel_config, _folder()
    path = folder / f"{config.instance_id}-{parallel.data_parallel_index}-{parallel.rank}.json"
    temporary = path.with_suffix(".tmp")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps(found), encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        logger.warning_once("/metrics will not tell of the decode kernels: %s", error)
        return
    for old in folder.iterdir():
        with suppress(OSError):
            if time.time() - old.stat().st_mtime > _KEPT_S:
                old.unlink()


def read(config: VllmConfig) -> dict[str, bool]:
    """Return for each kind whether all ranks of this host use it."""
    found: dict[str, bool] = {}
    # Ray's engines have the instance with a suffix of their own
    for path in _folder().glob(f"{config.instance_id}[-_]*.json"):
        for kind, used in json.loads(path.read_text(encoding="utf-8")).items():
            found[kind] = found.get(kind, True) and used
    return found
