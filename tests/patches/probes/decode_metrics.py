"""How /metrics learns which decode kernels are used: from the worker's check to the text.

Runs inside the interpreter under test; used by probe_decode_kernels.py.
"""

from __future__ import annotations

import types
from typing import Any
from unittest import mock

from tests.patches.probes.decode_device import configured


def metrics(_: Any) -> dict[str, Any]:
    import msgspec
    import prometheus_client
    from vllm.model_executor.kernels.decode import selfcheck
    from vllm.v1.engine import EngineCoreReadyResponse
    from vllm.v1.engine.core import EngineCore, EngineCoreProc
    from vllm.v1.engine.core_client import MPClient
    from vllm.v1.metrics.loggers import PrometheusStatLogger
    from vllm.v1.worker.worker_base import WorkerBase

    checked = {("MXFP4", (1, 2)): True, ("MXFP4", (3, 4)): False, ("BF16", (5, 6)): True}
    selfcheck._passed.update(checked)
    answers = [WorkerBase.get_decode_kernels_in_use(mock.Mock()), {"BF16": True, "MXFP8": True}]
    selfcheck._passed.clear()
    # as another worker of the same model has it, whose BF16 kernels failed
    answers.append({"BF16": False, "MXFP8": True})

    with configured("auto") as config:
        before = config.kernel_config.compute_hash()
        engine = types.SimpleNamespace(vllm_config=config, collective_rpc=lambda _: answers)
        EngineCore._update_decode_kernels_in_use(engine)
        after = config.kernel_config.compute_hash()
        proc = mock.MagicMock(vllm_config=config)
        config.model_config = mock.MagicMock()
        ready = EngineCoreProc._make_ready_response(proc).decode_kernels_in_use

    numbers = {
        name: 1
        for name, kind in EngineCoreReadyResponse.__annotations__.items()
        if kind is int or kind == "int"
    }
    texts = dict.fromkeys(("dtype", "vllm_version", "instance_id"), "")
    response = EngineCoreReadyResponse(
        **numbers,
        **texts,
        dp_stats_address=None,
        supports_lora=False,
        decode_kernels_in_use=ready,
    )
    frontend = mock.MagicMock()
    frontend.vllm_config.model_config.max_model_len = 1
    frontend.vllm_config.cache_config.num_gpu_blocks = 0
    MPClient._apply_ready_response(frontend, msgspec.msgpack.encode(response))
    told = frontend.vllm_config.kernel_config.decode_kernels_in_use

    def text(in_use: dict[str, bool]) -> list[str]:
        registry = prometheus_client.CollectorRegistry()
        logger = mock.MagicMock(per_engine_labelvalues={0: ["model", "0"]})
        logger.vllm_config.kernel_config.decode_kernels_in_use = in_use

        def gauge(multiprocess_mode: str, **options: Any) -> Any:
            return prometheus_client.Gauge(**options, registry=registry)

        logger._gauge_cls = gauge
        PrometheusStatLogger._log_decode_kernels(logger)
        lines = prometheus_client.generate_latest(registry).decode().splitlines()
        return [line for line in lines if not line.startswith("#")]

    return {
        "worker": answers[0],
        "same key": before == after,
        "frontend": told,
        "text": text(told),
        "text of none": text({}),
    }
