"""A tiny gpt-oss checkpoint that speaks Harmony: fixed messages, built into the weights by hand.

It has gpt-oss's whole vocabulary, so that chats, tools and reasoning are served as they are for the
real model. Its words say nothing about a model's quality. Its parts, all in native MXFP4:

* the residual stream has a constant, a place for each word of the script, and bits of context;
* layer 0 (sliding window) looks back by exactly one and four tokens, through rotary phases, and its
  experts recognise the declaration of tools and the header of a tool's result;
* layer 1 (full attention) finds these anywhere before; with sinks, "nowhere" gives 0;
* its experts are the script: each neuron is a rule, "after this word, in this context, that one".
  The router sends each word to the expert with its rules.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from sparkforge.checkpoints.harmony import SPECIAL_TOKENS, VOCAB_SIZE, tokenizer
from sparkforge.checkpoints.tensors import to_bf16
from sparkforge.checkpoints.tiny import MX_BLOCK, json_files, write_checkpoint

REASONING = "The words of this thought are built in (by hand.)"
"""The text on the channel ``analysis``: first in each answer, except after a tool's result."""
ANSWER = "Hello from the forge, small and hot!"
JSON_ANSWER = '{"temperature":21}'
"""The final message if the prompt has the word " JSON"."""
TOOL, ARGUMENTS = "weather", '{"city":"Paris"}'
"""The call if the prompt declares tools and has no tool's result yet."""
TOOL_ANSWER = "Sunny all day \U0001f9be"
"""The final message after a tool's result; the last character is three tokens."""


HIDDEN_SIZE = 96
INTERMEDIATE_SIZE = 64
NUM_EXPERTS = 8
NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 4, 2, 32
# the real model's
ROPE_THETA, YARN_FACTOR, ORIGINAL_CONTEXT, WINDOW = 150_000.0, 32, 4096, 128


Words = tuple[bytes | str, ...]
_REASONING: Words = (
    b"The",
    b" words",
    b" of",
    b" this",
    b" thought",
    b" are",
    b" built",
    b" in",
    b" (",
    b"by",
    b" hand",
    b".)",
)
_ANSWER: Words = (b"Hello", b" from", b" the", b" forge", b",", b" small", b" and", b" hot", b"!")
_TOOL_ANSWER: Words = (b"Sunny", b" all", b" day", b" \xf0\x9f", b"\xa6", b"\xbe")
_CALL: Words = (
    b"comment",
    b"ary",
    b" to",
    b"=",
    b"functions",
    b".weather",
    b" ",
    "<|constrain|>",
    b"json",
    "<|message|>",
)
_ARGUMENTS: Words = (b"city", b'":"', b"Paris", b'"}', "<|call|>")  # both begin with {"
_JSON_ANSWER: Words = (b"temperature", b'":', b"21", b"}", "<|return|>")

# Bits of context.
_BEFORE = (b"analysis", b"final", b"json", "<|start|>", b"namespace")  # the word before
_THOUGHT = ".) four back"  # the message before this one was the reasoning
_DECLARES, _RESULT = "declares tools", "begins a result"  # the current word does that
_HAS_TOOLS, _HAS_RESULT, _WANTS_JSON = "has tools", "has a result", "wants JSON"

# Sizes in the residual stream. The constant is much larger than all bits together, so that the norm
# divides by nearly the same number everywhere.
_CONSTANT = 16.0
_UNIT = _CONSTANT / math.sqrt(HIDDEN_SIZE)  # 1 / a bit's value after a norm of weight 1
_GATE = 16.0  # a bit's value before the experts: half of it is beyond the limit of swiglu
_LIMIT = 7.0


@dataclass(frozen=True)
class Rule:
    """A rule: after ``word``, with all of ``given`` and none of ``without``, comes ``then``."""

    word: bytes | str
    then: bytes | str
    given: Words = ()
    without: Words = ()


def _chain(words: Words) -> list[Rule]:
    return [Rule(word, then) for word, then in itertools.pairwise(words)]


