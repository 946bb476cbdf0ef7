"""Runs inside the interpreter under test and writes what it saw as JSON (and arrays as .npy).

usage: probe_mxfp4_layers.py STEP[,STEP...] REQUEST.json OUT_FOLDER

Works like probe_logits.py, whose engine it borrows.
"""

from __future__ import annotations

import gc
import itertools
import types
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import probe_logits as base  # type: ignore[import-not-found]  # beside this file when it runs

QUANTIZED = ("attn.qkv_proj", "attn.o_proj", "lm_head")


attempt: Callable[[Callable[[], Any]], dict[str, Any]] = base.attempt


def layer_tensors(model: Any) -> dict[str, dict[str, Any]]:
    """Parameters and buffers of the layers that can be quantised, biases left out."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {
        name: {
            "dtype": str(tensor.dtype),
            "bytes": tensor.untyped_storage().nbytes(),
            "shape": list(tensor.shape),
        }
        for name, tensor in tensors.items()
        if name.rpartition(".")[0].endswith(QUANTIZED) and not name.endswith(".bias")
    }


def stray_copies(model: Any) -> list[list[int]]:
    """Shapes of BF16 tensors in the process that are as large as a weight and no parameter."""
    import torch

    gc.collect()
    known = {p.untyped_storage().data_ptr() for p in model.parameters()}
    strays = []
    for thing in gc.get_objects():
        if isinstance(thing, torch.Tensor) and thing.dtype == torch.bfloat16:
            weight = thing.dim() == 2 and thing.shape[1] == 128 and thing.shape[0] >= 64
            if weight and not thing.is_meta and thing.untyped_storage().data_ptr() not in known:
                strays.append(list(thing.shape))
    return strays


def logits(request: dict[str, Any], out: Path) -> Any:
    """One engine for each way to quantise; NAME.npy gets its logits."""
    results = {}
    for name, options in request["engines"].items():
        with watch_loading() as watched:
            engine = base.make_engine(request["checkpoint"], **options)
        (tensors,) = engine.apply_model(layer_tensors)
        (strays,) = engine.apply_model(stray_copies)
        base.save_logits(engine, request["prompt"], out / f"{name}.npy")
        results[name] = {"tensors": tensors, "strays": strays, **watched}
        del engine
        base.drop_engine()
    return results


@contextmanager
def watch_loading() -> Iterator[dict[str, Any]]:
    """For each quantised layer, and once more at the end: whether the BF16 weights of those before
    it were gone; and for each whether its turn came before the checkpoint was read to its end."""
    from torch.multiprocessing.reductions import StorageWeakRef
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
    from vllm_sparkforge.mx.linear import MxLinearMethod as method

    watched: dict[str, Any] = {"freed": [], "early": []}
    reading: list[bool] = []
    process, load = method.process_weights_after_loading, DefaultModelLoader.load_weights
    storages: list[Any] = []

    def watched_process(self: Any, layer: Any) -> None:
        if layer.weight.element_size() == 2:
            watched["freed"].append(all(storage.expired() for storage in storages))
            watched["early"].append(bool(reading))
            storages.append(StorageWeakRef(layer.weight.untyped_storage()))
        process(self, layer)

    def watched_load(self: Any, *args: Any, **kwargs: Any) -> Any:
        reading.append(True)
        load(self, *args, **kwargs)
        reading.clear()

    with (
        mock.patch.object(method, "process_weights_after_loading", watched_process),
        mock.patch.object(DefaultModelLoader, "load_weights", watched_load),
    ):
        yield watched
        watched["freed"].append(all(storage.expired() for storage in storages))


def plain(request: dict[str, Any], out: Path) -> Any:
    """The BF16 checkpoint of the same model, as it is."""
    engine = base.small_engine(request["bf16_checkpoint"])
    base.save_logits(engine, request["prompt"], out / "plain.npy")
    del engine
    base.drop_engine()
    return {}


def two_ranks(request: dict[str, Any], out: Path) -> Any:
    """The real thing on two ranks, whose second vocabulary shard is padded.

    The ranks are forked. On CPUs vLLM starts Python for each, so that it preloads a library for
    binding threads to cores, which is off here.
    """
    import multiprocessing

    from vllm.v1.executor import multiproc_executor

    multiproc_executor.get_mp_context = lambda: multiprocessing.get_context("fork")
    engine = base.make_engine(
        request["checkpoint"], tensor_parallel_size=2, **request["engines"]["all"]
    )
    base.save_logits(engine, request["prompt"], out / "two_ranks.npy")
    del engine
    base.drop_engine()
    return {}


def dummy(request: dict[str, Any], out: Path) -> Any:
    """Weights made up by the engine itself, which a benchmark without a checkpoint serves."""
    import numpy as np

    options = request["engines"]["mixed"]
    engine = base.make_engine(request["checkpoint"], load_format="dummy", **options)
    (tensors,) = engine.apply_model(layer_tensors)
    (strays,) = engine.apply_model(stray_copies)
    rows, _ = base.raw_logits(engine, request["prompt"], 1)
    del engine
    base.drop_engine()
    return {"tensors": tensors, "strays": strays, "finite": bool(np.isfinite(rows).all())}


def quantizers(request: dict[str, Any], out: Path) -> Any:
    """Codes and scales that the torch quantisers give for the request's weights, and the memory
    that they take for them."""
    import numpy as np
    import torch
    from vllm_sparkforge.mx import formats

    # The second round cuts the weights into many slices, the last one shorter.
    for suffix, slice_elems, threads in (("", 1 << 24, 1), ("-otherwise", 1000, 3)):
        formats._SLICE_ELEMS = slice_elems
        torch.set_num_threads(threads)
        for name, path in request["weights"].items():
            dtype = torch.bfloat16 if name == "bfloat16" else torch.float32
            weight = torch.from_numpy(np.load(path)).to(dtype)
            packed, scales = formats.mxfp4_quantize(weight)
            np.save(out / f"{name}-mxfp4{suffix}.npy", packed.numpy())
            np.save(out / f"{name}-mxfp4-scales{suffix}.npy", scales.numpy())
            values, scales = formats.mxfp8_quantize(weight)
            np.save(out / f"{name}-mxfp8{suffix}.npy", values.view(torch.uint8).numpy())
            np.save(out / f"{name}-mxfp8-scales{suffix}.npy", scales.numpy())

    formats._SLICE_ELEMS = slice_elems = 1 << 16
    results: dict[str, Any] = {}
    for fmt, quantize in (("mxfp4", formats.mxfp4_quantize), ("mxfp8", formats.mxfp8_quantize)):
        results[fmt] = {}
        for slices in (3, 12):
            weight = torch.randn(slices * slice_elems // 256, 256, dtype=torch.bfloat16)
            taken = peak_bytes(partial(quantize, weight))
            results[fmt][f"{slices} slices"] = taken / slice_elems
    return results


def peak_bytes(action: Callable[[], Any]) -> int:
    """Bytes of tensors that were made and alive at once, less those of the result."""
    import torch
    from torch.multiprocessing.reductions import StorageWeakRef
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    storages: dict[int, tuple[Any, int]] = {}
    peak = 0

    def alive() -> int:
        return sum(size for storage, size in storages.values() if not storage.expired())

    class Watch(TorchDispatchMode):  # type: ignore[misc]  # no torch for mypy
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            nonlocal peak
            given = {leaf.untyped_storage()._cdata for leaf in tensors_in((args, kwargs))}
            result = func(*args, **(kwargs or {}))
            for tensor in tensors_in(result):
                storage = tensor.untyped_storage()
                if storage._cdata not in given:
                    storages[len(storages)] = StorageWeakRef(storage), storage.nbytes()
            peak = max(peak, alive())
            return result

    def tensors_in(tree: Any) -> list[Any]:
        return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]

    with Watch():
        kept = action()
    assert kept
    return peak - alive()


def linear(request: dict[str, Any], out: Path) -> Any:
    """The CPU kernels: their expansion of every code under every scale, and a product that is cut
    into slices."""
    import numpy as np
    import torch
    from vllm_sparkforge.mx import cpu, formats

    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    scales = codes[:, None].expand(256, 8).contiguous()
    elements = codes.expand(256, 256).contiguous().view(torch.float8_e4m3fn)
    values = formats.mxfp8_dequantize(elements, scales)
    np.save(out / "mxfp8-values.npy", values.to(torch.float32).numpy())

    torch.manual_seed(0)
    x = torch.randn(2, 3, 64, dtype=torch.bfloat16)
    bias = torch.randn(100, dtype=torch.bfloat16)
    results: dict[str, Any] = {}
    for name, quantize, expand in (
        ("mxfp4", formats.mxfp4_quantize, formats.mxfp4_dequantize),
        ("mxfp8", formats.mxfp8_quantize, formats.mxfp8_dequantize),
    ):
        weight, scale = quantize(torch.randn(100, 64))
        expected = x.double() @ expand(weight, scale).double().T + bias.double()
        errors = []
        for slice_elems in (cpu._SLICE_ELEMS, 700):
            with mock.patch.object(cpu, "_SLICE_ELEMS", slice_elems):
                actual = cpu.mx_linear(x, weight, scale, bias)
            assert actual.shape == (2, 3, 100), actual.shape
            assert actual.dtype == torch.bfloat16, actual.dtype
            errors.append(float((actual - expected).norm() / expected.norm()))
        results[name] = errors
    return results


def engine_args(checkpoint: str, layers: str, **options: Any) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    ours = base.plugin(mxfp4_layers=layers)
    return EngineArgs(checkpoint, enforce_eager=True, **ours, **options)


@contextmanager
def engine_config(checkpoint: str, layers: str = "", **options: Any) -> Iterator[Any]:
    """A VllmConfig as the engine makes it, current, outside of any process group: `as_rank` says
    which rank a layer is built for."""
    import torch
    import vllm.model_executor.layers.vocab_parallel_embedding as embedding
    from vllm.config import set_current_vllm_config
    from vllm.model_executor import parameter

    config = engine_args(checkpoint, layers, **options).create_engine_config()
    names = ("get_tensor_model_parallel_rank", "get_tensor_model_parallel_world_size")
    with ExitStack() as stack:
        for module, name in itertools.product((embedding, parameter), names):
            stack.enter_context(mock.patch.object(module, name))
        stack.callback(torch.set_default_dtype, torch.get_default_dtype())
        torch.set_default_dtype(torch.bfloat16)
        as_rank(0, 1)
        with set_current_vllm_config(config):
            yield config


def as_rank(rank: int, ranks: int) -> None:
    import vllm.model_executor.layers.vocab_parallel_embedding as embedding
    from vllm.model_executor import parameter

    for module in (embedding, parameter):
        module.get_tensor_model_parallel_rank = lambda: rank
        module.get_tensor_model_parallel_world_size = lambda: ranks


def make_head(config: Any, vocab: int = 264) -> Any:
    """The head that gpt-oss gets, outside of the model."""
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
    from vllm_sparkforge import options
    from vllm_sparkforge.model import SparkGptOssForCausalLM

    head = ParallelLMHead(vocab, 128, prefix="lm_head")
    model = types.SimpleNamespace(lm_head=head)
    SparkGptOssForCausalLM._set_head(model, config, options.of(config).mxfp4_layers["lm_head"])
    return head


def head_form(config: Any) -> str:
    form: str = make_head(config).quant_method.form
    return form


def refusals(request: dict[str, Any], out: Path) -> Any:
    """Heads that something else relies on, and two that look similar and are fine."""
    import torch
    from vllm.model_executor.models.gpt_oss import GptOssForCausalLM

    checkpoint = request["checkpoint"]

    def changed(**changes: Any) -> dict[str, Any]:
        with engine_config(checkpoint, "lm_head") as config:
            for name, value in changes.items():
                # Past the checks of the configuration: these are stand-ins.
                object.__setattr__(config, name, value)
            return attempt(lambda: head_form(config))

    def lora(modules: list[str] | None) -> Any:
        return types.SimpleNamespace(target_modules=modules)

    def drafter(method: str, path: str) -> Any:
        return types.SimpleNamespace(
            method=method,
            use_eagle=lambda: method != "ngram",
            draft_model_config=types.SimpleNamespace(model=path, revision=None),
        )

    drafts = request["drafts"]
    results = {
        "tied": base.failure(request["tied"], mxfp4_layers="lm_head"),
        "not finite": base.failure(request["not_finite"], mxfp4_layers="qkv"),
        "lora names it": changed(lora_config=lora(["o_proj", "lm_head"])),
        "lora elsewhere": changed(lora_config=lora(["o_proj"])),
        "lora anywhere": changed(lora_config=lora(None)),
        "eagle without": changed(speculative_config=drafter("eagle3", drafts["without"])),
        "eagle with": changed(speculative_config=drafter("eagle3", drafts["with"])),
        "mtp": changed(speculative_config=drafter("mtp", drafts["with"])),
        "ngram": changed(speculative_config=drafter("ngram", drafts["without"])),
    }
    overrides = {"head_dtype": "float32"}
    with engine_config(checkpoint, "lm_head", hf_overrides=overrides) as config:
        assert config.model_config.head_dtype == torch.float32
        results["float32"] = attempt(lambda: head_form(config))
    with engine_config(checkpoint, "lm_head") as config:
        lm_head = make_head(config)
        results["tied by the model"] = attempt(lambda: lm_head.tie_weights(lm_head))
    assert "embedding_modules" not in vars(GptOssForCausalLM)
    modules = {"lm_head": "output_embeddings"}
    with mock.patch.object(GptOssForCausalLM, "embedding_modules", modules, create=True):
        results["lora anywhere, head too"] = changed(lora_config=lora(None))
    return results


def options(request: dict[str, Any], out: Path) -> Any:
    """What the option is taken for, and what is wrong with it."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser
    from vllm_sparkforge import options as ours

    checkpoint = request["checkpoint"]

    def layers_of(config: Any) -> dict[str, str]:
        return dict(ours.of(config).mxfp4_layers)

    def taken(layers: str, **options: Any) -> dict[str, Any]:
        # an empty one, too
        config = {"sparkforge": {"mxfp4_layers": layers}}
        made = EngineArgs(checkpoint, additional_config=config, **options)
        return attempt(lambda: layers_of(made.create_engine_config()))

    def verified(quantization: str | None) -> dict[str, Any]:
        config = types.SimpleNamespace(
            **base.plugin(mxfp4_layers="qkv"),
            model_config=types.SimpleNamespace(
                model="some-model", quantization=quantization, quantization_config=None
            ),
        )
        return attempt(lambda: ours.verify(config, None))

    def from_command_line(words: list[str]) -> Any:
        parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
        parsed = parser.parse_args(["--model", checkpoint, *words])
        return layers_of(EngineArgs.from_cli_args(parsed).create_engine_config())

    def compiled_as(layers: str) -> str:
        with engine_config(checkpoint, layers) as config:
            digest: str = config.compute_hash()
        return digest

    with_moe = engine_args(checkpoint, "qkv", quantization_config={"moe": {"activation": "mxfp8"}})
    first, second = (with_moe.create_engine_config() for _ in range(2))
    activation = second.model_config.quantization_config.moe.activation
    return {
        "parsed": {layers: taken(layers) for layers in request["layers"]},
        "command line": from_command_line(request["command line"]),
        "no option": from_command_line([]),
        "graphs": [compiled_as(layers) for layers in ("", "qkv", "qkv=mxfp8", "lm_head", "qkv")],
        "moe activation": [
            str(activation),
            layers_of(second),
            first.compute_hash() == second.compute_hash(),
        ],
        "linear": taken("qkv", quantization_config={"linear": "mxfp4"}),
        "moe weight": taken("qkv", quantization_config={"moe": "mxfp8"}),
        "other targets": taken("qkv", quantization_config={"targets": {"lm_head": "mxfp8"}}),
        **{str(name): verified(name) for name in (None, "gpt_oss_mxfp4", "quark")},
    }


