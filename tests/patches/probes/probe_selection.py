"""Runs inside the interpreter under test: what the installed vLLM selects on a CUDA device.

usage: python -m tests.patches.probes.probe_selection OUT_FOLDER CAPABILITY...

One process a capability, because vLLM keeps what it once learnt about the platform; each is a fork
of this one, which has not imported it. The device is made up (fake_cuda.py); the
selectors are the installed ones. An outcome is a list: what was selected or how it was refused,
then the warnings that were logged meanwhile.
"""

import importlib.util
import json
import multiprocessing
import os
import sys
import types
import typing
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from tests.patches.probes import fake_cuda
from tests.patches.probes.decode_device import logged
from tests.patches.probes.moe_layers import moe_config

Outcome = list[str]
Table = dict[str, Outcome]

# Names with one of these answers share a line of the table.
ALIKE = {
    "is no value of --moe-backend": "(no value of --moe-backend)",
    "' is not supported for MXFP": "(not known for this kind of layer)",
}

# The dense layers of gpt-oss-120b: (out, in) of qkv, o and lm_head.
SHAPES = {"qkv": (5120, 2880), "o": (2880, 4096), "lm_head": (201_088, 2880)}


def outcome(ask: Callable[[], str]) -> Outcome:
    """Return what a selector answered, and what it warned of."""
    with logged() as lines:
        try:
            answer = ask()
        except Exception as error:
            # The list of all names would stand in the table once for every wrong one.
            answer = f"{type(error).__name__}: {str(error).partition(' Expected one of ')[0]}"
    warned = [line for line in lines if not line.startswith("INFO: ")]
    return [" ".join(line.split()) for line in (answer, *warned)]


def fold(table: Table) -> Table:
    """Give all names with an answer of ``ALIKE`` one line."""
    folded: Table = {}
    shared: Table = {}
    for name, lines in table.items():
        labels = [label for text, label in ALIKE.items() if text in " ".join(lines)]
        if labels:
            shared.setdefault(labels[0], []).append(name)
        else:
            folded[name] = lines
    return folded | shared


