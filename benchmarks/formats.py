"""What each format of the dense layers costs a trained model: bits against divergence.

    pip install --no-deps --require-hashes --target FOLDER -r benchmarks/formats.txt
    PYTHON benchmarks/formats.py --model FOLDER
    PYTHON benchmarks/formats.py --page

PYTHON: that of the cpu target's environment. The text is vLLM's docs, of the sdist in the store.
The first writes benchmarks/formats.json, the second docs/evidence/formats.md from it. Attention
weights and head are rounded, as the profiles do; everything is compared in one run, on the same
texts, with float32 activations. The profiles' formats are then served by vLLM's CPU engine from
checkpoints in BF16, and compared with its own answers for the model as it is.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import os
import sys
import tempfile
import time
from functools import partial
from importlib.metadata import version
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "kernels")]  # the checkout's plugin, not an installed one

from benchmarks import served  # noqa: E402
from sparkforge.check.divergence import measured  # noqa: E402
from sparkforge.core import pages  # noqa: E402

if TYPE_CHECKING:  # a page is written without it
    import torch

RECORD = ROOT / "benchmarks/formats.json"
PAGE = ROOT / "docs/evidence/formats.md"
PROFILES = {"balanced": "INT8", "fast": "INT6", "fastest": "NVFP4"}
SERVED = ("BF16", "Q8_0", "MXFP8", *PROFILES.values())
"""Also by vLLM; the first is what the others are compared with."""


Row = dict[str, Any]
"""What a format costs: perplexity, ``kl`` from the reference (mean over positions, in nats) with
its standard error from the means of the texts, ``same``: share of positions with the same likeliest
token. Of torch's also bits, and the relative errors of all attention weights together and of the
head (Frobenius norm); of vLLM's ``covered``, the probability of the tokens that both have."""
Record = dict[str, Any]
"""All of a run: formats.json."""


def row_of(record: Record, name: str) -> Row:
    """Return the row of a format."""
    return next(one for one in record["rows"] if one["name"] == name)


def beaten(record: Record, row: Row) -> str:
    """Return the nearest format that needs no more bits, or "" for itself."""
    fit = (one for one in record["rows"] if one["bits"] <= row["bits"])
    best = min(fit, key=lambda one: one["kl"])
    return best["name"] if best["kl"] < row["kl"] else ""


def bars(record: Record) -> list[tuple[str, ...]]:
    """Return a row for what a profile's format has to reach: wanted, found, and whether it does."""

    def row(profile: str, wanted: str, found: float, limit: float) -> tuple[str, ...]:
        met = "yes" if found <= limit else "**no**"
        return profile, PROFILES[profile], wanted, f"{found:.3g}", met

    def bar(profile: str, limit: float, other: str) -> tuple[str, ...]:
        share = row_of(record, PROFILES[profile])["kl"] / row_of(record, other)["kl"]
        return row(profile, f"KL at most {limit:.3g} times {other}'s", share, limit)

    same = (row_of(record, name)["same"] for name in (PROFILES["balanced"], "Q8_0"))
    points = abs(next(same) - next(same)) * 100
    return [
        bar("balanced", 1 / 25, "MXFP8"),
        bar("balanced", 3, "Q8_0"),
        row("balanced", "same first token within 2 points of Q8_0's", points, 2),
        bar("fast", 1 / 4, "MXFP8"),
        bar("fastest", 1 / 3, "MXFP4"),
    ]


def page(record: Record) -> str:
    """Return the page of evidence."""
    rows = sorted(record["rows"], key=lambda one: (-one["bits"], one["kl"]))
    nearer = partial(beaten, record)
    template = Path(__file__).with_suffix(".md.j2")
    return pages.render(template, record=record, rows=rows, beaten=nearer, bars=bars(record))


