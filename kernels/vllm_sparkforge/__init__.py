# SPDX-License-Identifier: Apache-2.0
"""Kernels for gpt-oss on vLLM as upstream has it: a plugin.

vLLM calls ``register`` in each of its processes (entry point ``vllm.general_plugins``). Off:
``VLLM_PLUGINS=`` without a name. Options: ``vllm_sparkforge.options``.
"""

from __future__ import annotations

import importlib
import os
from typing import Any


def register() -> None:
    """Put our model and quantization configuration in place of vLLM's own, for gpt-oss alone."""
    import torch
    from vllm import envs
    from vllm.logger import init_logger

    from vllm_sparkforge import options

    logger = init_logger(f"vllm.{__name__}")
    if options.VARIABLE in os.environ:  # or vLLM warns that it is unknown, or refuses it
        envs.environment_variables[options.VARIABLE] = lambda: os.environ.get(options.VARIABLE)
    try:
        off = options.of(None).off
    except ValueError as error:  # a wrong variable ends every program of vLLM's, so in one line
        raise SystemExit(f"vllm-sparkforge: error: {error}") from None
    # Linux kills a process that uses AMX tiles without having asked for them: once for all threads,
    # before any kernel that uses them.
    if "amx" not in off and torch.cpu._is_amx_tile_supported() and not torch.cpu._init_amx():
        logger.warning(
            "The operating system does not let this process use AMX tiles. Kernels that are"
            " selected for AMX will end it with SIGILL."
        )
    reason = _register()
    _verify_early(reason)
    if reason is not None:
        logger.warning("vllm-sparkforge is off: %s.", reason)


def _register() -> str | None:
    """Register both; returns why that is not possible, if so."""
    from vllm_sparkforge import contract

    if (reason := contract.broken("")) is not None:
        return reason
    try:
        importlib.import_module("vllm_sparkforge.quant")  # registers the configuration
        importlib.import_module("vllm_sparkforge.bf16_experts")  # which it imports for some models
        importlib.import_module("vllm_sparkforge.all_reduce").register()
    except ImportError as error:  # another vLLM: none of its models may fail by that
        return f"this vLLM differs: {error}"
    from vllm.model_executor.models import ModelRegistry

    ModelRegistry.register_model(
        "GptOssForCausalLM", "vllm_sparkforge.model:SparkGptOssForCausalLM"
    )
    return None


def _verify_early(off: str | None) -> None:
    """Have options refused with vLLM's own: for all models, and in the user's process."""
    from functools import wraps

    from vllm.engine.arg_utils import EngineArgs

    from vllm_sparkforge import options

    make = EngineArgs.create_engine_config

    @wraps(make)
    def create_engine_config(self: EngineArgs, *arguments: Any, **named: Any) -> Any:
        config = make(self, *arguments, **named)
        options.verify(config, off)
        return config

    EngineArgs.create_engine_config = create_engine_config
