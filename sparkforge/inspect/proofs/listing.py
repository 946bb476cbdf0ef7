"""cuobjdump's listing of machine code → instructions."""

from __future__ import annotations

import re
from dataclasses import dataclass

_FUNCTION = re.compile(r"^\s*Function : (\S+)", re.MULTILINE)
# offset, an optional predicate, the instruction with its modifiers, operands
_INSTRUCTION = re.compile(
    r"^\s*/\*(?P<offset>[0-9a-f]{4,})\*/\s+"
    r"(?P<text>(?:(?P<predicate>@!?U?P\S+)\s+)?(?P<word>[A-Z][A-Z0-9_.]*)(?P<operands>[^;]*));"
)


@dataclass(frozen=True)
class Instruction:
    """One instruction of a listing.

    Attributes:
        offset: in its kernel, bytes.
        predicate: e.g. ``@!P0``, or "".
        word: with its modifiers, e.g. ``LDG.E.128``.
        operands: as listed.
        text: the complete text.
    """

    offset: int
    predicate: str
    word: str
    operands: str
    text: str

    @property
    def opcode(self) -> str:
        """The word without its modifiers."""
        return self.word.partition(".")[0]


_WORDS = re.compile(r"/\*[0-9a-f]{4,}\*/\s+((?:@!?U?P\S+\s+)?([A-Z][A-Z0-9_.]*)[^;\n]*);")


def words(sass: str) -> dict[str, list[tuple[str, str]]]:
    """Return the text and the word of each instruction of each kernel, as ``functions`` has them.

    For listings of hundreds of megabytes: it creates no object for an instruction.
    """
    pieces = _FUNCTION.split(sass)[1:]
    return {
        name: _WORDS.findall(body) for name, body in zip(pieces[::2], pieces[1::2], strict=True)
    }


def functions(sass: str) -> dict[str, tuple[Instruction, ...]]:
    """Return the instructions of each kernel in the output of ``cuobjdump -sass``."""
    pieces = _FUNCTION.split(sass)[1:]
    return {name: _instructions(body) for name, body in zip(pieces[::2], pieces[1::2], strict=True)}


def _instructions(body: str) -> tuple[Instruction, ...]:
    found = (_INSTRUCTION.match(line) for line in body.splitlines())
    return tuple(
        Instruction(
            int(match["offset"], 16),
            match["predicate"] or "",
            match["word"],
            match["operands"].strip(),
            match["text"].strip(),
        )
        for match in found
        if match
    )
