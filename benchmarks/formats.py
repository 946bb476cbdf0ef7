"""What each format of the dense layers costs a trained model: bits against divergence.

    pip install --no-deps --require-hashes --target FOLDER -r benchmarks/formats.txt
    PYTHON benchmarks/formats.py --model FOLDER
    PYTHON benchmarks/formats.py --page

PYTHON: that of the cpu target's environment. The text is vLLM's docs, of the sdist in the store.
The first writes benchmarks/formats.json, the second docs/evidence/formats.md from it. Attention
weights and head are rounded, as the profiles do; everything is compared in one run, on the same
texts, with float32 activations.
"""

from __future__ import annotations

import argparse
import datetime
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "kernels")]  # the checkout's plugin, not an installed one

from sparkforge.core import pages  # noqa: E402

if TYPE_CHECKING:  # a page is written without it
    import torch

RECORD = ROOT / "benchmarks/formats.json"
PAGE = ROOT / "docs/evidence/formats.md"
COMPENSATED = (
    "INT8, BF16 a 64",
    "INT6, BF16 a 32",
    "INT4, E4M3 a 16, searched",
    "FP4, E4M3 a 16, searched",
    "NL4, E4M3 a 16, searched",
    "NL4, E4M3 a 32, searched",
)
"""Rounded once more against the other half of the pages."""
WITH = ", with prompts"


class Row(BaseModel):
    """A format of the table."""

    name: str
    bits: float
    attention: float
    """relative error of all attention weights together (Frobenius norm)"""
    head: float
    perplexity: float
    kl: float
    kl_error: float
    same: float


class Packed(BaseModel):
    """BF16 in 12 bits, on one kind of weights."""

    weights: str
    listed: float
    """share of the elements in the list"""
    bits: float


class Record(BaseModel):
    """All of a run."""

    date: str
    torch: str
    transformers: str
    threads: int
    seconds: int
    pages: list[str]
    tokens: int
    prompts: int
    """tokens that "with prompts" has seen"""
    permuted_kl: float
    """between the model as stored and the one with permuted channels"""
    written_back: bool
    """the model in MXFP8, written as a BF16 checkpoint and loaded again, has the same logits"""
    rows: list[Row]
    lossless: list[Packed]

    def row(self, name: str) -> Row:
        """Return the row of a format."""
        return next(one for one in self.rows if one.name == name)

    def beaten(self, row: Row) -> str:
        """Return the nearest format that needs no more (bits, prompts), or "" for itself."""
        prompts = row.name.endswith(WITH)
        able = [one for one in self.rows if prompts or not one.name.endswith(WITH)]
        best = min((one for one in able if one.bits <= row.bits), key=lambda one: one.kl)
        return best.name if best.kl < row.kl else ""


class Bar(BaseModel):
    """What a profile's format has to reach."""

    profile: str
    format: str
    wanted: str
    found: str
    met: bool


def bars(record: Record) -> list[Bar]:
    """Compare the nearest format of each profile's bytes with what it has to reach."""
    mxfp8, mxfp4, llama = (record.row(name) for name in ("MXFP8", "MXFP4", "Q8_0"))

    def best(low: float, high: float, prompts: bool = False) -> Row:
        found = [
            one
            for one in record.rows
            if low <= one.bits <= high
            and one not in (mxfp8, mxfp4)
            and prompts == one.name.endswith(WITH)
        ]
        return min(found, key=lambda one: one.kl)

    def bar(profile: str, row: Row, limit: float, of: Row) -> Bar:
        share = row.kl / of.kl
        return Bar(
            profile=profile,
            format=row.name,
            wanted=f"KL at most {limit:.3g} times {of.name}'s",
            found=f"{share:.3g}",
            met=share <= limit,
        )

    balanced = best(8.0, 8.3)
    points = abs(balanced.same - llama.same) * 100
    return [
        bar("balanced", balanced, 1 / 25, mxfp8),
        bar("balanced", balanced, 3, llama),
        Bar(
            profile="balanced",
            format=balanced.name,
            wanted="same first token within 2 points of Q8_0's",
            found=f"{points:.2f}",
            met=points <= 2,
        ),
        *(bar("fast", best(6.0, 6.6, prompts), 1 / 4, mxfp8) for prompts in (False, True)),
        *(bar("fastest", best(4.0, 4.52, prompts), 1 / 3, mxfp4) for prompts in (False, True)),
    ]


