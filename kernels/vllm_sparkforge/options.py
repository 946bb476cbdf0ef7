# SPDX-License-Identifier: Apache-2.0
"""What a user sets: `--additional-config '{"sparkforge": {...}}'` of vLLM, or the variable
VLLM_SPARKFORGE with the inner object. An option there wins over the variable.

The object stays in ``additional_config``, which is in the key of vLLM's compile cache. What a
worker finds out while a model loads, and what is traced depends on, is added to it (``note``).
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

from vllm_sparkforge.mx.table import FORMATS, LOSSLESS

if TYPE_CHECKING:
    from vllm.config import VllmConfig

KEY = "sparkforge"
VARIABLE = "VLLM_SPARKFORGE"
EXPERTS = "bf16_dequant"
LAYERS = ("qkv", "o", "lm_head")
PARTS = ("amx", "experts", "layers", "bf16", "norms", "rotary", "memory", "metrics")
"""What can be switched off: tiles of AMX (in the variable alone); the kernels of MXFP4 experts;
those of MX layers; those of BF16 layers; joined norms and routers; rotary embedding with the KV
cache; the measure of graphs on a shared memory; the gauge."""
NCCL, ALL_REDUCES = "nccl", "sparkforge.all_reduce"  # vLLM's own; the others' entry points
ALL = "all"  # failed: the device did not get as far as the first kind
TACTIC = "CUTLASS tactic "  # failed, with a number: none of our kernels
_FOUND = "found"  # what ``note`` adds


@dataclass(frozen=True)
class Options:
    """Options, checked.

    Attributes:
        decode_kernels: auto, on (an error where they cannot be used) or off.
        mxfp4_layers: format by kind of layer.
        experts: ``EXPERTS`` or "": what expands a checkpoint's experts to BF16.
        off: of ``PARTS``.
        failed: kinds of kernels, and tactics of CUTLASS, that failed a trial: none is used.
        all_reduce: ``NCCL``, or a communicator's name: all_reduce.py.
    """

    decode_kernels: str = "auto"
    mxfp4_layers: Mapping[str, str] = field(default_factory=dict)
    experts: str = ""
    off: frozenset[str] = frozenset()
    failed: frozenset[str] = frozenset()
    all_reduce: str = NCCL


def parse_layers(text: str) -> dict[str, str]:
    """Return the format of each kind of layer in a list like ``qkv,o,lm_head=mxfp8``.

    ``moe`` stands for what a checkpoint of gpt-oss has anyway, and is left out.

    Raises:
        ValueError: a kind or format is unknown, or a kind occurs twice.
    """
    layers: dict[str, str] = {}
    known = (*LAYERS, "moe")
    for item in text.split(","):
        kind, _, name = item.strip().partition("=")
        if kind not in known:
            msg = (
                f"mxfp4_layers: unknown layer kind {kind!r} in {text!r}; expected some of"
                f" {', '.join(known)}, separated by commas"
            )
            raise ValueError(msg)
        if kind in layers:
            raise ValueError(f"mxfp4_layers: {kind} occurs twice in {text!r}")
        name = name or "mxfp4"
        expected = ("mxfp4",) if kind == "moe" else (*FORMATS, LOSSLESS.name)
        if name not in expected:
            msg = f"mxfp4_layers: {kind} cannot be {name!r}; expected {' or '.join(expected)}"
            raise ValueError(msg)
        layers[kind] = name
    layers.pop("moe", None)
    return layers


def parse(given: Mapping[str, Any]) -> Options:
    """Check an object of options.

    Raises:
        ValueError: there is no such option, or it has no such value.
    """
    known = {"decode_kernels", "mxfp4_layers", "experts", "off", "failed", "all_reduce", _FOUND}
    if unknown := sorted(set(given) - known):
        listed = ", ".join(sorted(known - {_FOUND}))
        msg = f"{KEY}: there is no option {unknown[0]!r}; known: {listed}"
        raise ValueError(msg)
    if not isinstance(given.get(_FOUND, {}), dict):
        raise ValueError(f"{KEY}: {_FOUND} is this plugin's own; omit it")
    kernels, experts = given.get("decode_kernels", "auto"), given.get("experts", "")
    if kernels not in ("auto", "on", "off"):
        raise ValueError(f"{KEY}: decode_kernels is {kernels!r}; use auto, on or off")
    if experts not in ("", EXPERTS):
        raise ValueError(f"{KEY}: experts is {experts!r}; use {EXPERTS}")
    layers = given.get("mxfp4_layers", "moe")  # which is none
    if not isinstance(layers, str):
        raise ValueError(
            f"{KEY}: mxfp4_layers is {layers!r}; use a list like 'qkv,o,lm_head=mxfp8'"
        )
    off = given.get("off", [])
    if not isinstance(off, list) or any(part not in PARTS for part in off):
        raise ValueError(f"{KEY}: off is {off!r}; use a list of {', '.join(PARTS)}")
    failed = given.get("failed", "")
    if not isinstance(failed, str):
        raise ValueError(f"{KEY}: failed is {failed!r}; use a list like 'INT8,BF16'")
    chosen = given.get("all_reduce", NCCL)
    if chosen != NCCL and chosen not in (names := entry_points(group=ALL_REDUCES).names):
        listed = ", ".join([NCCL, *sorted(names)])
        raise ValueError(f"{KEY}: there is no all_reduce {chosen!r}; installed: {listed}")
    kinds = frozenset(filter(None, failed.split(",")))
    if ALL in kinds and kernels == "auto":
        kernels = "off"
    if kernels == "on" and any(not kind.startswith(TACTIC) for kind in kinds):
        raise ValueError(f"{KEY}: decode_kernels is on, but some failed their trial: {failed}")
    return Options(kernels, parse_layers(layers), experts, frozenset(off), kinds, chosen)


def given(config: VllmConfig | None) -> dict[str, Any]:
    """Return the object of a configuration, over that of the variable.

    Raises:
        ValueError: one of them is no object.
    """
    text = os.environ.get(VARIABLE, "")
    try:
        found = json.loads(text) if text else {}
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{VARIABLE} is no JSON: {error}") from None
    additional = config.additional_config if config is not None else {}
    ours = additional.get(KEY, {}) if isinstance(additional, dict) else {}
    for name, each in ((VARIABLE, found), (f"additional_config.{KEY}", ours)):
        if not isinstance(each, dict):
            raise ValueError(f"{name} is {each!r}; use a JSON object")
    return {**found, **ours}


def of(config: VllmConfig | None) -> Options:
    """Return the options of a configuration.

    Raises:
        ValueError: they cannot be used.
    """
    return parse(given(config))


def verify(config: VllmConfig, off: str | None) -> None:
    """Refuse options that nothing would heed.

    Args:
        off: why this plugin is off; None if it is not.

    Raises:
        ValueError: there are such, or they cannot be used.
    """
    chosen, model = of(config), config.model_config
    kernels = chosen.mxfp4_layers or chosen.experts or chosen.decode_kernels == "on"
    if off is not None and (kernels or chosen.all_reduce != NCCL):
        raise ValueError(f"{KEY}: there are options, but vllm-sparkforge is off: {off}")
    if (chosen.mxfp4_layers or chosen.experts) and model.quantization != "gpt_oss_mxfp4":
        msg = (
            f"{KEY}: mxfp4_layers and experts are for gpt-oss's MXFP4 checkpoints, but the"
            f" quantization of {model.model} is {model.quantization}"
        )
        raise ValueError(msg)
    asked = model.quantization_config
    if not chosen.mxfp4_layers or asked is None:
        return
    moe = asked.moe.weight if asked.moe is not None else None
    if asked.targets is not None or asked.linear is not None or moe is not None:
        msg = (
            f"{KEY}: mxfp4_layers cannot be combined with online quantization of other layers, but"
            f" quantization_config is {asked}"
        )
        raise ValueError(msg)


def note(config: VllmConfig, name: str, value: str) -> None:
    """Put a finding into the compile cache's key: other findings, another graph."""
    if not isinstance(config.additional_config, dict):
        raise ValueError("additional_config of this platform is no object")
    merged = given(config)
    merged[_FOUND] = {**merged.get(_FOUND, {}), name: value}
    config.additional_config[KEY] = merged