def shards(request: dict[str, Any], out: Path) -> Any:
    """Heads of made-up ranks, loaded the way a model loads them."""
    import numpy as np
    import torch

    results: dict[str, Any] = {}
    weight = torch.from_numpy(np.load(request["head"])).to(torch.bfloat16)
    for fmt in ("mxfp4", "mxfp8"):
        for ranks in request["ranks"]:
            layers = []
            with engine_config(request["checkpoint"], f"lm_head={fmt}") as config:
                for rank in range(ranks):
                    as_rank(rank, ranks)
                    layer = make_head(config, len(weight))
                    layer.weight.weight_loader(layer.weight, weight)
                    layers.append(layer)
            results[f"{fmt}-{ranks}"] = [
                {
                    "loaded": layer.shard_indices.num_org_elements,
                    "rows": layer.num_embeddings_per_partition,
                    "done": not layer.weight.is_meta,
                }
                for layer in layers
            ]
            if any(layer.weight.is_meta for layer in layers):
                continue  # and the test misses the files
            packed = [layer.weight.view(torch.uint8).numpy() for layer in layers]
            np.save(out / f"{fmt}-{ranks}.npy", np.concatenate(packed))
            scales = [layer.weight_scale.numpy() for layer in layers]
            np.save(out / f"{fmt}-{ranks}-scales.npy", np.concatenate(scales))
    return results


