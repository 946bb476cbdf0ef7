"""Decode speed of vLLM at gpt-oss-120b's shapes, random weights: trees against each other.

    python benchmarks/decode.py \\
        --case stock=/trees/stock:marlin \\
        --case exact=/trees/stock+/trees/plugin:marlin \\
        --case fast=/trees/stock+/trees/plugin:marlin:qkv,o,lm_head

A case is NAME=TREE[+PLUGIN]:BACKEND[:LAYERS[:KERNELS]]. TREE is a folder that holds a package
``vllm`` with the extension modules of the release wheel (an unpacked wheel), or ``-`` for the
installed one; PLUGIN is one with our plugin's wheel; BACKEND goes to ``--moe-backend``, LAYERS and
KERNELS to the plugin's ``mxfp4_layers`` and ``decode_kernels``.
The first case is what the others are compared with. Every case is a process of its own; the rounds
go through the cases in turn, so that a machine that drifts does so for all of them.

What is random: the weights, and so the tokens and the experts that the router picks. The speed of
a kernel here does not depend on the values; the number of distinct experts does at batch > 1, and
is the same for all cases in distribution only. The sequences resemble each other, so they share
more experts than those of real users.

Needs a GPU. Prints a Markdown table; ``--json FILE`` writes every figure.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

# openai/gpt-oss-120b's config.json, without what does not matter to random weights
SHAPES: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 36,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 201088,
    "num_local_experts": 128,
    "num_experts_per_tok": 4,
    "experts_per_token": 4,
    "max_position_embeddings": 131072,
    "initial_context_length": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 150000,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    },
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "hidden_act": "silu",
    "attention_bias": True,
    "attention_dropout": 0.0,
    "router_aux_loss_coef": 0.9,
    "tie_word_embeddings": False,
    "eos_token_id": 200002,
    "pad_token_id": 199999,
    "torch_dtype": "bfloat16",
    "quantization_config": {
        "quant_method": "mxfp4",
        "modules_to_not_convert": [
            "model.layers.*.self_attn",
            "model.layers.*.mlp.router",
            "model.embed_tokens",
            "lm_head",
        ],
    },
}


@dataclass(frozen=True)
class Case:
    """One configuration: of the folders to put first on the Python path, and vLLM's options."""

    name: str
    tree: str
    backend: str
    layers: str
    kernels: str
    """Empty ``layers`` or ``kernels``: a vLLM without the plugin, or its default."""

    def options(self) -> dict[str, Any]:
        """Return the plugin's options, as an argument of ``LLM``."""
        given = {"mxfp4_layers": self.layers, "decode_kernels": self.kernels}
        ours = {name: value for name, value in given.items() if value}
        return {"additional_config": {"sparkforge": ours}} if ours else {}

    @classmethod
    def parse(cls, text: str) -> Case:
        """Read ``NAME=TREE[+PLUGIN]:BACKEND[:LAYERS[:KERNELS]]``, or raise ValueError."""
        name, _, rest = text.partition("=")
        tree, backend, layers, kernels, *more = [*rest.split(":"), "", "", ""]
        if not (name and tree and backend) or any(more):
            raise ValueError(text)
        return cls(name, tree, backend, layers, kernels)


def spec(case: Case) -> str:
    """Return the command-line form of a case."""
    return f"{case.name}={case.tree}:{case.backend}:{case.layers}:{case.kernels}"


# -- the measuring process ---------------------------------------------------


def model_bytes(worker: Any) -> int:
    """Return the bytes of GPU memory that loading the model took, by vLLM's own account."""
    return int(worker.model_runner.model_memory_usage)


def measure(case: Case, arguments: argparse.Namespace) -> dict[str, Any]:
    """Load the model and time decode; the result is JSON-ready.

    The time of one decode step is the difference of two generations of unlike length from the
    same prompts, so that prefill and the request's overhead drop out.
    """
    import torch
    from vllm import LLM, SamplingParams

    with tempfile.TemporaryDirectory() as name:
        config = SHAPES | {
            "num_hidden_layers": arguments.layers,
            "num_local_experts": arguments.experts,
            "layer_types": [
                f"{('sliding', 'full')[n % 2]}_attention" for n in range(arguments.layers)
            ],
        }
        (Path(name) / "config.json").write_text(json.dumps(config))
        llm = LLM(
            name,
            load_format="dummy",
            skip_tokenizer_init=True,
            max_model_len=4096,
            max_num_seqs=max(arguments.batch),
            gpu_memory_utilization=arguments.memory,
            moe_backend=case.backend,
            attention_backend=arguments.attention,
            **case.options(),
        )

    fresh = itertools.count(1000)

    def generate(tokens: int, batch: int, prompt: int = 0) -> float:
        """Return the seconds of a generation; with ``prompt``, from one that no cache holds."""
        begin_with = [next(fresh)] if prompt else []
        sampling = SamplingParams(
            temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False
        )
        prompts: list[Any] = [
            {
                "prompt_token_ids": [
                    *begin_with,
                    *((7 * i + 13 * row) % 200000 for i in range(prompt or arguments.prompt)),
                ]
            }
            for row in range(batch)
        ]
        begin = time.perf_counter()
        llm.generate(prompts, sampling, use_tqdm=False)
        return time.perf_counter() - begin

    generate(8, 1)
    speeds: dict[int, list[float]] = {}
    for batch in arguments.batch:
        generate(2 + arguments.tokens, batch)  # compiles what no earlier length needed
        speeds[batch] = []
        for _ in range(arguments.repeat):
            short = generate(2, batch)
            long = generate(2 + arguments.tokens, batch)
            speeds[batch].append(arguments.tokens * batch / (long - short))
    prefill: dict[int, list[float]] = {}
    for prompt in arguments.prefill:
        generate(1, 1, prompt)
        prefill[prompt] = [1000 * generate(1, 1, prompt) for _ in range(arguments.repeat)]
    return {
        "case": asdict(case),
        "device": torch.cuda.get_device_name(),
        "model_bytes": llm.collective_rpc(model_bytes)[0],
        "tokens_per_second": speeds,
        "prefill_ms": prefill,
    }


