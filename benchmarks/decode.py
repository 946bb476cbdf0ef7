"""Decode speed of vLLM at gpt-oss-120b's shapes, random weights: trees against each other.

    python benchmarks/decode.py \\
        --case stock=/trees/stock:marlin \\
        --case exact=/trees/stock+/trees/plugin:marlin \\
        --case fast=/trees/stock+/trees/plugin:marlin:qkv,o,lm_head --profile

A case is NAME=TREE[+PLUGIN]:BACKEND[:LAYERS[:KERNELS]]. TREE is a folder that holds a package
``vllm`` with the extension modules of the release wheel (an unpacked wheel), or ``-`` for the
installed one; PLUGIN is one with our plugin's wheel; BACKEND goes to ``--moe-backend``, LAYERS and
KERNELS to the plugin's ``mxfp4_layers`` and ``decode_kernels``.
The first case is what the others are compared with. Every case is a process of its own; the rounds
go through the cases in turn, so that a machine that drifts does so for all of them.

What is random: the weights, and so the tokens and the experts that the router picks. The speed of
a kernel here does not depend on the values; the number of distinct experts does at batch > 1, and
is the same for all cases in distribution only. The sequences resemble each other, so they share
more experts than those of real users. ``--router uniform`` gives each row four experts at random,
others in each layer, in place of the router's. With Marlin the distinct experts of a layer in the
last timed step are printed.

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
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from routing import Routing

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
# a parameter belongs to the first kind whose word is in its name
KINDS = ("experts", "router", "qkv_proj", "o_proj", "lm_head", "embed_tokens", "embedding")

# by vLLM's mode of compilation: none (what runs is the kernels under test), and its default
GRAPHS = {0: "FULL_DECODE_ONLY", 3: "FULL_AND_PIECEWISE"}


@dataclass(frozen=True)
class Case:
    """One configuration."""

    name: str
    tree: str
    """What to put first on the Python path, folders with + between them, or ``-``."""
    backend: str
    """For ``moe_backend``."""
    layers: str
    """For ``mxfp4_layers``; empty for none."""
    kernels: str
    """For ``decode_kernels``; empty for a vLLM without the plugin, or its default."""

    def options(self) -> dict[str, Any]:
        """Return the plugin's options, as an argument of ``LLM``."""
        given = {"mxfp4_layers": self.layers, "decode_kernels": self.kernels}
        ours = {name: value for name, value in given.items() if value}
        return {"additional_config": {"sparkforge": ours}} if ours else {}

    @classmethod
    def parse(cls, text: str) -> Case:
        """Read ``NAME=TREE[+PLUGIN]:BACKEND[:LAYERS[:KERNELS]]``.

        Raises:
            argparse.ArgumentTypeError: it reads otherwise.
        """
        name, equals, rest = text.partition("=")
        tree, backend, layers, kernels, *more = [*rest.split(":"), "", "", ""]
        if not (name and equals and tree and backend) or any(more):
            msg = f"{text!r} is not NAME=TREE[+PLUGIN]:BACKEND[:LAYERS[:KERNELS]]"
            raise argparse.ArgumentTypeError(msg)
        return cls(name, tree, backend, layers, kernels)


def write_checkpoint(folder: Path, layers: int, experts: int) -> None:
    """Write a config.json with so many layers and experts; vLLM makes the weights up."""
    kinds = ["sliding_attention" if n % 2 == 0 else "full_attention" for n in range(layers)]
    config = SHAPES | {
        "num_hidden_layers": layers,
        "num_local_experts": experts,
        "layer_types": kinds,
    }
    (folder / "config.json").write_text(json.dumps(config))


# -- the measuring process ---------------------------------------------------


def model_bytes(worker: Any) -> int:
    """Return the bytes of GPU memory that loading the model took, by vLLM's own account."""
    return int(worker.model_runner.model_memory_usage)


def weight_bytes(model: Any) -> dict[str, int]:
    """Return the bytes of a model's parameters and buffers by kind of layer.

    Experts in Triton's layout are neither, and so are not counted.
    """
    total: dict[str, int] = defaultdict(int)
    seen: set[int] = set()
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.data_ptr() in seen:
            continue
        seen.add(tensor.data_ptr())
        kind = next((word for word in KINDS if word in name), "other")
        total[kind] += tensor.numel() * tensor.element_size()
    return dict(total)