def rules() -> list[Rule]:
    """Return the script. In any context at most one rule of a word applies."""
    return [
        *_chain(("<|end|>", "<|start|>", b"assistant", "<|channel|>")),
        Rule("<|channel|>", b"analysis", without=(_HAS_RESULT, _THOUGHT)),
        Rule("<|channel|>", b"final", given=(_HAS_RESULT,)),
        Rule("<|channel|>", b"final", given=(_THOUGHT,), without=(_HAS_RESULT, _HAS_TOOLS)),
        Rule("<|channel|>", _CALL[0], given=(_THOUGHT, _HAS_TOOLS), without=(_HAS_RESULT,)),
        Rule(b"analysis", "<|message|>"),
        Rule("<|message|>", _REASONING[0], given=(b"analysis",)),
        *_chain((*_REASONING, "<|end|>")),
        Rule(b"final", "<|message|>", without=(_WANTS_JSON,)),
        Rule(b"final", b" ", given=(_WANTS_JSON,)),
        Rule("<|message|>", _ANSWER[0], given=(b"final",), without=(_HAS_RESULT,)),
        Rule("<|message|>", _TOOL_ANSWER[0], given=(b"final", _HAS_RESULT)),
        *_chain((*_ANSWER, "<|return|>")),
        *_chain((*_TOOL_ANSWER, "<|return|>")),
        *_chain(_CALL),
        Rule("<|message|>", b'{"', given=(b"json",)),
        Rule(b'{"', _ARGUMENTS[0], given=(_HAS_TOOLS,), without=(_HAS_RESULT,)),
        Rule(b'{"', _JSON_ANSWER[0], given=(_HAS_RESULT,)),
        Rule(b'{"', _JSON_ANSWER[0], without=(_HAS_TOOLS, _HAS_RESULT)),
        *_chain(_ARGUMENTS),
        *_chain(_JSON_ANSWER),
    ]


def _words() -> list[bytes | str]:
    """Return each word that has a place in the residual stream, once, in a fixed order."""
    script = [word for rule in rules() for word in (rule.word, rule.then)]
    return list(dict.fromkeys((*script, b"namespace", b" functions", b" JSON")))


def make_chat_gpt_oss(dest: Path, tokens: Sequence[bytes]) -> int:
    """Write the checkpoint to the new folder `dest`: the same bytes on every machine.

    Args:
        dest: Folder to create; it appears complete or not at all.
        tokens: o200k_base: the bytes of each token, by rank.

    Returns:
        The size of all files in bytes: 93 MB, of them 77 in embedding and lm_head.

    Raises:
        FileExistsError: `dest` exists.
        ValueError: `tokens` lacks a word of the script, so it is another vocabulary.
        OSError: The folder cannot be written.
    """
    ranks = {token: rank for rank, token in enumerate(tokens)}
    if missing := [word for word in _words() if isinstance(word, bytes) and word not in ranks]:
        raise ValueError(f"not o200k_base: it has no token {missing[0]!r}")
    return write_checkpoint(dest, _tensors(ranks), _files(ranks))


def _places() -> tuple[dict[bytes | str, int], dict[bytes | str, int]]:
    """Return the places of words and bits in the residual stream; the constant is at 0."""
    words = {word: place for place, word in enumerate(_words(), start=1)}
    names: Words = (*_BEFORE, _THOUGHT, _DECLARES, _RESULT, _HAS_TOOLS, _HAS_RESULT, _WANTS_JSON)
    bits = {name: place for place, name in enumerate(names, start=1 + len(words))}
    assert len(words) + len(bits) < HIDDEN_SIZE
    return words, bits


def _tensors(ranks: dict[bytes, int]) -> dict[str, npt.NDArray[Any]]:
    """Return all tensors by their names in the checkpoint; BF16 as uint16 bits."""
    words, bits = _places()
    embedding = np.zeros((VOCAB_SIZE, HIDDEN_SIZE), np.float32)
    embedding[:, 0] = _CONSTANT
    head = np.zeros((VOCAB_SIZE, HIDDEN_SIZE), np.float32)
    for word, place in words.items():
        token = SPECIAL_TOKENS[word] if isinstance(word, str) else ranks[word]
        embedding[token, place] = 1.0
        head[token, place] = 8.0  # with the experts' 28: a logit of 68, where all others have 2
    # outside its script it stops, unless the request forbids that
    head[SPECIAL_TOKENS["<|return|>"], 0] = 1.0
    tensors = {
        "model.embed_tokens.weight": to_bf16(embedding),
        "model.norm.weight": to_bf16(np.ones(HIDDEN_SIZE, np.float32)),
        "lm_head.weight": to_bf16(head),
    }
    recognised = [
        Rule(b" functions", _DECLARES, given=(b"namespace",)),
        Rule(b"functions", _RESULT, given=("<|start|>",)),
    ]
    attentions = (_looking_back(words, bits), _looking_for(words, bits))
    experts = (
        _experts(recognised, words, bits, bits, 1.0),
        _experts(rules(), words, bits, words, 4.0),
    )
    for layer in range(2):
        base = f"model.layers.{layer}"
        into = np.full(HIDDEN_SIZE, _UNIT, np.float32)
        tensors |= {
            f"{base}.input_layernorm.weight": to_bf16(into),
            f"{base}.post_attention_layernorm.weight": to_bf16(_GATE * into),
            **{f"{base}.self_attn.{k}": to_bf16(v) for k, v in attentions[layer].items()},
            **{f"{base}.mlp.{name}": value for name, value in experts[layer].items()},
        }
    return tensors


