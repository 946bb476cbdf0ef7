"""The types that pins.yaml's values are made of."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StringConstraints,
)
from pydantic_core import PydanticCustomError

UNKNOWN = "unknown"
"""What stands in receipt, bill, provenance and labels for a commit that nobody knows."""


def number(value: Any) -> Any:
    """Turn a plain decimal number into an int; 010, 0x10, 1e3 and yes stay text, and refused."""
    plain = isinstance(value, str) and re.fullmatch(r"0|[1-9][0-9]{0,17}", value)
    return int(value) if plain else value


def _truth(value: Any) -> Any:
    """Turn true and false into what they say; yes, on and 1 stay text, and are refused."""
    return {"true": True, "false": False}.get(value, value) if isinstance(value, str) else value


def padded(commit: str) -> bool:
    """Tell whether a commit is an abbreviation that was filled up with zeros."""
    # twelve are chance once in 2.8e14 commits
    return commit.endswith("0" * 12)


def _whole(commit: str) -> str:
    if padded(commit):
        raise PydanticCustomError("padded", "an abbreviation filled up with zeros")
    return commit


Truth = Annotated[bool, BeforeValidator(_truth), Field(strict=True)]
Count = Annotated[int, BeforeValidator(number), Field(gt=0, strict=True)]
Commit = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{40}$"), AfterValidator(_whole)]
Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
Digest = Annotated[str, StringConstraints(pattern=r"^sha256:[0-9a-f]{64}$")]
Name = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9._-]*$")]
Tag = Annotated[str, StringConstraints(pattern=r"^v?[0-9]+(\.[0-9]+)+[0-9A-Za-z.]*$")]
Platform = Literal["linux/amd64", "linux/arm64"]


class Model(BaseModel):
    """Base of all parts: frozen, and unknown keys are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid")
