"""Runs inside the interpreter under test and writes what it saw as JSON (and arrays as .npy).

usage: python -m tests.patches.probes.probe_mxfp4_layers STEP[,STEP...] REQUEST.json OUT_FOLDER

Works like probe_logits.py, whose engine it borrows.
"""

import gc
import itertools
import types
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from tests.patches.probes import probe_logits as base

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


def quantizers(request: dict[str, Any], out: Path) -> Any:
    """Codes and scales that the torch quantisers give for the request's weights."""
    import numpy as np
    import torch
    from vllm_sparkforge.mx import formats
    from vllm_sparkforge.mx.table import FORMATS

    # The second round cuts the weights into many slices, the last one shorter.
    for suffix, slice_elems, threads in (("", 1 << 24, 1), ("-otherwise", 1000, 3)):
        formats._SLICE_ELEMS = slice_elems
        torch.set_num_threads(threads)
        for name, path in request["weights"].items():
            dtype = torch.bfloat16 if name == "bfloat16" else torch.float32
            weight = torch.from_numpy(np.load(path)).to(dtype)
            for form in FORMATS.values():
                values, scales, *_ = form.quantise(weight)
                plain = values.view(torch.uint8).numpy()
                np.save(out / f"{name}-{form.name}{suffix}.npy", plain)
                scales = scales.float().numpy()
                np.save(out / f"{name}-{form.name}-scales{suffix}.npy", scales)
    return {}


def linear(request: dict[str, Any], out: Path) -> Any:
    """The CPU kernels: their expansion of every code under every scale, and a product that is cut
    into slices."""
    import numpy as np
    import torch
    from vllm_sparkforge.mx import cpu, formats
    from vllm_sparkforge.mx.table import FORMATS

    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    scales = codes[:, None].expand(256, 8).contiguous()
    elements = codes.expand(256, 256).contiguous().view(torch.float8_e4m3fn)
    values = formats.mxfp8_dequantize(elements, scales)
    np.save(out / "mxfp8-values.npy", values.to(torch.float32).numpy())

    # each element under powers of two from one end to the other, and under odd scales between them
    values = torch.arange(-127, 129, dtype=torch.int32).clamp(max=127).to(torch.int8)
    patterns = torch.tensor([0, *range(0x80, 0x7F80, 37)], dtype=torch.int16)
    scales = patterns.view(torch.bfloat16)[:, None].expand(-1, 4).contiguous()
    values = formats.int8_dequantize(values.expand(len(patterns), 256).contiguous(), scales)
    np.save(out / "int8-values.npy", values.to(torch.float32).numpy())
    np.save(out / "int8-factors.npy", scales[:, 0].to(torch.float32).numpy())

    torch.manual_seed(0)
    x = torch.randn(2, 3, 64, dtype=torch.bfloat16)
    bias = torch.randn(100, dtype=torch.bfloat16)
    results: dict[str, Any] = {}
    for form in FORMATS.values():
        tensors = form.quantise(torch.randn(100, 64))
        expected = x.double() @ form.dequantise(*tensors).double().T + bias.double()
        errors = []
        for slice_elems in (cpu._SLICE_ELEMS, 700):
            with mock.patch.object(cpu, "_SLICE_ELEMS", slice_elems):
                actual = cpu.mx_linear(x, form.name, tensors, bias)
            assert actual.shape == (2, 3, 100), actual.shape
            assert actual.dtype == torch.bfloat16, actual.dtype
            errors.append(float((actual - expected).norm() / expected.norm()))
        results[form.name] = errors
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
    form: str = make_head(config).quant_method.form.name
    return form


def refusals(request: dict[str, Any], out: Path) -> Any:
    """Heads that something else relies on, and two that look similar and are fine."""
    import torch
    from vllm_sparkforge.mx.linear import MxLinearMethod

    checkpoint = request["checkpoint"]

    def changed(**changes: Any) -> dict[str, Any]:
        with engine_config(checkpoint, "lm_head") as config:
            for name, value in changes.items():
                # Past the checks of the configuration: these are stand-ins.
                object.__setattr__(config, name, value)
            return attempt(lambda: head_form(config))

    def lora(modules: list[str]) -> Any:
        return types.SimpleNamespace(target_modules=modules)

    def drafter(method: str, path: str) -> Any:
        return types.SimpleNamespace(
            method=method,
            use_eagle=lambda: True,
            draft_model_config=types.SimpleNamespace(model=path, revision=None),
        )

    drafts = request["drafts"]
    results = {
        "tied": base.failure(request["tied"], mxfp4_layers="lm_head"),
        "not finite": base.failure(request["not_finite"], mxfp4_layers="qkv"),
        "lora names it": changed(lora_config=lora(["o_proj", "lm_head"])),
        "lora elsewhere": changed(lora_config=lora(["o_proj"])),
        "eagle without": changed(speculative_config=drafter("eagle3", drafts["without"])),
        "eagle with": changed(speculative_config=drafter("eagle3", drafts["with"])),
        "mtp": changed(speculative_config=drafter("mtp", drafts["with"])),
    }
    results["96 columns"] = attempt(
        lambda: MxLinearMethod("int8").create_weights(
            torch.nn.Module(), 96, [16], 96, 16, torch.bfloat16
        )
    )
    overrides = {"head_dtype": "float32"}
    with engine_config(checkpoint, "lm_head", hf_overrides=overrides) as config:
        assert config.model_config.head_dtype == torch.float32
        results["float32"] = attempt(lambda: head_form(config))
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

    return {
        "parsed": {layers: taken(layers) for layers in request["layers"]},
        "command line": from_command_line(request["command line"]),
        "no option": from_command_line([]),
        "graphs": [
            compiled_as(layers)
            for layers in (
                *("", "qkv", "qkv=mxfp8", "qkv=int8", "qkv=int6", "qkv=nvfp4", "lm_head"),
                *("qkv=lossless", "qkv"),
            )
        ],
        "linear": taken("qkv", quantization_config={"linear": "mxfp4"}),
        "other targets": taken("qkv", quantization_config={"targets": {"lm_head": "mxfp8"}}),
        **{str(name): verified(name) for name in (None, "gpt_oss_mxfp4")},
    }


def shards(request: dict[str, Any], out: Path) -> Any:
    """Heads of made-up ranks, loaded the way a model loads them."""
    import numpy as np
    import torch
    from vllm_sparkforge.mx.table import FORMATS

    results: dict[str, Any] = {}
    weight = torch.from_numpy(np.load(request["head"])).to(torch.bfloat16)
    for fmt in FORMATS:
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
            scales = [layer.weight_scale.float().numpy() for layer in layers]
            np.save(out / f"{fmt}-{ranks}-scales.npy", np.concatenate(scales))
    return results


def selectors(request: dict[str, Any], out: Path) -> Any:
    """The kernels on this CPU, and on a platform where vLLM's only one expands weights to BF16."""
    from vllm.platforms import PlatformEnum, current_platform
    from vllm_sparkforge.mx.linear import MxLinearMethod
    from vllm_sparkforge.mx.table import FORMATS

    def kind() -> str:
        # without the constructor, which asks for a whole engine configuration
        method: Any = object.__new__(MxLinearMethod)
        method.form = FORMATS["mxfp4"]
        return type(method._kernel((5120, 2880))).__name__

    here, results = type(current_platform), {}
    for platform in (here._enum, PlatformEnum.ROCM):
        with mock.patch.object(here, "_enum", platform):
            results[f"mxfp4, {platform.name}"] = attempt(kind)
    return results


if __name__ == "__main__":
    base.main(globals())
