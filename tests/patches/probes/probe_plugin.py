"""Runs inside the interpreter under test: the plugin beside what is not its own, and its options.

usage: python -m tests.patches.probes.probe_plugin STEP[,STEP...] REQUEST.json OUT_FOLDER

Works like probe_logits.py, whose engine it borrows.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

from tests.patches.probes import probe_logits as base
from tests.patches.probes import probe_mxfp4_layers as layers

VARIABLE = "VLLM_SPARKFORGE"
LLAMA = {"load_format": "dummy", "skip_tokenizer_init": True}


def off(request: dict[str, Any], out: Path) -> Any:
    """As a user switches plugins off; the first step of its process."""
    os.environ["VLLM_PLUGINS"] = ""
    return {}


def llama(request: dict[str, Any], out: Path) -> Any:
    """Another model: what it answers, and the key of its compiled graphs."""
    import numpy as np

    engine = base.small_engine(request["llama"], **LLAMA)
    logits, tokens = base.raw_logits(engine, list(range(20)), 5)
    np.save(out / "llama.npy", logits)
    digest = engine.llm_engine.vllm_config.compute_hash()
    del engine
    base.drop_engine()
    return {"tokens": tokens, "hash": digest, "spread": float(logits.std())}


def gpt_oss(request: dict[str, Any], out: Path) -> Any:
    """gpt-oss with an option of the plugin, and what is registered for it."""
    from vllm.model_executor.layers.quantization import get_quantization_config
    from vllm.model_executor.models import ModelRegistry

    failure = base.failure(request["checkpoint"])
    model = ModelRegistry.models["GptOssForCausalLM"].load_model_cls()
    return {
        **failure,
        "modules": [model.__module__, get_quantization_config("gpt_oss_mxfp4").__module__],
    }


def variable(request: dict[str, Any], out: Path) -> Any:
    """Options of the variable, one of them in ``additional_config``, too."""
    os.environ[VARIABLE] = json.dumps({"experts": base.EXPERTS, "mxfp4_layers": "qkv,o"})
    ours = base.plugin(mxfp4_layers="o=mxfp8")
    engine = base.small_engine(request["checkpoint"], **ours)
    (tensors,) = engine.apply_model(layers.layer_tensors)
    (experts,) = engine.apply_model(base.expert_parameters)
    merged = engine.llm_engine.vllm_config.additional_config["sparkforge"]
    del os.environ[VARIABLE], engine
    base.drop_engine()
    return {
        "layers": {name: tensor["dtype"] for name, tensor in tensors.items()},
        "experts": sorted({one["dtype"] for one in experts}),
        "in the key": {key: merged[key] for key in ("experts", "mxfp4_layers")},
    }


def wrong(request: dict[str, Any], out: Path) -> Any:
    """What is said of options that cannot be used, by their JSON."""
    from vllm.engine.arg_utils import EngineArgs

    def started(model: str, ours: Any, **options: Any) -> dict[str, Any]:
        made = EngineArgs(model, additional_config={"sparkforge": ours}, **options)
        found: dict[str, Any] = layers.attempt(lambda: bool(made.create_engine_config()))
        return found

    results = {text: started(request["checkpoint"], json.loads(text)) for text in request["wrong"]}
    for text in request["wrong variables"]:
        os.environ[VARIABLE] = text
        results[text] = started(request["checkpoint"], {})
    del os.environ[VARIABLE]
    results["llama"] = started(request["llama"], {"mxfp4_layers": "qkv"}, **LLAMA)
    results["fine"] = started(request["checkpoint"], {"off": ["rotary"], "decode_kernels": "off"})
    return results


def wrong_at_start(request: dict[str, Any], out: Path) -> Any:
    """What is said of the variable where vLLM loads the plugin, if it is no JSON; and of a good one
    where vLLM is to refuse variables that it does not know."""
    import vllm_sparkforge
    from vllm.engine.arg_utils import EngineArgs

    os.environ[VARIABLE] = "{"
    results: dict[str, Any] = {}
    try:
        vllm_sparkforge.register()
    except SystemExit as end:
        results["no JSON"] = end.code
    os.environ[VARIABLE] = "{}"
    os.environ.pop("VLLM_DIST_IDENT", None)  # vLLM's own, of the engines before
    vllm_sparkforge.register()
    made = EngineArgs(request["checkpoint"], fail_on_environ_validation=True)
    results["known"] = layers.attempt(lambda: bool(made.create_engine_config()))
    del os.environ[VARIABLE]
    return results


def other_vllm(request: dict[str, Any], out: Path) -> Any:
    """A vLLM that lacks what the plugin needs: without options, and with some. The last step."""
    import vllm_sparkforge
    from vllm.engine.arg_utils import EngineArgs
    from vllm_sparkforge import contract

    sys.modules["vllm_sparkforge.quant"] = None  # type: ignore[assignment]  # its import fails
    vllm_sparkforge.register()
    contract.broken = lambda part: "this vLLM has no such function"
    vllm_sparkforge.register()

    def started(**ours: str) -> dict[str, Any]:
        made = EngineArgs(request["checkpoint"], **base.plugin(**ours))
        found: dict[str, Any] = layers.attempt(lambda: bool(made.create_engine_config()))
        return found

    return {
        "none": started(),
        "experts": started(experts=base.EXPERTS),
        "mxfp4_layers": started(mxfp4_layers="o"),
        "decode_kernels": started(decode_kernels="on"),
    }


if __name__ == "__main__":
    base.main(globals())
