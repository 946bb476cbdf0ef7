"""The inputs of an image and of its parts, as a file in the image: ``verify IMAGE`` names changes.

But for the C++ compiler of a pack they do not depend on the machine, nor on how sources were
fetched.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sparkforge.build.context import PLUGIN
from sparkforge.core import plain

Inputs = Mapping[str, Any]
NAME = "inputs.json"
"""The file, in the image's share folder."""


@dataclass(frozen=True)
class ImageNote:
    """The inputs of an image, and of all that it names by a key alone."""

    target: str
    image: Inputs
    wheels: Mapping[str, Inputs]
    """By upstream."""
    wheelhouse: Inputs
    trial: Inputs
    """Of the preflight's checkpoint."""
    plugin: Inputs | None = None
    pack: Inputs | None = None

    def comparable(self) -> dict[str, Inputs]:
        """Return the inputs that two builds of a checkout share, by the part's name in messages.

        The image names its parts by key, so they are separate.
        """
        return {
            "image": _without(self.image, "wheels", "wheelhouse", "labels"),
            # the sources are a choice of the build, not of the checkout
            **{
                f"wheel {name}": _without(inputs, "sources") for name, inputs in self.wheels.items()
            },
            **({} if self.plugin is None else {PLUGIN: self.plugin}),
            "wheelhouse": self.wheelhouse,
            "preflight checkpoint": self.trial,
            # of the machine that compiled it
            **({} if self.pack is None else {"pack": _without(self.pack, "host")}),
        }

    def dumps(self) -> bytes:
        """Return the text of the file."""
        return f"{json.dumps(plain.as_json(self), indent=1, sort_keys=True)}\n".encode()


def _without(inputs: Inputs, *names: str) -> Inputs:
    return {name: value for name, value in inputs.items() if name not in names}


def loads(text: bytes) -> ImageNote:
    """Return the note in a text of ``dumps``.

    Raises:
        ValueError, LookupError, AttributeError: the text is invalid.
    """
    note = plain.load(ImageNote, plain.json_of(text), exact=False)
    if note is None or not isinstance(note.image["labels"], dict):
        raise ValueError("a field is missing, or of another type")
    return note