def relative(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> float:
    """Return the error of rounded weights against the exact ones, all together."""
    lost = sum(float((ours.float() - exact.float()).square().sum()) for ours, exact in pairs)
    return math.sqrt(lost / sum(float(exact.float().square().sum()) for _, exact in pairs))


def measure(model_folder: Path, sdist: Path, count: int) -> Record:
    """Measure every format on the same pages."""
    # before torch is there: threads that spin take ten times as long beside other programs
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
    import torch
    import transformers

    from benchmarks import trained

    begun = time.monotonic()
    torch.manual_seed(0)
    torch.set_num_threads(min(2, os.cpu_count() or 1))
    tokenizer, model = trained.load(model_folder)
    scored = trained.chosen(tokenizer, trained.texts(sdist), count)
    ids = list(scored.values())
    stored = next(trained.logits(model, ids))
    trained.permuted(model)
    reference = list(trained.logits(model, ids))
    permuted_kl = float((stored.exp() * (stored - reference[0])).sum(-1).mean())
    weights = trained.rounded(model)
    exact = {name: weight.bfloat16() for name, weight in weights.items()}
    print(f"{len(ids)} pages, {time.monotonic() - begun:.0f} s", flush=True)

    rows, finalists = [], []
    first: list[served.Page] = []
    texts = [one.tolist() for one in ids]
    for name, (bits, quantise) in trained.TABLE.items():
        for key, weight in weights.items():
            weight.copy_(quantise(exact[key]))
        pairs = {key: (weight, exact[key]) for key, weight in weights.items()}
        head = relative([pairs.pop("lm_head.weight")])
        attention, cost = relative(list(pairs.values())), trained.cost(model, ids, reference)
        rows.append({"name": name, "bits": bits, "attention": attention, "head": head} | cost)
        print(f"{rows[-1]!r} {time.monotonic() - begun:.0f} s", flush=True)
        if name in SERVED:
            with tempfile.TemporaryDirectory() as folder:
                trained.save(model, Path(folder))
                said = served.scored(Path(folder), texts)
            first = first or said
            finalists.append(answered(name, texts, first, said))
            print(f"{finalists[-1]!r} {time.monotonic() - begun:.0f} s", flush=True)
    return {
        "date": f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "vllm": version("vllm"),
        "threads": torch.get_num_threads(),
        "seconds": round(time.monotonic() - begun),
        "pages": list(scored),
        "tokens": sum(map(len, ids)),
        "permuted_kl": permuted_kl,  # between the model as stored and with permuted channels
        "rows": rows,
        "served": finalists,
        "lossless": packed(exact),
    }


def answered(
    name: str, texts: list[list[int]], reference: list[served.Page], pages: list[served.Page]
) -> Row:
    """Compare what vLLM said of each text with what it said of the model as it is."""
    from benchmarks import trained

    found = [measured(p, q) for p, q in zip(reference, pages, strict=True)]
    losses = [
        fmean(-row[token] for row, token in zip(page, text[1:], strict=True))
        for page, text in zip(pages, texts, strict=True)
    ]
    kls, same = ([one[key] for one in found] for key in ("mean_kl", "agreement"))
    cost = trained.summed(kls, same, losses)
    return {"name": name, "covered": fmean(one["covered"] for one in found)} | cost


def packed(exact: dict[str, torch.Tensor]) -> list[dict[str, Any]]:
    """Encode the model's weights, and made-up ones in the shape of gpt-oss's qkv, in 12 bits.

    ``listed``: share of the elements in the list.
    """
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
        found.append({"weights": label, "listed": listed / count, "bits": bits / count})
    return found


def main() -> None:
    """Measure, or write the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", type=Path, metavar="FOLDER")
    parser.add_argument("--pages", type=int, default=12, help="how many to score, 256 tokens each")
    parser.add_argument("--page", action="store_true", help="write the page from the record")
    options = parser.parse_args()
    if options.page:
        PAGE.write_text(page(json.loads(RECORD.read_bytes())), encoding="utf-8")
        return
    if options.model is None:
        parser.error("--model FOLDER: see the head of this file")
    sys.path.append(str(options.model))
    from sparkforge.pins import pins
    from sparkforge.store.store import Store

    file = pins.load(ROOT / "pins.yaml").upstreams["vllm"].files["sdist"]
    store = Path(os.environ.get("SPARKFORGE_STORE") or "~/.cache/sparkforge").expanduser()
    sdist = Store(store).download_path(file.sha256, file.file)
    record = measure(options.model, sdist, options.pages)
    RECORD.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
