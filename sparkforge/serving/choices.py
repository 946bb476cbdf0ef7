"""The user's choice among a profile's, and the bytes that a token reads with it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from sparkforge.serving import arguments, traffic
from sparkforge.serving.document import DocumentError
from sparkforge.serving.errors import SettingError
from sparkforge.serving.profile import Profile
from sparkforge.serving.shapes import Shape
from sparkforge.serving.traffic import GB, Format, Kind, KvCache, Moe, Setup

VARIABLE = "SPARKFORGE_PROFILE"
LAYERS = "SPARKFORGE_MXFP4_LAYERS"
OPTION = "--mxfp4-layers"
_CONTEXT = 2048  # tokens, as in docs/kernels.md
_Layers = Mapping[Kind, Format]


class ChoiceError(SettingError):
    """There is no such choice, or another setting contradicts it."""


def named(variables: Mapping[str, str]) -> str:
    """Return the name in ``SPARKFORGE_PROFILE``; "" for none, or where it is the path of a file."""
    value = variables.get(VARIABLE, "")
    return "" if "/" in value else value


def pick(profile: Profile, name: str, setting: str) -> Profile:
    """Return a profile with another choice.

    Args:
        setting: the variable or option that has the name, for the error.

    Raises:
        ChoiceError: the profile has no such choice.
    """
    if name in profile.choices:
        return replace(profile, choice=name)
    import difflib  # only for the error

    near = difflib.get_close_matches(name, profile.choices, n=1)
    guess = f"did you mean {near[0]}? " if near else ""
    names = sorted(profile.choices)
    known = f"use {', '.join(names[:-1])} or {names[-1]}" if names[1:] else "omit it: there is none"
    raise ChoiceError(f"{setting} {name!r}: no such profile", guess + known)


def check(profile: Profile, setting: str, others: Mapping[str, str | None]) -> None:
    """Check that no other setting names other layers than a choice that the user made.

    Args:
        profile: with that choice.
        setting: the variable or option of the choice, with its value, for the error.
        others: values of further settings of layers, by name; empty or None where not set.

    Raises:
        ChoiceError: one is not a list of layers, or has others.
    """
    for other, text in others.items():
        if not text:
            continue
        try:
            same = _parsed(text) == _parsed(profile.layers)
        except traffic.LayersError as error:
            raise ChoiceError(f"{other} {error}", error.hint) from None
        if not same:
            wanted = profile.layers or "no layers"
            msg = f"{setting} quantises {wanted}, but {other} is {text!r}"
            raise ChoiceError(msg, "remove one of the two")


def line(
    profile: Profile, command: Sequence[str], folder: Path | None, machines: int = 1
) -> str | None:
    """Return a line with the bytes a token now, and with the next faster choice.

    Args:
        command: of ``vllm serve``, with its options.
        folder: of the checkpoint; None: vLLM downloads it.
        machines: that hold the model together.

    Returns:
        The line; None where the profile has no choices.
    """
    if not profile.choices:
        return None
    text = arguments.value(command, OPTION) or ""
    try:
        layers = _parsed(text)
        shape = None if folder is None else Shape.of(folder)
    except traffic.LayersError:  # vLLM refuses it, with the reason
        return f"{OPTION} {text}"
    except (DocumentError, OSError) as error:
        return f"profile {profile.choice}; bytes a token are unknown: {error}"
    equal = [
        name for name, choice in profile.choices.items() if _parsed(choice.mxfp4_layers) == layers
    ]
    name = profile.choice if profile.choice in equal else next(iter(equal), None)
    what = f"{OPTION} {text}" if name is None else f"profile {name}"
    if shape is None:
        return what
    context = min(_CONTEXT, arguments.positive(command, "--max-model-len", _CONTEXT))

    def read(chosen: _Layers) -> float:
        setup = Setup(_moe(command), chosen, _kv_cache(command))
        return traffic.step_bytes(shape, setup, context=context).total

    now = read(layers)
    faster = {
        other: read(_parsed(choice.mxfp4_layers)) for other, choice in profile.choices.items()
    }
    faster = {other: size for other, size in faster.items() if size < now}
    together = "" if machines == 1 else f" on {machines} machines together"
    said = f"{what}: a token reads {_gb(now)}{together} at {context:,} tokens of context"
    if faster:
        after = max(faster, key=lambda other: faster[other])
        said += f"; with {after} {_gb(faster[after])} (accuracy not measured)"
    return said


def _parsed(text: str | None) -> _Layers:
    return traffic.parse_layers(text) if text else {}


def _gb(size: float) -> str:
    return f"{size / GB:.2f} GB" if size >= GB else f"{size / GB:.3g} GB"


def _moe(command: Sequence[str]) -> Moe:
    """Return the backend of the experts; of one that the table lacks, one without padding."""
    named = arguments.value(command, "--moe-backend")
    return next((backend for backend in traffic.MOE_MULTIPLES if backend == named), "triton")


def _kv_cache(command: Sequence[str]) -> KvCache:
    return (
        "fp8" if (arguments.value(command, "--kv-cache-dtype") or "").startswith("fp8") else "auto"
    )
