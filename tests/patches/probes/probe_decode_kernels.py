"""Runs inside the interpreter under test: the Python side of the decode kernels, without a GPU.

usage: python -m tests.patches.probes.probe_decode_kernels IN.json OUT.json

IN holds "places", the tables that the CUDA sources print, and "capabilities". OUT has an entry for
each step. Real are vLLM's selection, packing, operators, self-check and expert classes; the device
(fake_cuda.py), Marlin's CUDA operators (marlin_layout.py), the kernels (decode_contract.py) and the
driver are not.
"""

from __future__ import annotations

import hashlib
import importlib.machinery
import json
import logging
import multiprocessing
import os
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.patches.probes import fake_cuda
from tests.patches.probes.probe_selection import HEAVY, outcome

ARCHITECTURES = ("90a", "120a", "121a")
KERNELS = [{"name": name} for name in ("experts_combine", "expand_mxfp4")]


def _shipped(folder: Path) -> Path:
    """Return a folder as the build makes it, with bytes that no device takes for cubins."""
    folder.mkdir()
    cubins = []
    for architecture in ARCHITECTURES:
        data = f"cubin of {architecture}".encode()
        file = f"sm_{architecture}.cubin"
        (folder / file).write_bytes(data)
        cubins.append(
            {
                "architecture": architecture,
                "file": file,
                "sha256": hashlib.sha256(data).hexdigest(),
                "size": len(data),
                "kernels": KERNELS,
            }
        )
    manifest = {"schema": 1, "sources": {}, "compiler": "13.0.88", "flags": [], "cubins": cubins}
    (folder / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
    return folder


@contextmanager
def _logged() -> Iterator[list[str]]:
    """Collect what vLLM's loggers say, what was said before once again."""
    import vllm.logger

    for name in ("_print_warning_once", "_print_info_once"):
        getattr(vllm.logger, name).cache_clear()
    lines: list[str] = []
    handler = logging.Handler(logging.INFO)
    handler.emit = lambda record: lines.append(  # type: ignore[method-assign]
        f"{record.levelname}: {record.getMessage()}"
    )
    logger = logging.getLogger("vllm")
    level = logger.level
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


@contextmanager
def _config(decode_kernels: str, model_type: str = "gpt_oss") -> Iterator[Any]:
    from vllm.config import VllmConfig, set_current_vllm_config

    config = VllmConfig()
    config.model_config = types.SimpleNamespace(
        quantization_config=None,
        is_diffusion=False,
        get_num_layers=lambda _: 36,
        hf_text_config=types.SimpleNamespace(model_type=model_type),
    )
    config.kernel_config.decode_kernels = decode_kernels
    with set_current_vllm_config(config):
        yield config


def _load(method: Any, layer: Any) -> None:
    """Do what a loader does after the weights are there; BF16 is torch's default type then."""
    import torch

    torch.set_default_dtype(torch.bfloat16)
    try:
        method.process_weights_after_loading(layer)
    finally:
        torch.set_default_dtype(torch.float32)


def _start(capability: str, cubins: Path) -> None:
    """Make vLLM believe in a device whose memory is the CPU's."""
    fake_cuda.add_packages()
    fake_cuda.install(fake_cuda.Capability.parse(capability))
    import vllm.platforms

    platform = vllm.platforms._current_platform
    platform.device_type, platform.dispatch_key = "cpu", "CPU"
    for name in ("cuda", "cuda.bindings", "cuda.bindings.driver"):
        module = types.ModuleType(name)
        module.__path__ = []
        module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
        sys.modules[name] = module
    setattr(sys.modules["cuda.bindings"], "driver", _Driver())  # noqa: B010
    from vllm.model_executor.kernels.decode import module as ours

    ours.CUBINS = cubins


# -- what is selected ------------------------------------------------------------------


def _selection(capability: str, folder: Path, out: Path) -> None:
    """Which dense kernels are chosen, by option and by what the build ships."""
    shipped = _shipped(folder / f"shipped {capability}")
    _start(capability, shipped)
    import vllm.model_executor.kernels.linear as kernels
    from vllm.model_executor.kernels.decode import module

    damaged = _shipped(folder / f"damaged {capability}")
    for file in damaged.glob("*.cubin"):
        file.write_bytes(b"another one")
    unreadable = _shipped(folder / f"unreadable {capability}")
    (unreadable / "manifest.json").write_text("{", encoding="utf-8")
    newer = _shipped(folder / f"newer {capability}")
    (newer / "manifest.json").write_text('{"schema": 2, "cubins": []}', encoding="utf-8")
    folders = {
        "shipped": shipped,
        "none": folder / "none",
        "damaged": damaged,
        "unreadable": unreadable,
        "newer": newer,
    }

    def ask(option: str) -> dict[str, Any]:
        def linear() -> str:
            chosen = (
                kernels.init_mxfp4_linear_kernel(None),
                kernels.init_mxfp8_linear_kernel(weight_shape=(5120, 2880), weight_only=True),
            )
            return " ".join(type(kernel).__name__ for kernel in chosen)

        with _config(option) as config, _logged() as lines:
            chosen = outcome(linear)[0]
            refusal = outcome(lambda: str(module.verify_option(config)))[0]
            said = [line.split("Decode kernels ")[1] for line in lines if "Decode k" in line]
            key = config.kernel_config.compute_hash()
        return {"chosen": chosen, "refusal": refusal, "said": said, "key": key}

    result: dict[str, Any] = {}
    for name, path in folders.items():
        module.CUBINS = path
        module.unavailable.cache_clear()
        result[name] = {option: ask(option) for option in ("auto", "on", "off")}
    module.CUBINS = shipped
    module.unavailable.cache_clear()
    os.environ["VLLM_BATCH_INVARIANT"] = "1"
    result["batch invariant"] = {"auto": ask("auto")}
    out.write_text(json.dumps(result), encoding="utf-8")


# -- the driver ------------------------------------------------------------------------


class _Named:
    """An error code of the driver."""

    def __init__(self, number: int, name: str) -> None:
        self.number, self.name = number, name

    def __int__(self) -> int:
        return self.number


class _Driver:
    """Stands in for ``cuda.bindings.driver``; notes what it is called with."""

    CUfunction_attribute = types.SimpleNamespace(
        CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES="dynamic shared",
        CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES="static shared",
    )
    CUlaunchAttributeID = types.SimpleNamespace(
        CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION="dependent"
    )

    CUstream = _Named  # tvm_ffi asks for it

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.error = _Named(0, "CUDA_SUCCESS")

    def CUlaunchAttribute(self) -> Any:
        return types.SimpleNamespace(value=types.SimpleNamespace())

    def CUlaunchConfig(self) -> Any:
        return types.SimpleNamespace()

    def cuModuleLoadData(self, image: bytes) -> tuple[Any, str]:
        self.calls.append(["load", image.decode()])
        return self.error, "module"

    def cuModuleGetFunction(self, module: str, name: bytes) -> tuple[Any, str]:
        return self.error, name.decode()

    def cuFuncLoad(self, function: str) -> tuple[Any]:
        self.calls.append(["load", function])
        return (self.error,)

    def cuFuncGetAttribute(self, attribute: str, function: str) -> tuple[Any, int]:
        assert attribute == "static shared"
        return self.error, 512

    def cuFuncSetAttribute(self, function: str, attribute: str, value: int) -> tuple[Any]:
        self.calls.append([function, attribute, value])
        return (self.error,)

    def cuLaunchKernelEx(self, config: Any, function: str, arguments: int, _: int) -> tuple[Any]:
        import ctypes

        from vllm.model_executor.kernels.decode import module

        (address,) = (ctypes.c_void_p * 1).from_address(arguments)
        operands = module.CombineOperands.from_address(address)
        (attribute,) = config.attrs
        self.calls.append(
            {
                "function": function,
                "grid": [config.gridDimX, config.gridDimY, config.gridDimZ],
                "block": [config.blockDimX, config.blockDimY, config.blockDimZ],
                "shared": config.sharedMemBytes,
                "stream": config.hStream,
                "dependent": [
                    attribute.id,
                    attribute.value.programmaticStreamSerializationAllowed,
                    config.numAttrs,
                ],
                "operands": [operands.experts, operands.ids, operands.sum, operands.k],
            }
        )
        return (self.error,)


def _driver() -> dict[str, Any]:
    """What reaches the driver of two launches and of one that it refuses."""
    import torch
    from vllm.model_executor.kernels.decode import module

    driver = sys.modules["cuda.bindings"].driver
    properties = types.SimpleNamespace(
        shared_memory_per_block_optin=101_376, multi_processor_count=48
    )
    kept = torch.cuda.current_stream, torch.cuda.get_device_properties
    torch.cuda.current_stream = lambda device: types.SimpleNamespace(cuda_stream=77)
    torch.cuda.get_device_properties = lambda device: properties
    operands = module.CombineOperands(experts=16, ids=32, sum=48, k=64)
    device = torch.device("cuda", 0)
    try:
        for _ in range(2):
            module.launch("experts_combine", (3, 2), 256, 1024, operands, device)
        calls = list(driver.calls)
        unknown = outcome(lambda: str(module.launch("no", (1, 1), 1, 0, operands, device)))
        driver.error = _Named(1, "CUDA_ERROR_INVALID_VALUE")
        name = "experts_combine"
        refused = outcome(lambda: str(module.launch(name, (1, 1), 1, 0, operands, device)))
        sizes = [module.max_shared_memory(0), module.multiprocessors(0)]
    finally:
        torch.cuda.current_stream, torch.cuda.get_device_properties = kept
    return {
        "calls": calls,
        "refused": [unknown[0], refused[0]],
        "sizes": sizes,
    }


# -- what is computed ------------------------------------------------------------------


def _structures() -> dict[str, list[int]]:
    """Size and offsets of each structure of operands."""
    import ctypes

    from vllm.model_executor.kernels.decode import module

    found = {}
    for name in ("Dense", "Expand", "Expert", "Combine"):
        kind = getattr(module, f"{name}Operands")
        offsets = [getattr(kind, field).offset for field, _ in kind._fields_]
        found[name] = [ctypes.sizeof(kind), *offsets]
    return found


def _emulate() -> Any:
    """Put the contract in place of the kernels."""
    from vllm.model_executor.kernels.decode import module

    from tests.patches.probes import decode_contract

    launches = decode_contract.Launches()
    module.launch = launches
    module.max_shared_memory = lambda device: decode_contract.SHARED_MEMORY
    module.multiprocessors = lambda device: decode_contract.MULTIPROCESSORS
    return launches


def _weight(kind: str, n: int, k: int) -> tuple[Any, Any]:
    import torch

    scale = torch.randint(117, 123, (n, k // 32), dtype=torch.uint8)
    if kind == "mxfp4":
        return torch.randint(0, 256, (n, k // 2), dtype=torch.uint8), scale
    codes = torch.randint(0, 256, (n, k), dtype=torch.uint8)
    codes[codes & 127 == 127] = 0  # NaN
    return codes.view(torch.float8_e4m3fn), scale


def _values(weight: Any, scale: Any) -> Any:
    """Read a weight by the formats' definitions, float64 [n, k]."""
    import torch

    from tests.patches.probes.decode_contract import E2M1

    if weight.dtype == torch.uint8:
        values = E2M1[torch.stack([weight & 15, weight >> 4], -1).flatten(-2).long()]
    else:
        values = weight.to(torch.float64)
    return values * torch.exp2(scale.to(torch.float64) - 127).repeat_interleave(32, 1)


def _error(ours: Any, wanted: Any) -> float:
    import torch

    return float((ours.to(torch.float64) - wanted).norm() / wanted.norm())


def _packing(places: dict[str, Any]) -> dict[str, Any]:
    """Whether the packing puts every code where dense.cuh's own functions put it."""
    import torch
    from vllm.model_executor.kernels.decode import dense

    same = {}
    for kind, table in places["packed"].items():
        n, k, each = table["n"], table["k"], 2 if kind == "mxfp4" else 1
        codes = torch.tensor(table["codes"], dtype=torch.uint8).view(n, k)
        scale = torch.tensor(table["scales"], dtype=torch.uint8).view(n, k // 32)
        weight = codes[:, ::2] | codes[:, 1::2] << 4 if each == 2 else codes
        if each == 1:
            weight = weight.view(torch.float8_e4m3fn)
        dense._PACKED_ELEMS = 1  # a block at a time
        words, scales = dense.pack(weight, scale)
        same[f"{kind} weights"] = words.flatten().tolist() == table["words"]
        same[f"{kind} scales"] = scales.flatten().tolist() == table["packed_scales"]
        dense._PACKED_ELEMS = 8 << 20
        again = dense.pack(weight, scale)
        same[f"{kind} at once"] = bool((again[0] == words).all() and (again[1] == scales).all())
    return same


def _marlin_order(places: dict[str, Any]) -> dict[str, bool]:
    """Whether experts.cuh and marlin_layout.py agree on Marlin's order."""
    import torch

    from tests.patches.probes import marlin_layout

    rows, columns = marlin_layout._tile()
    place = torch.tensor(places["place"])  # lane, word, nibble, then k and n
    # a lane's 16 bytes are four words of the tile's 128
    place = place.view(128, 8, 2)
    scale = torch.zeros(64)
    scale[torch.tensor(places["scale_at"])] = torch.arange(64.0)
    column = torch.arange(64).reshape(8, 8).T.reshape(-1, 4)[:, [0, 2, 1, 3]].reshape(-1)
    bias = marlin_layout.bias(torch.arange(32.0))
    return {
        "k": bool((place[..., 0].flatten() == rows).all()),
        "n": bool((place[..., 1].flatten() == columns).all()),
        "scales": scale.tolist() == column.tolist(),
        "biases": bias.tolist() == [float(at) for at in places["bias_at"]],
    }


SHAPES = {
    # n, k, numbers of rows
    "narrow": (40, 192, (0, 1, 7, 8, 9, 16, 17, 64, 65)),
    "long": (32, 3136, (1, 9)),
    "wide": (65_552, 64, (1, 9, 17)),
    "expanded in slices": (16_400, 64, (65,)),
}


def _dense(launches: Any) -> dict[str, Any]:
    """Errors of the MX operator against the definition, and the kernels that it launched."""
    import torch
    from vllm.model_executor.kernels.decode import dense, module

    from tests.patches.probes import decode_contract

    result = {}
    for kind in ("mxfp4", "mxfp8"):
        for name, (n, k, counts) in SHAPES.items():
            weight, scale = _weight(kind, n, k)
            packed, values = dense.pack(weight, scale), _values(weight, scale)
            bias = torch.randn(n).to(torch.bfloat16)
            for count in counts:
                launches.names.clear()
                # not contiguous, and not on a boundary of 16 bytes
                x = torch.randn(count, k + 1).to(torch.bfloat16)[:, 1:]
                out = dense.mx_linear(x, *packed, bias, n)
                wanted = x.to(torch.float64) @ values.T + bias.to(torch.float64)
                result[f"{kind} {name} {count}"] = {
                    "error": _error(out, wanted) if count else 0.0,
                    "shape": list(out.shape),
                    "launches": list(launches.names),
                    "fake": _fake(dense.mx_linear, x, *packed, bias, n),
                }
    weight, scale = _weight("mxfp4", 48, 128)
    packed = dense.pack(weight, scale)
    x = torch.randn(2, 3, 128).to(torch.bfloat16)
    out = dense.mx_linear(x, *packed, None, 48)
    wanted = x.to(torch.float64) @ _values(weight, scale).T
    result["without a bias, three dimensions"] = {
        "error": _error(out, wanted),
        "shape": list(out.shape),
        "fake": _fake(dense.mx_linear, x, *packed, None, 48),
    }
    # less shared memory than the rows of lm_head take
    module.max_shared_memory = lambda device: 16 * 96 * 2 - 1
    weight, scale = _weight("mxfp4", 65_552, 64)
    launches.names.clear()
    x = torch.randn(9, 64).to(torch.bfloat16)
    out = dense.mx_linear(x, *dense.pack(weight, scale), None, 65_552)
    result["wide without the shared memory"] = {
        "error": _error(out, x.to(torch.float64) @ _values(weight, scale).T),
        "shape": list(out.shape),
        "launches": list(launches.names),
        "fake": [9, 65_552],
    }
    module.max_shared_memory = lambda device: decode_contract.SHARED_MEMORY
    weight, scale = _weight("mxfp4", 48, 128)
    packed = dense.pack(weight, scale)
    # an offset of half a boundary
    x = torch.randn(129).to(torch.bfloat16)[1:].view(1, 128)
    out = dense.mx_linear(x, *packed, None, 48)
    result["an address that is no multiple of 16"] = {
        "error": _error(out, x.to(torch.float64) @ _values(weight, scale).T),
        "shape": list(out.shape),
        "fake": _fake(dense.mx_linear, x, *packed, None, 48),
    }
    return result


def _fake(function: Callable[..., Any], *arguments: Any) -> list[int]:
    """Return the shape that an operator's fake gives."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode() as mode:
        faked = [mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in arguments]
        return list(function(*faked).shape)


def _linear_layer(n: int, k: int, dtype: Any) -> Any:
    import torch
    from vllm.model_executor.layers.linear import ReplicatedLinear, UnquantizedLinearMethod

    layer = torch.nn.Module()
    layer.weight = torch.nn.Parameter(torch.randn(n, k).to(dtype), requires_grad=False)
    layer.bias = torch.nn.Parameter(torch.randn(n).to(dtype), requires_grad=False)
    assert ReplicatedLinear
    method = UnquantizedLinearMethod()
    return layer, method


def _bf16(launches: Any) -> dict[str, Any]:
    """The unquantized linear method: which calls go through the kernels, and their errors."""
    import torch
    from vllm.model_executor.kernels.decode import selfcheck

    cases = {
        "large": (2048, 2112, torch.bfloat16, "auto", "gpt_oss"),
        "small": (128, 2880, torch.bfloat16, "auto", "gpt_oss"),
        "odd": (2112, 2080, torch.bfloat16, "auto", "gpt_oss"),
        "float16": (2048, 2112, torch.float16, "auto", "gpt_oss"),
        "another model": (2048, 2112, torch.bfloat16, "auto", "llama"),
        "another model, on": (2048, 2112, torch.bfloat16, "on", "llama"),
        "off": (2048, 2112, torch.bfloat16, "off", "gpt_oss"),
    }
    result: dict[str, Any] = {}
    for name, (n, k, dtype, option, model_type) in cases.items():
        selfcheck._passed.clear()
        with _config(option, model_type):
            layer, method = _linear_layer(n, k, dtype)
            _load(method, layer)
            result[name] = {}
            for shape in ((0,), (1,), (2, 4), (9,)):
                launches.names.clear()
                x = torch.randn(*shape, k).to(dtype)
                out = method.apply(layer, x, layer.bias)
                wanted = torch.nn.functional.linear(
                    x.double(), layer.weight.double(), layer.bias.double()
                )
                result[name][str(shape)] = {
                    "launches": list(launches.names),
                    "error": _error(out, wanted) if out.numel() else 0.0,
                    "same shape": out.shape == wanted.shape,
                }
                if layer.uses_decode_kernels:
                    operator = torch.ops.vllm.decode_bf16_linear
                    fake = _fake(operator, x, layer.weight, layer.bias)
                    result[name][str(shape)]["fake"] = fake == list(wanted.shape)
    return result


def _head(launches: Any) -> list[str]:
    """Launches of an unquantized lm_head, after those of its self-check."""
    import torch
    from vllm.model_executor.layers import vocab_parallel_embedding as embedding

    head = embedding.ParallelLMHead.__new__(embedding.ParallelLMHead)
    torch.nn.Module.__init__(head)
    head.weight = torch.nn.Parameter(torch.randn(65_600, 64).to(torch.bfloat16))
    method = embedding.UnquantizedEmbeddingMethod()
    with _config("auto"):
        _load(method, head)
    launches.names.clear()
    method.apply(head, torch.randn(3, 64).to(torch.bfloat16))
    return list(launches.names)


# -- experts ---------------------------------------------------------------------------


def _experts_layer(hidden: int, inner: int, experts: int, **moe: Any) -> tuple[Any, Any, Any]:
    """Return MarlinExperts as the layer makes them, their layer, and the checkpoint."""
    import torch
    import vllm._custom_ops as ops
    from vllm.model_executor.layers.fused_moe.experts import marlin_moe
    from vllm.model_executor.layers.fused_moe.oracle import mxfp4 as oracle

    from tests.patches.probes import marlin_layout
    from tests.patches.probes.probe_marlin_padding import _checkpoint, _moe_config, _swiglu

    ops.gptq_marlin_repack = marlin_layout.repack
    ops.moe_wna16_marlin_gemm = marlin_layout.MoeGemm()
    ops.moe_sum = lambda parts, out, *_: out.copy_(parts.sum(1))
    marlin_moe.moe_align_block_size = marlin_layout.align
    marlin_moe.get_marlin_workspace = lambda device: torch.zeros(4)
    size = {
        "hidden": hidden,
        "intermediate": inner,
        "experts": experts,
        "top_k": 4,
        "tokens": 9,
        "ranks": 1,
        "seed": 5,
    }
    data = _checkpoint(size)
    config = _moe_config(size)
    for name, value in moe.items():
        setattr(config, name, value)
    layer = torch.nn.Module()
    layer.params_dtype = torch.bfloat16
    converted = oracle.convert_gpt_oss_weight_to_mxfp4_moe_kernel_format(
        oracle.Mxfp4MoeBackend.MARLIN,
        layer,
        *(data[f"{name}_weight"] for name in ("w13", "w2")),
        *(data[f"{name}_weight_scale"] for name in ("w13", "w2")),
        w13_bias=data["w13_bias"],
        w2_bias=data["w2_bias"],
    )
    names = ("w13_weight", "w2_weight", "w13_scale", "w2_scale", "w13_bias", "w2_bias")
    for name, tensor in zip(names, converted, strict=True):
        setattr(layer, name, torch.nn.Parameter(tensor, requires_grad=False))
    quant = oracle.make_mxfp4_moe_quant_config(
        mxfp4_backend=oracle.Mxfp4MoeBackend.MARLIN,
        w1_scale=layer.w13_scale,
        w2_scale=layer.w2_scale,
        w1_bias=layer.w13_bias,
        w2_bias=layer.w2_bias,
        swiglu_limit=7.0,
    )
    marlin = marlin_moe.MarlinExperts(config, quant)
    marlin.activation = lambda _, output, both, **__: output.copy_(_swiglu(both))
    return marlin, layer, data


def _apply(marlin: Any, layer: Any, data: dict[str, Any], rows: int, **others: Any) -> Any:
    import torch
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation

    out = torch.full((rows, data["x"].shape[1]), torch.nan, dtype=torch.bfloat16)
    arguments = {
        "topk_weights": data["topk_weights"][:rows],
        "topk_ids": data["topk_ids"][:rows],
        "expert_map": None,
    } | others
    marlin.apply(
        output=out,
        hidden_states=data["x"][:rows],
        w1=layer.w13_weight,
        w2=layer.w2_weight,
        activation=MoEActivation.SWIGLUOAI,
        global_num_experts=data["w13_weight"].shape[0],
        a1q_scale=None,
        a2_scale=None,
        workspace13=torch.empty(0),
        workspace2=torch.empty(0),
        expert_tokens_meta=None,
        apply_router_weight_on_input=False,
        **arguments,
    )
    return out


def _experts(launches: Any) -> dict[str, Any]:
    """MarlinExperts with few rows and with more, against the checkpoint in float64."""
    import torch
    from vllm.model_executor.kernels.decode import selfcheck
    from vllm.model_executor.layers.fused_moe.experts import marlin_moe

    from tests.patches.probes.probe_marlin_padding import _reference

    marlin_moe._fused_marlin_moe = _without_workspaces(marlin_moe._fused_marlin_moe)
    result: dict[str, Any] = {}
    with _config("auto"):
        marlin, layer, data = _experts_layer(192, 128, 6)
        _load(marlin, layer)
        wanted = _reference(data)
        for rows in (0, 1, 2, 3, 4, 5, 8, 9):
            launches.names.clear()
            out = _apply(marlin, layer, data, rows)
            error = _error(out, wanted[:rows]) if rows else 0.0
            result[str(rows)] = {"error": error, "launches": list(launches.names)}
        ids = data["topk_ids"][:3].clone()
        ids[1] = -1
        out = _apply(marlin, layer, data, 3, topk_ids=ids.to(torch.int64))
        result["padding"] = {
            "zeros": not out[1].any(),
            "error": _error(out[::2], wanted[:3:2]),
        }
        launches.names.clear()
        marlin._lora_context = None
        marlin.uses_decode_kernels = False
        _apply(marlin, layer, data, 1)
        result["switched off"] = list(launches.names)

    refused = {
        "LoRA": {"is_lora_enabled": True},
        "float16": {"in_dtype": torch.float16},
        "three experts a row": {"experts_per_token": 3},
        "no bias": {"has_bias": False},
    }
    for name, moe in refused.items():
        selfcheck._passed.clear()
        with _config("auto"), _logged() as lines:
            marlin, layer, data = _experts_layer(192, 128, 6, **moe)
            _load(marlin, layer)
            result[name] = [marlin.uses_decode_kernels, *lines]
    with _config("auto"), _logged() as lines:
        marlin, layer, data = _experts_layer(192, 128, 6)
        marlin.w2_scale.view(torch.uint8)[3, 1, 5] = 191
        _load(marlin, layer)
        result["a scale of 191"] = [marlin.uses_decode_kernels, *lines]
    with _config("off"), _logged() as lines:
        _load(marlin, layer)
        result["off"] = [marlin.uses_decode_kernels, *lines]
    return result


def _without_workspaces(function: Callable[..., Any]) -> Callable[..., Any]:
    """Let ``fused_marlin_moe`` make its own, as it does where it is given none."""

    def call(**options: Any) -> Any:
        return function(**options | {"intermediate_cache13": None, "intermediate_cache2": None})

    return call


# -- the self-check --------------------------------------------------------------------


def _self_check(launches: Any) -> dict[str, Any]:
    """What becomes of layers whose kernels are wrong."""
    import torch
    from vllm.model_executor.kernels.decode import selfcheck
    from vllm.model_executor.kernels.linear.mxfp4 import MxFp4LinearLayerConfig
    from vllm.model_executor.kernels.linear.mxfp4.decode import DecodeMxFp4LinearKernel
    from vllm.model_executor.kernels.linear.mxfp8 import Mxfp8LinearLayerConfig
    from vllm.model_executor.kernels.linear.mxfp8.decode import DecodeMxFp8LinearKernel

    def fail(result: Any) -> Any:
        raise RuntimeError("CUDA driver: CUDA_ERROR_ILLEGAL_ADDRESS")

    spoils: dict[str, Callable[[Any], Any]] = {
        "right": lambda result: result,
        "3 % too large": lambda result: result * 1.03,
        "1 % too large": lambda result: result * 1.01,
        "NaN": lambda result: result * torch.nan,
        "an error": fail,
    }

    def dense(kernel: Any, kind: str, n: int, k: int, *, zero: bool = False) -> dict[str, Any]:
        layer = torch.nn.Module()
        weight, scale = _weight(kind, n, k)
        if zero:
            weight = torch.zeros_like(weight.view(torch.uint8)).view(weight.dtype)
        layer.weight = torch.nn.Parameter(weight, requires_grad=False)
        layer.weight_scale = torch.nn.Parameter(scale, requires_grad=False)
        layer.params_dtype, layer.output_size_per_partition = torch.bfloat16, n
        found: dict[str, Any] = {}

        class Fallback:
            def __init__(self, config: Any) -> None:
                pass

            def process_weights_after_loading(self, layer: Any) -> None:
                # what it gets are weights that nobody has packed
                found["fallback"] = bool((layer.weight.data == weight).all())

        kernel.fallback_cls = Fallback
        with _logged() as lines:
            try:
                _load(kernel, layer)
            except RuntimeError as error:
                found["raised"] = str(error)
        found["packed"] = layer.weight.dtype == torch.int32
        found["said"] = lines
        return found

    def kernels() -> dict[str, Any]:
        four, eight = MxFp4LinearLayerConfig(), Mxfp8LinearLayerConfig((48, 128))
        made = {}
        for kind, cls, config in (
            ("mxfp4", DecodeMxFp4LinearKernel, four),
            ("mxfp8", DecodeMxFp8LinearKernel, eight),
        ):
            made[kind] = cls.__new__(cls)
            made[kind].config = config
        return made

    result: dict[str, Any] = {}

    def forget() -> None:
        selfcheck._passed.clear()
        selfcheck._switched_off.clear()

    for name, spoil in spoils.items():
        for option in ("auto", "on"):
            launches.spoil = spoil
            forget()
            with _config(option):
                for kind, kernel in kernels().items():
                    result[f"{name}, {kind}, {option}"] = dense(kernel, kind, 48, 128)
                if option == "auto":
                    other = dense(kernels()["mxfp4"], "mxfp4", 64, 128)
                    result[f"{name}, another shape"] = other
                # a checkpoint of zeros is compared, too
                forget()
                zero = dense(kernels()["mxfp4"], "mxfp4", 48, 128, zero=True)
                result[f"{name}, zero weights, {option}"] = zero
        forget()
        with _config("auto"), _logged() as lines:
            layer, method = _linear_layer(2048, 2112, torch.bfloat16)
            _load(method, layer)
            launches.names.clear()
            x = torch.randn(2, 2112).to(torch.bfloat16)
            method.apply(layer, x)
            result[f"{name}, BF16"] = {"launches": list(launches.names), "said": lines}
        for weights in ("real", "zero"):
            forget()
            with _config("auto"), _logged() as lines:
                marlin, layer, _ = _experts_layer(192, 128, 6)
                if weights == "zero":
                    for tensor in (layer.w13_weight, layer.w2_weight):
                        tensor.zero_()
                _load(marlin, layer)
                result[f"{name}, {weights} experts"] = {
                    "used": marlin.uses_decode_kernels,
                    "said": lines,
                }
    launches.spoil = lambda result: result
    forget()
    with _config("auto"):
        kernel = kernels()["mxfp4"]
        for name, k, dtype, largest in (
            ("k = 96", 96, torch.bfloat16, 120),
            ("float16", 128, torch.float16, 120),
            ("a scale of 191", 128, torch.bfloat16, 191),
        ):
            layer = torch.nn.Module()
            weight, scale = _weight("mxfp4", 48, k)
            scale[7, 1] = largest
            layer.weight, layer.weight_scale, layer.params_dtype = weight, scale, dtype
            with _logged() as lines:
                found = kernel._packed(layer)
            result[name] = {"packed": found is not None, "said": lines}
    return result


def _compute(asked: dict[str, Any], folder: Path, out: Path) -> None:
    _start("9.0", _shipped(folder / "computed"))
    import torch

    torch.manual_seed(3)
    result: dict[str, Any] = {
        "structures": _structures(),
        "driver": _driver(),
        "packing": _packing(asked["places"]),
        "marlin": _marlin_order(asked["places"]),
    }
    launches = _emulate()
    steps: tuple[Callable[[Any], Any], ...] = (_dense, _bf16, _head, _experts, _self_check)
    for step in steps:
        result[step.__name__.strip("_")] = step(launches)
    out.write_text(json.dumps(result), encoding="utf-8")


def main() -> None:
    """Read the questions, write the answers; a process for each device."""
    asked = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    out = Path(sys.argv[2])
    folder = out.parent / "devices"
    folder.mkdir()
    os.environ |= {"VLLM_NO_USAGE_STATS": "1"}
    for name in HEAVY:
        importlib.import_module(name)
    fork = multiprocessing.get_context("fork")
    jobs: dict[str, tuple[Callable[..., None], tuple[Any, ...]]] = {
        capability: (_selection, (capability, folder)) for capability in asked["capabilities"]
    }
    jobs["computed"] = (_compute, (asked, folder))
    answers = {}
    for name, (function, arguments) in jobs.items():
        path = folder / f"{name}.json"
        one = fork.Process(target=function, args=(*arguments, path))
        one.start()
        one.join()
        if one.exitcode:
            sys.exit(f"{name}: exit code {one.exitcode}")
        answers[name] = json.loads(path.read_text(encoding="utf-8"))
    out.write_text(json.dumps(answers), encoding="utf-8")


if __name__ == "__main__":
    main()
