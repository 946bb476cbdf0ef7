"""Whether vLLM's compile cache tells starts apart whose layers are computed in other ways."""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from tests.patches.probes.decode_device import (
    configured,
    fail,
    forget,
    mx_layer,
    right,
)


class _BegunError(Exception):
    """vLLM would build the model now."""


def begin(config: Any) -> str:
    """Do what the model does before vLLM builds it."""
    from vllm.model_executor.models.gpt_oss import GptOssForCausalLM
    from vllm_sparkforge.model import SparkGptOssForCausalLM

    def init(self: Any, vllm_config: Any, prefix: str = "") -> None:
        raise _BegunError

    with mock.patch.object(GptOssForCausalLM, "__init__", new=init):
        try:
            SparkGptOssForCausalLM(vllm_config=config)
        except _BegunError:
            return "begun"
    raise AssertionError("no model")


@functools.cache
def _operator() -> Any:
    """Return an operator for a product, ten times too large: to be told from our kernels'."""
    import torch

    def product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return 10 * (x @ weight + bias)

    # by hand: annotations are texts here
    made = torch.library.custom_op(
        "tests::marlin",
        product,
        mutates_args=(),
        schema="(Tensor x, Tensor weight, Tensor bias) -> Tensor",
    )
    made.register_fake(lambda x, weight, bias: x.new_empty(*x.shape[:-1], weight.shape[1]))
    return made


@contextmanager
def marlin() -> Iterator[list[str]]:
    """Put stand-ins in place of Marlin's dense kernels; yield the formats they get."""
    from vllm.model_executor.utils import replace_parameter
    from vllm_sparkforge.mx import linear
    from vllm_sparkforge.mx.table import FORMATS

    reached: list[str] = []
    multiply = _operator()

    def stand_in(form: str) -> Any:
        class Marlin:
            __name__ = ""

            @staticmethod
            def is_supported() -> tuple[bool, None]:
                return True, None

            def __init__(self, config: Any) -> None: ...

            def process_weights_after_loading(self, layer: Any) -> None:
                reached.append(form)
                # in an order of its own, which no kernel of ours could read
                tensors = (getattr(layer, name).data for name in FORMATS[form].names)
                weight = FORMATS[form].dequantise(*tensors)
                replace_parameter(layer, "weight", weight.T.contiguous())

            def apply_weights(self, layer: Any, x: Any, bias: Any) -> Any:
                return multiply(x, layer.weight, bias)

        Marlin.__name__ = real[form].__name__
        return Marlin

    real = {
        "mxfp4": linear.MarlinMxFp4LinearKernel,
        "mxfp8": linear.MarlinMxfp8LinearKernel,
        "nvfp4": linear.MarlinNvFp4LinearKernel,
    }
    assert all(kind.is_supported()[0] for kind in real.values())
    with mock.patch.multiple(
        linear, **{kind.__name__: stand_in(form) for form, kind in real.items()}
    ):
        yield reached


def cache(launches: Any) -> dict[str, Any]:
    """The keys of starts of one configuration, by what the self-check of a layer finds."""
    import torch
    from vllm.compilation.caching import aot_compile_hash_factors

    @contextmanager
    def start(form: str) -> Iterator[Any]:
        forget()
        torch.manual_seed(1)
        with configured("auto", mxfp4_layers=f"qkv={form}") as config, marlin():
            begin(config)
            yield config

    def key(config: Any) -> str:
        return str(aot_compile_hash_factors(config))

    result: dict[str, Any] = {}
    for form in ("mxfp4", "mxfp8", "nvfp4"):
        for name, spoil in {"passes": right, "fails": fail, "passes again": right}.items():
            with start(form) as config:
                launches.spoil = spoil
                layer = mx_layer(form)
                launches.spoil = right
                out, _ = layer(torch.ones(2, 128, dtype=torch.bfloat16))
                result[f"{form} {name}"] = {"key": key(config), "size": float(out.norm())}
        # a scale that the kernels do not take is a matter of one layer, not of its kind
        for name, scales in {"one": (100, 0), "other": (0, 100)}.items():
            with start(form) as config:
                packed = [mx_layer(form, layer=n, power=s) for n, s in enumerate(scales)]
                assert [each.weight.dtype == torch.int32 for each in packed] == [
                    power == 0 for power in scales
                ]
                result[f"{form} {name} layer fails"] = {"key": key(config)}
    for name, spoil in {"passes": right, "fails": fail}.items():
        with start("int8") as config:
            launches.spoil = spoil
            layer = mx_layer("int8")
            launches.spoil = right
            assert (layer.weight.dtype == torch.int32) == (name == "passes")
            result[f"int8 {name}"] = key(config)
    return result