@contextmanager
def settings(*, moe: dict[str, str] | None = None, experts: str = "") -> Iterator[Any]:
    """Make a configuration of the engine current, of which the selectors, and our plugin, read
    these."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.config.quantization import QuantizationConfigArgs

    config = VllmConfig(additional_config={"sparkforge": {"experts": experts}})
    config.model_config = types.SimpleNamespace(
        quantization_config=QuantizationConfigArgs(moe=moe) if moe else None,
        get_num_layers=lambda parallel_config: 36,
        is_diffusion=False,
    )
    with set_current_vllm_config(config):
        yield config


def moe_layer(moe_backend: str, *, gpt_oss: bool) -> Any:
    """Return an MoE layer in the engine's words: gpt-oss's, or a plain one with SiLU."""
    from vllm.config import KernelConfig

    # Refuses what is no value of --moe-backend.
    try:
        KernelConfig(moe_backend=moe_backend)
    except ValueError as error:
        msg = f"{moe_backend!r} is no value of --moe-backend"
        raise ValueError(msg) from error
    size, kind = (2880, "SWIGLUOAI") if gpt_oss else (2944, "SILU")
    return moe_config(128, size, size, kind, has_bias=gpt_oss, moe_backend=moe_backend)


def moe_names() -> list[str]:
    """Return every value of --moe-backend, and every name that the MXFP4 selector knows."""
    from vllm.config.kernel import MoEBackend
    from vllm.model_executor.layers.fused_moe.oracle.mxfp4 import map_mxfp4_backend

    names = {*typing.get_args(MoEBackend)}
    try:
        map_mxfp4_backend("auto")
    except ValueError as error:
        # The only place where the list of names can be had from.
        names |= {*json.loads(str(error).partition("one of ")[2].rstrip(".").replace("'", '"'))}
    return ["auto", *sorted(names - {"auto"})]


def mxfp4_moe(**quantization: str) -> Table:
    """What runs the experts of gpt-oss, by backend name."""
    from vllm.model_executor.layers.fused_moe.oracle import mxfp4 as oracle

    def ask(name: str) -> str:
        backend, experts = oracle.select_mxfp4_moe_backend(moe_layer(name, gpt_oss=True))
        padded = oracle.mxfp4_round_up_hidden_size_and_intermediate_size(backend, 2880, 2880)
        return f"{backend.value}: {experts.__name__}, 2880x2880 as {padded[0]}x{padded[1]}"

    with settings(moe=dict(quantization)):
        return fold({name: outcome(partial(ask, name)) for name in moe_names()})


@contextmanager
def flashinfer_mxfp8(archs: tuple[int, ...]) -> Iterator[None]:
    """Have a FlashInfer whose CUTLASS MoE has MXFP8 kernels for some devices, and a compiler."""
    from vllm.utils import flashinfer as ours

    fused_moe: Any = sys.modules["flashinfer.fused_moe"]
    config = types.SimpleNamespace(supported=lambda arch: arch in archs)
    fused_moe.CutlassMxfp8Config = config
    shutil, ours.shutil = ours.shutil, types.SimpleNamespace(which=lambda program: program)
    _forget(ours)
    try:
        yield
    finally:
        ours.shutil = shutil
        del fused_moe.CutlassMxfp8Config
        _forget(ours)


def _forget(module: types.ModuleType) -> None:
    """Forget what functions of a module keep."""
    for function in vars(module).values():
        if callable(getattr(function, "cache_clear", None)):
            function.cache_clear()


RELEASED = (100, 103, 107)
"""Devices for which FlashInfer 0.7.0.post1 has MXFP8 x MXFP8 MoE kernels."""


def mxfp8_moe(archs: tuple[int, ...]) -> Table:
    """What runs MXFP8 experts, by backend name."""
    from vllm.model_executor.layers.fused_moe.oracle import mxfp8 as oracle

    def ask(name: str) -> str:
        backend, experts = oracle.select_mxfp8_moe_backend(moe_layer(name, gpt_oss=False))
        return f"{backend.value}: {experts.__name__}"

    with settings(), flashinfer_mxfp8(archs):
        return fold({name: outcome(partial(ask, name)) for name in moe_names()})


def plugin() -> dict[str, Table]:
    """What our plugin, where it is installed, takes for the layers of gpt-oss."""
    if importlib.util.find_spec("vllm_sparkforge") is None:
        return {}
    import torch
    from vllm_sparkforge import bf16_experts
    from vllm_sparkforge.mx.linear import MxLinearMethod
    from vllm_sparkforge.quant import GptOssConfig

    def moe(name: str) -> str:
        method = GptOssConfig()._make_moe_method(moe_layer(name, gpt_oss=True))
        hidden, inner = method.maybe_roundup_sizes(
            2880, 2880, method.moe.in_dtype, method.moe.moe_parallel_config
        )
        backend, kind = method.mxfp4_backend.value, method.experts_cls.__name__
        return f"{backend}: {kind}, 2880x2880 as {hidden}x{inner}"

    def dense(form: str, shape: tuple[int, int]) -> str:
        kernel = MxLinearMethod(form)._kernel(shape)
        return f"{type(kernel).__name__}, or {type(kernel._fallback).__name__}"

    def float16() -> str:
        method = MxLinearMethod("mxfp4")
        layer, sizes = torch.nn.Module(), (64, [128], 64, 128)
        method.create_weights(layer, *sizes, torch.float16, weight_loader=None)
        return type(method.kernel).__name__

    with settings(moe={"activation": "mxfp8"}):
        asked = outcome(partial(moe, "flashinfer_cutlass"))
    with settings(experts="bf16_dequant"):
        expanded = outcome(partial(moe, "auto"))
    with settings() as config:
        layer = moe_layer("auto", gpt_oss=True)
        return {
            "plugin, MXFP4 MoE, gpt-oss": {
                "auto": outcome(partial(moe, "auto")),
                "marlin": outcome(partial(moe, "marlin")),
                "flashinfer_cutlass": outcome(partial(moe, "flashinfer_cutlass")),
                "flashinfer_cutlass, moe.activation=mxfp8": asked,
                "(experts: bf16_dequant)": expanded,
                "(hint at bf16_dequant)": outcome(lambda: str(bf16_experts.hint(layer, config))),
            },
            "plugin, dense layers": {
                f"{layer}={form}": outcome(partial(dense, form, shape))
                for layer, shape in SHAPES.items()
                for form in ("mxfp4", "mxfp8", "nvfp4", "int6")
            }
            | {"mxfp4, float16": outcome(float16)},
        }


def attention() -> dict[str, Table]:
    """What runs attention with sinks, by what of FlashInfer's cubins is at hand."""
    import requests
    import torch
    from vllm.platforms import current_platform
    from vllm.utils import flashinfer
    from vllm.v1.attention.selector import AttentionSelectorConfig

    def ask(kv_cache_dtype: str, sliding: bool) -> str:
        config = AttentionSelectorConfig(
            head_size=64,
            dtype=torch.bfloat16,
            kv_cache_dtype=kv_cache_dtype,
            block_size=None,
            has_sink=True,
            has_sliding_window=sliding,
        )
        path: str = current_platform.get_attn_backend_cls(None, config, 64)
        return path.rpartition(".")[2]

    # None: no answer, as behind a firewall.
    reach: dict[str, tuple[bool, int | None]] = {
        "cubins installed": (True, None),
        "cubins to be had": (False, 200),
        "cubins out of reach": (False, None),
    }
    tables: dict[str, Table] = {}
    for name, (installed, status) in reach.items():

        def get(*args: Any, status: int | None = status, **kwargs: Any) -> Any:
            if status is None:
                raise requests.ConnectionError("out of reach")
            return types.SimpleNamespace(status_code=status)

        os.environ["VLLM_HAS_FLASHINFER_CUBIN"] = str(int(installed))
        flashinfer.requests = types.SimpleNamespace(get=get)
        # FlashInfer is of no use without cubins or a compiler.
        flashinfer.shutil = types.SimpleNamespace(which=lambda program: program)
        _forget(flashinfer)
        with settings():
            tables[name] = {
                f"KV {dtype}, {'sliding' if sliding else 'full'}": outcome(
                    partial(ask, dtype, sliding)
                )
                for dtype in ("auto", "fp8")
                for sliding in (False, True)
            }
    return tables


