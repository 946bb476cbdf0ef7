"""Does a whole model compute on a GPU what it should? vLLM against a float32 reference.

    python benchmarks/gpu_logits.py --case stock=/trees/stock:marlin \\
        --case dense=/trees/stock+/trees/plugin:marlin:qkv,o,lm_head

A case is NAME=TREE[+PLUGIN]:BACKEND[:LAYERS]. TREE is a folder that holds a package ``vllm`` with
the extension modules of the release wheel (an unpacked wheel), or ``-`` for the installed one;
PLUGIN is one with our plugin's wheel; BACKEND goes to ``--moe-backend``, LAYERS to the plugin's
``mxfp4_layers``. Speed: ``vllm bench latency --load-format dummy``.

Serves a made-up gpt-oss checkpoint of a few megabytes in vLLM, in a process for each case, and
compares the distribution of every next token, of the prompts and of what is generated, with that of
the numpy reference of our tests, whose weights are quantised in the same places by a quantiser of
its own. The hidden size, 320, is one that Marlin's stock padding enlarges (to 512) and the series
does not. All sizes are such that the decode kernels can run; ``--rows 8`` (or fewer) makes each
step so small that they do.

Prints, for each case, the Kullback-Leibler divergence from the reference (nats: median and mean
over positions, and the median over generated tokens alone; where BF16 makes the router pick another
expert, a position is far off) and, as a control, that from the reference of the *other*
quantisation. Exit code 1 if a case's median is beyond --limit or not below that from the other.

Needs numpy, vLLM and a GPU. Run it in the checkout.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT)]

from sparkforge.check.roofline import parse_layers  # noqa: E402
from sparkforge.checkpoints import gptoss, tiny  # noqa: E402
from tests.patches import mx_reference  # noqa: E402

# eight heads to a KV head, as in gpt-oss: FlashInfer has a module for each such number
SHAPE = tiny.Shape(
    hidden=320, inter=128, experts=16, experts_per_token=4, heads=16, kv_heads=2, head_dim=64
)
PROMPTS = (
    [ord(letter) for letter in "Weights are read once for every token, whoever asks for it."],
    [(37 * i + 11) % 250 for i in range(96)],  # longer than the sliding window
)
MXFP4: dict[str, str] = dict.fromkeys(("qkv", "o", "lm_head"), "mxfp4")

TOKENS = 32  # to generate: each is a decode step, with its attention kernel

Logs = npt.NDArray[np.float64]
Scored = tuple[list[int], Logs]
"""A prompt with its generated tokens but the last, and the log-probabilities that vLLM has for the
token behind each of them."""


@dataclass(frozen=True)
class Case:
    """One configuration: of the folders to put first on the Python path, and vLLM's options."""

    name: str
    tree: str
    backend: str
    layers: str
    """Empty: a vLLM without the plugin, or its default."""

    @classmethod
    def parse(cls, text: str) -> Case:
        """Read ``NAME=TREE[+PLUGIN]:BACKEND[:LAYERS]``, or raise ValueError."""
        name, _, rest = text.partition("=")
        tree, backend, layers, *more = [*rest.split(":"), "", ""]
        if not (name and tree and backend) or any(more):
            raise ValueError(text)
        return cls(name, tree, backend, layers)

    def scored(self, result: Path, checkpoint: Path) -> list[Scored]:
        """Measure in a process of its own; SystemExit if it fails, its output was passed on."""
        variables = {
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            "VLLM_USE_FLASHINFER_SAMPLER": "0",  # compiles at run time, and samples only
        }
        if self.tree != "-":
            path = [*self.tree.split("+"), os.environ.get("PYTHONPATH", "")]
            variables["PYTHONPATH"] = os.pathsep.join(filter(None, path))
        more = ("--measure", str(result), str(checkpoint), "--only", self.name)
        # vLLM's log goes to standard error, so that standard output holds the table alone
        done = subprocess.run(
            [sys.executable, __file__, *sys.argv[1:], *more],
            env={**os.environ, **variables},
            stdout=sys.stderr,
            check=False,
        )
        if done.returncode != 0:
            sys.exit(f"gpu_logits: case {self.name} failed with exit code {done.returncode}")
        return [(tokens, np.asarray(logs)) for tokens, logs in json.loads(result.read_text())]


