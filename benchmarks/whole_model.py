"""Speed and distance of whole models at gpt-oss-120b's shapes, with every weight filled.

    python benchmarks/whole_model.py --case release=/trees/release --case plain=/trees/series \\
        --case balanced=/trees/series:qkv=int8,o=int8,lm_head=int8 --out FOLDER

A case is NAME=TREE[+TREE...][:LAYERS]: folders to put first on the Python path (a tree of vLLM with
the release's extension modules, our plugin), and the plugin's ``mxfp4_layers``. "q8_0" as LAYERS
rounds the dense weights as llama.cpp's Q8_0 does, and "none" leaves them.

``load_format=dummy`` leaves the experts zero. Here all weights come through vLLM's own loading of a
checkpoint, made on the device from one seed: dense ones of a Student-t distribution with five
degrees (real ones have outliers), experts of random bytes, and a head under which the likeliest 256
tokens have most of the probability. So routers choose unlike experts for unlike tokens.

Each case runs in a process of its own, ``--gpus`` at a time. Tokens/s of decoding are from the
difference of two lengths, the median of ``--repeat``; milliseconds of prefill likewise. Distances
are of all positions of two prompts, from steps of eight tokens and from one step, to the first
case: KL in nats over the whole vocabulary and the share of positions with the same likeliest token.
``as_alone``: how many of twelve sequences together have the tokens that each has alone.
With ``--tensor-parallel`` each case has as many GPUs, connected by NCCL as two machines are.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parent.parent))

from sparkforge.checkpoints import tiny

SEED, PROMPT, TIMED, SCORED = 5, 512, 128, 512
BATCHES = (1, 2, 4, 8, 16)


def config(shape: tiny.Shape, vocab: int) -> dict[str, Any]:
    """Return config.json of gpt-oss-120b, or of less of it."""
    found: dict[str, Any] = tiny.json_files(shape, "tiny.json")["config.json"]
    found["rope_scaling"] |= {"beta_fast": 32.0, "factor": 32.0}
    found["rope_scaling"]["original_max_position_embeddings"] = 4096
    found |= {"initial_context_length": 4096, "max_position_embeddings": 131072}
    found |= {"rope_theta": 150000.0, "sliding_window": 128, "vocab_size": vocab}
    return found | {"eos_token_id": vocab - 2, "pad_token_id": vocab - 1}


def tensors(model: Any, rounded: bool) -> Any:
    """Yield the checkpoint's tensors; ``rounded``: the dense ones as Q8_0 has them."""
    import torch

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    made = torch.Generator(device).manual_seed(SEED)
    hidden, heads = model.hidden_size, model.num_attention_heads * model.head_dim
    inner, experts = model.intermediate_size, model.num_local_experts
    kv = model.num_key_value_heads * model.head_dim

    def normal(*shape: int) -> Any:
        return torch.randn(*shape, generator=made, device=device, dtype=torch.float32)

    def dense(rows: int, columns: int, deviation: float) -> Any:
        parts = []
        for first in range(0, rows, 16384):
            shape = (min(16384, rows - first), columns)
            chi = normal(*shape).square_()
            for _ in range(4):
                chi += normal(*shape).square_()
            part = normal(*shape).div_(chi.div_(5).sqrt_()).mul_(deviation * 0.6**0.5).bfloat16()
            if rounded:
                block = part.float().unflatten(-1, (-1, 32))
                scale = block.abs().amax(-1, keepdim=True) / 127
                part = ((block / scale).round() * scale.half().float()).flatten(-2).bfloat16()
            parts.append(part)
        return torch.cat(parts)

    def small(*shape: int, mean: float = 0.0, deviation: float = 0.05) -> Any:
        return (normal(*shape) * deviation + mean).bfloat16()

    def some(low: int, high: int, *shape: int) -> Any:
        found = torch.empty(shape, dtype=torch.uint8, device=device)
        return found.random_(low, high, generator=made)

    yield "model.embed_tokens.weight", small(model.vocab_size, hidden, deviation=1.0)
    for layer in range(model.num_hidden_layers):
        base = f"model.layers.{layer}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield f"{base}{norm}.weight", small(hidden, mean=1.0)
        for name, rows in (("q_proj", heads), ("k_proj", kv), ("v_proj", kv)):
            yield f"{base}self_attn.{name}.weight", dense(rows, hidden, 1.07 * hidden**-0.5)
            yield f"{base}self_attn.{name}.bias", small(rows)
        yield f"{base}self_attn.o_proj.weight", dense(hidden, heads, 0.04 * heads**-0.5)
        yield f"{base}self_attn.o_proj.bias", small(hidden)
        yield f"{base}self_attn.sinks", small(model.num_attention_heads, deviation=1.0)
        yield f"{base}mlp.router.weight", small(experts, hidden, deviation=2 * hidden**-0.5)
        yield f"{base}mlp.router.bias", small(experts)
        for name, rows, columns in (("gate_up", 2 * inner, hidden), ("down", hidden, inner)):
            at = f"{base}mlp.experts.{name}_proj_"
            yield f"{at}blocks", some(0, 256, experts, rows, columns // 32, 16)
            low = 119 if name == "gate_up" else 112  # 2^-8, 2^-15: more, and rounding decides
            yield f"{at}scales", some(low, low + 3, experts, rows, columns // 32)
            yield f"{at}bias", small(experts, rows)
    yield "model.norm.weight", small(hidden, mean=1.0)
    yield "lm_head.weight", dense(model.vocab_size, hidden, 6 * hidden**-0.5)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Serve one case in this process, as vLLM does by default, and measure it."""
    os.environ.update(VLLM_NO_USAGE_STATS="1", HF_HUB_OFFLINE="1", VLLM_USE_FLASHINFER_SAMPLER="0")
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1" if options.server else "0"
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
    import numpy as np
    from vllm import LLM, SamplingParams
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader
    from vllm.model_executor.models.gpt_oss import GptOssForCausalLM

    rounded = options.layers == "q8_0"

    @register_model_loader("made_up")
    class MadeUp(BaseModelLoader):  # type: ignore[misc]
        def download_model(self, model_config: Any) -> None:
            pass

        def load_weights(self, model: Any, model_config: Any) -> None:
            model.load_weights(tensors(model_config.hf_config, rounded))

    seen: list[Any] | None = None
    usual = GptOssForCausalLM.compute_logits

    def compute_logits(self: Any, states: Any) -> Any:
        logits = usual(self, states)
        if seen is not None and len(states) > 1:  # those of a prompt, not that of the next token
            seen.append(logits.float().log_softmax(-1).cpu())
        return logits

    GptOssForCausalLM.compute_logits = compute_logits
    folder = options.out / "model"
    extra: dict[str, Any] = {}
    if options.layers not in ("", "q8_0"):
        chosen = {} if options.layers == "none" else {"mxfp4_layers": options.layers}
        extra = {"additional_config": {"sparkforge": chosen}}
    rank, ranks = int(os.environ.get("RANK", "0")), options.tensor_parallel
    if ranks > 1:  # a process for each, which all do the same
        extra |= {"tensor_parallel_size": ranks, "disable_custom_all_reduce": True}
        extra["distributed_executor_backend"] = "external_launcher"
    begun = time.monotonic()
    llm = LLM(
        str(folder),
        load_format="made_up",
        skip_tokenizer_init=True,
        max_model_len=4096,
        max_num_seqs=max(BATCHES),
        gpu_memory_utilization=0.92,
        kv_cache_memory_bytes=options.kv << 30,
        enable_prefix_caching=False,
        moe_backend=options.moe,
        attention_backend=options.attention or None,
        enforce_eager=options.eager,
        **extra,
    )
    found: dict[str, Any] = {"case": options.name, "start_s": round(time.monotonic() - begun)}
    vocab = llm.llm_engine.model_config.hf_config.vocab_size
    calls = 0

    def run(tokens: int, batch: int = 1, length: int = PROMPT) -> float:
        nonlocal calls
        calls += 1
        steps = [7919 * (k + 1) for k in range(batch)]
        ids = [[(step * i + 104729 * calls) % (vocab - 8) for i in range(length)] for step in steps]
        prompts: Any = [{"prompt_token_ids": one} for one in ids]
        given = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        begin = time.perf_counter()
        llm.generate(prompts, given, use_tqdm=False)
        return time.perf_counter() - begin

    if not rounded:  # those are the first case's speeds
        for batch in options.batch:
            run(8, batch)
            rounds = [run(2 + TIMED, batch) - run(2, batch) for _ in range(options.repeat)]
            speed = batch * TIMED / statistics.median(rounds)
            found[f"decode_{batch}"] = round(speed, 1)
            print(options.name, batch, round(speed, 1), flush=True)
        for length in (512, 2048):
            run(1, 1, length)
            times = [run(1, 1, length) for _ in range(options.repeat)]
            found[f"prefill_{length}_ms"] = round(1e3 * statistics.median(times), 2)
    # sequences of unlike length, which end one after the other
    ids = [[(31 * i * (k + 2) + k) % (vocab - 8) for i in range(20 + 37 * k)] for k in range(12)]
    many: Any = [{"prompt_token_ids": one} for one in ids]
    each = [
        SamplingParams(temperature=0, max_tokens=16 + 8 * k, ignore_eos=True, detokenize=False)
        for k in range(12)
    ]
    together = llm.generate(many, each, use_tqdm=False)
    alone = [llm.generate(*one, use_tqdm=False)[0] for one in zip(many, each, strict=True)]
    pairs = zip(together, alone, strict=True)
    found["as_alone"] = sum(a.outputs[0].token_ids == b.outputs[0].token_ids for a, b in pairs)
    if not options.server:
        scheduler = llm.llm_engine.engine_core.engine_core.scheduler
        for name, most in (("whole", scheduler.max_num_scheduled_tokens), ("steps", 8)):
            scheduler.max_num_scheduled_tokens = most
            seen = []
            for start in (11, 5011):
                ids = [(start + 104729 * i) % (vocab - 8) for i in range(SCORED)]
                given = SamplingParams(max_tokens=1, prompt_logprobs=1, detokenize=False)
                llm.generate([{"prompt_token_ids": ids}], given, use_tqdm=False)
            import torch

            rows = torch.cat(seen).numpy()
            if rank == 0:
                np.save(options.out / f"{options.name}-{name}.npy", rows)
            found[f"rows_{name}"] = [len(rows), len(seen)]  # positions, steps
            seen = None
    return found


def distances(out: Path, first: str, name: str) -> dict[str, Any]:
    """Compare what two cases have kept, some positions at a time."""
    import numpy as np
    import torch

    found: dict[str, Any] = {}
    device = "cuda" if torch.cuda.is_available() else "cpu"
    # of the first case itself: what rounding alone does
    for mine, theirs in (("steps", "steps"), ("whole", "steps" if name == first else "whole")):
        files = (out / f"{first}-{theirs}.npy", out / f"{name}-{mine}.npy")
        pair = [np.load(file, mmap_mode="r") for file in files]
        kl, same = [], []
        for at in range(0, len(pair[0]), 64):
            both = (torch.from_numpy(np.array(one[at : at + 64])) for one in pair)
            p, q = (one.to(device).double() for one in both)
            kl += (p.exp() * (p - q)).sum(-1).tolist()
            same += (p.argmax(-1) == q.argmax(-1)).double().tolist()
        found[f"{mine}-{theirs}"] = {
            "kl": statistics.fmean(kl),
            "kl_error": statistics.stdev(kl) / len(kl) ** 0.5,
            "kl_median": statistics.median(kl),
            "same": statistics.fmean(same),
        }
    return found


def main() -> None:
    """Run the cases, or one of them in this process."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--case", action="append", default=[], metavar="NAME=TREE[+TREE][:LAYERS]")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--tensor-parallel", type=int, default=1)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--kv", type=int, default=5, help="GiB")
    parser.add_argument("--batch", type=int, nargs="*", default=list(BATCHES))
    parser.add_argument("--moe", default="marlin")
    parser.add_argument("--attention", default="TRITON_ATTN")
    parser.add_argument("--size", type=int, nargs=4, default=(36, 2880, 128, 201088))
    for flag in ("--eager", "--server"):
        parser.add_argument(flag, action="store_true")
    parser.add_argument("--name", help=argparse.SUPPRESS)
    parser.add_argument("--layers", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.name:
        found = measure(options)
        if os.environ.get("RANK", "0") == "0":
            (options.out / f"{options.name}.json").write_text(json.dumps(found))
        if options.tensor_parallel > 1:
            os._exit(0)  # else one hung while Python ended
        return
    layers, hidden, experts, vocab = options.size
    shape = tiny.Shape(layers, hidden, hidden, experts, 4, heads=64, kv_heads=8, head_dim=64)
    folder = options.out / "model"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config(shape, vocab)))
    waiting, names = list(options.case), []
    running: dict[int, tuple[str, list[subprocess.Popen[bytes]]]] = {}
    ranks = range(options.tensor_parallel)
    while waiting or running:
        for gpu, (name, processes) in list(running.items()):
            codes = [process.poll() for process in processes]
            if None not in codes or any(codes):
                for process in processes:
                    process.kill()  # a rank that waits for one that failed
                    process.wait()
                del running[gpu]
                path = options.out / f"{name}.json"
                print(path.read_text() if path.exists() else f"{name}: failed", flush=True)
        gpus = range(0, options.gpus - len(ranks) + 1, len(ranks))
        free = [gpu for gpu in gpus if gpu not in running]
        if free and waiting:
            name, _, rest = waiting.pop(0).partition("=")
            trees, _, layers = rest.partition(":")
            names.append(name)
            if (options.out / f"{name}.json").exists():
                continue  # of an earlier run
            paths = [*trees.split("+"), os.environ.get("PYTHONPATH", "")]
            variables = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
            variables["CUDA_VISIBLE_DEVICES"] = ",".join(str(free[0] + rank) for rank in ranks)
            if len(ranks) > 1:
                variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(29500 + free[0])}
                variables |= {"WORLD_SIZE": str(len(ranks))}
            words = [sys.executable, __file__, *sys.argv[1:], "--name", name, "--layers", layers]
            with (options.out / f"{name}.log").open("w") as log:
                running[free[0]] = (
                    name,
                    [
                        subprocess.Popen(
                            words,
                            env=variables | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                            stdout=log,
                            stderr=log,
                        )
                        for rank in ranks
                    ],
                )
        else:
            time.sleep(0.5)
    if options.server:
        return
    for name in names:
        if (options.out / f"{name}-steps.npy").exists():
            print(json.dumps({"case": name, **distances(options.out, names[0], name)}), flush=True)


if __name__ == "__main__":
    main()