def _attention() -> dict[str, npt.NDArray[np.float32]]:
    """Return the weights of an attention without effect."""
    queries, keys = NUM_HEADS * HEAD_DIM, NUM_KV_HEADS * HEAD_DIM
    shapes = {
        "q_proj.weight": (queries, HIDDEN_SIZE),
        "q_proj.bias": (queries,),
        "k_proj.weight": (keys, HIDDEN_SIZE),
        "k_proj.bias": (keys,),
        "v_proj.weight": (keys, HIDDEN_SIZE),
        "v_proj.bias": (keys,),
        "o_proj.weight": (HIDDEN_SIZE, queries),
        "o_proj.bias": (HIDDEN_SIZE,),
        "sinks": (NUM_HEADS,),
    }
    return {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}


def _looking_back(
    words: dict[bytes | str, int], bits: dict[bytes | str, int]
) -> dict[str, npt.NDArray[np.float32]]:
    """Return an attention: head 0 reads the word before, head 1 the word four back.

    Keys are the same everywhere, and queries are turned by one or four tokens: so the product is
    largest at that distance. The fast frequencies tell neighbours apart (by 28 at least in the
    exponent, at up to 128 tokens); YaRN leaves them alone.
    """
    made = _attention()
    half, strength = HEAD_DIM // 2, 16.0
    turning = 6
    for pair in range(turning):
        frequency = ROPE_THETA ** (-pair / half)
        made["k_proj.bias"][pair] = strength
        for head, distance in enumerate((1, 4)):
            angle = -frequency * distance
            made["q_proj.bias"][head * HEAD_DIM + pair] = strength * math.cos(angle)
            made["q_proj.bias"][head * HEAD_DIM + half + pair] = strength * math.sin(angle)
    read = {name: (0, name) for name in _BEFORE} | {_THOUGHT: (1, _REASONING[-1])}
    for place, (bit, (head, word)) in enumerate(read.items()):
        made["v_proj.weight"][place, words[word]] = 1.0
        made["o_proj.weight"][bits[bit], head * HEAD_DIM + place] = 1.0
    return made


def _looking_for(
    words: dict[bytes | str, int], bits: dict[bytes | str, int]
) -> dict[str, npt.NDArray[np.float32]]:
    """Return an attention: heads 0 to 2 find a declaration of tools, a result, the word " JSON".

    The wanted token has an exponent of about 40, the sink 20, all else 0: neither 131,072 other
    tokens nor distance (these frequencies turn by a tenth at most) changes the answer.
    """
    made = _attention()
    wanted = {
        _HAS_TOOLS: (bits[_DECLARES], 7.0),
        _HAS_RESULT: (bits[_RESULT], 7.0),
        _WANTS_JSON: (words[b" JSON"], 1.0),
    }
    for head, (bit, (seen, size)) in enumerate(wanted.items()):
        pair = HEAD_DIM // 2 - 1 - head % 2  # heads that share keys have a pair each
        kept = head // (NUM_HEADS // NUM_KV_HEADS) * HEAD_DIM
        made["q_proj.bias"][head * HEAD_DIM + pair] = 16.0
        made["k_proj.weight"][kept + pair, seen] = 8.0 / size
        made["v_proj.weight"][kept + head, seen] = 1.0 / size
        made["o_proj.weight"][bits[bit], head * HEAD_DIM + head] = 1.0
        made["sinks"][head] = 20.0
    return made