def page(record: Record) -> str:
    """Return the page of evidence."""
    rows = sorted(record.rows, key=lambda one: (-one.bits, one.kl))
    return pages.render(
        Path(__file__).with_suffix(".md.j2"),
        record=record,
        formats=[
            (
                one.name,
                f"{one.bits:.2f}",
                f"{one.attention:.4f} / {one.head:.4f}",
                f"{one.perplexity:.2f}",
                f"{one.kl:.5f} ± {one.kl_error:.5f}",
                f"{one.same:.1%}",
                record.beaten(one),
            )
            for one in rows
        ],
        bars=[
            (one.profile, one.format, one.wanted, one.found, "yes" if one.met else "**no**")
            for one in bars(record)
        ],
        lossless=[(one.weights, f"{one.listed:.3%}", f"{one.bits:.3f}") for one in record.lossless],
    )


def relative(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> float:
    """Return the error of rounded weights against the exact ones, all together."""
    lost = sum(float((ours.float() - exact.float()).square().sum()) for ours, exact in pairs)
    return math.sqrt(lost / sum(float(exact.float().square().sum()) for _, exact in pairs))


def measure(model_folder: Path, sdist: Path, count: int, only: list[str]) -> Record:
    """Measure every format (or only some) on the same pages."""
    # before torch is there: threads that spin take ten times as long beside other programs
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
    import torch
    import transformers

    from benchmarks import quantisers, trained

    begun = time.monotonic()
    torch.manual_seed(0)
    torch.set_num_threads(min(2, os.cpu_count() or 1))
    tokenizer, model = trained.load(model_folder)
    texts = trained.texts(sdist)
    scored = trained.chosen(tokenizer, texts, count, 0)
    prompts = list(trained.chosen(tokenizer, texts, count, 1).values())
    ids = list(scored.values())
    stored = next(trained.logits(model, ids))
    trained.permuted(model)
    reference = list(trained.logits(model, ids))
    permuted_kl = float((stored.exp() * (stored - reference[0])).sum(-1).mean())
    weights = trained.rounded(model)
    exact = {name: weight.bfloat16() for name, weight in weights.items()}
    print(f"{len(ids)} pages, {time.monotonic() - begun:.0f} s", flush=True)

    def tried(name: str, bits: float, one: Callable[[str], torch.Tensor]) -> Row:
        """Put a format's weights in and compare."""
        for key, weight in weights.items():
            weight.copy_(one(key))
        pairs = {key: (weight, exact[key]) for key, weight in weights.items()}
        head = pairs.pop("lm_head.weight")
        found = trained.cost(model, ids, reference)
        row = Row(
            name=name,
            bits=bits,
            attention=relative(list(pairs.values())),
            head=relative([head]),
            **vars(found),
        )
        print(f"{row!r} {time.monotonic() - begun:.0f} s", flush=True)
        return row

    rows = []
    for name, one in quantisers.TABLE.items():
        if not only or name in only:
            rows.append(tried(name, one.bits, lambda key, one=one: one.quantise(exact[key])))  # type: ignore[misc]
    wanted = [name for name in COMPENSATED if not only or name + WITH in only]
    if wanted:
        for key, weight in weights.items():
            weight.copy_(exact[key])
        seen = trained.hessians(model, prompts)
        for name in wanted:
            blocks = quantisers.BLOCKS[name]
            rows.append(
                tried(
                    name + WITH,
                    blocks.bits,
                    lambda key, b=blocks: trained.compensated(exact[key], seen[key], b),  # type: ignore[misc]
                )
            )
    for key, weight in weights.items():
        weight.copy_(quantisers.mxfp8(exact[key]))
    return Record(
        date=f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}",
        torch=torch.__version__,
        transformers=transformers.__version__,
        threads=torch.get_num_threads(),
        pages=list(scored),
        tokens=sum(map(len, ids)),
        prompts=sum(map(len, prompts)),
        permuted_kl=permuted_kl,
        written_back=written_back(model, ids[0]),
        rows=rows,
        lossless=packed(exact),
        seconds=round(time.monotonic() - begun),
    )