# -- the comparing process ---------------------------------------------------


def run_case(case: Case, arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure a case in a process of its own, with the options of this one."""
    variables = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the model must be in reach
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # a function is passed to it
    }
    with tempfile.TemporaryDirectory() as name:
        result = Path(name) / "result.json"
        command = [__file__, *sys.argv[1:], "--measure", str(result), "--only", case.name]
        loaded: dict[str, Any] = measured(case, command, result, variables)
        return loaded


def measured(
    case: Case, command: Sequence[str], result: Path, variables: Mapping[str, str] | None = None
) -> Any:
    """Run a script of ours on a case's tree, in a process of its own; return the JSON it writes.

    Raises:
        SystemExit: the process failed; its output was passed on.
    """
    environment = {
        **os.environ,
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",  # compiles at run time, and samples only
        **(variables or {}),
    }
    if case.tree != "-":
        path = [*case.tree.split("+"), environment.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join(part for part in path if part)
    # vLLM's log goes to standard error, so that standard output holds the table alone
    done = subprocess.run(
        [sys.executable, *command], env=environment, stdout=sys.stderr, check=False
    )
    if done.returncode != 0:
        script = Path(command[0]).stem
        sys.exit(f"{script}: case {case.name} failed with exit code {done.returncode}")
    return json.loads(result.read_text())


def table(results: Sequence[Mapping[str, Any]]) -> str:
    """Return the Markdown table: median tokens/s (lowest–highest) and ratio to the first case."""
    batches = list(results[0]["tokens_per_second"])
    prompts = list(results[0]["prefill_ms"])
    head = ["case", "MoE backend", "`--mxfp4-layers`", "memory of the model, GiB"]
    head += [f"batch {batch}, tokens/s" for batch in batches]
    head += [f"prefill of {prompt}, ms" for prompt in prompts]
    lines = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    for result in results:
        case = result["case"]
        gib = result["model_bytes"] / 2**30
        cells = [case["name"], case["backend"], case["layers"] or "none", f"{gib:.2f}"]
        for batch in batches:
            speeds = result["tokens_per_second"][batch]
            middle = statistics.median(speeds)
            ratio = middle / statistics.median(results[0]["tokens_per_second"][batch])
            cells.append(f"{middle:.1f} ({min(speeds):.1f}–{max(speeds):.1f}), {ratio:.3f}×")
        cells += [f"{statistics.median(result['prefill_ms'][prompt]):.1f}" for prompt in prompts]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    """Run every case in turn and print the table, after each case what is known so far."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--case", type=Case.parse, action="append", required=True)
    parser.add_argument("--layers", type=int, default=SHAPES["num_hidden_layers"])
    parser.add_argument(
        "--experts", type=int, default=SHAPES["num_local_experts"], help="32 in gpt-oss-20b"
    )
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 2, 8])
    parser.add_argument(
        "--prefill", type=int, nargs="*", default=[], help="prompt lengths to time the prefill of"
    )
    parser.add_argument("--prompt", type=int, default=512, help="tokens before the timed ones")
    parser.add_argument("--tokens", type=int, default=128, help="timed tokens a sequence")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--memory", type=float, default=0.85, help="gpu_memory_utilization")
    parser.add_argument("--attention", default="TRITON_ATTN", help="attention backend")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--only", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        (case,) = (case for case in arguments.case if case.name == arguments.only)
        arguments.measure.write_text(json.dumps(measure(case, arguments)))
        return
    found: dict[str, dict[str, Any]] = {}
    for _ in range(arguments.rounds):
        for case in arguments.case:
            result = run_case(case, arguments)
            before = found.setdefault(case.name, result)
            for kind in ("tokens_per_second", "prefill_ms") if before is not result else ():
                for key, values in result[kind].items():
                    before[kind][key] += values
            if arguments.json:
                arguments.json.write_text(json.dumps([*found.values()], indent=1) + "\n")
    print(table([*found.values()]))


if __name__ == "__main__":
    main()