def measure(case: Case, arguments: argparse.Namespace) -> dict[str, Any]:
    """Load the model and time decode; the result is JSON-ready.

    The time of one decode step is the difference of two generations of unlike length from the
    same prompts, so that prefill and the request's overhead drop out.
    """
    import torch
    from vllm import LLM, SamplingParams

    routing = Routing(arguments.experts, uniform=arguments.router == "uniform")
    if case.backend == "marlin":
        routing.install()
    with tempfile.TemporaryDirectory() as name:
        write_checkpoint(Path(name), arguments.layers, arguments.experts)
        start = time.perf_counter()
        llm = LLM(
            name,
            load_format="dummy",
            skip_tokenizer_init=True,
            max_model_len=4096,
            max_num_seqs=max(arguments.batch),
            gpu_memory_utilization=arguments.memory,
            moe_backend=case.backend,
            attention_backend=arguments.attention,
            compilation_config={"mode": arguments.mode, "cudagraph_mode": GRAPHS[arguments.mode]},
            **case.options(),
        )
        load_seconds = time.perf_counter() - start

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
    distinct: dict[int, float | None] = {}
    for batch in arguments.batch:
        generate(2 + arguments.tokens, batch)  # compiles what no earlier length needed
        speeds[batch] = []
        for _ in range(arguments.repeat):
            short = generate(2, batch)
            long = generate(2 + arguments.tokens, batch)
            speeds[batch].append(arguments.tokens * batch / (long - short))
        distinct[batch] = routing.distinct(batch)
    prefill: dict[int, list[float]] = {}
    for prompt in arguments.prefill:
        generate(1, 1, prompt)
        prefill[prompt] = [1000 * generate(1, 1, prompt) for _ in range(arguments.repeat)]
    result = {
        "case": asdict(case),
        "device": torch.cuda.get_device_name(),
        "load_seconds": load_seconds,
        "model_bytes": llm.collective_rpc(model_bytes)[0],
        "weight_bytes": llm.apply_model(weight_bytes)[0],
        "tokens_per_second": speeds,
        "router": arguments.router,
        "distinct_experts": distinct,
        "prefill_ms": prefill,
    }
    if arguments.profile:
        result["kernels"] = {"a decode step at batch 1": profile(lambda: generate(66, 1), steps=64)}
        for prompt in arguments.prefill:
            name = f"a prefill of {prompt} tokens"
            result["kernels"][name] = profile(partial(generate, 1, 1, prompt), steps=1)
    return result


def profile(work: Any, *, steps: int) -> list[dict[str, Any]]:
    """Return the GPU kernels of ``work``, the heaviest first, in microseconds a step."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as recorder

    with recorder(activities=[ProfilerActivity.CUDA]) as record:
        work()
    rows = [
        {"name": row.key, "us_per_step": row.device_time_total / steps, "calls": row.count / steps}
        for row in record.key_averages()
    ]
    return sorted(rows, key=lambda row: -float(row["us_per_step"]))[:25]


# -- the comparing process ---------------------------------------------------


def run_case(case: Case, arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure a case in a process of its own.

    Raises:
        SystemExit: the process failed; its output was passed on.
    """
    variables = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the model must be in reach of apply_model
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # apply_model passes a function
    }
    with tempfile.TemporaryDirectory() as name:
        result = Path(name) / "result.json"
        command = [
            *(__file__, "--measure", str(result), "--case", spec(case)),
            *("--layers", str(arguments.layers), "--experts", str(arguments.experts)),
            *("--prompt", str(arguments.prompt), "--tokens", str(arguments.tokens)),
            *("--repeat", str(arguments.repeat), "--memory", str(arguments.memory)),
            *("--mode", str(arguments.mode), "--router", arguments.router),
            *("--attention", arguments.attention),
            *("--batch", *map(str, arguments.batch), "--prefill", *map(str, arguments.prefill)),
        ]
        if arguments.profile:
            command.append("--profile")
        loaded: dict[str, Any] = measured(case, command, result, variables)
        return loaded


def measured(
    case: Case, command: Sequence[str], result: Path, variables: Mapping[str, str] | None = None
) -> Any:
    """Run a script of ours on a case's tree, in a process of its own; return what it writes.

    Args:
        command: the script and its arguments.
        result: the JSON file that it writes.
        variables: environment variables besides those that every case gets.

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


def spec(case: Case) -> str:
    """Return the command-line form of a case."""
    return f"{case.name}={case.tree}:{case.backend}:{case.layers}:{case.kernels}"


def merge(results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Join the rounds of one case: the times of all, the rest of the first."""
    merged: dict[str, Any] = dict(results[0])
    for measure in ("tokens_per_second", "prefill_ms"):
        merged[measure] = {
            of: [value for result in results for value in result[measure][of]]
            for of in results[0][measure]
        }
    return merged


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
    parser.add_argument(
        "--mode", type=int, choices=GRAPHS, default=3, help="vLLM's compilation mode (default: 3)"
    )
    parser.add_argument("--attention", default="TRITON_ATTN", help="attention backend")
    parser.add_argument(
        "--router",
        choices=("model", "uniform"),
        default="model",
        help="which experts a row has: those that the model's router picks, or any (Marlin only)",
    )
    parser.add_argument(
        "--profile", action="store_true", help="and the kernels at batch 1 and of each prefill"
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.router == "uniform" and any(c.backend != "marlin" for c in arguments.case):
        parser.error("--router uniform needs the backend marlin in every case")
    if arguments.measure:
        arguments.measure.write_text(json.dumps(measure(arguments.case[0], arguments)))
        return
    rounds: dict[str, list[dict[str, Any]]] = {case.name: [] for case in arguments.case}
    for _ in range(arguments.rounds):
        for case in arguments.case:
            rounds[case.name].append(run_case(case, arguments))
            merged = [merge(results) for results in rounds.values() if results]
            if arguments.json:
                arguments.json.write_text(json.dumps(merged, indent=1) + "\n")
    print(table(merged))
    print(f"\nDistinct experts of a layer in a step, router: {arguments.router}")
    for result in merged:
        counts = (f"{n:.1f}" if n else "not known" for n in result["distinct_experts"].values())
        batches = zip(result["distinct_experts"], counts, strict=True)
        print(f"{result['case']['name']}: " + ", ".join(f"batch {b}: {n}" for b, n in batches))
    for result in merged if arguments.profile else []:
        for work, rows in result["kernels"].items():
            print(f"\n{result['case']['name']}: GPU kernels of {work}")
            for row in rows:
                print(f"{row['us_per_step']:9.1f} us {row['calls']:7.1f}x  {row['name'][:110]}")


if __name__ == "__main__":
    main()