def written_back(model: Any, ids: torch.Tensor) -> bool:
    """Write the rounded model as a BF16 checkpoint, load it: are its logits the same?"""
    import torch
    from transformers import AutoModelForCausalLM

    from benchmarks import trained

    ours = next(trained.logits(model, [ids]))
    config = model.config.to_dict()
    del config["quantization_config"]  # that of the GGUF file
    plain = type(model)(type(model.config).from_dict(config)).bfloat16()
    plain.load_state_dict(model.state_dict())
    with tempfile.TemporaryDirectory() as folder:
        plain.save_pretrained(folder)
        again = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    return bool(torch.equal(ours, next(trained.logits(again.float().eval(), [ids]))))


def packed(exact: dict[str, torch.Tensor]) -> list[Packed]:
    """Encode the model's weights, and made-up ones in the shape of gpt-oss's qkv, in 12 bits."""
    import torch
    from vllm_sparkforge.mx import lossless

    generator = torch.Generator().manual_seed(0)
    shape = (5120, 2880)
    normal = torch.randn(shape, generator=generator) * 0.02
    chi = sum(torch.randn(shape, generator=generator).square() for _ in range(3))
    elements = torch.rand(shape, generator=generator) < 0.001
    columns = torch.rand(shape[1], generator=generator) < 0.005
    of = {
        "attention of the model": [one for name, one in exact.items() if "attn" in name],
        "its head": [exact["lm_head.weight"]],
        "made up: normal": [normal],
        "one element in 1000 is 20 times as large": [normal * torch.where(elements, 20.0, 1.0)],
        "one channel in 200 is 20 times as large": [normal * torch.where(columns, 20.0, 1.0)],
        "Student-t, 3 degrees": [normal / (chi / 3).sqrt()],
    }
    found = []
    for label, some in of.items():
        listed = count = 0
        bits = 0.0
        for one in some:
            weight = one.bfloat16()
            result = lossless.encode(weight)
            if not torch.equal(lossless.decode(result).view(torch.int16), weight.view(torch.int16)):
                raise SystemExit(f"{label}: 12 bits gave other bits back")
            listed += lossless.num_listed(result)
            count += weight.numel()
            bits += lossless.bits_each(result) * weight.numel()
        found.append(Packed(weights=label, listed=listed / count, bits=bits / count))
    return found


def main() -> None:
    """Measure, or write the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", type=Path, metavar="FOLDER")
    parser.add_argument("--pages", type=int, default=12, help="how many to score, 256 tokens each")
    parser.add_argument("--only", action="append", default=[], help="a format; may be repeated")
    parser.add_argument("--out", type=Path, default=RECORD, help="the record")
    parser.add_argument("--page", action="store_true", help="write the page from the record")
    options = parser.parse_args()
    if options.page:
        text = page(Record.model_validate_json(options.out.read_bytes()))
        PAGE.write_text(text, encoding="utf-8")
        return
    if options.model is None:
        parser.error("--model FOLDER: see the head of this file")
    sys.path.append(str(options.model))
    from sparkforge.pins import pins
    from sparkforge.store.store import Store

    file = pins.load(ROOT / "pins.yaml").upstreams["vllm"].files["sdist"]
    store = Path(os.environ.get("SPARKFORGE_STORE") or "~/.cache/sparkforge").expanduser()
    sdist = Store(store).download_path(file.sha256, file.file)
    record = measure(options.model, sdist, options.pages, options.only)
    options.out.write_text(record.model_dump_json(indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