def log_softmax(logits: npt.NDArray[Any]) -> Logs:
    """Return the natural logarithms of the probabilities: [positions, vocabulary]."""
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True)))


def divergence(reference: Logs, other: Logs) -> Logs:
    """Return KL(reference ‖ other) for each position, in nats."""
    return np.asarray((np.exp(reference) * (reference - other)).sum(axis=-1))


def measure(
    case: Case, attention: str, rows: int | None, checkpoint: Path, vocabulary: int
) -> list[tuple[list[int], list[list[float]]]]:
    """Return what vLLM scored, as JSON: a ``Scored`` for each prompt."""
    from vllm import LLM, SamplingParams

    extra: dict[str, Any] = {}
    if case.layers:
        extra["additional_config"] = {"sparkforge": {"mxfp4_layers": case.layers}}
    if rows:
        extra["max_num_batched_tokens"] = rows
    llm = LLM(
        str(checkpoint),
        skip_tokenizer_init=True,
        max_model_len=256,
        max_num_seqs=1,
        gpu_memory_utilization=0.2,
        moe_backend=case.backend,
        attention_backend=attention,
        enforce_eager=True,
        max_logprobs=vocabulary,
        enable_prefix_caching=False,
        **extra,
    )
    sampling = SamplingParams(
        temperature=0,
        max_tokens=TOKENS,
        ignore_eos=True,
        prompt_logprobs=vocabulary,
        logprobs=vocabulary,
        detokenize=False,
    )
    prompts: list[Any] = [{"prompt_token_ids": list(prompt)} for prompt in PROMPTS]
    found = []
    for prompt, output in zip(
        PROMPTS, llm.generate(prompts, sampling, use_tqdm=False), strict=True
    ):
        made = output.outputs[0]
        assert output.prompt_logprobs is not None and made.logprobs is not None
        known = [row for row in (*output.prompt_logprobs, *made.logprobs) if row is not None]
        scores = [[row[token].logprob for token in range(vocabulary)] for row in known]
        found.append(([*prompt, *made.token_ids[:-1]], scores))
    return found


def main() -> None:
    """Compare every case with the reference; see the module's text."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--case", type=Case.parse, action="append", required=True)
    parser.add_argument("--attention", default="TRITON_ATTN", help="attention backend")
    parser.add_argument("--rows", type=int, help="tokens a step (default: all of a prompt)")
    parser.add_argument("--limit", type=float, default=0.05, help="median divergence, nats")
    parser.add_argument("--measure", type=Path, nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--only", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        result, checkpoint = arguments.measure
        (case,) = (case for case in arguments.case if case.name == arguments.only)
        scores = measure(case, arguments.attention, arguments.rows, checkpoint, tiny.VOCAB_SIZE)
        result.write_text(json.dumps(scores))
        return
    wrong = False
    with tempfile.TemporaryDirectory() as name:
        checkpoint = tiny.make_tiny_gpt_oss(Path(name) / "checkpoint", shape=SHAPE).path
        model = gptoss.load(checkpoint)
        heads = ("case", "KL from its reference, median", "mean", "generated", "from the other")
        print(f"| {' | '.join(heads)} |\n{'| --- ' * len(heads)}|")
        for case in arguments.case:
            found = case.scored(checkpoint.parent / f"{case.name}.json", checkpoint)
            ours = {
                str(kind): str(form) for kind, form in parse_layers(case.layers or "moe").items()
            }
            own = mx_reference.quantize_layers(model, ours)
            other = mx_reference.quantize_layers(model, {} if case.layers else MXFP4)
            near, far = (
                [
                    divergence(log_softmax(gptoss.logits(which, tokens)), logs)
                    for tokens, logs in found
                ]
                for which in (own, other)
            )
            every = np.concatenate(near)
            made = float(np.median(np.concatenate([one[-TOKENS:] for one in near])))
            median, control = float(np.median(every)), float(np.median(np.concatenate(far)))
            wrong |= not max(median, made) < min(arguments.limit, control)
            figures = (median, every.mean(), made, control)
            spec = f"{case.name}={case.tree}:{case.backend}:{case.layers}"
            print(f"| {spec} | {' | '.join(f'{one:.5f}' for one in figures)} |", flush=True)
    if wrong:
        sys.exit("gpu_logits: a case is not what its reference says")


if __name__ == "__main__":
    main()
