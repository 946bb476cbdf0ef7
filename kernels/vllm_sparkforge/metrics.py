# SPDX-License-Identifier: Apache-2.0
"""``vllm:decode_kernels_in_use`` in /metrics: what the workers found out while the model loaded."""

from __future__ import annotations

from typing import Any

from prometheus_client import REGISTRY, Gauge

from vllm.config import VllmConfig
from vllm.v1.metrics.loggers import StatLoggerBase

from vllm_sparkforge import options
from vllm_sparkforge.decode import verdicts

_NAME = "vllm:decode_kernels_in_use"


class KernelMetrics(StatLoggerBase):
    """Sets the gauge once the engine is ready.

    Args:
        vllm_config: of the engine.
        engine_index: its number.
    """

    def __init__(self, vllm_config: VllmConfig, engine_index: int = 0) -> None:
        self._config, self._engine = vllm_config, engine_index

    def log_engine_initialized(self) -> None:
        """Set the gauge of each kind that was compared."""
        found = verdicts.read(self._config)
        if not found or "metrics" in options.of(self._config).off:
            return
        gauge = REGISTRY._names_to_collectors.get(_NAME) or Gauge(
            _NAME,
            "Whether few rows take the decode kernels of a kind (1), or the kind failed its"
            " comparison with the usual kernels (0).",
            ("model_name", "engine", "kind"),
            multiprocess_mode="mostrecent",
        )
        model = self._config.model_config.served_model_name
        for kind, used in found.items():
            gauge.labels(model, str(self._engine), kind).set(used)

    def record(self, *arguments: Any, **named: Any) -> None:
        """Nothing changes while the engine runs."""