def _experts(
    script: list[Rule],
    words: dict[bytes | str, int],
    bits: dict[bytes | str, int],
    targets: dict[bytes | str, int],
    strength: float,
) -> dict[str, npt.NDArray[Any]]:
    """Return experts: each neuron is a rule, and adds 7 times `strength` at the rule's target.

    The rules of a word are in one expert, which gets all weight of the router.
    """
    weights = np.zeros((NUM_EXPERTS, 2 * INTERMEDIATE_SIZE, HIDDEN_SIZE), np.float32)
    bias = np.zeros((NUM_EXPERTS, 2 * INTERMEDIATE_SIZE), np.float32)
    bias[:, 0::2] = -_GATE  # gates and ups alternate; a neuron without a rule stays shut
    down = np.zeros((NUM_EXPERTS, HIDDEN_SIZE, INTERMEDIATE_SIZE), np.float32)
    router = np.zeros((NUM_EXPERTS, HIDDEN_SIZE), np.float32)
    used = [0] * NUM_EXPERTS
    for rule in script:
        expert = words[rule.word] % NUM_EXPERTS
        router[expert, words[rule.word]] = 1.0
        neuron = used[expert]
        used[expert] += 1
        row = weights[expert, 2 * neuron]
        row[[words[rule.word], *(bits[bit] for bit in rule.given)]] = 1.0
        row[[bits[bit] for bit in rule.without]] = -1.0
        bias[expert, 2 * neuron] = -_GATE * (len(rule.given) + 0.5)
        down[expert, targets[rule.then], neuron] = strength
    return {
        "router.weight": to_bf16(router),
        "router.bias": to_bf16(np.zeros(NUM_EXPERTS, np.float32)),
        **_packed("experts.gate_up_proj", weights),
        "experts.gate_up_proj_bias": to_bf16(bias),
        **_packed("experts.down_proj", down),
        "experts.down_proj_bias": to_bf16(np.zeros((NUM_EXPERTS, HIDDEN_SIZE), np.float32)),
    }


def _packed(name: str, weights: npt.NDArray[np.float32]) -> dict[str, npt.NDArray[np.uint8]]:
    """Return MXFP4 blocks and scales [experts, rows, ...] of weights that are exact in it."""
    values = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
    codes = np.searchsorted(values, np.abs(weights)).astype(np.uint8)
    assert np.array_equal(values[codes], np.abs(weights))
    codes |= (weights < 0).astype(np.uint8) << 3
    blocks = codes.reshape(*codes.shape[:-1], -1, MX_BLOCK)
    scales = np.full(blocks.shape[:-1], 127, np.uint8)  # 2**0
    return {
        f"{name}_blocks": (blocks[..., 0::2] | blocks[..., 1::2] << 4).astype(np.uint8),
        f"{name}_scales": scales,
    }


def _files(ranks: dict[bytes, int]) -> dict[str, Any]:
    """Return the small files of the checkpoint by name."""
    files = json_files()
    ends = [SPECIAL_TOKENS[token] for token in ("<|return|>", "<|endoftext|>", "<|call|>")]
    start, pad = SPECIAL_TOKENS["<|startoftext|>"], SPECIAL_TOKENS["<|endoftext|>"]
    context = ORIGINAL_CONTEXT * YARN_FACTOR
    files["config.json"] |= {
        "eos_token_id": ends[0],
        "pad_token_id": pad,
        "head_dim": HEAD_DIM,
        "hidden_size": HIDDEN_SIZE,
        "initial_context_length": ORIGINAL_CONTEXT,
        "intermediate_size": INTERMEDIATE_SIZE,
        "num_hidden_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"],
        "max_position_embeddings": context,
        "num_attention_heads": NUM_HEADS,
        "num_key_value_heads": NUM_KV_HEADS,
        "num_local_experts": NUM_EXPERTS,
        "rope_theta": ROPE_THETA,
        "sliding_window": WINDOW,
        "swiglu_limit": _LIMIT,
        "vocab_size": VOCAB_SIZE,
    }
    files["config.json"]["rope_scaling"] |= {
        "beta_fast": 32.0,
        "factor": float(YARN_FACTOR),
        "original_max_position_embeddings": ORIGINAL_CONTEXT,
    }
    files["generation_config.json"] |= {
        "bos_token_id": start,
        "eos_token_id": ends,
        "pad_token_id": pad,
    }
    files["tokenizer_config.json"] |= {"model_max_length": context}
    files["tokenizer.json"] = tokenizer(ranks)
    return files