def selectors(request: dict[str, Any], out: Path) -> Any:
    """The kernels on this CPU, and on platforms where vLLM's only one expands weights to BF16."""
    from vllm.platforms import PlatformEnum, current_platform

    def kind(fmt: str) -> str:
        return type(kernel_of(fmt, request["shapes"][0])).__name__

    here, results = type(current_platform), {}
    for platform in (here._enum, PlatformEnum.ROCM, PlatformEnum.XPU):
        with mock.patch.object(here, "_enum", platform):
            for fmt in ("mxfp4", "mxfp8"):
                results[f"{fmt}, {platform.name}"] = attempt(partial(kind, fmt))
    return results


def kernel_of(fmt: str, shape: list[int]) -> Any:
    """The kernel for a weight, without the method's constructor, which asks for a whole engine
    configuration."""
    return method_of(fmt)._kernel(tuple(shape))


def method_of(fmt: str) -> Any:
    from vllm_sparkforge.mx.linear import MxLinearMethod

    method: Any = object.__new__(MxLinearMethod)
    method.form = fmt
    return method


def cuda(request: dict[str, Any], out: Path) -> Any:
    """The kernels on GPUs that are not there: only the platform's answers are made up."""
    become = make_up_cuda()
    import torch
    import vllm.model_executor.kernels.linear as kernels
    import vllm.model_executor.kernels.linear.mxfp4.flashinfer as flashinfer4
    import vllm.model_executor.kernels.linear.mxfp8.flashinfer as flashinfer8
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.quantization.utils.quant_utils import kMxfp4Dynamic

    # As where FlashInfer is installed, or nothing would speak against Marlin.
    flashinfer4.has_flashinfer_cutedsl = lambda: True
    flashinfer8.has_flashinfer = flashinfer8.has_flashinfer_cutedsl = lambda: True

    def name(kernel: Any) -> str:
        # where a device has none of our kernels, theirs compute all rows
        return type(kernel._fallback).__name__

    def created(fmt: str, dtype: torch.dtype) -> str:
        method, layer = method_of(fmt), torch.nn.Module()
        method.create_weights(layer, 64, [128], 64, 128, dtype, weight_loader=None)
        return name(method.kernel)

    results: dict[str, Any] = {}
    as_rank(0, 1)
    with set_current_vllm_config(VllmConfig()):
        results["dtypes"] = {
            f"{fmt}, {dtype}": attempt(partial(created, fmt, dtype))
            for fmt in ("mxfp4", "mxfp8")
            for dtype in (torch.bfloat16, torch.float16)
        }
        for version in request["capabilities"]:
            become(version)
            results[".".join(map(str, version))] = {
                "mxfp4": [name(kernel_of("mxfp4", shape)) for shape in request["shapes"]],
                "mxfp8": [name(kernel_of("mxfp8", shape)) for shape in request["shapes"]],
                "mxfp4 activations": type(kernels.init_mxfp4_linear_kernel(kMxfp4Dynamic)).__name__,
                "mxfp8 activations": type(
                    kernels.init_mxfp8_linear_kernel(weight_shape=tuple(request["shapes"][0]))
                ).__name__,
            }
    return results


def make_up_cuda() -> Callable[[list[int]], None]:
    """Put a CUDA platform in place; what is returned sets its capability."""
    import fake_cuda  # type: ignore[import-not-found]  # beside this file when it runs

    fake_cuda.install(fake_cuda.Capability(12, 1))
    import vllm.platforms
    from vllm.platforms.interface import DeviceCapability

    platform: Any = type(vllm.platforms.current_platform)

    def become(version: list[int]) -> None:
        capability = DeviceCapability(*version)
        platform.get_device_capability = classmethod(lambda cls, device_id=0: capability)

    return become


if __name__ == "__main__":
    base.main(globals())
