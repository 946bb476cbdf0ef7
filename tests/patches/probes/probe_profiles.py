"""Runs in the patched interpreter: what vLLM's own parser, and the plugin, make of a profile's
options.

usage: python -m tests.patches.probes.probe_profiles ASKED.json OUT.json

ASKED: '{"options": {"NAME": ["--moe-backend", …], …}, "wrong": {…}}'. OUT: by name, the parsed
values, and how those in ``wrong`` were refused; and the sentences that the check of backends looks
for, as vLLM's source makes them.
"""

import contextlib
import io
import json
import sys
from pathlib import Path
from typing import Any

from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.common.cli_args import make_arg_parser, validate_parsed_serve_args
from vllm.model_executor.layers.fused_moe.oracle.mxfp4 import Mxfp4MoeBackend, _make_log_backend
from vllm.reasoning import ReasoningParserManager
from vllm.tool_parsers import ToolParserManager
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm_sparkforge import bf16_experts
from vllm_sparkforge import options as plugin


def parsed(options: list[str]) -> dict[str, Any]:
    """Parse as ``vllm serve`` does; an unknown option or value raises SystemExit.

    The model is a folder: offline, any other name has to be in the hub's cache.
    """
    arguments = make_arg_parser(FlexibleArgumentParser()).parse_args(["--model", ".", *options])
    validate_parsed_serve_args(arguments)
    engine = AsyncEngineArgs.from_cli_args(arguments)
    ours = engine.additional_config.get(plugin.KEY, {})
    plugin.parse(ours)
    found: dict[str, Any] = {
        "address": arguments.uds,
        "moe_backend": ours.get("experts", engine.moe_backend),
        "attention_backend": engine.attention_backend
        and getattr(engine.attention_backend, "name", str(engine.attention_backend)),
        "kv_cache_dtype": engine.kv_cache_dtype,
        "load_format": str(engine.load_format),
        "max_model_len": engine.max_model_len,
        "max_num_seqs": engine.max_num_seqs,
        "max_num_batched_tokens": engine.max_num_batched_tokens,
        "cudagraph_capture_sizes": engine.cudagraph_capture_sizes,
        "prefix_caching": engine.enable_prefix_caching,
        "prefix_cache_retention_interval": engine.prefix_cache_retention_interval,
        "enforce_eager": engine.enforce_eager,
        "gpu_memory_utilization": engine.gpu_memory_utilization,
        "mxfp4_layers": ours.get("mxfp4_layers"),
        "reasoning_parser": engine.reasoning_parser,
        "tool_call_parser": arguments.tool_call_parser,
        "enable_auto_tool_choice": arguments.enable_auto_tool_choice,
        "exclude_tools_when_none": arguments.exclude_tools_when_tool_choice_none,
    }
    if name := found["reasoning_parser"]:
        found["reasoning_class"] = ReasoningParserManager.get_reasoning_parser(name).__name__
    if name := found["tool_call_parser"]:
        found["tool_class"] = ToolParserManager.get_tool_parser(name).__name__
    return found


def refusal(options: list[str]) -> str:
    """Return what is said of options with which the process would end; empty: they are taken."""
    with contextlib.redirect_stderr(io.StringIO()) as said:
        try:
            parsed(options)
        except (SystemExit, ValueError, KeyError, TypeError) as error:
            return f"{said.getvalue()}{error}"
    return ""


def main() -> None:
    """Read the questions, write the answers."""
    asked = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    result = {name: parsed(options) for name, options in asked["options"].items()}
    refused = {name: refusal(options) for name, options in asked["wrong"].items()}
    sentences = {backend.name: _make_log_backend(backend) for backend in Mxfp4MoeBackend}
    sentences["BF16_DEQUANT"] = bf16_experts.SAID
    answers = {"parsed": result, "refused": refused, "moe": sentences}
    Path(sys.argv[2]).write_text(json.dumps(answers), encoding="utf-8")


if __name__ == "__main__":
    main()
