"""A profile of pins.yaml, as the image holds it: JSON → options of ``vllm serve``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sparkforge.serving.document import Document, DocumentError, Kind
from sparkforge.serving.errors import StartError

# One value each. Names and values were held against vLLM 0.31.0's own parser:
# tests/patches/test_profiles.py.
_VALUES = (
    ("moe_backend", "--moe-backend"),
    ("attention_backend", "--attention-backend"),
    ("kv_cache_dtype", "--kv-cache-dtype"),
    ("load_format", "--load-format"),
    ("max_model_len", "--max-model-len"),
    ("max_num_seqs", "--max-num-seqs"),
    ("max_num_batched_tokens", "--max-num-batched-tokens"),
    ("mxfp4_layers", "--mxfp4-layers"),
    ("reasoning_parser", "--reasoning-parser"),
)

# What a profile may hold besides, by kind; the values themselves are vLLM's to judge.
_FLAGS = (
    "prefix_caching",
    "enforce_eager",
    "exclude_tools_when_none",
    "evict_page_cache",
    "answers",
)
_TEXTS = ("tool_call_parser", "vocabulary_sha256", "cuda_arch", "on_mismatch", "warm_up")
_MEMORY = ("keep_free_gib", "least_gib", "most_percent")


def read(path: Path) -> Mapping[str, Any]:
    """Return the profile in a file.

    Raises:
        StartError: it holds no profile.
        OSError: it cannot be read.
    """
    try:
        found = Document.load(path)
        profile = found.get(dict)
        for name in (key for key, _ in _VALUES if profile.get(key) is not None):
            found.get(str if isinstance(profile[name], str) else int, name)
        for kind, names in ((bool, _FLAGS), (str, _TEXTS)):
            for name in (one for one in names if profile.get(one) is not None):
                found.get(kind, name)
        for index in range(len(_part(found, list, "cudagraph_capture_sizes"))):
            found.get(int, "cudagraph_capture_sizes", index)
        for kind in _part(found, dict, "expect"):
            found.get(str, "expect", kind)
        for name in _MEMORY if _part(found, dict, "memory") else ():
            found.get(int, "memory", name)
    except DocumentError as error:
        raise StartError(f"this is no profile: {error}") from None
    return profile


def _part(found: Document, kind: type[Kind], name: str) -> Kind:
    """Return a part of a profile, an empty one where there is none."""
    return kind() if found.value.get(name) is None else found.get(kind, name)


def options(profile: Mapping[str, Any], *, most_memory: bool = False) -> list[str]:
    """Return the options that a profile stands for.

    Args:
        most_memory: with the largest share of memory that the profile allows. The right one depends
            on the machine and the hour: ``memory.utilisation``.
    """
    words: list[str] = []
    if most_memory and (plan := profile.get("memory")):
        words += ["--gpu-memory-utilization", f"{int(plan['most_percent']) / 100:.2f}"]
    for key, option in _VALUES:
        if (value := profile.get(key)) is not None:
            words += [option, str(value)]
    if sizes := profile.get("cudagraph_capture_sizes"):
        words += ["--cudagraph-capture-sizes", *(str(size) for size in sizes)]
    if parser := profile.get("tool_call_parser"):
        # without the second one, "tool_choice": "auto" is answered 400
        words += ["--tool-call-parser", str(parser), "--enable-auto-tool-choice"]
    if profile.get("exclude_tools_when_none"):
        # told of tools, the model calls them all the same; vLLM drops the call, and nothing is left
        words.append("--exclude-tools-when-tool-choice-none")
    if (caching := profile.get("prefix_caching")) is not None:
        words.append("--enable-prefix-caching" if caching else "--no-enable-prefix-caching")
    if profile.get("enforce_eager"):
        words.append("--enforce-eager")
    return words


def given(words: Sequence[str], option: str) -> bool:
    """Tell whether an option is among a command's words, in either way of writing it."""
    plain = [word.partition("=")[0].replace("_", "-") for word in words if word.startswith("--")]
    return option in plain


def value(words: Sequence[str], option: str) -> str | None:
    """Return the value that vLLM would take for an option: the last one, in either way."""
    found = None
    for index, word in enumerate(words):
        name, equals, text = word.partition("=")
        if word.startswith("--") and name.replace("_", "-") == option:
            found = text if equals else (words[index + 1] if index + 1 < len(words) else None)
    return found


def expectations(
    profile: Mapping[str, Any], words: Sequence[str], caller: Sequence[str]
) -> dict[str, str]:
    """Return which backends vLLM has to choose, by kind (``moe``, ``attention``, ``linear``).

    Who names a backend in the caller's options wants that one: the profile's no longer counts. Of
    dense layers vLLM says a word only where ``--mxfp4-layers`` has some quantised.

    Args:
        words: all options of the server.
        caller: those of them that the caller gave.
    """
    wanted = dict(profile.get("expect") or {})
    for kind in list(wanted):
        if given(caller, f"--{kind}-backend"):
            del wanted[kind]
    layers = (value(words, "--mxfp4-layers") or "").split(",")
    if not {one.partition("=")[0].strip() for one in layers} - {"", "moe"}:
        wanted.pop("linear", None)
    return wanted
