"""A device for the probes of the decode kernels, and what a build ships for it.

vLLM believes in a GPU whose memory is the CPU's.
"""

import hashlib
import importlib.machinery
import json
import logging
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.patches.probes import fake_cuda

ARCHITECTURES = ("90a", "120a", "121a")
BLOCKS = {"mxfp4": 32, "mxfp8": 32, "int8": 64, "int6": 32, "nvfp4": 16}
"""Elements under one scale."""
KERNELS = [{"name": name} for name in ("experts_combine", "expand_mxfp4")]


def ship(folder: Path) -> Path:
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
def logged() -> Iterator[list[str]]:
    """Collect the lines of vLLM's loggers; what they log once, they log again."""
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
def configured(decode_kernels: str, **options: Any) -> Iterator[Any]:
    """Make a configuration the current one, with our options; ``VLLM_SPARKFORGE`` has others."""
    import torch
    from vllm.config import VllmConfig, set_current_vllm_config

    given = {"decode_kernels": decode_kernels, **options}
    config = VllmConfig(additional_config={"sparkforge": given})
    config.model_config = types.SimpleNamespace(
        compute_hash=lambda: "",
        dtype=torch.bfloat16,
        get_num_layers=lambda _: 36,
        is_diffusion=False,
        model="model",
        multimodal_config=None,
        quantization="gpt_oss_mxfp4",
        quantization_config=None,
        served_model_name="model",
    )
    with set_current_vllm_config(config):
        yield config


def load(method: Any, layer: Any) -> None:
    """Do what a loader does after the weights are there; BF16 is torch's default type then."""
    import torch

    torch.set_default_dtype(torch.bfloat16)
    try:
        method.process_weights_after_loading(layer)
    finally:
        torch.set_default_dtype(torch.float32)


def start(capability: str, cubins: Path, rank: int = 0, ranks: int = 1) -> None:
    """Make vLLM believe in a device whose memory is the CPU's, and load its plugins.

    Args:
        cubins: what is shipped; ranks meet in a file beside it.
        rank: of ``ranks`` of tensor parallelism, which gloo connects.
    """
    fake_cuda.add_packages()
    fake_cuda.install(fake_cuda.Capability.parse(capability))
    import vllm.platforms

    platform = vllm.platforms._current_platform
    platform.device_type, platform.dispatch_key = "cpu", "CPU"
    gloo = vllm.platforms.interface.Platform.get_device_communicator_cls
    type(platform).get_device_communicator_cls = gloo
    for name in ("cuda", "cuda.bindings", "cuda.bindings.driver"):
        module = types.ModuleType(name)
        module.__path__ = []
        module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
        sys.modules[name] = module
    setattr(sys.modules["cuda.bindings"], "driver", Driver())  # noqa: B010
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    import torch
    from vllm.distributed import parallel_state
    from vllm_sparkforge.decode import module as ours

    # registered for CUDA, before the platform had another key
    torch.library.impl("vllm::all_reduce", "CPU")(parallel_state.all_reduce)

    ours.CUBINS = cubins
    with configured("off") as config:
        config.model_config.is_moe = True
        meeting = f"file://{cubins} meeting {ranks}"
        parallel_state.init_distributed_environment(ranks, rank, meeting, 0, "gloo")
        parallel_state.initialize_model_parallel(ranks, backend="gloo")


def forget() -> None:
    """Forget what self-checks found."""
    from vllm_sparkforge.decode import selfcheck

    selfcheck._passed.clear()
    selfcheck._switched_off.clear()


def right(result: Any) -> Any:
    return result


def fail(_: Any) -> Any:
    raise RuntimeError("CUDA driver: CUDA_ERROR_ILLEGAL_ADDRESS")


SPOILS: dict[str, Callable[[Any], Any]] = {
    "right": right,
    "3 % too large": lambda result: result * 1.03,
    "1 % too large": lambda result: result * 1.01,
    "NaN": lambda result: result * float("nan"),
    "an error": fail,
}
"""What is done to a kernel's result."""


class Named:
    """An error code of the driver."""

    def __init__(self, number: int, name: str) -> None:
        self.number, self.name = number, name

    def __int__(self) -> int:
        return self.number


class Driver:
    """Stands in for ``cuda.bindings.driver``; notes what it is called with."""

    CUfunction_attribute = types.SimpleNamespace(
        CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES="dynamic shared",
        CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES="static shared",
    )
    CUlaunchAttributeID = types.SimpleNamespace(
        CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION="dependent",
    )

    CUstream = Named  # tvm_ffi asks for it

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.error = Named(0, "CUDA_SUCCESS")

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

        from vllm_sparkforge.decode import module

        (address,) = (ctypes.c_void_p * 1).from_address(arguments)
        operands = module.CombineOperands.from_address(address)
        assert config.numAttrs == len(config.attrs)
        (dependent,) = config.attrs
        self.calls.append(
            {
                "function": function,
                "grid": [config.gridDimX, config.gridDimY, config.gridDimZ],
                "block": [config.blockDimX, config.blockDimY, config.blockDimZ],
                "shared": config.sharedMemBytes,
                "stream": config.hStream,
                "dependent": [
                    dependent.id,
                    dependent.value.programmaticStreamSerializationAllowed,
                ],
                "operands": [operands.experts, operands.ids, operands.sum, operands.k],
            }
        )
        return (self.error,)