def ask_all(capability: str, out: Path) -> None:
    """Write a capability's tables; vLLM's platform must be unknown yet in this process."""
    fake_cuda.add_packages()
    fake_cuda.install(fake_cuda.Capability.parse(capability))
    result = {
        "MXFP4 MoE, gpt-oss": mxfp4_moe(),
        "MXFP4 MoE, gpt-oss, moe.activation=mxfp8": mxfp4_moe(activation="mxfp8"),
        "MXFP8 MoE, SiLU": mxfp8_moe(RELEASED),
        "MXFP8 MoE, SiLU, FlashInfer with kernels for SM12x": mxfp8_moe((*RELEASED, 120, 121)),
        **{f"attention with sinks, {name}": table for name, table in attention().items()},
        **plugin(),
    }
    out.write_text(json.dumps(result, indent=1), encoding="utf-8")


def main() -> None:
    folder, *capabilities = sys.argv[1:]
    os.environ |= {"VLLM_HAS_FLASHINFER_CUBIN": "1", "VLLM_NO_USAGE_STATS": "1"}
    fork = multiprocessing.get_context("fork")
    for capability in capabilities:
        out = Path(folder) / f"{capability}.json"
        one = fork.Process(target=ask_all, args=(capability, out))
        one.start()
        one.join()
        if one.exitcode:
            sys.exit(f"capability {capability}: exit code {one.exitcode}")


if __name__ == "__main__":
    main()
