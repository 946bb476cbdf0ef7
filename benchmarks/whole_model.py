"""Speed of whole models at gpt-oss-120b's shapes, with every weight filled: vLLM's own benchmark.

    PYTHONPATH=TREE:PLUGIN PYTHON benchmarks/whole_model.py --moe-backend marlin \\
        --attention-backend TRITON_ATTN --input-len 512 --batch-size 4 --output-len 130 \\
        --additional-config '{"sparkforge": {"mxfp4_layers": "qkv=int8,o=int8,lm_head=int8"}}'

The arguments are those of ``vllm bench latency``. Two runs with ``--output-len`` 2 and 130 have 128
steps between them. PYTHONPATH says what is measured: a tree of vLLM with the release's extension
modules, and our plugin. VLLM_ENABLE_V1_MULTIPROCESSING=1 has the engine in a process of its own.

``load_format=dummy`` leaves the experts zero. Here all weights come through vLLM's own loading of a
checkpoint, made on the device from one seed: dense ones of a Student-t distribution with five
degrees (real ones have outliers), experts of random bytes, and a head under which the likeliest 256
tokens have most of the probability. So routers choose unlike experts for unlike tokens.

The figures in docs/evidence/h200.md are of an earlier script, which timed in its own loop and also
compared the answers of models (commit 1678b180).
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parent.parent))

from sparkforge.checkpoints import tiny

SEED = 5
ARGUMENTS = (
    *("--load-format", "made_up", "--skip-tokenizer-init", "--disable-detokenize"),
    *("--max-model-len", "4096", "--gpu-memory-utilization", "0.92", "--num-iters", "3"),
)


def config() -> dict[str, Any]:
    """Return config.json of gpt-oss-120b; ``--hf-overrides`` makes a smaller one of it."""
    shape, vocab = tiny.Shape(36, 2880, 2880, 128, 4, heads=64, kv_heads=8, head_dim=64), 201088
    found: dict[str, Any] = tiny.json_files(shape, "tiny.json")["config.json"]
    found["rope_scaling"] |= {"beta_fast": 32.0, "factor": 32.0}
    found["rope_scaling"]["original_max_position_embeddings"] = 4096
    found |= {"initial_context_length": 4096, "max_position_embeddings": 131072}
    found |= {"rope_theta": 150000.0, "sliding_window": 128, "vocab_size": vocab}
    return found | {"eos_token_id": vocab - 2, "pad_token_id": vocab - 1}


def tensors(model: Any) -> Any:
    """Yield the tensors of a configuration's checkpoint."""
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
            scale = chi.div_(5).sqrt_()
            parts.append(normal(*shape).div_(scale).mul_(deviation * 0.6**0.5).bfloat16())
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
        yield f"{base}self_attn.o_proj.weight", dense(hidden, heads, 0.16 * heads**-0.5)
        yield f"{base}self_attn.o_proj.bias", small(hidden)
        yield f"{base}self_attn.sinks", small(model.num_attention_heads, deviation=1.0)
        yield f"{base}mlp.router.weight", small(experts, hidden, deviation=2 * hidden**-0.5)
        yield f"{base}mlp.router.bias", small(experts)
        for name, rows, columns in (("gate_up", 2 * inner, hidden), ("down", hidden, inner)):
            at = f"{base}mlp.experts.{name}_proj_"
            yield f"{at}blocks", some(0, 256, experts, rows, columns // 32, 16)
            low = 119 if name == "gate_up" else 116  # 2^-8, 2^-11
            yield f"{at}scales", some(low, low + 3, experts, rows, columns // 32)
            yield f"{at}bias", small(experts, rows)
    yield "model.norm.weight", small(hidden, mean=1.0)
    yield "lm_head.weight", dense(model.vocab_size, hidden, 6 * hidden**-0.5)


def main() -> None:
    """Run ``vllm bench latency`` on a made-up model."""
    os.environ.update(VLLM_NO_USAGE_STATS="1", HF_HUB_OFFLINE="1", VLLM_USE_FLASHINFER_SAMPLER="0")
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"  # with the loader below
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    from vllm.entrypoints.cli.main import main as vllm
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader

    @register_model_loader("made_up")
    class MadeUp(BaseModelLoader):  # type: ignore[misc]
        def download_model(self, model_config: Any) -> None:
            pass

        def load_weights(self, model: Any, model_config: Any) -> None:
            model.load_weights(tensors(model_config.hf_config))

    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(config()))
        sys.argv[1:1] = ["bench", "latency", "--model", folder, *ARGUMENTS]
        vllm()


if __name__ == "__main__":
    main()
