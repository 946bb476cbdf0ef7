# SPDX-License-Identifier: Apache-2.0
"""``vllm:decode_kernels_in_use`` in /metrics: what the workers found out while the model loaded."""

from __future__ import annotations

from typing import Any

from prometheus_client import REGISTRY, Gauge
from vllm.config import VllmConfig
from vllm.v1.metrics.loggers import AggregateStatLoggerBase

from vllm_sparkforge import options
from vllm_sparkforge.decode import verdicts

_NAME = "vllm:decode_kernels_in_use"


class KernelMetrics(AggregateStatLoggerBase):
    """Sets the gauge once the engines are ready.

    Args:
        vllm_config: of the engines.
        engine_indexes: their numbers.
    """

    def __init__(self, vllm_config: VllmConfig, engine_indexes: list[int]) -> None:
        self._config, self._engines = vllm_config, engine_indexes

    def log_engine_initialized(self) -> None:
        """Set the gauge of each kind that was compared."""
        chosen = options.of(self._config)
        failed = (kind for kind in chosen.failed if not kind.startswith(options.TACTIC))
        found = {**verdicts.read(self._config), **dict.fromkeys(failed, False)}
        if not found or "metrics" in chosen.off:
            return
        gauge = REGISTRY._names_to_collectors.get(_NAME) or Gauge(
            _NAME,
            "Whether few rows take the decode kernels of a kind (1), or the kind failed its"
            " trial or its comparison with the usual kernels (0).",
            ("model_name", "engine", "kind"),
            multiprocess_mode="mostrecent",
        )
        model = self._config.model_config.served_model_name
        for engine in self._engines:
            for kind, used in found.items():
                gauge.labels(model, str(engine), kind).set(used)

    def record(self, *arguments: Any, **named: Any) -> None:
        """Nothing changes while the engines run."""
