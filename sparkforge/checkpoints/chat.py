"""A tiny gpt-oss checkpoint that speaks Harmony: fixed messages, built into the weights by hand.

It has gpt-oss's whole vocabulary, and says nothing about a model's quality. Its parts:

* the residual stream has a constant, a place for each word of the script, and bits of context;
* layer 0 (sliding window) looks back by exactly one and four tokens, through rotary phases, and its
  experts recognise the declaration of tools and the header of a tool's result;
* layer 1 (full attention) finds these anywhere before; with sinks, "nowhere" gives 0;
* its experts are the script: each neuron is a rule, "after this word, in this context, that one".
  The router sends each word to the expert with its rules.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from sparkforge.checkpoints.tiny import Shape, byte_bpe, json_files, to_bf16, write_checkpoint

# the text on the channel ``analysis``: first in each answer, except after a tool's result
REASONING = "The words of this thought are built in (by hand.)"
ANSWER = "Hello from the forge, small and hot!"
JSON_ANSWER = '{"temperature":21}'  # if the prompt has the word " JSON"
# the call if the prompt declares tools and has no tool's result yet
TOOL, ARGUMENTS = "weather", '{"city":"Paris"}'
TOOL_ANSWER = "Sunny all day \U0001f9be"  # after a result; the last character is three tokens

HIDDEN_SIZE, INTERMEDIATE_SIZE, NUM_EXPERTS = 96, 64, 8
NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 4, 2, 32
SHAPE = Shape(2, HIDDEN_SIZE, INTERMEDIATE_SIZE, NUM_EXPERTS, 2, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM)
# the real model's, as all of chat.json
ROPE_THETA, VOCAB_SIZE = 150_000.0, 201_088
SPECIAL_TOKENS = {
    "<|startoftext|>": 199_998,
    "<|endoftext|>": 199_999,
    "<|return|>": 200_002,
    "<|constrain|>": 200_003,
    "<|channel|>": 200_005,
    "<|start|>": 200_006,
    "<|end|>": 200_007,
    "<|message|>": 200_008,
    "<|call|>": 200_012,
    "<|endofprompt|>": 200_018,
}
"""Of o200k_harmony; the other numbers from 200,000 on are reserved ones."""
# o200k_base's split of text
_ENDINGS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_LOWER, _UPPER = r"\p{Ll}\p{Lm}\p{Lo}\p{M}", r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}"
_SPLIT = (
    rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]*[{_LOWER}]+{_ENDINGS}"
    rf"|[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]+[{_LOWER}]*{_ENDINGS}"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

Word = bytes | str  # a token: bytes of the vocabulary, or the name of a special one
Words = tuple[Word, ...]
Weights = npt.NDArray[np.float32]


def _split(text: str) -> Words:
    words = text.split("~")
    return tuple(word if word.startswith("<|") else word.encode() for word in words)


_REASONING = _split("The~ words~ of~ this~ thought~ are~ built~ in~ (~by~ hand~.)")
_ANSWER = _split("Hello~ from~ the~ forge~,~ small~ and~ hot~!")
_TOOL_ANSWER: Words = (*_split("Sunny~ all~ day"), b" \xf0\x9f", b"\xa6", b"\xbe")
_CALL = _split("comment~ary~ to~=~functions~.weather~ ~<|constrain|>~json~<|message|>")
_ARGUMENTS = _split('city~":"~Paris~"}~<|call|>')  # both begin with {"
_JSON_ANSWER = _split('temperature~":~21~}~<|return|>')

# Bits of context.
_BEFORE = (b"analysis", b"final", b"json", "<|start|>", b"namespace")  # the word before
_THOUGHT = ".) four back"  # the message before this one was the reasoning
_DECLARES, _RESULT = "declares tools", "begins a result"  # the current word does that
_HAS_TOOLS, _HAS_RESULT, _WANTS_JSON = "has tools", "has a result", "wants JSON"

# the constant is much larger than all bits together: the norm divides by nearly the same number
_CONSTANT = 16.0
_UNIT = _CONSTANT / math.sqrt(HIDDEN_SIZE)  # 1 / a bit's value after a norm of weight 1
_GATE = 16.0  # a bit's value before the experts: half of it is beyond the limit of swiglu


@dataclass(frozen=True)
class Rule:
    """After ``word``, with all of ``given`` and none of ``without``, comes ``then``."""

    word: Word
    then: Word
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


# places in the residual stream; the constant is at 0
_SCRIPT: list[Word] = [word for rule in rules() for word in (rule.word, rule.then)]
_EVERY = dict.fromkeys([*_SCRIPT, b"namespace", b" functions", b" JSON"])
_WORDS = {word: place for place, word in enumerate(_EVERY, start=1)}
_NAMES: Words = (*_BEFORE, _THOUGHT, _DECLARES, _RESULT, _HAS_TOOLS, _HAS_RESULT, _WANTS_JSON)
_BITS: dict[Word, int] = {name: place for place, name in enumerate(_NAMES, 1 + len(_WORDS))}
assert len(_WORDS) + len(_BITS) < HIDDEN_SIZE


def make_chat_gpt_oss(dest: Path, tokens: Sequence[bytes]) -> None:
    """Write the checkpoint (93 MB) to the new folder `dest`.

    ``tokens`` are those of o200k_base by rank; KeyError: they are of another vocabulary.
    """
    ranks = {token: rank for rank, token in enumerate(tokens)}
    special = {number: f"<|reserved_{number}|>" for number in range(len(ranks), VOCAB_SIZE)}
    special |= {number: name for name, number in SPECIAL_TOKENS.items()}
    split = {"type": "Split", "pattern": {"Regex": _SPLIT}, "behavior": "Isolated", "invert": False}
    files = {**json_files(SHAPE, "chat.json"), "tokenizer.json": byte_bpe(special, ranks, split)}
    write_checkpoint(dest, _tensors(ranks), files)


def _tensors(ranks: dict[bytes, int]) -> dict[str, npt.NDArray[Any]]:
    """Return all tensors by their names in the checkpoint; BF16 as uint16 bits."""
    embedding, head = _zeros(VOCAB_SIZE, HIDDEN_SIZE), _zeros(VOCAB_SIZE, HIDDEN_SIZE)
    embedding[:, 0] = _CONSTANT
    for word, place in _WORDS.items():
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
    into = np.full(HIDDEN_SIZE, _UNIT, np.float32)
    layers = (
        (_looking_back(), _experts(recognised, _BITS, 1.0)),
        (_looking_for(), _experts(rules(), _WORDS, 4.0)),
    )
    for layer, (attention, experts) in enumerate(layers):
        base = f"model.layers.{layer}"
        tensors |= {
            f"{base}.input_layernorm.weight": to_bf16(into),
            f"{base}.post_attention_layernorm.weight": to_bf16(_GATE * into),
            **{f"{base}.self_attn.{k}": to_bf16(v) for k, v in attention.items()},
            **{f"{base}.mlp.{name}": value for name, value in experts.items()},
        }
    return tensors


def _zeros(*shape: int) -> Weights:
    return np.zeros(shape, np.float32)


def _attention() -> dict[str, Weights]:
    made, wide = {"sinks": _zeros(NUM_HEADS)}, NUM_HEADS * HEAD_DIM
    for name, rows in {"q": wide, "k": wide // 2, "v": wide // 2, "o": HIDDEN_SIZE}.items():
        columns = wide if name == "o" else HIDDEN_SIZE
        made |= {f"{name}_proj.weight": _zeros(rows, columns), f"{name}_proj.bias": _zeros(rows)}
    return made


def _looking_back() -> dict[str, Weights]:
    """Return an attention: head 0 reads the word before, head 1 the word four back.

    Keys are the same everywhere, and queries are turned by one or four tokens: so the product is
    largest at that distance. YaRN leaves these fast frequencies alone.
    """
    made = _attention()
    half, strength = HEAD_DIM // 2, 16.0
    for pair in range(6):
        made["k_proj.bias"][pair] = strength
        for head, distance in enumerate((1, 4)):
            angle, row = -(ROPE_THETA ** (-pair / half)) * distance, head * HEAD_DIM + pair
            made["q_proj.bias"][row] = strength * math.cos(angle)
            made["q_proj.bias"][row + half] = strength * math.sin(angle)
    read = {name: (0, name) for name in _BEFORE} | {_THOUGHT: (1, _REASONING[-1])}
    for place, (bit, (head, word)) in enumerate(read.items()):
        made["v_proj.weight"][place, _WORDS[word]] = 1.0
        made["o_proj.weight"][_BITS[bit], head * HEAD_DIM + place] = 1.0
    return made


def _looking_for() -> dict[str, Weights]:
    """Return an attention: heads 0 to 2 find a declaration of tools, a result, the word " JSON".

    The wanted token has an exponent of about 40, the sink 20, all else 0, at any distance.
    """
    made = _attention()
    wanted = {
        _HAS_TOOLS: (_BITS[_DECLARES], 7.0),
        _HAS_RESULT: (_BITS[_RESULT], 7.0),
        _WANTS_JSON: (_WORDS[b" JSON"], 1.0),
    }
    for head, (bit, (seen, size)) in enumerate(wanted.items()):
        pair = HEAD_DIM // 2 - 1 - head % 2  # heads that share keys have a pair each
        kept = head // (NUM_HEADS // NUM_KV_HEADS) * HEAD_DIM
        made["q_proj.bias"][head * HEAD_DIM + pair] = 16.0
        made["k_proj.weight"][kept + pair, seen] = 8.0 / size
        made["v_proj.weight"][kept + head, seen] = 1.0 / size
        made["o_proj.weight"][_BITS[bit], head * HEAD_DIM + head] = 1.0
        made["sinks"][head] = 20.0
    return made


def _experts(
    script: list[Rule], targets: dict[Word, int], strength: float
) -> dict[str, npt.NDArray[Any]]:
    """Return experts: each neuron is a rule, and adds 7 times `strength` at the rule's target."""
    weights = _zeros(NUM_EXPERTS, 2 * INTERMEDIATE_SIZE, HIDDEN_SIZE)
    bias = _zeros(NUM_EXPERTS, 2 * INTERMEDIATE_SIZE)
    bias[:, 0::2] = -_GATE  # gates and ups alternate; a neuron without a rule stays shut
    down = _zeros(NUM_EXPERTS, HIDDEN_SIZE, INTERMEDIATE_SIZE)
    router = _zeros(NUM_EXPERTS, HIDDEN_SIZE)
    neurons = [itertools.count() for _ in range(NUM_EXPERTS)]
    for rule in script:
        expert = _WORDS[rule.word] % NUM_EXPERTS
        router[expert, _WORDS[rule.word]] = 1.0
        neuron = next(neurons[expert])
        row = weights[expert, 2 * neuron]
        row[[_WORDS[rule.word], *(_BITS[bit] for bit in rule.given)]] = 1.0
        row[[_BITS[bit] for bit in rule.without]] = -1.0
        bias[expert, 2 * neuron] = -_GATE * (len(rule.given) + 0.5)
        down[expert, targets[rule.then], neuron] = strength
    return {
        "router.weight": to_bf16(router),
        "router.bias": to_bf16(_zeros(NUM_EXPERTS)),
        **_packed("experts.gate_up_proj", weights),
        "experts.gate_up_proj_bias": to_bf16(bias),
        **_packed("experts.down_proj", down),
        "experts.down_proj_bias": to_bf16(_zeros(NUM_EXPERTS, HIDDEN_SIZE)),
    }


def _packed(name: str, weights: Weights) -> dict[str, npt.NDArray[np.uint8]]:
    """Return MXFP4 blocks and scales (1) of weights that are exact in it."""
    values = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
    codes = np.searchsorted(values, np.abs(weights)).astype(np.uint8)
    assert np.array_equal(values[codes], np.abs(weights))
    codes |= (weights < 0).astype(np.uint8) << 3
    blocks = codes.reshape(*codes.shape[:-1], -1, 32)
    pairs = (blocks[..., 0::2] | blocks[..., 1::2] << 4).astype(np.uint8)
    return {f"{name}_blocks": pairs, f"{name}_scales": np.full(blocks.shape[:-1], 127, np.uint8)}
