# SPDX-License-Identifier: Apache-2.0
"""Kernels for gpt-oss on vLLM as upstream has it: a plugin.

vLLM calls ``register`` in each of its processes (entry point ``vllm.general_plugins``). Off:
``VLLM_PLUGINS=`` without a name. Options: ``vllm_sparkforge.options``.
"""


def register() -> None:
    """Put our model and quantization configuration in place of vLLM's own, for gpt-oss alone."""
    import torch

    from vllm.logger import init_logger

    from vllm_sparkforge import contract, options

    logger = init_logger(f"vllm.{__name__}")
    # Linux kills a process that uses AMX tiles without having asked for them: once for all threads,
    # before any kernel that uses them.
    if (
        "amx" not in options.of(None).off
        and torch.cpu._is_amx_tile_supported()
        and not torch.cpu._init_amx()
    ):
        logger.warning(
            "The operating system does not let this process use AMX tiles. Kernels that are selected"
            " for AMX will end it with SIGILL."
        )
    if (reason := contract.broken("")) is not None:
        logger.warning("vllm-sparkforge is off: %s.", reason)
        return
    from vllm.model_executor.models import ModelRegistry

    from vllm_sparkforge import quant  # noqa: F401 - registers the configuration

    ModelRegistry.register_model("GptOssForCausalLM", "vllm_sparkforge.model:SparkGptOssForCausalLM")