def emulate() -> Any:
    """Put the contract in place of the kernels."""
    from vllm_sparkforge.decode import module

    from tests.patches.probes import decode_contract

    launches = decode_contract.Launches()
    module.launch = launches
    module.max_shared_memory = lambda device: decode_contract.SHARED_MEMORY
    module.multiprocessors = lambda device: decode_contract.MULTIPROCESSORS
    return launches


def random_weight(kind: str, n: int, k: int) -> tuple[Any, ...]:
    """Return a weight's tensors as the format's quantiser gives them."""
    import torch

    if kind == "lossless":
        weight = torch.randn(n, k).to(torch.bfloat16)
        weight[torch.rand(n, k) < 0.002] *= 2.0**-30  # in the list
        return (weight,)
    if kind.startswith("int"):
        most = 2 ** (int(kind[-1]) - 1)
        values = torch.randint(1 - most, most, (n, k), dtype=torch.int8)
        return values, torch.rand(n, k // BLOCKS[kind]).add_(0.1).to(torch.bfloat16)
    scale = torch.randint(117, 123, (n, k // BLOCKS[kind]), dtype=torch.uint8)
    if kind == "mxfp8":
        codes = torch.randint(0, 256, (n, k), dtype=torch.uint8)
        codes[codes & 127 == 127] = 0  # NaN
        return codes.view(torch.float8_e4m3fn), scale
    codes = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8)
    if kind == "mxfp4":
        return codes, scale
    return codes, (scale - 80).view(torch.float8_e4m3fn), torch.tensor(0.037)


def elements_of(kind: str, weight: Any) -> Any:
    """Read the elements of a weight, float64 [n, k]."""
    import torch

    from tests.patches.probes import marlin_layout

    if kind.endswith("fp4"):
        return marlin_layout.E2M1[torch.stack([weight & 15, weight >> 4], -1).flatten(-2).long()]
    return weight.to(torch.float64)


def values_of(kind: str, weight: Any, scale: Any = None, *factor: Any) -> Any:
    """Read a weight by the format's definition, float64 [n, k]."""
    import torch

    if kind == "lossless":
        return weight.to(torch.float64)
    scale = scale.to(torch.float64)
    factors = torch.exp2(scale - 127) if kind.startswith("mx") else scale
    values = elements_of(kind, weight) * factors.repeat_interleave(BLOCKS[kind], 1)
    return values * factor[0].to(torch.float64) if factor else values


def error_of(ours: Any, wanted: Any) -> float:
    import torch

    return float((ours.to(torch.float64) - wanted).norm() / wanted.norm())


def fake_shape(function: Callable[..., Any], *arguments: Any) -> list[int]:
    """Return the shape that an operator's fake gives."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.utils import _pytree

    with FakeTensorMode() as mode:
        faked = _pytree.tree_map_only(torch.Tensor, mode.from_tensor, arguments)
        return list(function(*faked).shape)


def linear_layer(n: int, k: int, dtype: Any, quantization: str | None = "gpt_oss_mxfp4") -> Any:
    """Return an attention's qkv projection with random weights, as a model makes it."""
    import torch
    from vllm.model_executor.layers.linear import ReplicatedLinear
    from vllm.model_executor.layers.quantization import get_quantization_config

    config = get_quantization_config(quantization)() if quantization else None
    name = "model.layers.0.attn.qkv_proj"
    layer = ReplicatedLinear(
        k, n, params_dtype=dtype, quant_config=config, prefix=name, disable_tp=True
    )
    for parameter in (layer.weight, layer.bias):
        parameter.requires_grad_(requires_grad=False).copy_(torch.randn(parameter.shape))
    return layer


def mx_layer(form: str, layer: int = 0, power: int = 0) -> Any:
    """Return such a projection, quantized, with random weights, loaded as a model's are.

    Args:
        form: as the current configuration names it.
        layer: its number.
        power: of two, by which its weights are larger.
    """
    import torch
    from vllm.model_executor.layers.linear import ReplicatedLinear
    from vllm.model_executor.layers.quantization import get_quantization_config
    from vllm.model_executor.model_loader.reload.layerwise import initialize_online_processing

    config = get_quantization_config("gpt_oss_mxfp4")()
    name, dtype = f"model.layers.{layer}.attn.qkv_proj", torch.bfloat16
    made = ReplicatedLinear(
        128, 48, params_dtype=dtype, quant_config=config, prefix=name, disable_tp=True
    )
    assert made.quant_method.form.name == form
    initialize_online_processing(made)  # as the model does once there is a bias
    torch.set_default_dtype(dtype)
    try:
        for parameter in (made.weight, made.bias):
            values = torch.randn(parameter.shape) * 2.0**power
            parameter.weight_loader(parameter, values.to(dtype))
    finally:
        torch.set_default_dtype(torch.float32)
    return made
