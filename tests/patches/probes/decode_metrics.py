"""How /metrics learns which decode kernels are used: from the workers' checks to the text."""

import os
import time
from pathlib import Path
from typing import Any
from unittest import mock

from tests.patches.probes.decode_device import configured, forget, logged

WEEK_S = 7 * 24 * 3600


def metrics(_: Any) -> dict[str, Any]:
    """What workers leave, what two API servers show of it, and whether the compile cache minds."""
    from vllm import envs
    from vllm_sparkforge.decode import verdicts

    forget()
    folder = Path(envs.VLLM_CACHE_ROOT) / "sparkforge"
    folder.mkdir(exist_ok=True)
    old, others = folder / "1-0-0.json", folder / "2-0-0.json"
    for path, age in ((old, WEEK_S), (others, 0)):
        path.write_text('{"of another server": true}', encoding="utf-8")
        os.utime(path, (time.time() - age,) * 2)
    with configured("auto", failed="CUTLASS tactic 3") as config:  # which is no kernel of ours
        nothing = _text(config, [0])
        before = config.compute_hash()
        _rank(("MXFP4", True), ("MXFP4", False), ("BF16", True))
        same = config.compute_hash() == before
        worker = verdicts.read(config)
        # a second rank, a second engine, and one that Ray started
        config.parallel_config.rank = 1
        _rank(("BF16", True), ("MXFP8", True))
        config.parallel_config.rank, config.parallel_config.data_parallel_index = 0, 1
        _rank(("BF16", False))
        own = config.instance_id
        config.instance_id, config.parallel_config.data_parallel_index = f"{own}_dp2", 2
        _rank(("norms and routers", True))
        config.instance_id = own
        texts = [_text(config, [0, 1]) for _ in range(2)]
        left = {"old": old.exists(), "others": others.exists()}
        with mock.patch.dict(os.environ, {"VLLM_CACHE_ROOT": str(others)}), logged() as lines:
            _rank(("BF16", True))  # where nothing can be written
    with configured("auto", off=["metrics"]) as off:
        off.instance_id = own
        switched_off = _text(off, [0])
    return {
        "worker": worker,
        "frontend": verdicts.read(config),
        "same key": same,
        "texts": texts,
        "text of none": nothing,
        "text of off": switched_off,
        "left": left,
        "unwritable": [line for line in lines if "metrics" in line],
    }


def _rank(*found: tuple[str, bool]) -> None:
    """Do what a rank does that finds kinds right or wrong, each with another shape."""
    from vllm_sparkforge.decode import selfcheck

    for number, (kind, right) in enumerate(found):
        difference = 0.0 if right else 1.0
        passed = selfcheck.passes(kind, (number, 8), False, lambda found=difference: found)
        assert passed == right
    forget()


def _text(config: Any, engines: list[int]) -> list[str]:
    """Return what an API server's /metrics says, once its engines are ready."""
    import prometheus_client
    from vllm.v1.metrics import loggers
    from vllm.v1.metrics.prometheus import unregister_vllm_metrics

    unregister_vllm_metrics()  # of the server before
    with mock.patch.object(loggers, "PrometheusStatLogger", new=_Others):
        manager = loggers.StatLoggerManager(
            config, engines, loggers.load_stat_logger_plugin_factories(), False
        )
    manager.log_engine_initialized()
    manager.record(None, None)
    lines = prometheus_client.generate_latest().decode().splitlines()
    return [line for line in lines if line.startswith("vllm:decode_kernels_in_use")]


class _Others:
    """Stands for the logger of vLLM's own metrics."""

    def __init__(self, *_: Any) -> None: ...

    def log_engine_initialized(self) -> None: ...

    def record(self, *_: Any, **__: Any) -> None: ...
